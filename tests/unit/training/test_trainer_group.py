"""The ranks of one role: their turns in a shared pool, and batches in Ray's object store."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from one_step_off.config.schema import Config
from one_step_off.data.samples import NOT_STORED, Batch
from one_step_off.rollout.replica_group import RolloutGroup
from one_step_off.training import trainer_group
from one_step_off.training.trainer_group import WorkerGroup
from tests.unit.stand_ins import (
    ActorMethod,
    RecordedEvents,
    StandInActor,
    asyncio_reports,
    make_prompts,
    mark_healthy,
    one_token_sample,
)


@pytest.fixture
def _no_object_store(monkeypatch):
    monkeypatch.setattr(trainer_group, "put_batch", lambda batch: batch)


@pytest.mark.usefixtures("_no_object_store")
def test_a_role_in_the_replicas_pool_has_them_sleep_first():
    events = []

    def recorded(event, answer):
        def method(*_):
            events.append(event)
            return answer

        return ActorMethod(method, delay=0.01)

    async def main():
        pool_lock = asyncio.Lock()
        replica = StandInActor(rollout=recorded("generate", []), sleep=recorded("sleep", None))
        rollout = mark_healthy(RolloutGroup([replica], Config(), True, pool_lock))
        rank = StandInActor(update=recorded("update", {}))
        actor = WorkerGroup("actor", [rank], Config(), pool_lock)
        actor.colocated = rollout
        await asyncio.gather(
            rollout.generate(make_prompts(0), "step 0", rollout.train_sampling),
            actor.update(Batch(0, [], (0, 0))),
        )

    asyncio.run(main())
    assert events == ["generate", "sleep", "update"]


@pytest.mark.usefixtures("_no_object_store")
def test_what_uses_the_devices_is_in_the_timeline():
    events = RecordedEvents()
    rank = StandInActor(update={}, log_prob={}, score=[np.zeros(2)])

    async def main():
        actor = WorkerGroup("actor", [rank], Config(), events=events)
        await actor.log_prob(Batch(3, [], (0, 3)))
        await actor.update(Batch(3, [], (0, 3)))
        await actor.score([np.arange(3)])

    asyncio.run(main())
    assert events.roles == [("actor", "log_prob", 3), ("actor", "update", 3)]


class CountingMethod:
    """Counts how many calls of all such methods run at once."""

    running = 0
    most_running = 0

    async def remote(self, *_):
        cls = CountingMethod
        cls.running += 1
        cls.most_running = max(cls.most_running, cls.running)
        await asyncio.sleep(0.01)
        cls.running -= 1
        return {}


@pytest.mark.usefixtures("_no_object_store")
@pytest.mark.parametrize(("shared", "at_once"), [(True, 1), (False, 2)])
def test_roles_in_one_pool_take_turns(shared, at_once, monkeypatch):
    monkeypatch.setattr(CountingMethod, "most_running", 0)

    async def main():
        pool_lock = asyncio.Lock() if shared else None
        groups = []
        for role in ("actor", "ref"):
            rank = SimpleNamespace(log_prob=CountingMethod())
            groups.append(WorkerGroup(role, [rank], Config(), pool_lock))
        batch = Batch(0, [], (0, 0))
        await asyncio.gather(*(group.log_prob(batch) for group in groups))

    asyncio.run(main())
    assert CountingMethod.most_running == at_once


def test_a_batch_goes_into_the_store_again_only_when_it_has_changed(monkeypatch):
    stored = []

    def put(batch):
        stored.append(batch)
        return len(stored)

    monkeypatch.setattr("ray.put", put)
    put_batch = trainer_group.put_batch
    (prompt,) = make_prompts(0)
    batch = Batch(0, [one_token_sample(prompt, 0)], expected_stamp=(0, 0))
    for_reference = put_batch(batch)
    for_critic = put_batch(batch)
    assert for_reference == for_critic == 1
    batch.advantages = [np.ones(1, np.float32)]
    assert put_batch(batch) == 2
    assert put_batch(batch) == 2
    assert stored[1].advantages[0][0] == 1.0
    batch.samples = [replace(batch.samples[0], loss_mask=np.zeros(1, bool))]
    assert put_batch(batch) == 3
    assert not stored[2].samples[0].loss_mask.any()
    assert stored[2].stored == NOT_STORED


def test_a_canary_that_nobody_asks_for_any_more_is_not_reported():
    """The trainer's half is scored ahead; the run may fail before the sync that needs it."""

    async def main():
        rank = StandInActor(score=ActorMethod(RuntimeError("it was killed"), delay=0.01))
        WorkerGroup("actor", [rank], Config()).score([np.arange(3)])
        await asyncio.sleep(0.02)

    assert asyncio_reports(main) == []
