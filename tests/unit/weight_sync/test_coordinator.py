"""The weight sync's driver side: who is named when it fails, and the canary."""

from __future__ import annotations

import asyncio
import gc
from typing import Any

import numpy as np
import pytest

from one_step_off.cluster.errors import GIVEN_UP, ProcessDied, SyncError
from one_step_off.config.schema import Config
from one_step_off.rollout.health import ReplicaState
from one_step_off.rollout.replica_group import RolloutGroup
from one_step_off.training.trainer_group import WorkerGroup
from one_step_off.weight_sync import sync_calls
from one_step_off.weight_sync.canary import canary_limit_s
from one_step_off.weight_sync.coordinator import WeightSync
from one_step_off.weight_sync.trainer_sender import SenderAddress
from one_step_off.weight_sync.weight_piece import WeightPiece
from tests.unit.stand_ins import TRAINER_CONTROL, ActorMethod, RecordedEvents, StandInActor

SCORES = [np.array([-1.0])]
SENT = {"bytes": 8.0, "changed": 1.0, "gather": 0.1, "bucket_wire": [[0, 0.3]], "spans": []}
RECEIVED = {
    "bytes": 8.0,
    "load": 0.2,
    "bucket_wire": [[0, 0.1]],
    "spans": [["", "load", 1.0, 2.0]],
    "bare_wire": 0.05,
}


def stand_in_replica(scores: list[np.ndarray]) -> StandInActor:
    return StandInActor(
        score=lambda sequences: scores,
        sync=lambda stamp, sharded_only: [dict(RECEIVED)],
        learn_shards=lambda shapes: [{"kept": None, "reason": "a stand-in"}],
        alive=None,
    )


def connected_sync(
    trainer_scores: list, replica_scores: list[list], dtype: str = "float32"
) -> WeightSync:
    """A connected weight sync. The trainer and each replica score the canary like this."""
    cfg = Config()
    cfg.model.dtype = dtype
    rank = StandInActor(
        score=lambda sequences: trainer_scores,
        send_weights=lambda version, sharded_only, wants_full: dict(SENT),
        release=None,
        **TRAINER_CONTROL,
    )
    actor = WorkerGroup("actor", [rank], cfg)
    replicas = [stand_in_replica(scores) for scores in replica_scores]
    supervisor = RolloutGroup(replicas, cfg, True).supervisor
    sync = WeightSync(actor, supervisor, [np.arange(3)], "127.0.0.1", [[]])
    sync.senders = actor.ranks
    sync.sending_ranks = actor.ranks
    sync.groups.replicas = replicas
    sync.total_bytes = 8
    return sync


def use_two_senders(sync: WeightSync, first: ActorMethod, second: ActorMethod) -> None:
    """Let two ranks send the weights by these methods."""
    ranks: list[Any] = [
        StandInActor(send_weights=first, **TRAINER_CONTROL),
        StandInActor(send_weights=second, **TRAINER_CONTROL),
    ]
    ranks[0].score = sync.actor.ranks[0].score
    ranks[1].score = ActorMethod(None)
    sync.senders = ranks
    sync.sending_ranks = ranks
    sync.actor.ranks = ranks


def test_a_replica_that_comes_back_while_the_next_version_waits_gets_that_one_too():
    """It received the version before when the sync of all replicas began to wait for its turn, and
    took no part in that one then. It served since then, and gets no prompt while it receives: its
    engine has no verified weights, and would refuse it."""
    sync = connected_sync(SCORES, [SCORES, SCORES])
    supervisor: Any = sync.rollout
    received: dict[int, list] = {0: [], 1: []}
    states: list[ReplicaState] = []
    sync.connect_info = {}

    def receiving(i: int) -> ActorMethod:
        def receive(stamp, sharded_only):
            received[i].append(stamp)
            states.append(supervisor.health[i].state)
            return [{"bytes": 8.0, "bucket_wire": [[0, 0.1]], "spans": [], "bare_wire": 0.05}]

        return ActorMethod(receive, delay=0.02)

    for actor in (*sync.actor.ranks, *supervisor.replicas):
        actor.connect_sync = ActorMethod(None)
    for i, replica in enumerate(supervisor.replicas):
        replica.sync = receiving(i)

    async def come_back():
        assert await sync.restore(1)
        del supervisor.restart_tasks[1]

    async def main():
        sync.versions.send((0, 3), SCORES)
        sync.groups.replicas = []
        supervisor.restart_tasks[1] = asyncio.create_task(come_back())
        await asyncio.sleep(0.01)
        assert received == {0: [], 1: []}
        assert sync.lock.locked(), "replica 1 receives"
        await sync((0, 4))
        assert received == {0: [(0, 4)], 1: [(0, 3), (0, 4)]}
        assert states == [ReplicaState.STALE] * 3
        assert await supervisor.wait_for_healthy() == [0, 1]

    asyncio.run(main())


def test_a_restore_that_has_not_begun_may_be_cancelled():
    """As that of lent replicas whose trainer has its batch."""
    sync = connected_sync(SCORES, [SCORES])

    async def main():
        sync.versions.send((0, 3), SCORES)
        begun = asyncio.Event()
        async with sync.lock:  # another sync
            restore = asyncio.create_task(sync.restore(0, begun=begun))
            await asyncio.sleep(0.01)
            assert not begun.is_set()
            restore.cancel()
            await asyncio.wait([restore])
        assert not sync.lock.locked()
        restore = asyncio.create_task(sync.restore(0, begun=begun))
        await asyncio.sleep(0)
        assert begun.is_set()
        assert sync.lock.locked()
        restore.cancel()

    asyncio.run(main())


def test_a_canary_may_wait_behind_the_requests_that_a_sync_has_paused():
    """A full engine scores it when some of them have ended, which is no sign of a fault."""
    sync = connected_sync(SCORES, [SCORES])
    sync.cfg.in_flight = "recompute"
    sync.cfg.timeout_s = 0.2
    supervisor: Any = sync.rollout
    replica = supervisor.replicas[0]
    replica.score = ActorMethod(lambda sequences: SCORES, delay=0.5)

    asyncio.run(sync((0, 3)))
    assert supervisor.replicas == [replica]
    assert supervisor.health[0].state is ReplicaState.HEALTHY
    cfg = sync.actor.cfg
    assert canary_limit_s(cfg) == cfg.rollout.progress_timeout_s
    cfg.weight_sync.in_flight = "wait"
    assert canary_limit_s(cfg) == 0.2


def test_when_several_senders_fail_the_first_is_named_and_no_failure_is_unretrieved(caplog):
    """asyncio logs every failure that is never asked for, with a traceback, among what the user
    reads."""
    sync = connected_sync(SCORES, [SCORES])
    late = ActorMethod(SyncError("sender 0: late"), delay=0.05)
    use_two_senders(sync, late, ActorMethod(SyncError("sender 1: first")))

    async def main():
        with pytest.raises(SyncError, match="trainer rank 1: sender 1: first"):
            await sync((0, 3))
        gc.collect()

    asyncio.run(main())
    assert "never retrieved" not in caplog.text


def test_a_process_that_fails_because_the_sync_was_given_up_is_not_named_as_the_cause():
    sync = connected_sync(SCORES, [SCORES])
    cause = "receiver 0, phase load: too little memory"
    consequence = SyncError(f"sender 0, phase wire: {GIVEN_UP}{cause}")
    sender: Any = sync.actor.ranks[0]
    sender.send_weights = ActorMethod(consequence)
    # The receiver's answer comes by way of the engine, and later.
    sync.rollout.replicas[0].sync = ActorMethod(SyncError(cause), delay=0.05)
    with pytest.raises(SyncError, match=f"version 3, rollout 0: {cause}"):
        asyncio.run(sync((0, 3)))


def test_a_trainer_that_hangs_in_the_sync_is_named_and_not_the_one_that_waited_for_it(monkeypatch):
    """Another attempt may do better then: the rank that waited reports only that no answer came."""
    monkeypatch.setattr(sync_calls, "BUSY_GRACE_S", 0.1)
    sync = connected_sync(SCORES, [SCORES])
    hanging = ActorMethod(None, delay=30)
    waiting = ActorMethod(SyncError("sender 1, phase header: timed out"), delay=0.02)
    use_two_senders(sync, hanging, waiting)
    with pytest.raises(ProcessDied, match="version 3: trainer rank 0: it hangs"):
        asyncio.run(sync((0, 3)))


def test_the_canary_reports_the_largest_difference():
    exact = [np.full(50, -1.0), np.array([-2.0])]
    near = [np.full(50, -1.0), np.array([-2.0005])]
    metrics = asyncio.run(connected_sync(exact, [exact, near])((0, 3)))
    assert metrics["canary/logprob_diff_max"] == pytest.approx(5e-4)
    assert metrics["sync/bytes"] == 8
    assert metrics["sync/load_s"] == 0.2


@pytest.mark.parametrize("second", [-2.01, float("nan")])
def test_a_canary_over_the_tolerance_or_nan_stops(second):
    good = [np.array([-1.0, -2.0])]
    bad = [np.array([-1.0, second])]
    with pytest.raises(SyncError, match="version 3: rollout replica 1 .*canary_tolerance = 0.001"):
        asyncio.run(connected_sync(good, [good, bad])((0, 3)))


def test_bfloat16_measures_its_tolerance_and_says_so():
    good = [np.full(50, -1.0), np.array([-2.0])]
    near = [np.full(50, -1.0), np.array([-2.2])]
    sync = connected_sync(good, [near], "bfloat16")
    events = RecordedEvents()
    sync.events = events
    metrics = asyncio.run(sync((0, 0)))
    assert metrics["canary/logprob_diff_max"] == pytest.approx(0.2)
    assert metrics["canary/tolerance"] == pytest.approx(1.0)
    (line,) = events.lines
    assert line.startswith("canary after the sync of version 0: engine and trainer differ by 0.2")
    asyncio.run(sync((0, 1)))
    assert len(events.lines) == 1, "measured once"


def test_nan_in_any_sequence_stops():
    good = [np.array([-1.0]), np.array([-2.0]), np.array([-3.0])]
    bad = [np.array([-1.0]), np.array([float("nan")]), np.array([-3.0])]
    with pytest.raises(SyncError, match="differ by nan"):
        asyncio.run(connected_sync(good, [bad])((0, 1)))


def test_weights_that_are_only_a_little_off_everywhere_are_caught_by_the_mean():
    good = [np.full(50, -1.0)]
    bad = [np.full(50, -1.2)]
    with pytest.raises(SyncError, match=r"\(mean\).* the bound of a first sync = 0.1"):
        asyncio.run(connected_sync(good, [bad], "bfloat16")((0, 1)))


def test_a_replica_that_dies_after_its_canary_is_not_taken_for_healthy():
    """The canary of another replica was still awaited then; a call under way noticed the death."""
    sync = connected_sync(SCORES, [SCORES, SCORES])
    supervisor: Any = sync.rollout

    def score_as_the_other_dies(sequences):
        supervisor.health[0].state = ReplicaState.DEAD
        return SCORES

    supervisor.replicas[1].score = ActorMethod(score_as_the_other_dies)
    asyncio.run(sync((0, 4)))
    states = [health.state for health in supervisor.health]
    assert states == [ReplicaState.DEAD, ReplicaState.HEALTHY]


def test_what_a_replica_returns_during_a_sync_waits_for_its_canary():
    """With partial rollouts it continues its prompts before the others have their weights."""
    sync = connected_sync(SCORES, [SCORES])
    supervisor: Any = sync.rollout

    async def main() -> None:
        supervisor.mark_stale()
        held = asyncio.create_task(supervisor.wait_until_verified(0))
        await asyncio.sleep(0.01)
        assert not held.done()
        supervisor.mark_synced(0, supervisor.replicas[0])
        await held
        await supervisor.wait_until_verified(0)  # nothing is held back any more

    asyncio.run(main())


@pytest.mark.parametrize(("given", "expected_mb"), [(None, 192), (8, 8)])
def test_without_a_size_buckets_suit_the_smallest_device(given, expected_mb):
    sync = connected_sync(SCORES, [SCORES])
    sync.cfg.bucket_mb = given
    opened: list[int] = []

    def open_sender(groups, pieces, bucket_bytes, *more):
        opened.append(bucket_bytes)
        return SenderAddress(("127.0.0.1", 1))

    ranks: list[Any] = []
    for rank, megabytes in enumerate((640, 192)):
        piece = WeightPiece("w", "float32", (4, 2), 2 * rank, 2 * rank + 2)
        ranks.append(
            StandInActor(
                weight_plan=[piece],
                automatic_bucket_mb=megabytes,
                open_sender=open_sender,
                **TRAINER_CONTROL,
            )
        )
    sync.actor.ranks = ranks
    sync.same_device = [[], []]
    asyncio.run(sync.connect())
    assert opened == [expected_mb << 20] * 2
    assert sync.connect_info["bucket_bytes"] == expected_mb << 20
