"""Where the training loop's batches come from: `BatchSource.batch(step)`.

`ScheduledSource` (scheduled_batches.py) generates whole batches between the syncs. `PooledSource`
(pooled_batches.py) keeps prompts of several steps in progress, and each step trains on the groups
that are complete first.
"""

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

from one_step_off.cluster.remote_calls import now
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

    Attributes:
        stream: the prompts, see `PromptStream`.
        first_step: that this run trains.
        attempt: of the trainer.
        restored: what a checkpoint held.
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

    def __post_init__(self) -> None:
        self.staleness = self.cfg.pipeline.staleness
        self.finished = {batch.step: batch for batch in self.restored.batches}
        self.next_step = self.first_step
        self.handed_out: FinishedBatch | None = None
        self.activity = RolloutActivity()
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
            await self._complete(step)
        self._raise_if_failed()
        finished = self.finished.pop(step)
        self.handed_out = finished
        self.next_step = step + 1
        metrics = {"time/generate_s": finished.generate_s, "time/wait_rollout_s": now() - begin}
        batch = self._stamped(finished)
        metrics |= self._metrics(finished)
        assert_staleness(batch)
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
    async def _complete(self, step: int) -> None:
        """Wait until `finished` has the batch of `step`, or `failure` is set."""

    @abstractmethod
    def _stamped(self, finished: FinishedBatch) -> Batch:
        """The samples as a batch, with the weights that may have made them. Raises
        StalenessError."""

    def _metrics(self, finished: FinishedBatch) -> dict[str, float]:
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

    def _finished_from(self, step: int) -> list[FinishedBatch]:
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

    def _raise_if_failed(self) -> None:
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
