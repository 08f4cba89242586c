"""A run of several sources whose draw depends on results: from each of its checkpoints a resumed
run draws the same prompts in the same order, and reports the same."""

from __future__ import annotations

import asyncio
import copy
import io
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from one_step_off.checkpoint.files import read_state, write_state
from one_step_off.checkpoint.in_flight import restored_in_flight
from one_step_off.config.schema import Config
from one_step_off.config.sections.data import Curriculum, DifficultyFilter
from one_step_off.data.mixture import DrawRules, MixedStream, PromptSource
from one_step_off.data.samples import Prompt, PromptId, Sample
from one_step_off.monitoring.tracker import Tracker
from one_step_off.ray_trainer import Pipeline, Resumed, RunGroups
from one_step_off.rollout import pooled_batches
from one_step_off.rollout.replica_supervisor import NoReplica
from tests.unit.ray_trainer.stand_ins import (
    FakeActor,
    FakeRollout,
    FakeSync,
    MemoryCheckpointer,
    World,
    read_rows,
)
from tests.unit.rollout.test_prompt_pool import make_sample as versioned_sample

STEPS = 14
SIZES = (7, 5)
RULES = DrawRules(1.0, DifficultyFilter(1, max_dropped=0.6, return_after=2), Curriculum())


def make_stream(steps: int = STEPS) -> MixedStream:
    prompts = [
        Prompt((0, row), np.arange(2, dtype=np.int32), "q", "1") for row in range(sum(SIZES))
    ]
    sources = [
        PromptSource("a", prompts[: SIZES[0]], 0.6),
        PromptSource("b", prompts[SIZES[0] :], 0.4),
    ]
    return MixedStream(sources, 3, True, 0, steps, draw=RULES)


def set_rewards(samples: list[Sample]) -> None:
    """A third of the prompts is never solved, a third always; the others by epoch and index."""
    for sample in samples:
        epoch, row = sample.prompt_id
        is_lucky = random.Random(f"{epoch} {row} {sample.index}").random() < 0.5
        sample.reward = float(row % 3 == 2 or (row % 3 == 1 and is_lucky))


class ScoredRollout(FakeRollout):
    """Whole batches with rewards."""

    async def generate(self, prompts, purpose, sampling, on_group=None, on_begin=None):
        samples, seconds = await super().generate(prompts, purpose, sampling)
        set_rewards(samples)
        return samples, seconds


class SlowGroups(FakeRollout):
    """Of the prompts that are begun together one may be slow: it is complete two steps later, also
    where it is begun again in a resumed run."""

    def __init__(self, world: World, complete_at: dict[PromptId, int]) -> None:
        """`complete_at`: the trainer's version with which each prompt is complete."""
        super().__init__(world)
        self.complete_at = complete_at

    async def generate(self, prompts, purpose, sampling, on_group=None, on_begin=None):
        new = [prompt for prompt in prompts if prompt.id not in self.complete_at]
        self.complete_at |= {prompt.id: self.world.version for prompt in new}
        for prompt in prompts:
            on_begin(prompt)
        for prompt in new[:1]:
            if random.Random(str(prompt.id)).random() < 0.7:
                self.complete_at[prompt.id] = min(self.world.version + 2, STEPS - 1)
        waiting = sorted(prompts, key=lambda prompt: self.complete_at[prompt.id])
        version = self.world.engine_version
        while waiting:
            for prompt in list(waiting):
                if self.complete_at[prompt.id] <= self.world.version:
                    waiting.remove(prompt)
                    group = [versioned_sample(prompt, i, [version]) for i in range(sampling.n)]
                    set_rewards(group)
                    on_group(group)
            await asyncio.sleep(0.0005)
        return [], 0.0


class SlowActor(FakeActor):
    """Trains a little longer than the sync takes, so that what can be complete is complete."""

    async def update(self, batch, learn=True):
        metrics = await super().update(batch, learn)
        await asyncio.sleep(0.003)
        return metrics


class KeepsAll(MemoryCheckpointer):
    """Writes the state of every step, through the files of a real checkpoint."""

    is_always_due = True

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.samples: dict[int, list[Sample] | None] = {}

    def keep(self, step, samples, state):
        folder = self.folder / str(step)
        folder.mkdir(parents=True)
        write_state(state, folder)
        self.samples[step] = copy.deepcopy(samples)


def build(
    folder: Path, kind: str, staleness: int, world: World, rollout: Any, resumed: Any = None,
    stream: Any = None,
) -> Pipeline:  # fmt: skip
    cfg = Config()
    cfg.pipeline.staleness = staleness
    cfg.data.train_batch_size = 3
    if kind == "pool":
        cfg.pipeline.staleness = 3  # no prompt comes to its last step, which a resume delays
        cfg.weight_sync.in_flight = "recompute"
    cfg.algorithm.max_gen_batches = 3 if kind == "dynamic" else 1
    roles: Any = RunGroups(SlowActor(world), rollout, FakeSync(world))
    tracker = Tracker(str(folder), STEPS, out=io.StringIO())
    return Pipeline(cfg, roles, stream or make_stream(), None, tracker, KeepsAll(folder), resumed)


def reported(folder: Path) -> list[Any]:
    """What each step used, and what it says of sources and difficulty."""
    rows = []
    for used, row in zip(
        read_rows(folder, "ledger.jsonl"), read_rows(folder, "metrics.jsonl"), strict=True
    ):
        metrics = {n: v for n, v in row.items() if n.startswith(("source/", "difficulty/"))}
        rows.append((used, metrics))
    return rows


def resume(
    folder: Path, kind: str, staleness: int, first: Pipeline, step: int, complete_at: Any
) -> Pipeline:
    """A pipeline that starts with the first one's checkpoint of `step`."""
    keeper: Any = first.checkpointer
    state = read_state(keeper.folder / str(step))
    stream = make_stream()
    stream.load_state_dict(state["stream"])
    by_row = {prompt.id[1]: prompt for prompt in stream.prompts}
    samples = copy.deepcopy(keeper.samples[step]) or []
    in_flight = restored_in_flight(
        state | {"step": step}, samples, lambda prompt: by_row[prompt[1]]
    )
    resumed = Resumed(step, in_flight)
    world = World(random.Random(step))
    world.version = step
    rollout = rollout_of(kind, world, complete_at)
    return build(folder, kind, staleness, world, rollout, resumed, stream)


def rollout_of(kind: str, world: World, complete_at: dict[PromptId, int]) -> Any:
    if kind == "pool":
        return SlowGroups(world, complete_at)
    return ScoredRollout(world)


@pytest.mark.parametrize(
    ("kind", "staleness"),
    [
        *[("whole", staleness) for staleness in (0, 1, 2, 4)],
        *[("dynamic", staleness) for staleness in (0, 1, 2, 4)],
        ("pool", 3),
    ],
)
def test_every_checkpoint_resumes_with_the_same_prompts(tmp_path, kind, staleness, monkeypatch):
    # A batch fewer in progress than the staleness allows, so that no prompt comes to its last step.
    monkeypatch.setattr(pooled_batches, "prompts_allowed", lambda cfg, version: 3 * (version + 3))
    world = World(random.Random(0))
    complete_at: dict[PromptId, int] = {}
    whole = build(tmp_path / "whole", kind, staleness, world, rollout_of(kind, world, complete_at))
    asyncio.run(whole.fit())
    expected = reported(tmp_path / "whole")
    assert len(expected) == STEPS
    filtered = [row for row, _ in expected if row.get("filtered")]
    assert filtered, "the filter had something to do"
    if kind == "dynamic":
        assert any(row.get("replaced") for row, _ in expected)
    if kind == "pool":
        keeper: Any = whole.checkpointer
        assert any(
            sample.extra.get("carried")
            for samples in keeper.samples.values()
            for sample in samples or ()
        ), "some group was late"
    for step in range(1, STEPS, 2):
        folder = tmp_path / f"from_{step}"
        again = resume(folder, kind, staleness, whole, step, dict(complete_at))
        asyncio.run(again.fit())
        assert reported(folder) == expected[step:], f"resumed from step {step}"


@pytest.mark.parametrize("staleness", [0, 1])
def test_with_no_replica_left_the_results_so_far_are_saved(tmp_path, staleness):
    """The checkpoint before failing has no samples and the position before them, but the results of
    all steps that were trained."""
    world = World(random.Random(0))
    whole = build(tmp_path / "whole", "whole", staleness, world, ScoredRollout(world))
    asyncio.run(whole.fit())
    world = World(random.Random(0))
    rollout = ScoredRollout(world)
    generate = rollout.generate

    async def generate_until_step_6(prompts, purpose, sampling):
        if purpose == "step 6":
            await asyncio.sleep(0.005)
            raise NoReplica("none is left")
        return await generate(prompts, purpose, sampling)

    rollout.generate = generate_until_step_6
    first = build(tmp_path / "first", "whole", staleness, world, rollout)
    keeper: Any = first.checkpointer
    keeper.is_due = lambda step: False
    with pytest.raises(NoReplica):
        asyncio.run(first.fit())
    assert list(keeper.samples) == [6]
    again = resume(tmp_path / "again", "whole", staleness, first, 6, {})
    asyncio.run(again.fit())
    assert reported(tmp_path / "again") == reported(tmp_path / "whole")[6:]


def test_replaced_groups_are_visits_and_none_is_forgotten(tmp_path):
    """Also those that replaced others and were replaced in turn."""
    world = World(random.Random(0))
    pipeline = build(tmp_path, "dynamic", 1, world, ScoredRollout(world))
    recorded: list[Any] = []
    record = pipeline.stream.record

    def record_and_keep(batch):
        metrics = record(batch)
        recorded.extend(pipeline.stream._pending[batch.step])
        return metrics

    pipeline.stream.record = record_and_keep
    asyncio.run(pipeline.fit())
    ledger = read_rows(tmp_path, "ledger.jsonl")
    trained = [tuple(prompt) for row in ledger for prompt in row["prompts"]]
    replaced = [tuple(prompt) for row in ledger for prompt in row.get("replaced", ())]
    assert sorted((epoch, row) for epoch, row, _, _ in recorded) == sorted(trained + replaced)
    assert all(samples == 2 for _, _, samples, _ in recorded)
    twice = [p for p in world.begun("generate") if "instead of" in p]
    assert len(twice) > STEPS, "some step replaced twice"
