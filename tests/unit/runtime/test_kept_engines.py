"""When an attempt hands its engines over, what goes with them, and who ends them: with stand-ins
for all processes. Real ones die in tests/e2e/test_kept_engines.py."""

from __future__ import annotations

import asyncio
import io
from types import SimpleNamespace
from typing import Any

import pytest

from one_step_off.cluster import placement, remote_calls
from one_step_off.cluster.errors import ProcessDied, SyncError
from one_step_off.config.schema import Config
from one_step_off.monitoring.tracker import Tracker
from one_step_off.runtime import attempts, processes
from one_step_off.runtime.persistent_actors import PersistentActors
from one_step_off.runtime.prepare import RunInputs
from one_step_off.runtime.processes import RunProcesses
from tests.unit.stand_ins import ActorMethod, StandInActor


class ActorDiedError(Exception):
    """Named as Ray's."""


WELL = ActorMethod(None)
GONE = ActorMethod(ActorDiedError("gone"))
HANGS = ActorMethod(None, delay=30.0)


def team(
    shares_pool: bool = False,
    active: tuple[int, ...] = (0,),
    has_started: bool = True,
    **ranks: ActorMethod,
) -> Any:
    """Processes of an attempt. `ranks`: role -> what its one rank answers when asked for life."""
    run: Any = object.__new__(RunProcesses)
    run.engines = object.__new__(PersistentActors)
    run.engines.rollout = SimpleNamespace(shares_pool=shares_pool, active=list(active))
    run.engines.frozen_groups = {}
    run.engines.pools = {}
    run.roles = SimpleNamespace(sync=SimpleNamespace(epoch=6))
    run.groups = {role: SimpleNamespace(ranks=[StandInActor(alive=a)]) for role, a in ranks.items()}
    run.hands_over = False
    run.has_started = has_started
    return run


@pytest.mark.parametrize("failure", [GONE, HANGS])
@pytest.mark.parametrize("role", ["actor", "critic", "ref"])
def test_engines_and_healthy_roles_that_do_not_learn_outlive_a_trainer(role, failure, monkeypatch):
    monkeypatch.setattr(remote_calls, "LIVENESS_TIMEOUT_S", 0.1)
    ranks = {"actor": WELL, "critic": WELL, "ref": WELL, "reward_model": WELL} | {role: failure}
    run = team(**ranks)
    assert asyncio.run(run.hand_over_engines()) is run.engines
    kept = {"ref", "reward_model"} - {role}
    assert run.engines.frozen_groups.keys() == kept
    assert run.groups.keys() == ranks.keys() - kept, "these end with the attempt"
    assert run.hands_over
    assert run.engines.sync_epoch == 6


@pytest.mark.parametrize(
    "run",
    [
        team(actor=WELL),  # what failed was no trainer
        team(shares_pool=True, actor=GONE),
        team(active=(), actor=GONE),
        team(has_started=False, actor=GONE),
    ],
)
def test_otherwise_everything_ends(run):
    assert asyncio.run(run.hand_over_engines()) is None
    assert not run.hands_over


def test_pools_with_a_failed_node_are_not_kept(monkeypatch):
    states = {"a": "CREATED", "b": "CREATED"}
    monkeypatch.setattr(placement, "placement_group_table", lambda group: {"state": states[group]})
    run = team(actor=GONE)
    groups: Any = ("a", "b")
    run.engines.pools = {f"pool {g}": [placement.ProcessSlot(g, 0, 0, ())] for g in groups}
    states["b"] = "RESCHEDULING"
    assert asyncio.run(run.hand_over_engines()) is None
    states["b"] = "CREATED"
    assert asyncio.run(run.hand_over_engines()) is run.engines


class Attempt:
    """In place of `RunProcesses`: one attempt, which fails with the next of `failures`."""

    failures: list[Exception | None] = []
    started: list[Any] = []
    handed_over: list[bool] = []
    ended: list[str] = []

    def __init__(
        self, prepared: Any, attempt: int, kept: Any, events: Any, replicas: int | None
    ) -> None:
        self.keeps_engines = kept is not None
        self.endpoint = None
        self.roles = SimpleNamespace(
            rollout=SimpleNamespace(replicas=[], active=[], has_answered=True),
        )
        self.engines = kept or SimpleNamespace(end=self.end_engines, name=f"of {attempt}")
        self.started.append(kept.name if kept else None)

    async def end_engines(self) -> None:
        self.ended.append(self.engines.name)

    async def setup(self) -> None: ...

    is_process_failure = RunProcesses.is_process_failure
    groups: dict[str, Any] = {}

    async def hand_over_engines(self) -> Any:
        return self.engines

    async def end(self) -> None: ...


def run(monkeypatch, tmp_path, outcomes: list, max_restarts: int = 5) -> tuple[Any, list, Tracker]:
    """A run whose attempts end as `outcomes` say: (steps that are done by then, error).

    Returns what it raised, the engines with which each attempt began, and the tracker.
    """
    cfg = Config()
    cfg.trainer.output_dir = str(tmp_path)
    cfg.trainer.max_restarts = max_restarts
    cfg.trainer.save_hf_model = False
    stream = SimpleNamespace(state_dict=dict, load_state_dict=lambda state: None)
    prepared = RunInputs(cfg, "cpu", SimpleNamespace(stream=stream), [], None, {}, [])
    tracker = Tracker(str(tmp_path), 10, io.StringIO())
    remaining = iter(outcomes)

    async def fit():
        steps, error = next(remaining)
        tracker.steps = [{"step": step} for step in range(steps)]
        if error is not None:
            raise error

    async def create_pipeline(*_: Any) -> Any:
        return SimpleNamespace(stopping=False, fit=fit)

    for name in ("started", "ended"):
        monkeypatch.setattr(Attempt, name, [])
    monkeypatch.setattr(processes, "RunProcesses", Attempt)
    monkeypatch.setattr(attempts, "create_pipeline", create_pipeline)
    monkeypatch.setattr(attempts, "log_pools", lambda *_: None)
    monkeypatch.setattr(attempts, "open_files", lambda *_: tracker.start(0))
    raised = None
    try:
        attempts.run_with_restarts(prepared, tracker)
    except (ProcessDied, SyncError) as error:
        raised = error
    return raised, Attempt.started, tracker


DIED = ProcessDied("actor 0: its process died")


def test_the_next_attempt_begins_with_the_engines(monkeypatch, tmp_path):
    raised, started, tracker = run(monkeypatch, tmp_path, [(3, DIED), (4, DIED), (9, None)])
    assert raised is None
    assert started == [None, "of 0", "of 0"]
    assert tracker.usage["restarts/engines_kept"] == 2.0
    assert Attempt.ended == [], "the last attempt ends them, as its own"


@pytest.mark.parametrize(
    "second", [ProcessDied("actor 0: its process died"), SyncError("another bucket plan")]
)
def test_a_second_failure_before_the_next_step_starts_everything_again(
    second, monkeypatch, tmp_path
):
    """Whatever fails: it may be the state that was kept."""
    clock = SimpleNamespace(perf_counter=iter([10.0, 20.0]).__next__)
    monkeypatch.setattr(attempts, "time", clock)
    raised, started, tracker = run(monkeypatch, tmp_path, [(3, DIED), (0, second), (9, None)])
    assert raised is None
    assert started == [None, "of 0", None]
    assert tracker.restart_begin == 10.0, "the recovery counts from the first failure"


def test_without_kept_engines_a_failed_sync_ends_the_run(monkeypatch, tmp_path):
    failed = SyncError("another bucket plan")
    raised, started, _ = run(monkeypatch, tmp_path, [(3, failed)])
    assert raised is failed
    assert started == [None]


def test_engines_that_no_attempt_takes_over_are_ended(monkeypatch, tmp_path):
    raised, started, _ = run(monkeypatch, tmp_path, [(3, DIED)], max_restarts=0)
    assert raised is DIED
    assert Attempt.ended == ["of 0"]
