"""Replicas that outlive an attempt: they drop its work, and those that do not are replaced. With
stand-ins for engine and Ray actors; real ones are in the e2e tests."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from one_step_off.cluster.errors import SyncError
from one_step_off.cluster.run_events import RunEvents
from one_step_off.config.schema import Config
from one_step_off.rollout import replica_group
from one_step_off.rollout.concurrency import ConcurrencyLimiter
from one_step_off.rollout.replica import RolloutReplica
from one_step_off.rollout.replica_group import RolloutGroup, reuse_engines
from tests.unit.rollout.stand_ins import UNSEEDED, FakeScorer, vllm_engine
from tests.unit.stand_ins import ActorMethod, RecordedEvents, StandInActor, make_prompts

OF_THE_LOST = (0, 7)
"""The stamp of the weights that the attempt had sent last."""


class Engine:
    """An engine whose requests never end by themselves, and whose sync takes until `senders_left`.

    Attributes:
        requests: those that have not ended.
        labels: the weight versions that it was given.
    """

    errored = False

    def __init__(self, sync_fails: bool = False) -> None:
        self.requests: set[str] = set()
        self.labels: list[str] = []
        self.senders_left = asyncio.Event()
        self.sync_fails = sync_fails
        self.engine_core = SimpleNamespace(pause_scheduler_async=self.nothing)
        self.output_processor = SimpleNamespace(has_unfinished_requests=lambda: bool(self.requests))
        self.resume_generation = self.nothing

    async def nothing(self, **_: Any) -> None: ...

    async def generate(self, prompt: Any, params: Any, name: str, lora_request: Any):
        self.requests.add(name)
        try:
            await asyncio.sleep(60)
            yield None
        finally:
            self.requests.discard(name)

    async def collective_rpc(self, *_: Any, **__: Any) -> list[dict]:
        await self.senders_left.wait()
        if self.sync_fails:
            raise RuntimeError("the connection to the sender broke")
        return [{}]

    async def update_weight_version(self, label: str) -> None:
        self.labels.append(label)


def replica_with(engine: Engine) -> Any:
    replica = RolloutReplica(Config(), 0, "cpu", [FakeScorer()])
    replica.engine = vllm_engine(engine)
    replica.stamp = OF_THE_LOST
    return replica


async def end_of(task: asyncio.Task) -> BaseException:
    """What a task raises, soon."""
    await asyncio.wait([task], timeout=2)
    return task.exception()


def test_a_replica_drops_what_it_generates_and_refuses_prompts_until_new_weights_come():
    async def main() -> None:
        engine = Engine()
        replica = replica_with(engine)
        replica.tokenizer = SimpleNamespace(decode=lambda *_, **__: "", eos_token_id=0)
        scores = asyncio.create_task(
            replica.score([make_prompts(1)[0].ids, make_prompts(2)[0].ids])
        )
        waiting = asyncio.create_task(replica.wait_for_capacity(5, 1))
        rollout = asyncio.create_task(replica.rollout(make_prompts(1, 2), UNSEEDED))
        await asyncio.sleep(0.05)
        assert engine.requests
        former_limiter = replica.limiter
        await asyncio.wait_for(replica.drop_work(1), 2)
        assert not engine.requests
        assert not replica.work
        for task in (scores, waiting, rollout):
            assert "the attempt has ended" in str(await end_of(task))
        assert replica.limiter is not former_limiter, "the next attempt counts from zero"
        assert replica.limiter.idle_trajectories == 0
        with pytest.raises(RuntimeError, match="no verified weights"):
            await replica.rollout(make_prompts(3), UNSEEDED)

    asyncio.run(main())


@pytest.mark.parametrize("sync_fails", [False, True])
def test_weights_of_the_lost_attempt_count_for_nothing_even_if_their_sync_ends_well(sync_fails):
    async def main() -> None:
        engine = Engine(sync_fails)
        replica = replica_with(engine)
        sync = asyncio.create_task(replica.sync((0, 8)))
        await asyncio.sleep(0.01)
        dropping = asyncio.create_task(replica.drop_work(1))
        await asyncio.sleep(0.05)
        assert not dropping.done(), "the update in the engine must end first"
        engine.senders_left.set()
        await asyncio.wait_for(dropping, 2)
        await asyncio.wait([sync])
        assert replica.stamp is None
        assert "1.8" not in engine.labels, "old weights with the label of the new attempt"
        with pytest.raises(SyncError, match="attempt 0, which has ended"):
            await replica.sync((0, 9))
        assert replica.stamp is None

    asyncio.run(main())


def test_what_waits_for_a_score_is_dropped():
    async def main() -> None:
        replica = RolloutReplica(Config(), 0, "cpu", [])  # all workers are busy
        waiting = asyncio.create_task(replica.rewards.score(SimpleNamespace()))
        await asyncio.sleep(0)
        replica.rewards.drop_waiting()
        await asyncio.wait([waiting], timeout=1)
        assert waiting.cancelled()
        assert not replica.rewards.waiting

    asyncio.run(main())


def group_of(
    replicas: list[Any], started: list[int], events: RunEvents | None = None
) -> RolloutGroup:
    """A group that notes in `started` which replicas it starts again."""

    def respawn(i: int) -> Any:
        started.append(i)
        return StandInActor(start=(8, [(1000 + i, 0.0)]), alive=None)

    group = RolloutGroup(replicas, Config(), False, respawn=respawn, events=events)

    async def restore(i: int) -> bool:
        return True

    group.supervisor.restore = restore
    return group


def test_healthy_replicas_are_kept_and_the_others_are_started_again(monkeypatch):
    monkeypatch.setattr(replica_group, "DROP_S", 0.2)

    async def main() -> None:
        dropped: list[int] = []
        well = StandInActor(drop_work=dropped.append)
        refuses = StandInActor(drop_work=RuntimeError("the engine died"))
        hangs = StandInActor(drop_work=ActorMethod(None, delay=30))
        was_restarting = StandInActor(drop_work=None)
        replicas = [well, refuses, hangs, was_restarting]
        former = group_of(replicas, [])
        former.supervisor.child_processes = [[(i, 0.0)] for i in range(4)]
        former.supervisor.restart_tasks[3] = asyncio.get_running_loop().create_future()
        former.supervisor.restarts = 5
        former.router.replica_capacity = 3
        started: list[int] = []
        events = RecordedEvents()
        group = group_of(replicas, started, events)
        await reuse_engines(group, former, 4)
        assert dropped == [4], "it learned the new incarnation"
        assert group.replicas[0] is well
        assert group.router.replica_capacity == 3
        assert group.supervisor.child_processes[0] == [(0, 0.0)]
        assert events.lines[-1] == "1 of 4 replicas were kept"
        assert group.active == [0], "the others are being started"
        await asyncio.gather(*group.supervisor.restart_tasks.values())
        assert sorted(started) == [1, 2, 3]
        assert group.active == [0, 1, 2, 3]
        assert group.supervisor.child_processes[2] == [(1002, 0.0)]
        assert group.restarts == 5 + 3
        reasons = [line for line in events.lines if "failed" in line]
        assert "the engine died" in reasons[0]
        assert "no answer in 0.2 s" in reasons[1]

    asyncio.run(main())


def test_a_lent_replica_drops_its_work_and_sleeps_in_the_same_attempt_or_for_the_next_one():
    async def main() -> None:
        for attempt, expected in ((None, 0), (1, 1)):
            engine = Engine()
            replica = replica_with(engine)
            replica.tokenizer = SimpleNamespace(decode=lambda *_, **__: "", eos_token_id=0)
            slept: list[bool] = []

            async def sleep(engine=engine, slept=slept) -> None:
                slept.append(bool(engine.requests))

            replica.engine.sleep = sleep
            rollout = asyncio.create_task(replica.rollout(make_prompts(1, 2), UNSEEDED))
            await asyncio.sleep(0.05)
            assert engine.requests
            await asyncio.wait_for(replica.hand_device_back(attempt), 2)
            assert slept == [False], "no request is in an engine that sleeps"
            assert replica.attempt == expected
            assert "the attempt has ended" in str(await end_of(rollout))
            with pytest.raises(RuntimeError, match="no verified weights"):
                await replica.rollout(make_prompts(3), UNSEEDED)

    asyncio.run(main())


def test_the_limit_of_a_loan_is_that_with_which_the_next_one_begins():
    """Requests that are cancelled say nothing about the cache, however much room there is."""

    async def main() -> None:
        replica = replica_with(Engine())
        replica.tokenizer = SimpleNamespace(decode=lambda *_, **__: "", eos_token_id=0)
        replica.engine.sleep = replica.engine.llm.nothing
        replica.engine.max_sequences = 256
        replica.engine.longest_sequences = 0.75
        replica.limiter = ConcurrencyLimiter(1024, replica.engine)
        assert await replica.wait_for_capacity(0, 256) == (0, 3)
        replica.limiter.limit = 5.0  # it has learned
        for _ in range(2):  # loans
            replica.stamp = OF_THE_LOST
            work = asyncio.create_task(replica.rollout(make_prompts(*range(20)), UNSEEDED))
            while len(replica.engine.llm.requests) < 5:
                await asyncio.sleep(0.01)
            await asyncio.wait_for(replica.hand_device_back(), 2)
            assert "the attempt has ended" in str(await end_of(work))
            assert replica.limiter.report()["open_requests"] == 5, "the sync of the next loan"
            assert await replica.wait_for_capacity(0, 256) == (0, 5)

    asyncio.run(main())


@pytest.mark.parametrize("sleeps", [True, False])
def test_lent_replicas_sleep_before_the_trainers_of_the_next_attempt_load(sleeps, monkeypatch):
    monkeypatch.setattr(replica_group, "DROP_S", 0.2)

    async def main() -> None:
        handed_back: list[int] = []
        answer: Any = handed_back.append if sleeps else ActorMethod(None, delay=30)
        lent = StandInActor(hand_device_back=answer)
        replicas = [StandInActor(drop_work=None), lent]
        ended: list[int] = []

        def group_with_lent() -> RolloutGroup:
            group = RolloutGroup(replicas, Config(), False, respawn=lambda i: None, lent=[1])
            group.supervisor.end_lent = ActorMethod(ended.append, delay=0.05).remote
            return group

        former = group_with_lent()
        former.supervisor.wake(1)
        former.supervisor.mark_synced(1, lent)
        group = group_with_lent()
        await reuse_engines(group, former, 4)
        assert handed_back == [4] * sleeps
        assert ended == [1] * (not sleeps), "its processes are gone when this returns"
        assert group.supervisor.lendable == [1] * sleeps
        assert group.active == [0]

    asyncio.run(main())
