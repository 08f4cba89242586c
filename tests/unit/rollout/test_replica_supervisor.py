"""Replicas that die, hang and come back, with stand-ins for Ray actors; real ones die in the e2e
tests."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from one_step_off.cluster.errors import ProcessDied, TrainerDied
from one_step_off.cluster.remote_calls import MAX_TRIES
from one_step_off.cluster.run_events import RunEvents
from one_step_off.config.schema import Config
from one_step_off.rollout import replica_supervisor
from one_step_off.rollout.health import ReplicaState
from one_step_off.rollout.replica_group import RolloutGroup
from tests.unit.stand_ins import (
    ActorMethod,
    RecordedEvents,
    asyncio_reports,
    make_prompts,
    mark_healthy,
    one_token_sample,
)

PROMPTS = make_prompts(*range(12))


class MortalReplica:
    """A replica that dies, or hangs, when it gets the prompt of `deadly_row`."""

    def __init__(self, deadly_row: int = -1, hangs: bool = False) -> None:
        self.deadly_row = deadly_row
        self.hangs = hangs
        self.rows: list[int] = []
        self.dead = False
        self.rollout = ActorMethod(self.generate)
        self.ping = ActorMethod(self.answer)
        self.alive = ActorMethod(self.answer)
        self.wait_for_capacity = ActorMethod((0, 1024))
        self.start = ActorMethod((8, []))
        self.stop = ActorMethod(None)

    async def generate(self, prompts, sampling):
        rows = [prompt.id[1] for prompt in prompts]
        if self.deadly_row in rows:
            self.dead = True
            if self.hangs:
                await asyncio.sleep(60)
            raise RuntimeError("the engine died")
        await asyncio.sleep(0.01)
        self.rows += rows
        return [one_token_sample(p, i) for p in prompts for i in range(sampling.n)]

    async def answer(self):
        if self.dead and self.hangs:
            await asyncio.sleep(60)
        if self.dead:
            raise RuntimeError("gone")
        return len(self.rows), 0


def group_of(
    replicas: list[MortalReplica],
    routing: str = "static",
    respawn: Any = None,
    events: RunEvents | None = None,
) -> RolloutGroup:
    cfg = Config()
    cfg.rollout.routing = routing
    cfg.rollout.n = 2
    cfg.rollout.heartbeat_s = 0.02
    cfg.rollout.heartbeat_timeout_s = 0.3
    respawn = respawn or (lambda i: MortalReplica())
    group = RolloutGroup(replicas, cfg, False, respawn=respawn, events=events)

    async def restore(i: int) -> bool:
        group.supervisor.mark_synced(i, group.replicas[i])
        return True

    group.supervisor.restore = restore
    return mark_healthy(group)


def generate(group: RolloutGroup, purpose: str = "step 0"):
    return group.generate(PROMPTS, purpose, group.train_sampling)


@pytest.mark.parametrize("routing", ["static", "least_loaded"])
@pytest.mark.parametrize("hangs", [False, True])
def test_what_a_failed_replica_had_not_returned_is_generated_by_the_others(
    routing, hangs, monkeypatch
):
    monkeypatch.setattr(replica_supervisor, "PING_S", 0.05)

    async def main():
        mortal = MortalReplica(deadly_row=4, hangs=hangs)
        group = group_of([MortalReplica(), mortal, MortalReplica()], routing)
        watch = asyncio.create_task(group.watch())
        samples, _ = await generate(group)
        order = [(sample.prompt_id[1], sample.index) for sample in samples]
        assert order == [(row, i) for row in range(12) for i in range(2)]
        await asyncio.sleep(0.1)
        assert group.restarts == 1
        assert group.replicas[1] is not mortal
        assert group.supervisor.health[1].state is ReplicaState.HEALTHY
        await generate(group, "step 1")
        if routing == "static":
            assert group.replicas[1].rows, "it serves again"
        watch.cancel()

    asyncio.run(main())


@pytest.mark.parametrize("hangs", [False, True])
def test_each_group_arrives_once_though_a_replica_failed_with_groups_in_flight(hangs, monkeypatch):
    """As in a pool of prompts, where each prompt has a call of its own."""
    monkeypatch.setattr(replica_supervisor, "PING_S", 0.05)

    async def main():
        mortal = MortalReplica(deadly_row=4, hangs=hangs)
        group = group_of([mortal, MortalReplica()], "least_loaded")
        watch = asyncio.create_task(group.watch())
        rows: list[int] = []

        def on_group(samples):
            assert [sample.index for sample in samples] == [0, 1]
            rows.append(samples[0].prompt_id[1])

        sampling = group.train_sampling
        samples, _ = await group.generate(PROMPTS, "step 0", sampling, on_group)
        assert mortal.dead
        assert sorted(rows) == list(range(12))
        assert len(samples) == 24
        watch.cancel()

    asyncio.run(main())


@pytest.mark.parametrize("routing", ["static", "least_loaded"])
def test_with_one_replica_its_prompts_wait_for_its_restart(routing):
    group = group_of([MortalReplica(deadly_row=4)], routing)
    samples, _ = asyncio.run(generate(group))
    assert len(samples) == 24
    assert len({sample.prompt_id for sample in samples}) == 12


def test_a_replica_that_dies_in_the_first_sync_of_every_restart_is_excluded():
    restarted = []

    def respawn(i):
        restarted.append(i)
        return MortalReplica()

    async def restore(i: int) -> bool:
        return False

    async def main():
        group = group_of([MortalReplica(), MortalReplica(deadly_row=5)], respawn=respawn)
        supervisor = group.supervisor
        supervisor.restore = restore
        samples, _ = await generate(group)
        assert len(samples) == 24
        await asyncio.wait([supervisor.restart_tasks[1]])
        assert restarted == [1] * MAX_TRIES
        assert group.active == [0]
        assert await supervisor.wait_for_healthy() == [0]

    asyncio.run(main())


def test_an_idle_replica_that_dies_is_noticed_by_its_heartbeat():
    async def main():
        mortal = MortalReplica()
        group = group_of([mortal, MortalReplica()])
        watch = asyncio.create_task(group.watch())
        await asyncio.sleep(0.05)
        mortal.dead = True
        await asyncio.sleep(0.1)
        assert group.restarts == 1
        assert group.replicas[0] is not mortal
        assert await group.supervisor.wait_for_healthy() == [0, 1]
        watch.cancel()

    asyncio.run(main())


@pytest.mark.parametrize("routing", ["static", "least_loaded"])
def test_a_prompt_that_kills_replicas_ends_in_a_named_error_and_not_in_a_loop(routing):
    def respawn(i):
        return MortalReplica(deadly_row=4)

    async def main():
        replicas = [MortalReplica(deadly_row=4), MortalReplica(deadly_row=4)]
        await asyncio.wait_for(generate(group_of(replicas, routing, respawn)), 5)

    words = "step 0, rollout .: 3 replicas in a row failed with the same prompts"
    with pytest.raises(ProcessDied, match=words):
        asyncio.run(main())


def test_in_a_shared_pool_a_failed_replica_ends_the_attempt():
    group = group_of([MortalReplica(deadly_row=4)])
    group.supervisor.shares_pool = True
    with pytest.raises(ProcessDied, match="rollout 0"):
        asyncio.run(generate(group))


def test_a_trainer_found_dead_when_a_replica_comes_back_ends_the_attempt():
    restored = []

    async def restore(i: int) -> bool:
        restored.append(i)
        raise TrainerDied("weight sync of version 3: trainer rank 0: it hangs")

    async def main():
        group = group_of([MortalReplica(), MortalReplica(deadly_row=5)])
        group.supervisor.restore = restore
        watch = asyncio.create_task(group.watch())
        await generate(group)
        await asyncio.wait_for(watch, 5)

    with pytest.raises(TrainerDied, match="trainer rank 0: it hangs"):
        asyncio.run(main())
    assert restored == [1], "no other restart of the replica would help"


def test_the_user_reads_of_a_failure_and_of_the_restart():
    events = RecordedEvents()

    async def main():
        group = group_of([MortalReplica(), MortalReplica(deadly_row=5)], events=events)
        await generate(group)
        await asyncio.sleep(0.05)

    asyncio.run(main())
    failed, restarted = events.lines
    assert failed.startswith("rollout 1 failed (step 0, rollout 1: RuntimeError: the engine died")
    assert failed.endswith("); restarting it")
    assert restarted.startswith("rollout 1 is back after ")


def test_a_call_that_fails_as_its_replica_is_given_up_is_not_reported():
    """Both may come at once: the heartbeat notices the death that the call dies of."""

    async def main():
        group = group_of([MortalReplica(deadly_row=0), MortalReplica()])
        supervisor = group.supervisor
        call = asyncio.create_task(
            supervisor.call(0, "step 0", "rollout", PROMPTS, group.train_sampling)
        )
        await asyncio.sleep(0)
        supervisor.mark_failed(0, "its process died")
        with pytest.raises(replica_supervisor.ReplicaFailed):
            await call
        await asyncio.sleep(0.02)

    assert asyncio_reports(main) == []
