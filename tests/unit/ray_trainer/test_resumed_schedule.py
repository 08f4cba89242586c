"""Whole batches of any age: a run that is resumed from any of its checkpoints trains on the same
prompts, made by the same weights."""

from __future__ import annotations

import asyncio
import copy
import random
from pathlib import Path
from typing import Any

import pytest

from one_step_off.checkpoint.in_flight import restored_in_flight
from one_step_off.ray_trainer import Pipeline, Resumed, Stopped
from tests.unit.ray_trainer.stand_ins import (
    MemoryCheckpointer,
    TrainedStep,
    World,
    build,
    change_samples,
    make_sample,
    read_rows,
    version_of_step,
)

STEPS = 11


class KeepsAll(MemoryCheckpointer):
    """A checkpointer that keeps in memory what it receives at each step."""

    is_always_due = True

    def __init__(self) -> None:
        self.saved: dict[int, dict[str, Any]] = {}

    def keep(self, step, samples, state):
        saved = state | {"step": step, "samples": samples or []}
        self.saved[step] = copy.deepcopy(saved)


def build_run(folder: Path, staleness: int, dynamic: bool, resume_from: Any = None) -> Pipeline:
    """A run, or its continuation from a checkpoint, as another attempt."""
    step = resume_from["step"] if resume_from else 0
    world = World(random.Random(step))
    first = build(folder, world, STEPS, staleness, rows=60, test_freq=3)
    if dynamic:
        first.cfg.algorithm.max_gen_batches = 3
        change_samples(first, score_odd_rows_alike)
    resumed = None
    if resume_from:
        world.version = step
        world.attempt = resume_from["incarnation"] + 1
        by_row = {prompt.id[1]: prompt for prompt in first.stream.prompts}
        in_flight = restored_in_flight(
            resume_from, copy.deepcopy(resume_from["samples"]), lambda prompt: by_row[prompt[1]]
        )
        resumed = Resumed(step, in_flight)
        first.stream.load_state_dict(resume_from["stream"])
    checkpointer: Any = KeepsAll()
    return Pipeline(
        first.cfg, first.roles, first.stream, first.val, first.tracker, checkpointer, resumed,
        world.attempt,
    )  # fmt: skip


def score_odd_rows_alike(purpose: str, samples: list[Any]) -> None:
    for sample in samples:
        if sample.prompt_id[1] % 2:
            sample.reward = 1.0


def run(pipeline: Pipeline) -> list[TrainedStep]:
    asyncio.run(asyncio.wait_for(pipeline.fit(), 20))
    actor: Any = pipeline.roles.actor
    return actor.world.trained


@pytest.mark.parametrize("staleness", [0, 1, 2, 4])
@pytest.mark.parametrize("dynamic", [False, True])
def test_every_checkpoint_resumes_exactly(tmp_path, staleness, dynamic):
    """Also a second time, from a checkpoint of the resumed run whose batches are of the first."""
    whole = build_run(tmp_path / "whole", staleness, dynamic)
    expected = run(whole)
    assert [trained.versions for trained in expected] == [
        {version_of_step(step, staleness)} for step in range(STEPS)
    ]
    evaluated = [evaluation["val/version"] for evaluation in whole.tracker.evaluations]
    ledger = read_rows(tmp_path / "whole", "ledger.jsonl")
    checkpoints: Any = whole.checkpointer
    for step in range(1, STEPS):
        folder = tmp_path / f"from_{step}"
        again = build_run(folder, staleness, dynamic, checkpoints.saved[step])
        assert run(again) == expected[step:], f"resumed from step {step}"
        assert read_rows(folder, "ledger.jsonl") == ledger[step:]
        evaluated_again = [evaluation["val/version"] for evaluation in again.tracker.evaluations]
        assert evaluated_again == [version for version in evaluated if version >= max(step, 1)]
        second_checkpoints: Any = again.checkpointer
        if step + 1 in second_checkpoints.saved:
            folder = tmp_path / f"twice_{step}"
            twice = build_run(folder, staleness, dynamic, second_checkpoints.saved[step + 1])
            assert run(twice) == expected[step + 1 :]


@pytest.mark.parametrize("staleness", [2, 4])
def test_a_run_that_is_asked_to_stop_saves_all_batches_that_were_begun(tmp_path, staleness):
    first = build_run(tmp_path / "first", staleness, False)
    checkpoints: Any = first.checkpointer
    checkpoints.is_due = lambda step: False
    actor: Any = first.roles.actor
    update = actor.update

    async def update_and_stop(batch, learn=True):
        first.stopping = batch.step == 4
        return await update(batch, learn)

    actor.update = update_and_stop
    with pytest.raises(Stopped):
        run(first)
    (saved,) = checkpoints.saved.values()
    assert saved["step"] == 5
    steps = [batch["step"] for batch in saved["batches"]]
    assert steps == ([5, 6] if staleness == 2 else [5, 6, 7, 8])
    assert len(saved["samples"]) == 6 * len(steps)


def test_a_checkpoint_without_samples_between_two_syncs(tmp_path):
    """What is missing up to the next sync of the schedule is generated with the weights of the
    checkpoint."""
    whole = build_run(tmp_path / "whole", 4, False)
    run(whole)
    checkpoints: Any = whole.checkpointer
    saved = checkpoints.saved[6]
    saved["batches"] = saved["batches"][:1]
    saved["samples"] = saved["samples"][:6]
    position = build_run(tmp_path / "position", 4, False).stream
    position.next_batch(3 * 7)
    saved["stream"] = position.state_dict()
    again = run(build_run(tmp_path / "again", 4, False, saved))
    versions = {trained.step: trained.versions for trained in again}
    assert versions == {6: {4}, 7: {6}, 8: {6}, 9: {8}, 10: {8}}


def test_a_batch_follows_when_half_of_the_one_before_is_complete(tmp_path):
    """The trainer gets the first of four batches long before the last."""
    pipeline = build_run(tmp_path, 4, False)
    pipeline.val = None
    rollout: Any = pipeline.roles.rollout
    begun: list[str] = []
    complete_when_begun: dict[str, int] = {}
    complete = 0

    async def generate(prompts, purpose, sampling, on_group):
        nonlocal complete
        begun.append(purpose)
        complete_when_begun[purpose] = complete
        version = rollout.world.engine_version
        samples = []
        for prompt in prompts:
            await asyncio.sleep(0.001)
            group = [make_sample(prompt, i, version) for i in range(sampling.size)]
            on_group(group)
            complete += 1
            samples += group
        return samples, 0.001

    rollout.generate = generate
    run(pipeline)
    assert begun == [f"step {step}" for step in range(STEPS)]
    # Batch 1 begins after batch 0; two of its three prompts are complete when batch 2 begins.
    assert complete_when_begun["step 1"] == 3
    assert 5 <= complete_when_begun["step 2"] <= 6
