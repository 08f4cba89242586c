"""The schedule with a pool of prompts, with stand-ins for engine and trainer; the real parts run it
in tests/e2e/test_staleness.py."""

from __future__ import annotations

import asyncio
import copy
import io
import random
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from one_step_off.checkpoint.in_flight import restored_in_flight
from one_step_off.config.schema import Config
from one_step_off.data.prompt_stream import PromptStream
from one_step_off.data.samples import Prompt, Sample
from one_step_off.data.staleness import StalenessError
from one_step_off.monitoring.tracker import Tracker
from one_step_off.ray_trainer import Pipeline, Resumed, RunGroups, Stopped
from one_step_off.rollout.replica_supervisor import NoReplica
from tests.unit.ray_trainer.stand_ins import (
    FakeActor,
    FakeRollout,
    FakeSync,
    MemoryCheckpointer,
    World,
    fail_after_ticks,
    read_rows,
)
from tests.unit.rollout.test_prompt_pool import make_prompt, make_sample
from tests.unit.stand_ins import asyncio_reports

PROMPTS = [make_prompt(row) for row in range(7)]


class InterruptedRollout(FakeRollout):
    """Generates each prompt by itself. A sync interrupts it, and the rest has the new version.

    Attributes:
        alike: whether all samples of a prompt score alike.
        generated: the prompts so far.
        room: for how many prompts at once there is room; the others begin later.
    """

    alike = staticmethod(lambda prompt: False)

    def __init__(self, world: World) -> None:
        super().__init__(world)
        self.generated: list[Prompt] = []
        self.room = asyncio.Semaphore(10**6)

    async def generate(self, prompts, purpose, sampling, on_group=None, on_begin=None):
        if on_group is None:
            return await super().generate(prompts, purpose, sampling)
        world = self.world
        self.generated += prompts

        async def generate_group(prompt: Prompt) -> list[Sample]:
            async with self.room:
                on_begin(prompt)
                return await begun_group(prompt)

        async def begun_group(prompt: Prompt) -> list[Sample]:
            versions = []
            for _ in range(world.delays.randrange(1, 6)):
                versions.append(world.engine_version)
                await asyncio.sleep(world.delays.random() * world.longest)
            samples = [make_sample(prompt, i, versions) for i in range(sampling.n)]
            for sample in samples:
                sample.attempt = world.attempt
                if self.alike(prompt):
                    sample.reward = 1.0
            on_group(samples)
            return samples

        groups = await asyncio.gather(*(generate_group(prompt) for prompt in prompts))
        return [sample for group in groups for sample in group], 0.001


class KeepsLast(MemoryCheckpointer):
    """Keeps the last checkpoint in memory."""

    def __init__(self, in_use: bool) -> None:
        self.in_use = in_use
        self.saved: dict[str, Any] = {}

    def keep(self, step, samples, state):
        self.saved = dict(state, step=step, samples=samples)


def make_stream(steps: int) -> PromptStream:
    return PromptStream(PROMPTS, 3, True, 0, steps)


def drawn(stream: PromptStream, steps: int) -> list[tuple[int, int]]:
    """The prompts of this many steps, in the order of the data."""
    return [prompt.id for _ in range(steps) for prompt in stream.next_batch()]


def build(
    folder: Path,
    world: World,
    steps: int,
    staleness: int = 2,
    stream: PromptStream | None = None,
    checkpointer: Any = None,
    resumed: Resumed | None = None,
    attempt: int = 0,
) -> Pipeline:
    cfg = Config()
    cfg.pipeline.staleness = staleness
    cfg.weight_sync.in_flight = "recompute"
    cfg.data.train_batch_size = 3
    roles: Any = RunGroups(FakeActor(world), InterruptedRollout(world), FakeSync(world))
    tracker = Tracker(str(folder), steps, out=io.StringIO())
    stream = stream or make_stream(steps)
    return Pipeline(cfg, roles, stream, PROMPTS[:2], tracker, checkpointer, resumed, attempt)


def trained_prompts(world: World) -> list[tuple[int, int]]:
    return [prompt for trained in world.trained for prompt in trained.prompts]


@settings(max_examples=100, deadline=None)
@given(
    st.integers(1, 9),
    st.sampled_from([1, 2, 4, 8, 100]),
    st.integers(1, 4),
    st.integers(1, 3),
    st.booleans(),
    st.integers(0, 10**6),
)
def test_any_mix_of_slow_and_fast_prompts(
    tmp_path_factory, steps, room, staleness, max_gen_batches, overlapped, seed
):
    """It never has more prompts in progress than it may, it ends, and it trains on each once.
    Syncs come before training or beside it, and there is room for many prompts at once or few."""
    world = World(random.Random(seed))
    pipeline = build(tmp_path_factory.mktemp("run"), world, steps, staleness)
    pipeline.cfg.algorithm.max_gen_batches = max_gen_batches
    pipeline.sync_overlap.is_auto = False
    pipeline.sync_overlap.overlapped = overlapped
    rollout: Any = pipeline.roles.rollout
    rollout.room = asyncio.Semaphore(room)
    rollout.alike = lambda prompt: prompt.id[1] % 3 == 0
    batches: Any = pipeline.batches
    launch = batches.launch

    def launch_and_check(step, version, tasks):
        launch(step, version, tasks)
        begun = 3 * batches.next_step + len(batches.pool.prompts)
        assert begun <= 3 * (version + 1 + staleness)

    batches.launch = launch_and_check
    asyncio.run(asyncio.wait_for(pipeline.fit(), 20))
    assert [trained.step for trained in world.trained] == list(range(steps))
    for trained in world.trained:
        assert max(0, trained.step - staleness) <= min(trained.versions)
        assert max(trained.versions) <= trained.step
    ledger = read_rows(pipeline.tracker.folder, "ledger.jsonl")
    replaced = [tuple(prompt) for row in ledger for prompt in row.get("replaced", ())]
    assert bool(replaced) <= (max_gen_batches > 1)
    used = sorted(trained_prompts(world) + replaced)
    stream = make_stream(steps)
    expected = [prompt.id for prompt in stream.next_batch(len(used))]
    assert used == sorted(expected), "prompts skipped or repeated"
    assert batches.pool.prompts == {}, "prompts were begun that no step trains on"
    for row in pipeline.tracker.steps:
        shares = [row[f"staleness/age_{age}"] for age in range(staleness + 1)]
        assert sum(shares) == pytest.approx(1.0)


def test_a_slow_group_is_overtaken_interrupted_and_trained_on_later(tmp_path):
    """One prompt takes several steps; the trainer waits for it only when it is due."""
    world = World(random.Random(0), longest=0.02)
    pipeline = build(tmp_path, world, 6)
    pipeline.val = None
    rollout: Any = pipeline.roles.rollout
    generate_fast = rollout.generate
    slowest = make_stream(6).next_batch()[0].id

    async def generate_slowly(prompt, on_group, on_begin) -> None:
        on_begin(prompt)
        versions = []
        while world.version < 2 or len(versions) < 3:
            versions.append(world.engine_version)
            await asyncio.sleep(0.005)
        on_group([make_sample(prompt, i, versions) for i in range(2)])

    async def generate(prompts, purpose, sampling, on_group=None, on_begin=None):
        fast = [prompt for prompt in prompts if prompt.id != slowest]
        work: list[Any] = [generate_fast(fast, purpose, sampling, on_group, on_begin)]
        work += [generate_slowly(p, on_group, on_begin) for p in prompts if p.id == slowest]
        await asyncio.gather(*work)
        return [], 0.0

    rollout.generate = generate
    asyncio.run(pipeline.fit())
    (step,) = [trained.step for trained in world.trained if slowest in trained.prompts]
    assert step == 2, "begun by version 0 with staleness 2: due in step 2"
    row = pipeline.tracker.steps[2]
    assert row["carry/groups"] >= 1
    assert row["carry/interrupted"] > 0
    assert row["staleness/max"] == 2


def test_a_token_that_is_older_than_allowed_stops_the_run(tmp_path):
    world = World(random.Random(0))
    pipeline = build(tmp_path, world, 5)
    pipeline.val = None

    async def generate(prompts, purpose, sampling, on_group, on_begin):
        for prompt in prompts:
            on_begin(prompt)
            on_group([make_sample(prompt, i, [0]) for i in range(2)])
        return [], 0.0

    rollout: Any = pipeline.roles.rollout
    rollout.generate = generate
    with pytest.raises(StalenessError, match=r"step 3, .*version 0.*versions 1 to 3"):
        asyncio.run(pipeline.fit())


def test_idle_replicas_are_counted_once(tmp_path):
    """All prompts of the run begin before the first step. When they are complete the replicas have
    nothing to do, and each sync finds them idle."""
    world = World(random.Random(0))
    pipeline = build(tmp_path, world, 10, staleness=9)
    pipeline.val = None
    actor: Any = pipeline.roles.actor
    update = actor.update

    async def update_slowly(batch, learn=True):
        await asyncio.sleep(0.02)
        return await update(batch, learn)

    actor.update = update_slowly
    asyncio.run(pipeline.fit())
    rows = pipeline.tracker.steps
    seconds = sum(row["time/step_s"] for row in rows)
    idle_s = sum(row["time/wait_trainer_s"] for row in rows)
    assert 0.4 * seconds < idle_s < 1.5 * seconds


def restored(saved: dict[str, Any]) -> Resumed:
    """What a run resumes with that finds this checkpoint."""
    samples = copy.deepcopy(saved["samples"]) or []
    in_flight = restored_in_flight(saved, samples, lambda prompt: PROMPTS[prompt[1]])
    return Resumed(saved["step"], in_flight)


@pytest.mark.parametrize("stop_after", [1, 2, 4])
@pytest.mark.parametrize("max_gen_batches", [1, 2])
def test_a_resumed_run_loses_and_repeats_nothing(tmp_path, stop_after, max_gen_batches):
    """Stopped at a step's beginning and resumed: together both train on each prompt of the stream
    once, and only unfinished prompts are generated again. Samples of the first run are older, and
    of an earlier attempt."""
    steps = 8
    world = World(random.Random(stop_after))
    checkpointer = KeepsLast(in_use=False)
    first = build(tmp_path / "a", world, steps, 3, checkpointer=checkpointer)
    stop_when_trained(first, stop_after)
    first_rollout: Any = first.roles.rollout
    first.cfg.algorithm.max_gen_batches = max_gen_batches
    first_rollout.alike = lambda prompt: prompt.id[1] % 3 == 0
    with pytest.raises(Stopped):
        asyncio.run(first.fit())
    saved = checkpointer.saved
    trained = trained_prompts(world)
    assert len(trained) == 3 * saved["step"]
    assert len(saved["batches"]) == 1
    complete = [row for row in saved["pool"] if row["samples"]]
    assert len(saved["samples"]) == 6 + 2 * len(complete)

    stream = make_stream(steps)
    stream.load_state_dict(saved["stream"])
    again = World(random.Random(9))
    again.version = saved["step"]
    again.attempt = 1
    second = build(tmp_path / "b", again, steps, 3, stream, KeepsLast(True), restored(saved), 1)
    second.cfg.algorithm.max_gen_batches = max_gen_batches
    second_rollout: Any = second.roles.rollout
    second_rollout.alike = first_rollout.alike
    asyncio.run(second.fit())
    ledger = read_rows(tmp_path / "a", "ledger.jsonl") + read_rows(tmp_path / "b", "ledger.jsonl")
    replaced = [tuple(prompt) for row in ledger for prompt in row.get("replaced", ())]
    used = trained + trained_prompts(again) + replaced
    assert sorted(used) == sorted(prompt.id for prompt in make_stream(steps).next_batch(len(used)))
    generated_again = {prompt.id for prompt in second_rollout.generated}
    assert not generated_again & {tuple(row["prompt"]) for row in complete}
    second_checkpointer: Any = second.checkpointer
    assert second_checkpointer.saved["past"] == {"0": saved["step"]}


def stop_when_trained(pipeline: Pipeline, step: int) -> None:
    """Ask a run to stop while it trains this step."""
    actor: Any = pipeline.roles.actor
    update = actor.update

    async def update_and_stop(batch, learn=True):
        pipeline.stopping = batch.step >= step
        return await update(batch, learn)

    actor.update = update_and_stop


def test_weights_that_were_rolled_back_are_not_of_a_runs_past(tmp_path):
    """A sample of an earlier attempt may have the versions up to the checkpoint, no newer
    ones."""
    steps = 8
    checkpointer = KeepsLast(in_use=False)
    world = World(random.Random(1))
    first = build(tmp_path / "a", world, steps, 3, checkpointer=checkpointer)
    stop_when_trained(first, 2)
    with pytest.raises(Stopped):
        asyncio.run(first.fit())
    saved = checkpointer.saved
    saved["samples"][-1].versions[-1] = saved["step"] + 1
    stream = make_stream(steps)
    stream.load_state_dict(saved["stream"])
    again = World(random.Random(9))
    again.version = saved["step"]
    again.attempt = 1
    second = build(tmp_path / "b", again, steps, 3, stream, None, restored(saved), 1)
    with pytest.raises(StalenessError, match=f"attempt 0, version {saved['step'] + 1}"):
        asyncio.run(second.fit())


def test_complete_groups_are_saved_when_the_last_replica_fails(tmp_path):
    """It fails while a step trains for which no sample is missing; the next step's samples are
    complete too, but for one group."""
    steps = 8
    world = World(random.Random(0))
    checkpointer = KeepsLast(in_use=True)
    pipeline = build(tmp_path, world, steps, checkpointer=checkpointer)
    pipeline.val = None
    roles: Any = pipeline.roles
    update = roles.actor.update
    calls = []
    fails = asyncio.Event()

    async def generate(prompts, purpose, sampling, on_group, on_begin):
        calls.append(purpose)
        is_last = len(calls) == 2
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
    stream = make_stream(steps)
    begun = []
    while stream.state_dict() != saved["stream"]:
        begun += [prompt.id for prompt in stream.next_batch(1)]
    in_pool = [tuple(row["prompt"]) for row in saved["pool"]]
    assert sorted(begun) == sorted(trained_prompts(world) + in_pool)
    assert len(in_pool) >= 4, "a complete batch, and the group that was missing"
    missing = [row for row in saved["pool"] if not row["samples"]]
    assert len(missing) == 1
    assert len(saved["samples"]) == 2 * (len(in_pool) - 1)


def test_a_trainer_that_waits_for_samples_learns_that_the_last_replica_failed_in_a_sync(tmp_path):
    world = World(random.Random(0))
    pipeline = build(tmp_path, world, 6, staleness=1)
    pipeline.val = None

    async def generate(prompts, purpose, sampling, on_group, on_begin):
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


def test_the_failure_that_ends_a_run_is_all_that_is_printed(tmp_path):
    """See the test of this name for the schedule without a pool. Here with checkpoints, too."""

    async def main():
        for tick in range(60):
            world = World(random.Random(tick), longest=0.0)
            checkpointer = KeepsLast(in_use=True)
            checkpointer.is_due = lambda step: step > 0
            pipeline = build(tmp_path / str(tick), world, 3, checkpointer=checkpointer)
            await fail_after_ticks(pipeline, tick)

    assert asyncio_reports(main) == []
