"""A process that dies or hangs while the run starts: with stand-ins for all processes. Real ones
are killed in tests/e2e/test_killed_starts.py."""

from __future__ import annotations

import asyncio
import io
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from one_step_off.cluster import remote_calls
from one_step_off.cluster.errors import (
    CanaryFailed,
    PhaseTimeout,
    ProcessDied,
    RoleError,
    SyncError,
)
from one_step_off.config.command_line import exit_code
from one_step_off.config.errors import ConfigError
from one_step_off.config.schema import Config
from one_step_off.monitoring.tracker import Tracker
from one_step_off.runtime import attempts, processes
from one_step_off.runtime.prepare import ResumePoint, RunInputs
from one_step_off.runtime.processes import RunProcesses, SupervisedProcesses
from tests.unit.stand_ins import ActorMethod, StandInActor


class ActorDiedError(Exception):
    """Named as Ray's."""


WELL = ActorMethod(None)
GONE = ActorMethod(ActorDiedError("gone"))
SILENT = ActorMethod(None, delay=30.0)
NO_USAGE = ActorMethod(RuntimeError("this process tells nothing"))

DIED = ProcessDied("rollout 0, start: its process died (pid 41)")
TOO_SLOW = PhaseTimeout("rollout, start: no answer in 900 s")
RAISED = RoleError("rollout 0, start: RuntimeError: Engine core initialization failed")


class Attempt:
    """In place of `RunProcesses`: an attempt whose start fails with the next of `failures`.

    `ranks`: what the actor's ranks answer when asked for life. `has_answered`: whether they did so
    before.
    """

    failures: list[BaseException | None] = []
    ranks = [WELL]
    has_answered = True
    events: list[str] = []
    keeps_engines = False
    endpoint = None

    engines = None

    def __init__(
        self,
        prepared: Any,
        attempt: int,
        kept: Any = None,
        events: Any = None,
        replicas: int | None = None,
    ) -> None:
        assert kept is None, "engines of a failed start are not kept"
        self.name = f"attempt {attempt}"
        self.events.append(f"{self.name} begins")
        ranks = [StandInActor(alive=alive, usage=NO_USAGE) for alive in self.ranks]
        self.groups = {"actor": SimpleNamespace(ranks=ranks, has_answered=self.has_answered)}
        rollout = SimpleNamespace(replicas=[], active=[], has_answered=False)
        sync = SimpleNamespace(ahead=SimpleNamespace(warning=lambda: ""))
        self.roles = SimpleNamespace(rollout=rollout, sync=sync)
        self.has_started = False

    async def setup(self) -> None:
        failure = self.failures.pop(0)
        if failure is not None:
            raise failure
        self.has_started = True

    is_process_failure = RunProcesses.is_process_failure
    hand_over_engines = RunProcesses.hand_over_engines

    async def end(self) -> None:
        self.events.append(f"{self.name} ends")


class SupervisedAttempt(Attempt):
    """In place of `SupervisedProcesses`."""

    def __init__(self, prepared: Any, events: Any = None) -> None:
        super().__init__(prepared, sum("begins" in event for event in self.events))

    is_process_failure = SupervisedProcesses.is_process_failure
    hand_over_engines = SupervisedProcesses.hand_over_engines


@pytest.fixture
def start(monkeypatch, tmp_path):
    """A function that runs attempts whose starts fail with these; without failure they train to the
    end. Returns what the run raised, and its lines about restarts."""

    def start(
        *failures: BaseException | None,
        max_restarts: int = 3,
        resume_point: ResumePoint | None = None,
        is_supervised: bool = False,
        **attributes: Any,
    ) -> tuple[BaseException | None, list[str]]:
        attempt_attributes = {"failures": list(failures), "events": []} | attributes
        for name, value in attempt_attributes.items():
            monkeypatch.setattr(Attempt, name, value)
        cfg = Config()
        cfg.trainer.output_dir = str(tmp_path)
        cfg.trainer.max_restarts = max_restarts
        cfg.trainer.save_hf_model = False
        stream = SimpleNamespace(state_dict=dict, load_state_dict=lambda state: None)
        data: Any = SimpleNamespace(stream=stream)
        prepared = RunInputs(cfg, "cpu", data, [], None, {}, [], resume_point, is_supervised)
        out = io.StringIO()
        tracker = Tracker(str(tmp_path), 10, out)
        monkeypatch.setattr(attempts, "open_files", lambda *_: tracker.start(0))
        raised = None
        try:
            attempts.run_with_restarts(prepared, tracker)
        except BaseException as error:
            raised = error
        assert not Attempt.failures, "it ended before the last attempt"
        return raised, [line for line in out.getvalue().splitlines() if "attempt" in line]

    async def fit() -> None: ...

    async def create_pipeline(*_: Any) -> Any:
        return SimpleNamespace(stopping=False, fit=fit)

    monkeypatch.setattr(remote_calls, "LIVENESS_TIMEOUT_S", 0.1)
    monkeypatch.setattr(processes, "RunProcesses", Attempt)
    monkeypatch.setattr(processes, "SupervisedProcesses", SupervisedAttempt)
    monkeypatch.setattr(attempts, "create_pipeline", create_pipeline)
    monkeypatch.setattr(attempts, "log_pools", lambda *_: None)
    return start


@pytest.mark.parametrize("is_supervised", [False, True])
@pytest.mark.parametrize("failure", [DIED, TOO_SLOW])
def test_a_first_start_in_which_a_process_dies_or_hangs_is_repeated(failure, is_supervised, start):
    raised, lines = start(failure, None, is_supervised=is_supervised)
    assert raised is None
    assert lines == [f"{failure}; starting again as attempt 1"]
    assert Attempt.events == [
        "attempt 0 begins",
        "attempt 0 ends",
        "attempt 1 begins",
        "attempt 1 ends",
    ]


def test_a_first_start_that_resumes_a_checkpoint_is_repeated_from_it(start):
    resume_point = ResumePoint(Path("checkpoints/step_000005"), {"incarnation": 3, "stream": {}})
    raised, lines = start(DIED, None, resume_point=resume_point)
    assert raised is None
    assert lines == [f"{DIED}; resuming from checkpoints/step_000005 as attempt 5"]


@pytest.mark.parametrize("max_restarts", [0, 1, 3])
def test_starts_that_always_fail_end_the_run_with_the_last_failure(max_restarts, start):
    failures = [ProcessDied(f"actor 0: its process died (pid {i})") for i in range(max_restarts)]
    raised, lines = start(*failures, DIED, max_restarts=max_restarts)
    assert raised is DIED
    assert len(lines) == max_restarts


@pytest.mark.parametrize("has_answered", [True, False])
@pytest.mark.parametrize("is_supervised", [False, True])
@pytest.mark.parametrize(
    "failure",
    [
        RAISED,
        ConfigError("model.path=x: no such folder"),
        SyncError("the ranks have other plans"),
        ImportError("no module"),
    ],
)
def test_an_exception_in_a_start_ends_the_run_at_once(failure, is_supervised, has_answered, start):
    raised, lines = start(failure, is_supervised=is_supervised, has_answered=has_answered)
    assert raised is failure
    assert lines == []
    assert Attempt.events == ["attempt 0 begins", "attempt 0 ends"]


def test_an_exception_in_a_repeated_start_ends_the_run_too(start):
    raised, lines = start(DIED, RAISED)
    assert raised is RAISED
    assert len(lines) == 1


@pytest.mark.parametrize("is_supervised", [False, True])
def test_bad_input_in_a_repeated_start_ends_the_run_as_in_the_first(is_supervised, start, capsys):
    """The start before has not come as far as to find it. Its death is in the log."""
    bad_input = ConfigError("teacher.path=x: its token ids do not match those of model.path")
    raised, lines = start(DIED, bad_input, is_supervised=is_supervised)
    assert lines == [f"{DIED}; starting again as attempt 1"]
    assert raised is bad_input
    assert not hasattr(raised, "__notes__")

    def main(argv: list[str]) -> int:
        raise raised

    assert exit_code(main, []) == 2
    assert capsys.readouterr().err == f"error: {bad_input}\n"


@pytest.mark.parametrize("is_supervised", [False, True])
@pytest.mark.parametrize("other_rank", [GONE, SILENT])
def test_the_exception_of_a_rank_that_waited_for_a_dead_one_counts_as_its_death(
    other_rank, is_supervised, start
):
    broken = RoleError("actor 0, setup: RuntimeError: connection closed by peer")
    raised, lines = start(broken, None, ranks=[WELL, other_rank], is_supervised=is_supervised)
    assert raised is None
    assert lines == [f"{broken}; starting again as attempt 1"]


@pytest.mark.parametrize("is_supervised", [False, True])
def test_a_process_that_still_starts_is_not_taken_for_one_that_hangs(is_supervised, start):
    """It does not answer yet. The exception of another one would come again."""
    still_starts = {"ranks": [SILENT], "has_answered": False}
    raised, lines = start(RAISED, is_supervised=is_supervised, **still_starts)
    assert raised is RAISED
    assert lines == []


@pytest.mark.parametrize("interrupt", [KeyboardInterrupt(), asyncio.CancelledError()])
def test_an_interrupt_in_a_start_ends_the_run(interrupt, start):
    """SIGTERM raises the first, Ctrl-C the second."""
    raised, lines = start(DIED, interrupt)
    assert isinstance(raised, type(interrupt))
    assert len(lines) == 1, "of the start before"
    assert Attempt.events[-1] == "attempt 1 ends"


def test_a_canary_that_failed_ends_the_run_even_where_a_process_is_gone(start):
    failure = CanaryFailed("canary after the sync of version 0: replica 1 differs")
    raised, lines = start(failure, ranks=[GONE, WELL])
    assert raised is failure
    assert lines == []
