"""The schedule, with stand-ins for engine and trainer; the real parts run it in
tests/e2e/test_pipeline.py."""

from __future__ import annotations

import asyncio
import inspect
import random
import time
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from one_step_off.data.staleness import StalenessError
from one_step_off.monitoring.callbacks import StepCallbacks, StopTraining
from one_step_off.ray_trainer import Pipeline, Resumed, Stopped
from one_step_off.weight_sync.overlap import SyncOverlap
from tests.unit.ray_trainer.stand_ins import (
    FakeRollout,
    FakeSync,
    World,
    build,
    change_samples,
    fail_after_ticks,
    read_rows,
    version_of_step,
)
from tests.unit.stand_ins import asyncio_reports


def world_of_equal_phases(longest: float) -> World:
    world = World(random.Random(0), longest)
    delays: Any = world.delays
    delays.random = lambda: 1.0
    return world


@settings(max_examples=60, deadline=None)
@given(
    st.integers(1, 11),
    st.sampled_from([0, 1, 2, 3, 4, 5]),
    st.integers(0, 10**6),
    st.sampled_from([-1, 1, 2, 3]),
)
def test_any_mix_of_slow_and_fast_phases(tmp_path_factory, steps, staleness, seed, test_freq):
    world = World(random.Random(seed))
    pipeline = build(tmp_path_factory.mktemp("run"), world, steps, staleness, test_freq=test_freq)
    asyncio.run(pipeline.fit())
    trained_steps = [trained.step for trained in world.trained]
    assert trained_steps == list(range(steps)), "steps out of order, skipped or repeated"
    for trained in world.trained:
        assert trained.versions == {version_of_step(trained.step, staleness)}
    twin = build(tmp_path_factory.mktemp("twin"), World(random.Random(0)), steps, staleness)
    expected = [[prompt.id for prompt in twin.stream.next_batch()] for _ in range(steps)]
    prompts = [trained.prompts for trained in world.trained]
    assert prompts == expected, "prompts skipped, repeated or out of order"
    launched = [name for name in world.begun("generate") if name.startswith("step")]
    assert launched == [f"step {s}" for s in range(steps)], "the last step must launch nothing"
    synced = [event[2] for event in world.events if event[:2] == ("end", "sync")]
    expected_syncs = [*range(0, steps, max(1, staleness)), steps]
    assert synced == expected_syncs, "each version once, the last for the last evaluation"
    assert pipeline.tracker.evaluations[-1]["val/version"] == steps


def test_rollout_and_training_overlap_only_one_step_off(tmp_path):
    for staleness in (0, 1):
        world = world_of_equal_phases(0.01)
        pipeline = build(tmp_path / str(staleness), world, 6, staleness)
        pipeline.val = None
        asyncio.run(pipeline.fit())
        for step in range(5):
            next_begins = world.events.index(("begin", "generate", f"step {step + 1}"))
            train_ends = world.events.index(("end", "train", step))
            assert (next_begins < train_ends) == bool(staleness)


@pytest.mark.parametrize("overlap", ["true", "false"])
def test_an_update_begins_beside_the_sync_of_its_own_weights(tmp_path, overlap):
    world = world_of_equal_phases(0.003)
    pipeline = build(tmp_path, world, 6, 1)
    pipeline.cfg.weight_sync.overlap = overlap
    pipeline.sync_overlap = SyncOverlap(pipeline.cfg)
    asyncio.run(pipeline.fit())
    for step in range(1, 6):
        train_begins = world.events.index(("begin", "train", step))
        sync_ends = world.events.index(("end", "sync", step))
        assert (train_begins < sync_ends) == (overlap == "true")
    for trained in world.trained:
        assert trained.versions == {max(0, trained.step - 1)}


@pytest.mark.parametrize(("generate_s", "overlapped"), [(0.0, 1.0), (1e3, 0.0)])
def test_auto_overlaps_where_training_is_longer(tmp_path, monkeypatch, generate_s, overlapped):
    """Step 0 has no sync of its own. The phases of steps 1 to 3 decide for step 4."""
    world = world_of_equal_phases(0.003)
    pipeline = build(tmp_path, world, 8, 1)
    pipeline.cfg.weight_sync.overlap = "auto"
    pipeline.sync_overlap = SyncOverlap(pipeline.cfg)

    async def sync(self, stamp, expected=None):
        await real_sync(self, stamp, expected)
        return {"time/sync_s": 1e-3}

    async def generate(self, *args):
        samples, _ = await real_generate(self, *args)
        return samples, generate_s

    real_sync, real_generate = FakeSync.__call__, FakeRollout.generate
    monkeypatch.setattr(FakeSync, "__call__", sync)
    monkeypatch.setattr(FakeRollout, "generate", generate)
    asyncio.run(pipeline.fit())
    found = [row["sync/overlapped"] for row in read_rows(tmp_path, "metrics.jsonl")]
    assert found == [0.0] * 4 + [overlapped] * 4
    for step in range(1, 8):
        train_begins = world.events.index(("begin", "train", step))
        sync_ends = world.events.index(("end", "sync", step))
        assert (train_begins < sync_ends) == found[step]


@pytest.mark.parametrize("staleness", [0, 1, 2])
@pytest.mark.parametrize(
    "fail_at",
    [
        ("generate", "step 0"),
        ("generate", "step 2"),
        ("train", 0),
        ("train", 2),
        ("sync", 0),
        ("sync", 2),
        ("generate", "evaluation of v0"),
        ("generate", "evaluation of v4"),
        ("log_prob", 1),
    ],
)
def test_an_exception_anywhere_ends_the_run_with_it(tmp_path, staleness, fail_at):
    world = World(random.Random(1))
    world.fail_at = fail_at
    pipeline = build(tmp_path, world, 4, staleness)
    pipeline.cfg.algorithm.old_log_probs = "recompute"

    async def main():
        with pytest.raises(ValueError, match="^broken on purpose"):
            await asyncio.wait_for(pipeline.fit(), 5)
        await many_turns_of_the_event_loop()
        assert world.blocked == 0, "a trainer still waits for a sync that will never end"

    asyncio.run(main())
    assert world.running == 0, "something was left running"


async def many_turns_of_the_event_loop() -> None:
    for _ in range(1000):
        await asyncio.sleep(0)


def test_a_sync_that_fails_beside_a_long_update_releases_the_trainer(tmp_path):
    """Overlapped: the trainer's update runs, and waits for the end of the sync before its optimizer
    step."""
    world = World(random.Random(0))
    pipeline = build(tmp_path, world, 4, 1)

    class FailingSync(FakeSync):
        async def __call__(self, stamp, expected=None):
            if stamp[1] == 2:
                while not world.blocked:
                    await asyncio.sleep(0)
                raise ValueError("the canary differs")
            return await super().__call__(stamp, expected)

    roles: Any = pipeline.roles
    roles.sync = FailingSync(world)

    async def main():
        with pytest.raises(ValueError, match="^the canary differs"):
            await asyncio.wait_for(pipeline.fit(), 5)
        await many_turns_of_the_event_loop()
        assert world.blocked == 0
        assert len(world.trained) == 2

    asyncio.run(main())


def test_a_failing_rollout_does_not_wait_for_a_long_training_step(tmp_path):
    world = World(random.Random(0))
    world.fail_at = ("generate", "step 1")
    pipeline = build(tmp_path, world, 4, 1)

    async def long_update(batch, learn=True):
        await asyncio.sleep(60)

    actor: Any = pipeline.roles.actor
    actor.update = long_update
    begin = time.perf_counter()
    with pytest.raises(ValueError, match="broken on purpose"):
        asyncio.run(pipeline.fit())
    assert time.perf_counter() - begin < 5


def test_a_token_of_another_version_stops_the_run(tmp_path):
    world = World(random.Random(0))
    pipeline = build(tmp_path, world, 4, 1)

    def forge(purpose, samples):
        if purpose == "step 3":
            samples[-1].versions[1] -= 1

    change_samples(pipeline, forge)
    with pytest.raises(StalenessError, match="step 3.*token 1.*version 1.*version 2"):
        asyncio.run(pipeline.fit())
    assert len(world.trained) == 3


def test_weights_that_are_newer_than_the_schedule_says_stop_the_run(tmp_path):
    """Also where the driver takes them for the right ones, and staleness allows their age."""
    pipeline = build(tmp_path, World(random.Random(0)), 4, 1)
    batches: Any = pipeline.batches
    launch = batches.launch

    def launch_by_a_wrong_version(step, version, tasks):
        launch(step, version + int(step == 2), tasks)

    def forge(purpose, samples):
        for sample in samples:
            sample.versions[:] += int(purpose == "step 2")

    batches.launch = launch_by_a_wrong_version
    change_samples(pipeline, forge)
    with pytest.raises(StalenessError, match=r"step 2.*version 2\), but .*version 1\)"):
        asyncio.run(pipeline.fit())


def test_the_loop_fits_on_one_screen():
    source = "".join(inspect.getsource(f) for f in (Pipeline._loop, Pipeline._step))
    assert len(source.splitlines()) <= 60


@pytest.mark.parametrize("evaluated", [True, False])
def test_after_the_last_step_only_the_last_evaluation_may_be_missing(tmp_path, evaluated):
    """A run that was killed between its last checkpoint and its end: nothing is trained, and
    nothing is saved twice."""
    world = World(random.Random(0))
    pipeline = build(tmp_path, world, 4, 1)
    world.version = 4
    pipeline.start = 4
    pipeline.resumed = Resumed(4)
    if evaluated:
        pipeline.tracker.evaluations = [{"val/version": 4.0, "val/reward": 0.5}]
    asyncio.run(pipeline.fit())
    assert not world.trained
    assert len(pipeline.tracker.evaluations) == 1
    assert bool(world.begun("generate")) is not evaluated


@pytest.mark.parametrize("staleness", [0, 1, 2])
def test_the_failure_that_ends_a_run_is_all_that_is_printed(tmp_path, staleness):
    """At any moment: asyncio prints a traceback of each failure that nobody reads, and of each
    coroutine that is never awaited, as of a task that is canceled before it begins."""

    async def main():
        for tick in range(60):
            world = World(random.Random(tick), longest=0.0)
            pipeline = build(tmp_path / str(tick), world, 3, staleness, test_freq=1)
            await fail_after_ticks(pipeline, tick)

    assert asyncio_reports(main) == []


def test_a_callback_that_asks_for_it_stops_the_run_at_the_next_step(tmp_path):
    def stop_in_step_1(row):
        if row["step"] == 1:
            raise StopTraining

    world = World(random.Random(0))
    pipeline = build(tmp_path, world, 4, 1)
    pipeline.tracker.callbacks = StepCallbacks([stop_in_step_1])
    with pytest.raises(Stopped, match="step 2"):
        asyncio.run(pipeline.fit())
    assert [trained.step for trained in world.trained] == [0, 1]
