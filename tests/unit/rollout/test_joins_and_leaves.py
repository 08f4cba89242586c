"""Replicas that join and leave while prompts are generated, with stand-ins for Ray actors; real
ones are in the e2e tests."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from one_step_off.cluster.remote_calls import MAX_TRIES
from one_step_off.rollout import replica_supervisor
from one_step_off.rollout.health import ReplicaState
from one_step_off.rollout.replica_group import RolloutGroup, reuse_engines
from one_step_off.weight_sync.sync_calls import FailedSyncs
from tests.unit.rollout.test_replica_supervisor import MortalReplica, generate, group_of
from tests.unit.stand_ins import ActorMethod, SlowReplica, mark_healthy

TIME_FOR_ALL = 30.0


class HangingReplica(MortalReplica):
    """Returns nothing that it is asked for."""

    async def generate(self, prompts, sampling):
        self.rows += [prompt.id[1] for prompt in prompts]
        await asyncio.sleep(60)


def rows_of(samples: list[Any]) -> list[tuple[int, int]]:
    return [(sample.prompt_id[1], sample.index) for sample in samples]


ALL_ROWS = [(row, i) for row in range(12) for i in range(2)]


async def join(group: RolloutGroup, replica: Any) -> int:
    """Let a replica join, and wait until it serves."""
    index = group.supervisor.join(lambda i: replica)
    await asyncio.wait([group.supervisor.restart_tasks[index]])
    return index


@pytest.mark.parametrize("routing", ["static", "least_loaded"])
def test_a_replica_that_joins_gets_prompts_and_one_that_left_does_not(routing):
    async def main():
        first = MortalReplica()
        group = group_of([first], routing)
        second = MortalReplica()
        assert await join(group, second) == 1
        assert group.serving == 2
        samples, _ = await generate(group)
        assert rows_of(samples) == ALL_ROWS
        assert first.rows
        assert second.rows
        assert group.restarts == 0
        assert await group.supervisor.leave(0, TIME_FOR_ALL)
        assert group.active == [1]
        assert group.serving == 1
        first.rows.clear()
        samples, _ = await generate(group, "step 1")
        assert rows_of(samples) == ALL_ROWS
        assert first.rows == []

    asyncio.run(main())


def test_a_replica_that_joins_gets_prompts_of_the_batch_that_is_being_generated():
    async def main():
        slow = SlowReplica(1.0)
        group = group_of([slow], "least_loaded")
        group.router.replica_capacity = 4
        work = asyncio.create_task(generate(group))
        await asyncio.sleep(0.05)
        fast = MortalReplica()
        await join(group, fast)
        samples, _ = await work
        assert rows_of(samples) == ALL_ROWS
        assert fast.rows == list(range(2, 12)), "without a wait for samples of the slow one"

    asyncio.run(main())


def test_a_replica_that_leaves_returns_what_it_has_in_time():
    async def main():
        slow = SlowReplica(0.1)
        group = group_of([MortalReplica(), slow])
        work = asyncio.create_task(generate(group))
        await asyncio.sleep(0.01)
        assert await group.supervisor.leave(1, TIME_FOR_ALL)
        samples, _ = await work
        assert rows_of(samples) == ALL_ROWS
        assert slow.rows == [1, 3, 5, 7, 9, 11]
        assert slow.cancelled == 0

    asyncio.run(main())


@pytest.mark.parametrize("routing", ["static", "least_loaded"])
def test_what_a_replica_that_leaves_does_not_return_is_generated_by_the_others(routing):
    """However many in a row leave with the same prompts: the prompts are not to blame."""

    async def main():
        replicas: list[Any] = [HangingReplica() for _ in range(MAX_TRIES + 1)]
        group = group_of([*replicas, MortalReplica()], routing)
        work = asyncio.create_task(generate(group))
        for i in range(len(replicas)):
            await asyncio.sleep(0.01)
            assert await group.supervisor.leave(i, limit_s=0.05)
        samples, _ = await work
        assert rows_of(samples) == ALL_ROWS

    asyncio.run(main())


def test_a_place_that_was_left_is_taken_by_the_next_one_that_joins():
    async def main():
        group = group_of([MortalReplica(), MortalReplica(), MortalReplica()])
        supervisor = group.supervisor
        await supervisor.leave(1, TIME_FOR_ALL)
        assert supervisor.members == [0, 2]
        replica = MortalReplica()
        assert await join(group, replica) == 1
        assert group.replicas[1] is replica
        assert supervisor.active == [0, 1, 2]
        assert await join(group, MortalReplica()) == 3

    asyncio.run(main())


def test_a_replica_that_dies_in_its_start_is_started_again_and_others_serve_meanwhile():
    async def main():
        group = group_of([MortalReplica()])
        broken = MortalReplica()
        broken.start = ActorMethod(RuntimeError("killed in its start"))
        index = await join(group, broken)
        assert group.active == [0, index], "by its second start"
        assert group.replicas[index] is not broken

    asyncio.run(main())


def test_a_replica_that_never_starts_can_be_removed_and_its_failure_is_known():
    async def main():
        def respawn(i: int) -> Any:
            broken = MortalReplica()
            broken.start = ActorMethod(RuntimeError("no memory"))
            return broken

        group = group_of([MortalReplica()], respawn=respawn)
        index = await join(group, respawn(1))
        failure = group.supervisor.restart_tasks[index].exception()
        assert "no memory" in str(failure)
        assert await group.supervisor.leave(index, TIME_FOR_ALL)
        assert group.supervisor.members == [0]
        assert not group.supervisor.restart_tasks

    asyncio.run(main())


def test_a_replica_that_is_removed_while_it_starts_is_not_started_again():
    async def main():
        group = group_of([MortalReplica()])
        starting = MortalReplica()
        starting.start = ActorMethod(RuntimeError("killed"), delay=0.05)
        index = group.supervisor.join(lambda i: starting)
        await asyncio.sleep(0.01)
        assert await group.supervisor.leave(index, TIME_FOR_ALL)
        assert group.supervisor.members == [0]
        assert group.replicas[index] is starting

    asyncio.run(main())


def test_a_replica_that_dies_as_it_is_removed_has_left():
    async def main():
        mortal = MortalReplica(deadly_row=4)
        group = group_of([mortal, MortalReplica()])
        work = asyncio.create_task(generate(group))
        await asyncio.sleep(0)
        assert await group.supervisor.leave(0, TIME_FOR_ALL)
        samples, _ = await work
        assert rows_of(samples) == ALL_ROWS
        assert group.supervisor.members == [1]
        assert group.replicas[0] is mortal, "nothing was started in its place"

    asyncio.run(main())


def test_a_replica_stays_if_all_others_fail_for_good_meanwhile(monkeypatch):
    async def main():
        slow = SlowReplica(0.2)
        group = group_of([slow, MortalReplica()])
        slow.ping = ActorMethod((0, 0))
        work = asyncio.create_task(generate(group))
        await asyncio.sleep(0.01)
        leaving = asyncio.create_task(group.supervisor.leave(0, TIME_FOR_ALL))
        await asyncio.sleep(0.01)
        group.supervisor.exclude(1, "its device is broken")
        assert await group.supervisor.wait_for_healthy() == [0]
        assert not await leaving
        samples, _ = await work
        assert rows_of(samples) == ALL_ROWS
        assert group.serving == 1

    asyncio.run(main())


def test_a_replica_that_stays_and_then_dies_is_restarted():
    """It dies before `leave` has seen that it stays."""

    async def main():
        replica = MortalReplica()
        group = group_of([replica, MortalReplica()])
        supervisor = group.supervisor
        supervisor.loads[0].sent = 1
        leaving = asyncio.create_task(supervisor.leave(0, TIME_FOR_ALL))
        await asyncio.sleep(0)
        supervisor.exclude(1, "its device is broken")
        assert supervisor._keep_leaving()
        killed: list[int] = []
        supervisor._kill = killed.append
        slow = MortalReplica()
        slow.start = ActorMethod((8, []), delay=0.5)
        supervisor.respawn = lambda i: slow
        supervisor.mark_failed(0, "killed")
        assert not await leaving
        assert killed == []
        await asyncio.wait([supervisor.restart_tasks[0]])
        assert supervisor.health[0].state is ReplicaState.HEALTHY
        assert group.serving == 1

    asyncio.run(main())


def test_nothing_is_started_in_place_of_a_replica_that_is_excluded_in_its_restart():
    async def main():
        started: list[int] = []

        def respawn(i: int) -> Any:
            started.append(i)
            return MortalReplica()

        group = group_of([MortalReplica(), MortalReplica()], respawn=respawn)
        supervisor = group.supervisor

        async def restore(i: int) -> bool:
            supervisor.exclude(i, "it failed in 3 weight syncs in a row")
            return False

        supervisor.restore = restore
        supervisor.mark_failed(1, "killed")
        await asyncio.sleep(0.1)
        assert started == [1]
        assert supervisor.excluded == [1]

    asyncio.run(main())


@pytest.mark.parametrize("late", [RuntimeError("killed"), None, "hangs"])
def test_a_late_answer_of_a_former_process_says_nothing_of_the_present_one(monkeypatch, late):
    async def main():
        former = MortalReplica()
        former.ping = ActorMethod(late or (-5, 1), delay=30 if late == "hangs" else 0.05)
        monkeypatch.setattr(replica_supervisor, "PING_S", 0.1)
        group = group_of([former])
        supervisor = group.supervisor
        check = asyncio.create_task(supervisor._check_heartbeat(0))
        await asyncio.sleep(0)
        supervisor.replicas[0] = MortalReplica()
        health = supervisor.health[0]
        health.last_heartbeat_s = -1000.0  # so that it would count as failed
        await check
        assert supervisor.restarts == 0
        assert health.state is ReplicaState.HEALTHY
        assert health.last_heartbeat_s == -1000.0

    asyncio.run(main())


def test_failed_syncs_are_those_of_the_replica_and_not_of_its_place():
    async def main():
        group = group_of([MortalReplica(), MortalReplica()])
        supervisor = group.supervisor
        failed = FailedSyncs(None, supervisor)
        for _ in range(MAX_TRIES - 1):
            failed.restart_replica(1, "gone", "weight sync")
            await asyncio.wait([supervisor.restart_tasks[1]])
        assert await supervisor.leave(1, TIME_FOR_ALL)
        assert await join(group, MortalReplica()) == 1
        failed.restart_replica(1, "gone", "weight sync", is_restore=True)
        failed.restart_replica(1, "gone", "weight sync")
        assert supervisor.excluded == []
        await asyncio.wait([supervisor.restart_tasks[1]])
        for _ in range(MAX_TRIES - 1):
            failed.restart_replica(1, "gone", "weight sync")
        assert supervisor.excluded == [1]

    asyncio.run(main())


def test_no_replica_leaves_in_the_middle_of_a_sync():
    async def main():
        group = group_of([MortalReplica(), MortalReplica()])
        supervisor = group.supervisor
        supervisor.mark_stale()
        leaving = asyncio.create_task(supervisor.leave(1, limit_s=0.0))
        await asyncio.sleep(3 * replica_supervisor.RETRY_S)
        assert supervisor.active == [0, 1]
        for i in (0, 1):
            supervisor.mark_synced(i, group.replicas[i])
        assert await leaving
        assert supervisor.health[1].state is ReplicaState.LEFT
        supervisor.mark_synced(1, group.replicas[1])
        supervisor.mark_failed(1, "late news")
        supervisor.exclude(1, "late news")
        assert supervisor.members == [0]

    asyncio.run(main())


def test_the_next_attempt_takes_over_only_those_that_have_not_left():
    async def main():
        replicas: list[Any] = [MortalReplica() for _ in range(3)]
        dropped: list[int] = []
        for i, replica in enumerate(replicas):
            replica.drop_work = ActorMethod(lambda attempt, i=i: dropped.append(i))
        former = group_of(replicas)
        await former.supervisor.leave(1, TIME_FOR_ALL)
        group = group_of(replicas)
        group.supervisor.mark_left(1)
        await reuse_engines(group, former, attempt=1)
        assert dropped == [0, 2]
        assert group.active == [0, 2]
        await group.stop()

    asyncio.run(main())


def test_all_prompts_go_at_once_to_a_single_replica_that_none_can_join():
    """One call costs less than several. Where others can join, some prompts are kept for them."""

    async def calls(**options: Any) -> int:
        replica = SlowReplica(0.01)
        group = group_of([replica], "least_loaded", **options)
        group.router.replica_capacity = 4
        if not options:
            group.supervisor.respawn = None
        await generate(mark_healthy(group))
        return replica.calls

    assert asyncio.run(calls()) == 1
    assert asyncio.run(calls(respawn=lambda i: MortalReplica())) > 1
