"""Where the training loop's batches come from: `BatchSource.batch(step)`.

`ScheduledSource` (scheduled_batches.py) generates whole batches between the syncs. `PooledSource`
(pooled_batches.py) keeps prompts of several steps in progress, and each step trains on the groups
that are complete first. `pipeline.batch_source` may name a user's own: see
docs/how_to/add_a_batch_source.md.
"""

import asyncio
import inspect
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

from one_step_off.cluster.remote_calls import now
from one_step_off.cluster.run_events import RunEvents
from one_step_off.config.errors import ConfigError
from one_step_off.config.registry import import_object
from one_step_off.config.schema import Config
from one_step_off.data.episodes import check_episodes
from one_step_off.data.samples import Batch, Sample
from one_step_off.data.staleness import assert_staleness
from one_step_off.rollout.prompt_pool import PooledPrompt
from one_step_off.rollout.replica_group import RolloutGroup
from one_step_off.rollout.replica_supervisor import NoReplica
from one_step_off.rollout.timeline import RolloutActivity

Generated = tuple[list[Sample], float]
"""Samples, and the seconds that they took."""

Generate = Callable[[], Awaitable[Generated]]
"""A call, and not its coroutine: a task that is canceled before it begins would not await that."""


@dataclass
class FinishedBatch:
    """The complete samples of a step that has not been trained.

    Attributes:
        version: of the weights that made them; in a pool the newest one.
        attempt: of the trainer that made these weights.
        generate_s: how long they took.
    """

    step: int
    samples: list[Sample]
    version: int
    attempt: int
    generate_s: float


@dataclass
class InFlight:
    """What has been generated or begun and not trained: for a checkpoint, or out of one.

    Attributes:
        batches: complete ones, one for each step from the first on.
        pool: prompts beside these batches, in the order in which they were begun.
        past: earlier attempt -> its newest version that the trainer's weights come from.
    """

    batches: list[FinishedBatch] = field(default_factory=list)
    pool: list[PooledPrompt] = field(default_factory=list)
    past: dict[int, int] = field(default_factory=dict)


@dataclass(eq=False)
class BatchSource(ABC):
    """Starts generation and hands out one batch per step, each token checked for its weight
    version.

    What the pipeline relies on:

    - It awaits `batch` once in each step. It calls `launch` when the replicas have got new weights:
      at the steps for which `needs_sync` is true, and once before the first step unless
      `has_first_batch`. Where `ready` is false, that sync comes before `batch` is awaited.
    - A prompt that is drawn from the stream is trained on once, or noted as replaced: what a
      checkpoint does not hold (`in_flight`) is drawn again by a resumed run.
    - `as_batch` names the weights that may have made the samples, from what the source knows, and
      not from the samples: `batch` compares both.
    - Where no replica is left `batch` raises, also where it waits already; generation goes through
      `stop_on_no_replica`, and tasks run in the group that `launch` gets.

    Attributes:
        stream: the prompts, see `PromptStream`.
        first_step: that this run trains.
        attempt: of the trainer.
        restored: what a checkpoint held.
        events: receives when the replicas worked.
        finished: step -> its complete batch, until it is handed out.
        next_step: whose batch comes next.
        handed_out: the last batch, as it was before training.
        activity: when the replicas last finished something.
        failure: set when no replica is left; then `batch` raises it.
    """

    cfg: Config
    rollout: RolloutGroup
    stream: Any
    first_step: int = 0
    attempt: int = 0
    restored: InFlight = field(default_factory=InFlight)
    events: RunEvents = field(default_factory=RunEvents)

    def __post_init__(self) -> None:
        self.staleness = self.cfg.pipeline.staleness
        self.finished = {batch.step: batch for batch in self.restored.batches}
        self.next_step = self.first_step
        self.handed_out: FinishedBatch | None = None
        self.activity = RolloutActivity(self.events)
        self.failure: NoReplica | None = None

    @property
    def has_first_batch(self) -> bool:
        """Whether a checkpoint had the batch of the first step, so that training may begin before
        anything is generated."""
        return self.first_step in self.finished

    async def batch(self, step: int) -> tuple[Batch, dict[str, float]]:
        """The batch of `step`, and metrics: seconds of generation and of the trainer's wait.

        Raises:
            NoReplica: no replica is left. Samples that are complete stay, for the checkpoint.
            StalenessError: a token was made by other weights than this step trains on.
            EpisodeError: a segment of an episode is missing.
        """
        begin = now()
        if step not in self.finished:
            await self.complete(step)
        self.raise_if_failed()
        finished = self.finished.pop(step)
        self.handed_out = finished
        self.next_step = step + 1
        metrics = {"time/generate_s": finished.generate_s, "time/wait_rollout_s": now() - begin}
        batch = self.as_batch(finished)
        metrics |= self.batch_metrics(finished)
        assert_staleness(batch, self.staleness)
        check_episodes(batch.samples)
        return batch, metrics

    @abstractmethod
    def launch(self, step: int, version: int, tasks: asyncio.TaskGroup) -> None:
        """Begin the prompts that `pipeline.staleness` allows, with the weights `version` that the
        replicas hold now: those of the batches up to `step`, or of a pool as many as there may
        be."""

    @abstractmethod
    def ready(self, step: int) -> bool:
        """Whether the trainer should wait for the batch of `step` before the next sync, not after
        it."""

    @abstractmethod
    def needs_sync(self, step: int) -> bool:
        """Whether the replicas need v(step) at the beginning of `step`."""

    @property
    def is_continuous(self) -> bool:
        """Whether the replicas generate throughout a step, so that no batch has a time of its
        own."""
        return False

    @abstractmethod
    async def complete(self, step: int) -> None:
        """Wait until `finished` has the batch of `step`, or `failure` is set."""

    @abstractmethod
    def as_batch(self, finished: FinishedBatch) -> Batch:
        """The samples as a batch, with the weights that may have made them. Raises
        StalenessError."""

    def batch_metrics(self, finished: FinishedBatch) -> dict[str, float]:
        """The source's own metrics of a batch that is handed out."""
        return {}

    def idle_seconds(self) -> float:
        """How long the replicas have had nothing to do."""
        return self.activity.idle_seconds()

    @abstractmethod
    async def settle(self) -> None:
        """Wait until everything that a checkpoint cannot hold unfinished is complete, or no replica
        is left."""

    @abstractmethod
    def in_flight(self, step: int) -> tuple[InFlight, dict[str, Any]]:
        """What a checkpoint of `step` holds beside the trainer: everything that is complete, the
        batch that was handed out for `step` too, and the data position that goes with it."""

    def finished_from(self, step: int) -> list[FinishedBatch]:
        """The complete batches of `step` and the steps after it, up to the first that is not."""
        batches = []
        if self.handed_out is not None and self.handed_out.step == step:
            batches.append(self.handed_out)
            step += 1
        while step in self.finished:
            batches.append(self.finished[step])
            step += 1
        return batches

    def record(self, batch: Batch) -> dict[str, float]:
        """Take the results of a batch that was trained; returns metrics of its sources."""
        return self.stream.record(batch)

    def fail(self, error: NoReplica) -> None:
        """No replica is left: `batch` raises this error, also where it waits already."""
        self.failure = error

    def raise_if_failed(self) -> None:
        """Raises NoReplica: no replica is left."""
        if self.failure is not None:
            raise self.failure

    async def stop_on_no_replica(self, generate: Generate) -> Generated | None:
        """Call `generate` and await it. Where no replica is left the trainer still ends its step,
        so NoReplica goes to `fail`, and the result is None."""
        try:
            return await generate()
        except NoReplica as e:
            self.fail(e)
            return None


def own_source(cfg: Config) -> type[BatchSource] | None:
    """The user's class that `pipeline.batch_source` names; None: it names none.

    Raises:
        ConfigError: there is no such class, or it is no `BatchSource`.
    """
    spec = cfg.pipeline.batch_source
    if spec == "auto":
        return None
    key = "pipeline.batch_source"
    if ":" not in spec:
        raise ConfigError(f"{key}={spec!r}: unknown; use auto, or module:Class of your own")
    source = import_object(key, spec)
    if not (isinstance(source, type) and issubclass(source, BatchSource)):
        raise ConfigError(
            f"{key}={spec!r}: is no subclass of one_step_off.rollout.batch_sources.BatchSource"
        )
    if inspect.isabstract(source):
        missing = ", ".join(sorted(source.__abstractmethods__))
        raise ConfigError(f"{key}={spec!r}: has no {missing}; a batch source needs them")
    return source
