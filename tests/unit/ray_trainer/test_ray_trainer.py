"""The schedule, with stand-ins for engine and trainer; the real parts run it in test_e2e_pipeline.py."""

from __future__ import annotations

import asyncio
import io
import json
import random
import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from one_step_off.config.errors import ConfigError
from one_step_off.config.schema import Config
from one_step_off.data.prompt_stream import PromptStream
from one_step_off.data.samples import Prompt, Sample
from one_step_off.data.staleness import StalenessError
from one_step_off.monitoring.tracker import Tracker
from one_step_off.ray_trainer import Pipeline, Resumed, Roles
from one_step_off.rollout.vllm_replica import Sampling


class World:
    """A trainer and an engine that note what happens, with phases of any length."""

    def __init__(self, delays: random.Random, longest: float = 0.003) -> None:
        self.delays, self.longest = delays, longest
        self.version = 0
        self.engine_version: int | None = None
        self.generating = 0
        self.events: list[tuple] = []
        self.trained: list[tuple] = []
        self.fail_at: tuple | None = None
        self.alive = 0
        self.blocked = 0  # trainers that wait for the end of a sync
        self.sync_failure: BaseException | None = None

    async def phase(self, *event) -> None:
        self.alive += 1
        try:
            self.events.append(("begin", *event))
            await asyncio.sleep(
                self.delays.random() * self.longest * (0.2 if event[0] == "sync" else 1.0)
            )
            if self.fail_at == event:
                raise ValueError(f"broken on purpose in {event}")
            self.events.append(("end", *event))
        finally:
            self.alive -= 1


class FakeRollout:
    train_sampling = Sampling(2, 1.0, 0)
    val_sampling = Sampling(1, 0.0, 0)
    restarts = 0

    async def watch(self):
        await asyncio.sleep(3600)

    def __init__(self, world: World) -> None:
        self.world = world

    async def generate(self, prompts, what, sampling):
        w = self.world
        made_by = w.engine_version
        assert made_by is not None, "generated before any weights came"
        w.generating += 1
        await w.phase("generate", what)
        w.generating -= 1
        assert w.engine_version == made_by, "weights changed in mid-generation"
        samples = [
            sample(p, i, made_by) for p in prompts for i in range(sampling.n + sampling.greedy)
        ]
        for s in samples:
            s.extra |= {"greedy": True} if s.index == sampling.n else {}
        return samples, 0.001


class FakeActor:
    def __init__(self, world: World) -> None:
        self.world = world

    async def update(self, batch, learn=True):
        w = self.world
        await w.phase("train", batch.step)
        # A process of its own: the driver may stop waiting for it, and it waits on all the same.
        await asyncio.shield(asyncio.ensure_future(self._before_step()))
        w.version += 1
        w.trained.append(
            (batch.step, batch.prompt_order(), {int(v) for s in batch.samples for v in s.versions})
        )
        return {"ratio/mean": 1.0}

    async def _before_step(self):
        w = self.world
        w.blocked += 1
        try:
            while w.engine_version != w.version:
                if w.sync_failure:
                    raise ValueError(f"the sync failed: {w.sync_failure}")
                await asyncio.sleep(0)
        finally:
            w.blocked -= 1

    async def log_prob(self, batch):
        await self.world.phase("log_prob", batch.step)
        return [s.log_probs for s in batch.samples]

    async def log_prob_and_squares(self, batch):
        return [
            np.stack([s.log_probs - 1, np.full(len(s.log_probs), 0.4 + 0.1 * s.index)], 1)
            for s in batch.samples
        ]


class FakeJudge:
    """A reward model: a score by the position in the group."""

    async def rewards(self, batch):
        return [10.0 * s.index for s in batch.samples]


class FakeSync:
    def __init__(self, world: World) -> None:
        self.world = world

    def score_canary(self):
        return self.world.version

    async def fail(self, error):
        self.world.sync_failure = error

    async def __call__(self, stamp, expected=None):
        w = self.world
        assert expected in (None, stamp[1]), "the canary's trainer half is of other weights"
        assert w.generating == 0, "a sync while the engine generates"
        assert stamp == (0, w.version), "asked for weights that the trainer does not hold"
        await w.phase("sync", stamp[1])
        assert stamp == (0, w.version), "the weights changed while they were being sent"
        w.engine_version = stamp[1]
        return {"time/sync_s": 0.0}


def sample(prompt: Prompt, index: int, version: int) -> Sample:
    ids = np.arange(3, dtype=np.int32)
    return Sample(
        prompt.id, index, prompt.ids, ids, np.zeros(3, np.float32), np.ones(3, bool), np.full(3, version, np.int32),
        reward=float(index),
    )  # fmt: skip


def build(
    tmp_path, world: World, steps: int, staleness: int, rows: int = 7, test_freq: int = -1
) -> Pipeline:
    cfg = Config()
    cfg.pipeline.staleness = staleness
    cfg.trainer.test_freq = test_freq
    prompts = [Prompt((0, r), np.arange(2, dtype=np.int32), "q", "1") for r in range(rows)]
    stream = PromptStream(prompts, 3, True, 0, steps)
    roles = Roles(FakeActor(world), FakeRollout(world), FakeSync(world))
    return Pipeline(
        cfg, roles, stream, prompts[:2], Tracker(str(tmp_path), steps, out=io.StringIO())
    )


@settings(max_examples=60, deadline=None)
@given(
    st.integers(1, 9), st.sampled_from([0, 1]), st.integers(0, 10**6), st.sampled_from([-1, 1, 2])
)
def test_any_mix_of_slow_and_fast_phases(tmp_path_factory, steps, staleness, seed, test_freq):
    world = World(random.Random(seed))
    pipeline = build(tmp_path_factory.mktemp("run"), world, steps, staleness, test_freq=test_freq)
    asyncio.run(pipeline.fit())
    assert [t[0] for t in world.trained] == list(range(steps)), (
        "steps out of order, lost or repeated"
    )
    for step, _, versions in world.trained:
        assert versions == {max(0, step - staleness)}
    twin = build(tmp_path_factory.mktemp("twin"), World(random.Random(0)), steps, staleness)
    expected = [[p.id for p in twin.stream.next_batch()] for _ in range(steps)]
    assert [t[1] for t in world.trained] == expected, "prompts lost, repeated or out of order"
    launched = [
        e[2] for e in world.events if e[:2] == ("begin", "generate") and e[2].startswith("step")
    ]
    assert launched == [f"step {s}" for s in range(steps)], "the last step must launch nothing"
    synced = [e[2] for e in world.events if e[:2] == ("end", "sync")]
    assert synced == list(range(steps + 1)), (
        "each version once, the final one for the final evaluation"
    )
    assert pipeline.tracker.evaluations[-1]["val/version"] == steps


@pytest.mark.parametrize("staleness", [0, 1])
def test_groups_that_score_alike_are_replaced_a_bounded_number_of_times(tmp_path, staleness):
    """Odd rows score alike: no prompt is used twice or lost, and steps keep their size."""
    world = World(random.Random(0))
    pipeline = build(tmp_path, world, 3, staleness, rows=60)
    pipeline.cfg.algorithm.max_gen_batches = 3
    real = pipeline.roles.rollout.generate

    async def generate(prompts, what, sampling):
        samples, seconds = await real(prompts, what, sampling)
        for s in samples:
            s.reward = 0.0 if s.prompt_id[1] % 2 else float(s.index)
        return samples, seconds

    pipeline.roles.rollout.generate, pipeline.val = generate, None
    asyncio.run(pipeline.fit())
    ledger = [json.loads(line) for line in (tmp_path / "ledger.jsonl").read_text().splitlines()]
    used = [tuple(p) for row in ledger for p in row["prompts"]]
    replaced = [tuple(p) for row in ledger for p in row.get("replaced", ())]
    assert (
        all(len(row["prompts"]) == 3 for row in ledger)
        and replaced
        and all(row % 2 for _, row in replaced)
    )
    twin = build(tmp_path / "twin", World(random.Random(0)), 3, staleness, rows=60)
    assert sorted(used + replaced) == sorted(
        p.id for p in twin.stream.next_batch(len(used) + len(replaced))
    )
    assert len(set(used + replaced)) == len(used + replaced)
    launched = [e[2] for e in world.events if e[:2] == ("begin", "generate")]
    assert all(sum(what.startswith(f"step {n}") for what in launched) <= 3 for n in range(3))
    assert any("in place of" in what for what in launched)


def train_all(pipeline: Pipeline) -> list:
    """Run it, and return the batches as the actor was given them."""
    batches, update = [], pipeline.roles.actor.update

    async def noted(batch, learn=True):
        batches.append(batch)
        return await update(batch, learn)

    pipeline.roles.actor.update = noted
    asyncio.run(pipeline.fit())
    return batches


@pytest.mark.parametrize("judged", [False, True])
@pytest.mark.parametrize("staleness", [0, 1])
def test_greedy_responses_are_baselines_and_nothing_else(tmp_path, staleness, judged):
    pipeline = build(tmp_path, World(random.Random(0)), 3, staleness)
    pipeline.cfg.algorithm.adv_estimator, pipeline.val = "remax", None
    pipeline.cfg.data.max_response_length, pipeline.cfg.reward.overlong_buffer = (
        4,
        2,
    )  # 3 tokens lose 1 / 2
    pipeline.roles.rollout.train_sampling = Sampling(2, 1.0, 0, greedy=True)
    pipeline.roles.reward_model = FakeJudge() if judged else None
    batches = train_all(pipeline)
    assert len(batches) == 3
    for batch in batches:
        assert [s.index for s in batch.samples] == [0, 1] * 3 and len(batch.advantages) == 6
        # indices are rewards; the greedy one has index 2, and the judge adds ten times the index
        of = 11.0 if judged else 1.0
        assert [s.reward for s in batch.samples] == [0, of] * 3
        assert {s.extra["baseline"] for s in batch.samples} == {2 * of - 0.5}
        assert [set(a.tolist()) for a in batch.advantages] == [{-2 * of}, {-of}] * 3
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [(row["samples"], row["reward/mean"]) for row in rows] == [(6, of / 2)] * 3
    ledger = [json.loads(line) for line in (tmp_path / "ledger.jsonl").read_text().splitlines()]
    assert [len(row["prompts"]) for row in ledger] == [3] * 3


def test_a_greedy_response_of_other_weights_stops_the_run(tmp_path):
    pipeline = build(tmp_path, World(random.Random(0)), 3, 1)
    pipeline.cfg.algorithm.adv_estimator = "remax"
    pipeline.roles.rollout.train_sampling, honest = (
        Sampling(2, 1.0, 0, greedy=True),
        pipeline.roles.rollout.generate,
    )

    async def forged(prompts, what, sampling):
        samples, seconds = await honest(prompts, what, sampling)
        samples[-1].versions[1] += what == "step 2"
        return samples, seconds

    pipeline.roles.rollout.generate = forged
    with pytest.raises(StalenessError, match="step 2.*sample 2"):
        asyncio.run(pipeline.fit())


def test_greedy_responses_do_not_make_a_dull_group_informative(tmp_path):
    world = World(random.Random(0))
    pipeline = build(tmp_path, world, 2, 1, rows=60)
    pipeline.cfg.algorithm.max_gen_batches, pipeline.val = 2, None
    pipeline.roles.rollout.train_sampling, real = (
        Sampling(2, 1.0, 0, greedy=True),
        pipeline.roles.rollout.generate,
    )

    async def generate(prompts, what, sampling):
        samples, seconds = await real(prompts, what, sampling)
        for s in samples:
            s.reward = float(s.index == 2)
        return samples, seconds

    pipeline.roles.rollout.generate = generate
    asyncio.run(pipeline.fit())
    assert [e[2] for e in world.events if "in place of" in str(e)].count(
        "step 0, in place of 3 prompts"
    ) == 2


def test_the_optimal_token_baseline_reads_the_trainers_own_distribution(tmp_path):
    pipeline = build(tmp_path, World(random.Random(0)), 1, 1)
    pipeline.cfg.algorithm.adv_estimator, pipeline.val = "optimal_token_baseline", None
    (batch,) = train_all(pipeline)
    # rewards 0 and 1; energies t (1 - 2 / e + .4) and t (1 - 2 / e + .5), whose ratio is the same at each t
    energies = [1 - 2 * np.exp(-1) + square for square in (0.4, 0.5)]
    baseline = energies[1] / sum(energies)
    for s, advantage in zip(batch.samples, batch.advantages, strict=True):
        np.testing.assert_allclose(advantage, s.index - baseline, rtol=1e-5)


@pytest.mark.parametrize("lacking", [(), ("form",), ("form", "right")])
@pytest.mark.parametrize("estimator", ["gdpo", "dr_grpo"])
def test_parts_of_the_reward(tmp_path, estimator, lacking):
    """They are reported, and gdpo normalises them one by one; it alone must have them, of every sample."""
    pipeline = build(tmp_path, World(random.Random(0)), 1, 1)
    pipeline.cfg.algorithm.adv_estimator, pipeline.val = estimator, None
    real = pipeline.roles.rollout.generate

    async def generate(prompts, what, sampling):
        samples, seconds = await real(prompts, what, sampling)
        for k, s in enumerate(samples if len(lacking) < 2 else ()):
            s.extra["reward_parts"] = {"right": float(s.index), "form": 100.0 * (k in (0, 3, 5))}
        for name in lacking[:1] if len(lacking) == 1 else ():
            del samples[-1].extra["reward_parts"][name]
        return samples, seconds

    pipeline.roles.rollout.generate = generate
    if estimator == "gdpo" and lacking:
        match = (
            "gdpo: sample 5, of prompt .* has no part 'form'"
            if len(lacking) == 1
            else "gdpo: needs rewards in parts"
        )
        with pytest.raises(ConfigError, match=match):
            asyncio.run(pipeline.fit())
        return
    (batch,) = train_all(pipeline)
    (row,) = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    if len(lacking) < 2:
        assert (row["reward/right/mean"], row["reward/form/mean"]) == (
            0.5,
            40.0 if lacking else 50.0,
        )
    if estimator == "gdpo":
        # each part is -s, s in every group of two; form is against right in the first and with it in the others
        s = np.sqrt(0.5)
        x = np.array([0, 0, -2 * s, 2 * s, -2 * s, 2 * s])
        np.testing.assert_allclose(
            [a[0] for a in batch.advantages], x / x.std(ddof=1), rtol=1e-4, atol=1e-5
        )


def test_rollout_and_training_overlap_only_one_step_off(tmp_path):
    """With phases of 50 ms each, 6 steps: in turns about 2 phases a step, one step off about 1."""
    seconds = {}
    for staleness in (0, 1):
        world = World(random.Random(0))
        world.delays.random = lambda: 1.0
        world.longest = 0.05
        pipeline = build(tmp_path / str(staleness), world, 6, staleness)
        pipeline.val = None
        begin = time.perf_counter()
        asyncio.run(pipeline.fit())
        seconds[staleness] = time.perf_counter() - begin
        overlaps = order_of(world.events, ("begin", "generate", "step 3")) < order_of(
            world.events, ("end", "train", 2)
        )
        assert overlaps == bool(staleness)
    assert seconds[1] < 0.85 * seconds[0]


@pytest.mark.parametrize("overlap", [True, False])
def test_an_update_begins_beside_the_sync_of_its_own_weights(tmp_path, overlap):
    world = World(random.Random(0))
    world.delays.random = lambda: 1.0
    pipeline = build(tmp_path, world, 6, 1)
    pipeline.overlap = overlap and pipeline.overlap
    asyncio.run(pipeline.fit())
    for step in range(1, 6):
        assert (
            order_of(world.events, ("begin", "train", step))
            < order_of(world.events, ("end", "sync", step))
        ) == overlap
    assert all(versions == {max(0, step - 1)} for step, _, versions in world.trained)


def order_of(events: list[tuple], wanted: tuple) -> int:
    return events.index(wanted)


@pytest.mark.parametrize("staleness", [0, 1])
@pytest.mark.parametrize(
    "fail_at",
    [("generate", "step 0"), ("generate", "step 2"), ("train", 0), ("train", 2), ("sync", 0), ("sync", 2),
     ("generate", "evaluation of v0"), ("generate", "evaluation of v4"), ("log_prob", 1)],
)  # fmt: skip
def test_an_exception_anywhere_ends_the_run_with_it(tmp_path, staleness, fail_at):
    world = World(random.Random(1))
    world.fail_at = fail_at
    pipeline = build(tmp_path, world, 4, staleness)
    pipeline.cfg.algorithm.old_log_probs = "recompute"

    async def bounded():
        with pytest.raises(ValueError, match="^broken on purpose"):
            await asyncio.wait_for(pipeline.fit(), 5)
        for _ in range(1000):
            await asyncio.sleep(0)
        assert world.blocked == 0, "a trainer still waits for a sync that will never end"

    asyncio.run(bounded())
    assert world.alive == 0, "something was left running"


def test_a_sync_that_fails_beside_a_long_update_releases_the_trainer(tmp_path):
    """Overlapped: the trainer's update is under way, and waits for the end of the sync before its optimiser step."""
    world = World(random.Random(0))
    pipeline = build(tmp_path, world, 4, 1)

    class Sync(FakeSync):
        async def __call__(self, stamp, expected=None):
            if stamp[1] == 2:
                while not world.blocked:
                    await asyncio.sleep(0)
                raise ValueError("the canary differs")
            return await super().__call__(stamp, expected)

    pipeline.roles.sync = Sync(world)

    async def bounded():
        with pytest.raises(ValueError, match="^the canary differs"):
            await asyncio.wait_for(pipeline.fit(), 5)
        for _ in range(1000):
            await asyncio.sleep(0)
        assert world.blocked == 0 and len(world.trained) == 2

    asyncio.run(bounded())


def test_a_failing_rollout_does_not_wait_for_a_long_training_step(tmp_path):
    world = World(random.Random(0))
    world.fail_at = ("generate", "step 1")
    pipeline = build(tmp_path, world, 4, 1)

    async def long_update(batch, learn=True):
        await asyncio.sleep(60)

    pipeline.roles.actor.update = long_update
    begin = time.perf_counter()
    with pytest.raises(ValueError, match="broken on purpose"):
        asyncio.run(pipeline.fit())
    assert time.perf_counter() - begin < 5


def test_a_token_of_another_version_stops_the_run(tmp_path):
    world = World(random.Random(0))
    pipeline = build(tmp_path, world, 4, 1)
    honest = pipeline.roles.rollout.generate

    async def forged(prompts, what, sampling):
        samples, seconds = await honest(prompts, what, sampling)
        if what == "step 3":
            samples[-1].versions[1] -= 1
        return samples, seconds

    pipeline.roles.rollout.generate = forged
    with pytest.raises(StalenessError, match="step 3.*token 1.*version 1.*version 2"):
        asyncio.run(pipeline.fit())
    assert len(world.trained) == 3


def test_the_loop_fits_on_one_screen():
    import inspect

    assert len(inspect.getsource(Pipeline._loop).splitlines()) <= 100


@pytest.mark.parametrize("told", [True, False])
def test_after_the_last_step_only_the_last_evaluation_may_be_missing(tmp_path, told):
    """A run that was killed between its last checkpoint and its end: nothing is trained, and nothing is saved twice."""
    world = World(random.Random(0))
    pipeline = build(tmp_path, world, 4, 1)
    world.version = 4
    pipeline.start, pipeline.resumed = 4, Resumed(4, None, 0.0)
    pipeline.tracker.evaluations = [{"val/version": 4.0, "val/reward": 0.5}] if told else []
    asyncio.run(pipeline.fit())
    assert not world.trained and len(pipeline.tracker.evaluations) == 1
    assert any(event[1] == "generate" for event in world.events) is not told
