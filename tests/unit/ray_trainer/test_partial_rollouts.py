"""The schedule with partial rollouts, with stand-ins for engine and trainer; the real parts run it
in tests/e2e/test_partial_rollouts.py."""

from __future__ import annotations

import asyncio
import io
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from one_step_off.config.schema import Config
from one_step_off.data.prompt_stream import PromptStream
from one_step_off.data.samples import Prompt, Sample
from one_step_off.data.staleness import StalenessError
from one_step_off.monitoring.tracker import Tracker
from one_step_off.ray_trainer import Pipeline, Resumed, Roles, Stopped
from one_step_off.rollout.replica_supervisor import NoReplica
from tests.unit.ray_trainer.stand_ins import FakeActor, FakeRollout, FakeSync, World
from tests.unit.rollout.test_partial_rollouts import make_prompt, make_sample

PROMPTS = [make_prompt(row) for row in range(7)]


class InterruptedRollout(FakeRollout):
    """Generates each prompt by itself. A sync interrupts it, and the rest has the new version."""

    async def generate(self, prompts, purpose, sampling, on_group=None):
        if on_group is None:
            return await super().generate(prompts, purpose, sampling)
        world = self.world

        async def generate_group(prompt: Prompt) -> list[Sample]:
            versions = []
            for _ in range(world.delays.randrange(1, 6)):
                versions.append(world.engine_version)
                await asyncio.sleep(world.delays.random() * world.longest)
            samples = [make_sample(prompt, i, versions) for i in range(sampling.n)]
            on_group(samples)
            return samples

        groups = await asyncio.gather(*(generate_group(prompt) for prompt in prompts))
        return [sample for group in groups for sample in group], 0.001


class MemoryCheckpointer:
    """Keeps the last checkpoint in memory."""

    def __init__(self, in_use: bool) -> None:
        self.in_use = in_use
        self.saved: dict[str, Any] = {}

    def has(self, step: int) -> bool:
        return False

    def is_due(self, step: int) -> bool:
        return False

    async def save(self, step, samples, state):
        self.saved = dict(state, step=step, samples=samples)

        async def write():
            return "memory", 0

        return write()


def make_stream(steps: int) -> PromptStream:
    return PromptStream(PROMPTS, 3, True, 0, steps)


def drawn(stream: PromptStream, steps: int) -> list[tuple[int, int]]:
    """The prompts of this many steps, in the order of the data."""
    return [prompt.id for _ in range(steps) for prompt in stream.next_batch()]


def build(
    folder: Path,
    world: World,
    steps: int,
    oversample: float = 1.0,
    max_carry: int = 1,
    stream: PromptStream | None = None,
    checkpointer: Any = None,
    resumed: Resumed | None = None,
) -> Pipeline:
    cfg = Config()
    cfg.pipeline.partial_rollout = True
    cfg.pipeline.max_carry = max_carry
    cfg.rollout.oversample = oversample
    cfg.data.train_batch_size = 3
    roles: Any = Roles(FakeActor(world), InterruptedRollout(world), FakeSync(world))
    tracker = Tracker(str(folder), steps, out=io.StringIO())
    stream = stream or make_stream(steps)
    return Pipeline(cfg, roles, stream, PROMPTS[:2], tracker, checkpointer, resumed)


def trained_prompts(world: World) -> list[tuple[int, int]]:
    return [prompt for trained in world.trained for prompt in trained.prompts]


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 9), st.floats(1.0, 3.0), st.integers(0, 2), st.integers(0, 10**6))
def test_any_mix_of_slow_and_fast_prompts(tmp_path_factory, steps, oversample, max_carry, seed):
    world = World(random.Random(seed))
    oversample = min(oversample, 1 + max_carry)
    pipeline = build(tmp_path_factory.mktemp("run"), world, steps, oversample, max_carry)
    asyncio.run(pipeline.fit())
    assert [trained.step for trained in world.trained] == list(range(steps))
    for trained in world.trained:
        assert max(0, trained.step - 1 - max_carry) <= min(trained.versions)
        assert max(trained.versions) <= trained.step
    expected = drawn(make_stream(steps), steps)
    assert sorted(trained_prompts(world)) == sorted(expected), "prompts skipped or repeated"
    batches: Any = pipeline.batches
    assert batches.pool.unfinished == {}, "prompts were begun that no step trains on"


def test_a_slow_group_is_overtaken_interrupted_and_trained_on_later(tmp_path):
    """One prompt takes several steps; the trainer waits for it only when it is due."""
    world = World(random.Random(0), longest=0.02)
    pipeline = build(tmp_path, world, 6, oversample=2.0)
    pipeline.val = None
    rollout: Any = pipeline.roles.rollout
    generate_fast = rollout.generate
    slowest = make_stream(6).next_batch()[0].id

    async def generate_slowly(prompt, on_group) -> None:
        versions = []
        while world.version < 2 or len(versions) < 3:
            versions.append(world.engine_version)
            await asyncio.sleep(0.005)
        on_group([make_sample(prompt, i, versions) for i in range(2)])

    async def generate(prompts, purpose, sampling, on_group=None):
        fast = [prompt for prompt in prompts if prompt.id != slowest]
        work: list[Any] = [generate_fast(fast, purpose, sampling, on_group)]
        work += [generate_slowly(p, on_group) for p in prompts if p.id == slowest]
        await asyncio.gather(*work)
        return [], 0.0

    rollout.generate = generate
    asyncio.run(pipeline.fit())
    (step,) = [trained.step for trained in world.trained if slowest in trained.prompts]
    assert step == 2, "begun by version 0 with max_carry=1: due in step 2"
    row = pipeline.tracker.steps[2]
    assert row["carry/groups"] >= 1
    assert row["carry/interrupted"] > 0
    assert row["staleness/max"] == 2


def test_a_token_that_is_older_than_allowed_stops_the_run(tmp_path):
    world = World(random.Random(0))
    pipeline = build(tmp_path, world, 5)
    pipeline.val = None

    async def generate(prompts, purpose, sampling, on_group):
        for prompt in prompts:
            on_group([make_sample(prompt, i, [0]) for i in range(2)])
        return [], 0.0

    rollout: Any = pipeline.roles.rollout
    rollout.generate = generate
    with pytest.raises(StalenessError, match=r"step 3, .*version 0.*versions 1 to 3"):
        asyncio.run(pipeline.fit())


@pytest.mark.parametrize("stop_after", [1, 2, 4])
def test_a_resumed_run_generates_unfinished_prompts_again(tmp_path, stop_after):
    """Stopped at a step's beginning and resumed: together both train on each prompt of the stream
    once."""
    steps = 8
    world = World(random.Random(stop_after))
    checkpointer = MemoryCheckpointer(in_use=False)
    first = build(tmp_path / "a", world, steps, oversample=2.0, checkpointer=checkpointer)
    actor: Any = first.roles.actor
    update = actor.update

    async def update_and_stop(batch, learn=True):
        first.stopping = batch.step >= stop_after
        return await update(batch, learn)

    actor.update = update_and_stop
    with pytest.raises(Stopped):
        asyncio.run(first.fit())
    saved = checkpointer.saved
    trained = trained_prompts(world)
    assert len(trained) == 3 * saved["step"]
    assert len(saved["samples"]) == 6

    stream = make_stream(steps)
    stream.load_state_dict(saved["stream"])
    unfinished = [
        Prompt(tuple(prompt), np.arange(2, dtype=np.int32), "q", "1") for prompt in saved["carried"]
    ]
    resumed = Resumed(saved["step"], saved["samples"], 0.1, unfinished=unfinished)
    again = World(random.Random(9))
    again.version = saved["step"]
    second = build(tmp_path / "b", again, steps, oversample=2.0, stream=stream, resumed=resumed)
    asyncio.run(second.fit())
    expected = drawn(make_stream(steps), steps)
    assert sorted(trained + trained_prompts(again)) == sorted(expected)


def test_complete_groups_are_saved_when_the_last_replica_fails(tmp_path):
    """It fails while a step trains for which no sample is missing; the next step's samples are
    complete too, but for one group."""
    steps = 8
    world = World(random.Random(0))
    checkpointer = MemoryCheckpointer(in_use=True)
    pipeline = build(tmp_path, world, steps, oversample=2.0, checkpointer=checkpointer)
    pipeline.val = None
    roles: Any = pipeline.roles
    update = roles.actor.update
    calls = []
    fails = asyncio.Event()

    async def generate(prompts, purpose, sampling, on_group):
        calls.append(purpose)
        is_last = len(calls) == 3
        complete = prompts[:-1] if is_last else prompts
        for prompt in complete:
            on_group([make_sample(prompt, i, [world.engine_version]) for i in range(2)])
        if is_last:
            await fails.wait()
            raise NoReplica("none is left")
        return [], 0.0

    async def update_and_fail(batch, learn=True):
        metrics = await update(batch, learn)
        if batch.step == 1:
            fails.set()
            await asyncio.sleep(0.05)
        return metrics

    roles.rollout.generate = generate
    roles.actor.update = update_and_fail
    with pytest.raises(NoReplica):
        asyncio.run(pipeline.fit())
    saved = checkpointer.saved
    assert saved["step"] == 2
    assert saved["samples"] is None
    stream = make_stream(steps)
    begun = []
    while stream.state_dict() != saved["stream"]:
        begun += [prompt.id for prompt in stream.next_batch(1)]
    assert sorted(begun) == sorted(trained_prompts(world) + saved["carried"])
    assert len(saved["carried"]) >= 4, "a complete batch, and the group that was missing"


def test_a_trainer_that_waits_for_samples_learns_that_the_last_replica_failed_in_a_sync(tmp_path):
    world = World(random.Random(0))
    pipeline = build(tmp_path, world, 6)
    pipeline.val = None

    async def generate(prompts, purpose, sampling, on_group):
        if world.version == 0:
            for prompt in prompts:
                on_group([make_sample(prompt, i, [world.engine_version]) for i in range(2)])
        await asyncio.sleep(60)  # those that were begun later never come

    class SyncUntilVersion1(FakeSync):
        async def __call__(self, stamp, expected=None):
            if stamp[1] > 1:
                raise NoReplica("none is left")
            return await super().__call__(stamp, expected)

        async def release(self, version):
            pass

    roles: Any = pipeline.roles
    roles.rollout.generate = generate
    roles.sync = SyncUntilVersion1(world)
    with pytest.raises(NoReplica):
        asyncio.run(asyncio.wait_for(pipeline.fit(), 10))
