"""Prompts under way over several steps: the bookkeeping alone, then the schedule with stand-ins for engine and trainer.
The real parts carry in test_e2e_carry.py."""

from __future__ import annotations

import asyncio
import io
import math
import random
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from one_step_off.checkpoint import Checkpointer
from one_step_off.config.errors import ConfigError
from one_step_off.config.schema import Config
from one_step_off.data.prompt_stream import PromptStream
from one_step_off.data.samples import Prompt, Sample
from one_step_off.data.staleness import StalenessError
from one_step_off.monitoring.tracker import Tracker
from one_step_off.ray_trainer import Pipeline, Resumed, Roles, Stopped
from one_step_off.rollout.partial_rollouts import Pool
from one_step_off.rollout.replica_group import NoReplica
from one_step_off.runtime.validation import validate
from tests.conftest import tiny_config
from tests.unit.ray_trainer.test_ray_trainer import FakeActor, FakeRollout, FakeSync, World


def prompt(row: int) -> Prompt:
    return Prompt((0, row), np.arange(2, dtype=np.int32), "q", "1")


def sample(p: Prompt, index: int, versions: list[int], length: int | None = None) -> Sample:
    made = np.resize(np.array(versions, np.int32), length or len(versions))
    made.sort()
    n, zeros = len(made), np.zeros(len(made), np.float32)
    return Sample(
        p.id,
        index,
        p.ids,
        np.arange(n, dtype=np.int32),
        zeros,
        np.ones(n, bool),
        made,
        reward=float(index),
    )


@settings(max_examples=200, deadline=None)
@given(st.data(), st.integers(1, 5), st.integers(0, 3), st.integers(0, 10**6))
def test_every_prompt_is_taken_once_and_in_time_whatever_lands_first(data, size, max_carry, seed):
    over = data.draw(st.floats(1.0, 1 + max_carry))
    chance, pool, steps, rows = random.Random(seed), Pool(size, max_carry), 8, iter(range(10**6))
    begun, taken, flying = [], [], []
    for step in range(
        1, steps + 1
    ):  # begun by version step - 1, as the replicas' renewal in the step before does
        early = chance.random() < 0.5
        for version in (step - 1, step)[
            : 1 + early
        ]:  # the next prompts may be begun before this step's are complete
            most = math.ceil(((version == step) + over) * size)
            new = [prompt(next(rows)) for _ in range(most - len(pool.flights))]
            pool.begin(new, version, version + 1)
            begun += [p.id for p in new]
            flying += new
        while not pool.choose(step):
            assert flying, "everything is complete, and the step still waits"
            p = flying.pop(chance.randrange(len(flying)))
            pool.land([sample(p, 0, [0])])
        due = {f.prompt.id: f.due for f in pool.flights.values()}
        there = {f.prompt.id for f in pool.flights.values() if f.samples}
        samples = pool.take(step)
        assert len(samples) == size
        assert {s.prompt_id for s in samples} <= there
        assert all(due[s.prompt_id] >= step for s in samples), "a prompt came too late"
        assert [begun.index(s.prompt_id) for s in samples] == sorted(
            begun.index(s.prompt_id) for s in samples
        )
        taken += [s.prompt_id for s in samples]
    assert len(taken) == len(set(taken)), "a prompt was trained on twice"
    assert set(taken) | set(pool.flights) == set(begun), "a prompt was lost"


def test_the_first_complete_groups_win_unless_one_is_due():
    pool = Pool(2, 1)
    pool.begin([prompt(r) for r in range(4)], 0, 1)
    for row in (3, 1):
        pool.land([sample(prompt(row), 0, [0])])
    samples = pool.take(1)
    assert [s.prompt_id[1] for s in samples] == [1, 3]
    assert all("carried" not in s.extra for s in samples)
    pool.begin([prompt(4), prompt(5)], 1, 2)
    for row in (4, 5):
        pool.land([sample(prompt(row), 0, [1])])
    assert pool.choose(2) == [], "0 and 2 are due in step 2, and not there"
    for row in (0, 2):
        pool.land([sample(prompt(row), 0, [0, 1])])
    samples = pool.take(2)
    assert [s.prompt_id[1] for s in samples] == [0, 2] and [
        s.extra["carried"] for s in samples
    ] == [1, 1]
    assert pool.missing == 0 and list(pool.flights) == [(0, 4), (0, 5)]


def test_figures_tell_who_was_carried_and_that_short_ones_came_first():
    pool = Pool(2, 1)
    first = pool.figures([sample(prompt(0), 0, [0], 4), sample(prompt(1), 0, [0], 4)], 1)
    assert first.pop("carry/under_way") == 0
    assert first == {
        "carry/groups": 0,
        "carry/interrupted": 0,
        "carry/old_tokens": 0,
        "carry/length_bias": 1.0,
    }
    late = [sample(prompt(2), i, [0, 1], 20) for i in range(2)]
    for s in late:
        s.extra["carried"] = 1
    found = pool.figures([*late, sample(prompt(3), 0, [1], 4), sample(prompt(4), 0, [1], 8)], 2)
    assert found["carry/groups"] == 1 and found["carry/interrupted"] == 0.5
    assert found["carry/old_tokens"] == pytest.approx(20 / 52)
    assert found["carry/length_bias"] == pytest.approx(
        6.0 / 10.0
    )  # 4 and 8; 60 tokens in 6 samples


class Engine(FakeRollout):
    """Generates each prompt on its own; a sync in between interrupts, and the rest has the new version."""

    async def generate(self, prompts, what, sampling, land=None):
        if land is None:
            return await super().generate(prompts, what, sampling)
        w = self.world

        async def one(p: Prompt) -> list[Sample]:
            versions = []
            for _ in range(w.delays.randrange(1, 6)):
                versions.append(w.engine_version)
                await asyncio.sleep(w.delays.random() * w.longest)
            made = [sample(p, i, versions) for i in range(sampling.n)]
            land(made)
            return made

        return [s for group in await asyncio.gather(*map(one, prompts)) for s in group], 0.001


def build(
    folder, world, steps, over=1.0, max_carry=1, stream=None, checkpointer=None, resumed=None
) -> Pipeline:
    cfg = Config()
    cfg.pipeline.partial_rollout, cfg.pipeline.max_carry, cfg.rollout.oversample = (
        True,
        max_carry,
        over,
    )
    cfg.data.train_batch_size = 3
    prompts = [prompt(r) for r in range(7)]
    stream = stream or PromptStream(prompts, 3, True, 0, steps)
    roles = Roles(FakeActor(world), Engine(world), FakeSync(world))
    tracker = Tracker(str(folder), steps, out=io.StringIO())
    return Pipeline(cfg, roles, stream, prompts[:2], tracker, checkpointer, resumed)


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 9), st.floats(1.0, 3.0), st.integers(0, 2), st.integers(0, 10**6))
def test_any_mix_of_slow_and_fast_prompts(tmp_path_factory, steps, over, max_carry, seed):
    world, over = World(random.Random(seed)), min(over, 1 + max_carry)
    pipeline = build(tmp_path_factory.mktemp("run"), world, steps, over, max_carry)
    asyncio.run(pipeline.fit())
    assert [t[0] for t in world.trained] == list(range(steps))
    for step, _, versions in world.trained:
        assert max(0, step - 1 - max_carry) <= min(versions) and max(versions) <= step
    twin = PromptStream([prompt(r) for r in range(7)], 3, True, 0, steps)
    expected = [p.id for _ in range(steps) for p in twin.next_batch()]
    assert sorted(p for t in world.trained for p in t[1]) == sorted(expected), (
        "prompts lost or repeated"
    )
    assert pipeline.pool.flights == {}, "prompts were begun that no step trains on"


def test_a_slow_group_is_overtaken_interrupted_and_trained_on_later(tmp_path):
    """One prompt takes several steps; the trainer waits for it only when it is due."""
    world = World(random.Random(0), longest=0.02)
    pipeline = build(tmp_path, world, 6, over=2.0)
    quick = pipeline.roles.rollout.generate

    async def generate(prompts, what, sampling, land=None):
        slow = [p for p in prompts if p.id == slowest]

        async def late() -> None:
            versions = []
            while world.version < 2 or len(versions) < 3:
                versions.append(world.engine_version)
                await asyncio.sleep(0.005)
            land([sample(slow[0], i, versions) for i in range(2)])

        rest = quick([p for p in prompts if p.id != slowest], what, sampling, land)
        await asyncio.gather(rest, *([late()] if slow and land else []))
        return [], 0.0

    slowest = next(iter(PromptStream([prompt(r) for r in range(7)], 3, True, 0, 6).next_batch())).id
    pipeline.roles.rollout.generate = generate
    pipeline.val = None
    asyncio.run(pipeline.fit())
    (step,) = [t[0] for t in world.trained if slowest in t[1]]
    assert step == 2, "begun by version 0 with max_carry=1: due in step 2"
    row = pipeline.tracker.steps[2]
    assert row["carry/groups"] >= 1 and row["carry/interrupted"] > 0
    assert (row["staleness/min"], row["staleness/max"]) == (pytest.approx(row["staleness/min"]), 2)


def test_a_token_that_is_older_than_allowed_stops_the_run(tmp_path):
    world = World(random.Random(0))
    pipeline = build(tmp_path, world, 5)

    async def generate(prompts, what, sampling, land=None):
        for p in prompts if land else []:
            land([sample(p, i, [0]) for i in range(2)])
        return [], 0.0

    pipeline.roles.rollout.generate, pipeline.val = generate, None
    with pytest.raises(StalenessError, match=r"step 3, .*version 0.*versions 1 to 3"):
        asyncio.run(pipeline.fit())


@pytest.mark.parametrize("stop_after", [1, 2, 4])
def test_a_resumed_run_begins_what_was_under_way_anew(tmp_path, stop_after):
    """Stopped at a step's beginning and resumed: together both train on each prompt of the stream once."""
    world, saved = World(random.Random(stop_after)), {}

    class Kept(Checkpointer):
        def __init__(self) -> None:
            self.cfg = Config()

        def has(self, step: int) -> bool:
            return False

        async def save(self, step, samples, state):
            saved.update(state, step=step, samples=samples)

            async def written():
                return tmp_path, 0

            return written()

        in_use = False

    first = build(tmp_path / "a", world, 8, over=2.0, checkpointer=Kept())
    update = first.roles.actor.update

    async def stopping(batch, learn=True):
        first.stopping = batch.step >= stop_after
        return await update(batch, learn)

    first.roles.actor.update = stopping
    with pytest.raises(Stopped):
        asyncio.run(first.fit())
    trained, stream = (
        [p for t in world.trained for p in t[1]],
        PromptStream([prompt(r) for r in range(7)], 3, True, 0, 8),
    )
    assert len(trained) == 3 * saved["step"] and len(saved["samples"]) == 6
    stream.load_state_dict(saved["stream"])
    ids = saved["carried"]
    rows = [Prompt(tuple(i), np.arange(2, dtype=np.int32), "q", "1") for i in ids]
    again = World(random.Random(9))
    again.version = saved["step"]
    resumed = Resumed(saved["step"], saved["samples"], 0.1, carried=rows)
    asyncio.run(build(tmp_path / "b", again, 8, over=2.0, stream=stream, resumed=resumed).fit())
    trained += [p for t in again.trained for p in t[1]]
    whole = PromptStream([prompt(r) for r in range(7)], 3, True, 0, 8)
    assert sorted(trained) == sorted(p.id for _ in range(8) for p in whole.next_batch())


@pytest.mark.parametrize(
    ("keys", "told"),
    [
        ({"pipeline.partial_rollout": True, "pipeline.staleness": 0}, "pipeline.staleness=1"),
        ({"rollout.oversample": 1.5}, "pipeline.partial_rollout=true"),
        ({"pipeline.partial_rollout": True, "rollout.oversample": 2.5}, "use 2 at most"),
        ({"pipeline.partial_rollout": True, "algorithm.max_gen_batches": 2}, "set it to 1"),
    ],
)
def test_what_cannot_be_carried_is_refused(models, tmp_path, keys, told):
    with pytest.raises(ConfigError, match=told):
        validate(tiny_config(models("qwen2", True), str(tmp_path), **keys), 0)


def test_what_is_complete_is_carried_when_the_last_replica_goes(tmp_path):
    """It goes while a step trains for which no sample is missing; the next step's are complete too, but for one."""
    world, saved = World(random.Random(0)), {}

    class Kept(Checkpointer):
        in_use = True

        def __init__(self) -> None:
            self.cfg = Config()

        async def save(self, step, samples, state):
            saved.update(state, step=step, samples=samples)

            async def written():
                return tmp_path, 0

            return written()

        def has(self, step: int) -> bool:
            return False

    pipeline = build(tmp_path, world, 8, over=2.0, checkpointer=Kept())
    update, gone, calls = pipeline.roles.actor.update, asyncio.Event(), []

    async def generate(prompts, what, sampling, land=None):
        calls.append(what)
        late = len(calls) == 3
        for p in prompts[: len(prompts) - late]:
            land([sample(p, i, [world.engine_version]) for i in range(2)])
        if late:
            await gone.wait()
            raise NoReplica("none is left")
        return [], 0.0

    async def last(batch, learn=True):
        found = await update(batch, learn)
        if batch.step == 1:
            gone.set()
            await asyncio.sleep(0.05)
        return found

    pipeline.roles.rollout.generate, pipeline.roles.actor.update, pipeline.val = (
        generate,
        last,
        None,
    )
    with pytest.raises(NoReplica):
        asyncio.run(pipeline.fit())
    assert saved["step"] == 2 and saved["samples"] is None
    whole = PromptStream([prompt(r) for r in range(7)], 3, True, 0, 8)
    begun = []
    while whole.state_dict() != saved["stream"]:
        begun += [p.id for p in whole.next_batch(1)]
    assert sorted(begun) == sorted([p for t in world.trained for p in t[1]] + saved["carried"])
    assert len(saved["carried"]) >= 4, "a complete batch, and what was late"


def test_when_the_last_replica_goes_in_a_sync_the_trainer_that_waits_for_samples_learns_it(
    tmp_path,
):
    world = World(random.Random(0))
    pipeline = build(tmp_path, world, 6)

    async def generate(prompts, what, sampling, land=None):
        for p in prompts if world.version == 0 else ():
            land([sample(p, i, [world.engine_version]) for i in range(2)])
        await asyncio.sleep(60)  # those given out later never come

    async def gone(stamp, expected=None):
        if stamp[1] > 1:
            raise NoReplica("none is left")
        return await sync(stamp, expected)

    sync = FakeSync(world)
    pipeline.roles.rollout.generate, pipeline.val, pipeline.roles.sync = generate, None, gone

    async def release(version):
        pass

    stand_in: Any = gone
    stand_in.score_canary, stand_in.release, stand_in.fail = sync.score_canary, release, sync.fail
    stand_in.on_trace = None
    with pytest.raises(NoReplica):
        asyncio.run(asyncio.wait_for(pipeline.fit(), 10))
