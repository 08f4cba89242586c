"""Stand-ins for the engine, the trainer and the weight sync, and pipelines over them."""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
import random
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from one_step_off.checkpoint.files import check_samples
from one_step_off.cluster.remote_calls import observed
from one_step_off.config.schema import Config
from one_step_off.data.prompt_stream import PromptStream
from one_step_off.data.samples import Batch, Prompt, PromptId, Sample
from one_step_off.monitoring.tracker import Tracker
from one_step_off.ray_trainer import Pipeline, RunGroups
from one_step_off.rollout.sampling import Sampling
from one_step_off.weight_sync.versions import VersionTable


class MemoryCheckpointer:
    """A checkpointer that writes nothing. `keep` receives what it would write."""

    in_use = False
    is_always_due = False

    def has(self, step: int) -> bool:
        return False

    def is_due(self, step: int) -> bool:
        return self.is_always_due

    def try_to_write(self, samples: Any, state: Any) -> None:
        check_samples(samples)

    def keep(self, step: int, samples: Any, state: dict[str, Any]) -> None:
        raise NotImplementedError

    async def save(self, step: int, samples: Any, state: dict[str, Any]) -> Any:
        self.keep(step, samples, state)

        async def write() -> tuple[str, int]:
            return "memory", 0

        return write()


class TrainedStep(NamedTuple):
    """What a step was trained on."""

    step: int
    prompts: list[PromptId]
    versions: set[int]


class World:
    """A trainer and an engine that record what happens, with phases of any length.

    Attributes:
        version: of the trainer's weights.
        engine_version: of the engine's weights.
        released: the version that the trainer may change.
        attempt: of the trainer.
        generating: calls of the engine that run.
        events: ("begin" or "end", phase, its name).
        trained: the steps so far.
        fail_at: the phase that fails, as (phase, its name).
        running: phases that run.
        blocked: trainers that wait for the end of a sync.
        sync_failure: the failure that the trainers were told of.
    """

    def __init__(self, delays: random.Random, longest: float = 0.003) -> None:
        self.delays = delays
        self.longest = longest
        self.version = 0
        self.engine_version: int | None = None
        self.released = -1
        self.attempt = 0
        self.generating = 0
        self.events: list[tuple] = []
        self.trained: list[TrainedStep] = []
        self.fail_at: tuple | None = None
        self.running = 0
        self.blocked = 0
        self.sync_failure: BaseException | None = None

    async def phase(self, *event) -> None:
        """One phase, of random length."""
        scale = 0.2 if event[0] == "sync" else 1.0
        self.running += 1
        try:
            self.events.append(("begin", *event))
            await asyncio.sleep(self.delays.random() * self.longest * scale)
            if self.fail_at == event:
                raise ValueError(f"broken on purpose in {event}")
            self.events.append(("end", *event))
        finally:
            self.running -= 1

    def begun(self, phase: str) -> list:
        """The names of the phases of a kind that have begun, in order."""
        return [event[2] for event in self.events if event[:2] == ("begin", phase)]


class FakeRollout:
    train_sampling = Sampling(2, 1.0, 0)
    val_sampling = Sampling(1, 0.0, 0)
    restarts = 0
    serving = 1

    def __init__(self, world: World) -> None:
        self.world = world

    async def watch(self):
        await asyncio.sleep(3600)

    async def generate(self, prompts, purpose, sampling, on_group=None, on_begin=None):
        world = self.world
        version = world.engine_version
        assert version is not None, "generated before any weights came"
        world.generating += 1
        await world.phase("generate", purpose)
        world.generating -= 1
        assert world.engine_version == version, "the weights changed during generation"
        samples = []
        for prompt in prompts:
            for i in range(sampling.size):
                sample = make_sample(prompt, i, version)
                sample.attempt = world.attempt
                if i == sampling.n:
                    sample.extra["greedy"] = True
                samples.append(sample)
        return samples, 0.001


class FakeActor:
    def __init__(self, world: World) -> None:
        self.world = world

    async def update(self, batch, learn=True):
        world = self.world
        await world.phase("train", batch.step)
        # A process of its own: the driver may stop waiting for it, and it goes on waiting.
        await asyncio.shield(observed(self._wait_for_the_sync()))
        world.version += 1
        versions = {int(version) for sample in batch.samples for version in sample.versions}
        world.trained.append(TrainedStep(batch.step, batch.prompt_order(), versions))
        return {"ratio/mean": 1.0}

    async def _wait_for_the_sync(self):
        world = self.world
        world.blocked += 1
        try:
            while world.released != world.version:
                if world.sync_failure:
                    raise ValueError(f"the sync failed: {world.sync_failure}")
                await asyncio.sleep(0)
        finally:
            world.blocked -= 1

    async def log_prob(self, batch):
        await self.world.phase("log_prob", batch.step)
        return [sample.log_probs for sample in batch.samples]

    async def log_prob_and_squares(self, batch):
        columns = []
        for sample in batch.samples:
            squares = np.full(len(sample.log_probs), 0.4 + 0.1 * sample.index)
            columns.append(np.stack([sample.log_probs - 1, squares], 1))
        return columns


class FakeJudge:
    """A reward model: a score by the position in the group."""

    def __init__(self, scale: float = 1.0) -> None:
        self.scale = scale

    async def rewards(self, batch):
        return [self.scale * sample.index for sample in batch.samples]


class FakeSync:
    def __init__(self, world: World) -> None:
        self.world = world
        self.versions = VersionTable()

    def score_canary(self):
        return self.world.version

    async def fail(self, error):
        self.world.sync_failure = error

    async def release(self, version):
        assert version == self.world.version
        self.world.released = version

    async def __call__(self, stamp, expected=None):
        world = self.world
        assert expected in (None, stamp[1]), "the trainer's half of the canary is of other weights"
        assert world.generating == 0, "a sync while the engine generates"
        current = (world.attempt, world.version)
        assert stamp == current, "asked for weights that the trainer does not hold"
        self.versions.send(stamp, [])
        await world.phase("sync", stamp[1])
        current = (world.attempt, world.version)
        assert stamp == current, "the weights changed while they were being sent"
        world.engine_version = stamp[1]
        world.released = stamp[1]
        return {"time/sync_s": 0.0}


def make_sample(prompt: Prompt, index: int, version: int) -> Sample:
    """Three tokens by one version; the reward is the index."""
    return Sample(
        prompt.id,
        index,
        prompt.ids,
        response_ids=np.arange(3, dtype=np.int32),
        log_probs=np.zeros(3, np.float32),
        loss_mask=np.ones(3, bool),
        versions=np.full(3, version, np.int32),
        reward=float(index),
    )


def version_of_step(step: int, staleness: int) -> int:
    """The weights that make the samples of a step, where a run begins at step 0."""
    if staleness == 0:
        return step
    return max(0, (step - 1) // staleness * staleness)


def build(
    folder: Path,
    world: World,
    steps: int,
    staleness: int,
    rows: int = 7,
    test_freq: int = -1,
    batch_source: str = "auto",
) -> Pipeline:
    """A pipeline of batches of 3 prompts."""
    cfg = Config()
    cfg.pipeline.batch_source = batch_source
    cfg.pipeline.staleness = staleness
    cfg.weight_sync.overlap = "true"
    cfg.trainer.test_freq = test_freq
    prompts = [Prompt((0, row), np.arange(2, dtype=np.int32), "q", "1") for row in range(rows)]
    stream = PromptStream(prompts, 3, True, 0, steps)
    roles: Any = RunGroups(FakeActor(world), FakeRollout(world), FakeSync(world))
    tracker = Tracker(str(folder), steps, out=io.StringIO())
    return Pipeline(cfg, roles, stream, prompts[:2], tracker)


def change_samples(pipeline: Pipeline, change: Any) -> None:
    """Let `change(purpose, samples)` change what the rollout generates."""
    rollout: Any = pipeline.roles.rollout
    generate_unchanged = rollout.generate

    async def generate(prompts, purpose, sampling, *on_group):
        samples, seconds = await generate_unchanged(prompts, purpose, sampling, *on_group)
        change(purpose, samples)
        return samples, seconds

    rollout.generate = generate


def train_all(pipeline: Pipeline) -> list[Batch]:
    """Run a pipeline; returns the batches that the actor received."""
    batches = []
    actor: Any = pipeline.roles.actor
    update = actor.update

    async def recorded(batch, learn=True):
        batches.append(batch)
        return await update(batch, learn)

    actor.update = recorded
    asyncio.run(pipeline.fit())
    return batches


async def fail_after_ticks(pipeline: Pipeline, ticks: int) -> None:
    """Run a pipeline in which something fails after so many turns of the event loop."""

    async def fail():
        for _ in range(ticks):
            await asyncio.sleep(0)
        raise ValueError("broken on purpose")

    rollout: Any = pipeline.roles.rollout
    rollout.watch = fail
    with contextlib.suppress(ValueError):
        await pipeline.fit()


def read_rows(folder: Path, name: str) -> list[dict[str, Any]]:
    """The rows of a JSON-lines file."""
    return [json.loads(line) for line in (folder / name).read_text().splitlines()]
