"""Replicas that fail in a weight sync and come back, with stand-ins for Ray actors."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest

from one_step_off.cluster.errors import ProcessDied, SyncError
from one_step_off.config.schema import Config
from one_step_off.rollout.health import ReplicaState
from one_step_off.rollout.replica_group import RolloutGroup
from one_step_off.rollout.replica_supervisor import NoReplica
from one_step_off.training.trainer_group import WorkerGroup
from one_step_off.weight_sync import sync_calls
from one_step_off.weight_sync.coordinator import WeightSync
from tests.unit.stand_ins import TRAINER_CONTROL, ActorMethod, RecordedEvents, StandInActor

SCORES = [np.array([-1.0])]


class FaultySync(WeightSync):
    """A weight sync whose processes are stand-ins; the groups are created by the real code.

    Attributes:
        deaths: replica -> in how many more syncs it dies.
        grouped: for each epoch, the replicas that connected.
        lines: the messages for the user.
    """

    def __init__(
        self,
        replicas: int,
        deaths: dict[int, int],
        respawn: Any = None,
        stays_alive: bool = False,
    ) -> None:
        """`stays_alive`: a replica that "died" in a sync answers afterwards all the same."""
        self.deaths = deaths
        self.stays_alive = stays_alive
        self.grouped: list[list[int]] = []
        events = RecordedEvents()
        self.lines = events.lines
        cfg = Config()
        cfg.weight_sync.timeout_s = 1.0
        supervisor = RolloutGroup(
            [self.replica(i) for i in range(replicas)],
            cfg,
            True,
            respawn=respawn or self.replica,
            events=events,
        ).supervisor
        supervisor.child_processes = [[(i, 1.0)] for i in range(replicas)]
        sent = {"bytes": 8.0, "changed": 1.0, "bucket_wire": [[0, 0.1]], "spans": []}
        trainer = StandInActor(
            score=lambda sequences: SCORES,
            connect_sync=None,
            send_weights=lambda version, sharded_only, wants_full: dict(sent),
            release=None,
            **TRAINER_CONTROL,
        )
        actor = WorkerGroup("actor", [trainer], cfg)
        super().__init__(actor, supervisor, [np.arange(2)], "127.0.0.1", [[]])
        self.senders = actor.ranks
        self.sending_ranks = actor.ranks
        self.total_bytes = 8
        self.connect_info = {}

    def replica(self, i: int) -> StandInActor:
        deaths = []

        async def sync(stamp, sharded_only):
            if self.deaths.get(i, 0):
                self.deaths[i] -= 1
                deaths.append(stamp)
                raise SyncError("its process died")
            return [{"bytes": 8.0, "bucket_wire": [[0, 0.1]], "spans": [], "bare_wire": 0.05}]

        async def alive():
            if deaths and not self.stays_alive:
                raise RuntimeError("gone")

        def connect_sync(info, first_receiver):
            if info["epoch"] > len(self.grouped):
                self.grouped.append([])
            self.grouped[-1].append(i)

        async def start(former):
            assert former == [(i, 1.0)], "the processes of the dead replica must be ended"
            await asyncio.sleep(0.05)
            return 8, [(i, 1.0)]

        return StandInActor(
            sync=sync,
            alive=alive,
            learn_shards=lambda shapes: [{"kept": None, "reason": "a stand-in"}],
            connect_sync=connect_sync,
            start=start,
            score=lambda sequences: SCORES,
        )


def test_a_replica_that_dies_in_a_sync_gets_the_same_weights_when_it_is_back():
    async def main():
        sync = FaultySync(3, {1: 1})
        supervisor: Any = sync.rollout
        await sync((0, 1))
        assert sync.grouped == [[0, 1, 2], [0, 2]]
        assert supervisor.active == [0, 2]
        (line,) = sync.lines
        assert "rollout 1" in line
        assert supervisor.health[1].state is ReplicaState.DEAD
        await sync((0, 2))
        assert supervisor.active == [0, 2], "it has not started yet"
        await asyncio.sleep(0.2)
        assert sync.grouped[2:] == [[1]], "by a sync of its own"
        assert supervisor.health[1].state is ReplicaState.HEALTHY
        await sync((0, 3))
        assert supervisor.active == [0, 1, 2]
        assert sync.grouped[3:] == [[0, 1, 2]]
        assert supervisor.restarts == 1

    asyncio.run(main())


def test_where_no_weights_are_kept_a_restarted_replica_waits_for_the_next_sync():
    async def main():
        sync = FaultySync(2, {1: 1})
        supervisor: Any = sync.rollout
        sync.cfg.keep_sent = False
        await sync((0, 1))
        await asyncio.sleep(0.2)
        assert supervisor.active == [0, 1]
        assert supervisor.health[1].state is ReplicaState.STALE
        assert await supervisor.wait_for_healthy() == [0]
        await sync((0, 2))
        assert await supervisor.wait_for_healthy() == [0, 1]

    asyncio.run(main())


def test_with_no_replica_left_the_sync_waits_for_the_first_that_restarts():
    async def main():
        sync = FaultySync(2, {0: 1, 1: 1})
        supervisor: Any = sync.rollout
        metrics = await sync((0, 1))
        assert metrics["sync/bytes"] == 8
        assert await supervisor.wait_for_healthy()

    asyncio.run(main())


def test_the_only_replica_comes_back_to_the_sync_in_which_it_died_though_nothing_is_kept():
    async def main():
        sync = FaultySync(1, {0: 1})
        supervisor: Any = sync.rollout
        sync.cfg.keep_sent = False
        metrics = await sync((0, 1))
        assert metrics["sync/bytes"] == 8
        assert await supervisor.wait_for_healthy() == [0]

    asyncio.run(main())


def test_a_replica_that_answers_but_did_not_get_the_weights_ends_the_run():
    sync = FaultySync(2, {1: 1}, stays_alive=True)
    with pytest.raises(SyncError, match="rollout 1: its process died"):
        asyncio.run(sync((0, 1)))


def test_a_replica_that_cannot_be_restarted_is_excluded_and_the_last_one_ends_the_run():
    def respawn(i):
        raise OSError("no seat left")

    async def main():
        sync = FaultySync(2, {0: 1}, respawn)
        supervisor: Any = sync.rollout
        await sync((0, 1))
        await asyncio.sleep(0.05)
        await sync((0, 2))
        assert await supervisor.wait_for_healthy() == [1]
        assert "excluded from now on" in sync.lines[-1]
        sync.deaths[1] = 1
        await sync((0, 3))

    with pytest.raises(NoReplica, match="none could be restarted: no seat left; no seat left"):
        asyncio.run(main())


def test_a_replica_whose_death_was_noticed_elsewhere_does_not_end_the_attempt():
    """By a heartbeat or a call under way: a new process stands in its place when the sync has
    failed, and that one answers.
    """

    async def main():
        sync = FaultySync(2, {})
        supervisor: Any = sync.rollout

        async def die(stamp):
            supervisor.mark_failed(1, "its process died")
            raise ProcessDied("rollout 1: its process died")

        async def not_alive():
            raise RuntimeError("gone")

        supervisor.replicas[1].sync = ActorMethod(die)
        supervisor.replicas[1].alive = ActorMethod(not_alive)
        await sync((0, 1))
        assert sync.grouped[:2] == [[0, 1], [0]]
        assert supervisor.restarts == 1
        await asyncio.sleep(0.2)
        assert await supervisor.wait_for_healthy() == [0, 1]

    asyncio.run(main())


def test_a_busy_replica_is_not_marked_as_failed_when_another_dies(monkeypatch):
    """It may be packing layers, which nothing interrupts."""
    monkeypatch.setattr(sync_calls, "ABORT_NOTICE_S", 0.05)

    async def main():
        sync = FaultySync(2, {1: 1})
        supervisor: Any = sync.rollout
        busy = supervisor.replicas[0]
        busy.sync = ActorMethod(busy.sync.answer, delay=0.5)
        await sync((0, 1))
        assert supervisor.restarts == 1
        assert supervisor.replicas[0] is busy
        assert sync.grouped[:2] == [[0, 1], [0]]

    asyncio.run(main())
