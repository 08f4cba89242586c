"""What the driver knows of the replicas' layouts, and when it lets go of it."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from one_step_off.weight_sync.replica_layouts import ReplicaLayouts, plain_shards_of_receivers
from one_step_off.weight_sync.shard_blocks import Block, plain_shards
from one_step_off.weight_sync.sync_calls import BrokenSync
from one_step_off.weight_sync.weight_piece import WeightPiece

PIECES = [[WeightPiece("a", "bfloat16", (4, 2), 0, 4)]]
HALVES = [{"a": (Block((0, 0), (2, 2)),)}, {"a": (Block((2, 0), (4, 2)),)}]
PROVED = [{"layout_proved": 1.0}, {"layout_proved": 1.0}]
UNPROVED = [{"layout_proved": 1.0}, {"layout_proved": 0.0}]


class Replica:
    """Two workers, each of which keeps half of `a` or says that it does not know."""

    def __init__(self, kept: list[Any] = HALVES) -> None:
        self.kept = kept
        self.asked = 0
        self.learn_shards = SimpleNamespace(remote=self._learn)
        self.alive = SimpleNamespace(remote=self._alive)

    async def _learn(self, shapes: dict[str, Any]) -> list[dict[str, Any]]:
        assert shapes == {"a": ["bfloat16", [4, 2]]}
        self.asked += 1
        return [{"kept": kept and plain_shards(kept), "reason": "packed"} for kept in self.kept]

    async def _alive(self) -> None:
        """It answers."""


async def no_abort(error: Exception) -> None:
    """Nothing to end."""


def learned(*replicas: Any) -> ReplicaLayouts:
    layouts = ReplicaLayouts(PIECES, 1.0)
    asyncio.run(layouts.learn(dict(enumerate(replicas)), no_abort))
    return layouts


def test_workers_with_the_same_rank_are_of_one_kind():
    first, second = Replica(), Replica()
    kept = learned(first, second).kept_by([first, second])
    assert kept.kind_of_receiver == (0, 1, 0, 1)
    assert kept.blocks == tuple(HALVES)
    plain = plain_shards_of_receivers(kept)
    assert plain["kind_of_receiver"] == [0, 1, 0, 1]


def test_a_replica_is_asked_once_as_long_as_it_lives():
    old, new = Replica(), Replica()
    layouts = learned(old)
    layouts.note_reports({old: PROVED})
    asyncio.run(layouts.learn({0: old, 1: new}, no_abort))
    assert (old.asked, new.asked) == (1, 1)
    assert layouts.are_proved([old])
    assert not layouts.are_proved([old, new])
    layouts.note_reports({new: UNPROVED})
    assert not layouts.are_proved([new])
    layouts.note_reports({new: PROVED})
    layouts.note_reports({new: UNPROVED})
    assert not layouts.are_proved([new]), "the last one counts"
    layouts.forget_all_but([new])
    asyncio.run(layouts.learn({0: old}, no_abort))
    assert old.asked == 2
    assert not layouts.are_proved([old])


def test_one_worker_that_does_not_know_is_enough_for_whole_tensors():
    knows, other = Replica(), Replica([HALVES[0], None])
    layouts = learned(knows, other)
    assert layouts.kept_by([knows, other]) is None
    assert layouts.kept_by([knows]) is not None


def test_the_replicas_of_a_sync_that_failed_must_prove_their_reports_again():
    failed, other = Replica(), Replica()
    layouts = learned(failed, other)
    layouts.note_reports({failed: PROVED, other: PROVED})
    layouts.forget_proofs([failed])
    assert not layouts.are_proved([failed])
    assert layouts.kept_by([failed]) is not None
    assert layouts.are_proved([other])


def test_a_replica_that_cannot_answer_breaks_the_sync():
    replica = Replica()

    async def dead(shapes: dict[str, Any]) -> None:
        raise RuntimeError("gone")

    replica.learn_shards.remote = dead
    with pytest.raises(BrokenSync, match="rollout 0: RuntimeError: gone"):
        learned(replica)
