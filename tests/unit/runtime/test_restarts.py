"""How often a run is restarted after a failed attempt, and where it resumes: with stand-ins for the
attempts; real failures are in the e2e tests."""

from __future__ import annotations

import io
from types import SimpleNamespace

import pytest

from one_step_off.config.errors import ConfigError
from one_step_off.config.schema import Config
from one_step_off.monitoring.tracker import Tracker
from one_step_off.runtime import attempts
from one_step_off.runtime.prepare import RunInputs

FIRST_POSITION = {"at": 5}


class Stream:
    """A position in the data, which an attempt moves and a restart resets."""

    def __init__(self) -> None:
        self.position = dict(FIRST_POSITION)

    def state_dict(self) -> dict:
        return dict(self.position)

    def load_state_dict(self, state: dict) -> None:
        self.position = dict(state)


class Killed(Exception):
    """What ended the process."""


def run(
    monkeypatch, tmp_path, max_restarts: int, outcomes: list, stopping: bool = False
) -> SimpleNamespace:
    """A run without checkpoints.

    Each outcome is that of one attempt: the number of steps after which it fails, "end", or an
    exception that it raises. Returns what it printed, what it raised, and for each attempt
    (attempt, data position, has trained before)."""
    cfg = Config()
    cfg.trainer.output_dir = str(tmp_path)
    cfg.trainer.max_restarts = max_restarts
    stream = Stream()
    prepared = RunInputs(cfg, "cpu", SimpleNamespace(stream=stream), [], None, {}, [])
    out = io.StringIO()
    tracker = Tracker(str(tmp_path), 10, out)
    remaining = iter(outcomes)
    started = []

    async def attempt(prepared, state, tracker, loop_runner):
        started.append((state.attempt, stream.state_dict(), state.has_trained))
        state.pipeline = SimpleNamespace(stopping=stopping)
        outcome = next(remaining)
        if isinstance(outcome, Exception):
            raise outcome
        if outcome == "end":
            return
        tracker.steps = [{"step": step} for step in range(outcome)]
        stream.position["at"] += 100
        failure = Killed(f"attempt {len(started)}")
        raise attempts.AttemptFailed(f"actor 0 is gone after {outcome} steps") from failure

    monkeypatch.setattr(attempts, "run_attempt", attempt)
    monkeypatch.setattr(attempts, "open_files", lambda *arguments: tracker.start(0))
    result = SimpleNamespace(started=started, raised=None, out=out)
    try:
        attempts.run_with_restarts(prepared, tracker)
    except (Killed, ConfigError, ValueError) as error:
        result.raised = error
    assert not list(remaining), "it ended before the last outcome"
    return result


@pytest.mark.parametrize(
    ("max_restarts", "outcomes"),
    [
        (0, [0]),
        (0, [7]),
        (1, [3, 3]),
        (2, [0, 0, 0]),
        (2, [1, 1, 1]),
        (2, [3, 1, 2]),  # further than the attempt before it, but not than any
        (2, [3, 2, 3]),
        (2, [1, 1, 2, 2, 2]),  # the count begins again after a step that is further
        (2, [3, 0, 4, 1, 4]),
        (3, [1, 1, 1, 2, 2, 2, 2]),
    ],
)
def test_so_many_failures_in_a_row_without_a_new_step_end_the_run(
    max_restarts, outcomes, monkeypatch, tmp_path
):
    result = run(monkeypatch, tmp_path, max_restarts, outcomes)
    assert str(result.raised) == f"attempt {len(outcomes)}", "the cause of the last failure"
    assert [attempt for attempt, *_ in result.started] == list(range(len(outcomes)))


@pytest.mark.parametrize("outcomes", [["end"], [0, "end"], [1, 2, 3, 4, 5, "end"]])
def test_a_run_that_gets_further_each_time_is_never_given_up(outcomes, monkeypatch, tmp_path):
    result = run(monkeypatch, tmp_path, 1, outcomes)
    assert result.raised is None
    assert len(result.started) == len(outcomes)


def test_without_a_checkpoint_each_attempt_starts_where_the_run_did(monkeypatch, tmp_path):
    result = run(monkeypatch, tmp_path, 2, [4, 2, "end"])
    assert result.started == [
        (0, FIRST_POSITION, False),
        (1, FIRST_POSITION, True),
        (2, FIRST_POSITION, True),
    ]
    lines = [line for line in result.out.getvalue().splitlines() if "resuming" in line]
    assert lines == [
        "actor 0 is gone after 4 steps; resuming from the beginning as attempt 1",
        "actor 0 is gone after 2 steps; resuming from the beginning as attempt 2",
    ]


def test_a_run_that_was_told_to_stop_is_not_restarted(monkeypatch, tmp_path):
    result = run(monkeypatch, tmp_path, 5, [3], stopping=True)
    assert str(result.raised) == "attempt 1"
    assert len(result.started) == 1
    assert "resuming" not in result.out.getvalue()


def test_an_error_that_is_no_process_failure_ends_the_run_at_once(monkeypatch, tmp_path):
    result = run(monkeypatch, tmp_path, 5, [ValueError("a mistake of ours")])
    assert str(result.raised) == "a mistake of ours"
    assert len(result.started) == 1


def test_a_run_that_cannot_be_restarted_raises_the_failure_with_the_reason(monkeypatch, tmp_path):
    """As after a host has failed: what failed there is the cause, and not the pool that is now too
    small."""
    too_little = ConfigError("placement.pools.actor=[2]: too little")
    result = run(monkeypatch, tmp_path, 3, [2, too_little])
    assert isinstance(result.raised, Killed)
    assert str(result.raised) == "attempt 1"
    assert result.raised.__notes__ == [
        "the run could not be restarted: placement.pools.actor=[2]: too little"
    ]


def test_what_does_not_fit_the_first_time_is_bad_input(monkeypatch, tmp_path):
    too_little = ConfigError("placement.pools.actor=[2]: too little")
    result = run(monkeypatch, tmp_path, 3, [too_little])
    assert result.raised is too_little
