"""What the log says after a failed canary. Stand-ins score; the second scoring may say anything."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from one_step_off.cluster.errors import CanaryFailed, SyncError
from one_step_off.weight_sync import canary
from tests.unit.stand_ins import ActorMethod, RecordedEvents
from tests.unit.weight_sync.test_coordinator import connected_sync

SEQUENCES = [np.array([5, 6, 7]), np.array([8, 9, 10, 11])]
GOOD = [np.array([-1.0, -2.0]), np.array([-3.0, -4.0, -5.0])]
BAD = [np.array([-1.0, -2.0]), np.array([-3.0, -4.5, -5.002])]


def one_after_another(*answers: Any) -> Callable[[Any], Any]:
    """Answers call after call; an exception is raised."""
    left = list(answers)

    def answer(sequences: Any) -> Any:
        assert sequences is SEQUENCES
        chosen = left.pop(0)
        if isinstance(chosen, Exception):
            raise chosen
        return chosen

    return answer


def log_of_failure(second: Any, trainer_second: Any = GOOD, delay: float = 0.0) -> list[str]:
    """The log of a sync in which replica 1 differs, and scores like `second` afterwards; the
    trainer answers then after `delay` seconds. The error is the canary's, whatever happens."""
    sync = connected_sync(GOOD, [GOOD, BAD])
    sync.canary = SEQUENCES
    events = RecordedEvents()
    sync.events = events
    lines = events.lines
    replicas: Any = sync.rollout.replicas
    replicas[0].score = ActorMethod(one_after_another(GOOD, GOOD))
    replicas[1].score = ActorMethod(one_after_another(BAD, second))
    for i, actor in enumerate([*replicas, *sync.actor.ranks]):
        actor.threads_and_cores = ActorMethod(f"OMP_NUM_THREADS={i}")
    trainer: Any = sync.actor.ranks[0]
    trainer.score = ActorMethod(one_after_another(GOOD))

    async def main() -> None:
        expected = await sync.score_canary()
        trainer.score = ActorMethod(one_after_another(trainer_second), delay)
        first = asyncio.get_running_loop().create_future()
        first.set_result(expected)
        await sync((0, 3), first)

    with pytest.raises(SyncError, match="version 3: rollout replica 1 .* differ by 0.5 nats"):
        asyncio.run(main())
    prefix = "canary after the sync of version 3"
    assert all(line.startswith(prefix) for line in lines)
    return [line.removeprefix(prefix) for line in lines]


def line_about(lines: list[str], who: str) -> str:
    (line,) = [line for line in lines if line.startswith(f", scored again: {who}: ")]
    return line.partition(f"{who}: ")[2]


def test_the_log_names_the_token_and_who_has_changed():
    lines = log_of_failure(GOOD)
    assert (
        ": rollout replica 1 and the trainer differ most in sequence 1, token 2 of 0 to 3 (id 10): "
        "-4 and -4.5; 2 tokens by more than 0.001"
    ) in lines
    assert ": rollout replica 1: OMP_NUM_THREADS=1" in lines
    assert ": trainer rank 0: OMP_NUM_THREADS=2" in lines
    assert line_about(lines, "rollout replica 0") == "the same log-probs, bit for bit"
    assert line_about(lines, "the trainer") == "the same log-probs, bit for bit"
    again = line_about(lines, "rollout replica 1")
    assert again.startswith("other log-probs, most in sequence 1, token 2 of 0 to 3 (id 10): -4.5 ")
    assert again.endswith("the new ones differ from the trainer's first ones by 0 at most")


def test_a_lasting_difference_is_told_from_a_passing_one():
    lines = log_of_failure(BAD)
    assert line_about(lines, "rollout replica 1") == "the same log-probs, bit for bit"


def test_a_trainer_that_changed_is_named():
    lines = log_of_failure(BAD, trainer_second=BAD)
    assert line_about(lines, "the trainer").startswith("other log-probs, most in sequence 1")


def test_nan_is_the_largest_difference():
    nan = [GOOD[0], np.array([-3.0, -4.0, np.nan])]
    again = line_about(log_of_failure(nan), "rollout replica 1")
    assert "token 3 of 0 to 3 (id 11): -5.002 and nan" in again
    assert again.endswith("by inf at most")


def test_a_side_that_fails_or_is_busy_hides_nothing(monkeypatch: pytest.MonkeyPatch):
    """A trainer whose update waits for this sync scores only when the attempt has ended."""
    monkeypatch.setattr(canary, "SCORE_AGAIN_S", 0.05)
    lines = log_of_failure(RuntimeError("the engine died"), delay=30)
    assert line_about(lines, "rollout replica 1") == "RuntimeError: the engine died"
    assert line_about(lines, "the trainer") == "no answer in time"


def test_an_answer_that_makes_no_sense_hides_nothing():
    (*_, last) = log_of_failure([GOOD[0]])
    assert last.startswith(": its diagnosis failed: ValueError")


def test_a_restored_replica_is_not_scored_again():
    """The trainer may have newer weights by then, and would be named wrongly."""
    sync = connected_sync(GOOD, [BAD])
    sync.canary = SEQUENCES
    events = RecordedEvents()
    sync.events = events
    lines = events.lines
    replicas: Any = sync.rollout.replicas
    replicas[0].score = ActorMethod(one_after_another(BAD))
    with pytest.raises(CanaryFailed, match="differ by 0.5 nats"):
        asyncio.run(sync._check_canary((0, 3), GOOD, [0], is_restore=True))
    assert lines == []
