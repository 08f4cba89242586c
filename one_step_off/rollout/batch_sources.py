"""Where the training loop's batches come from: `BatchSource.batch(step)`.

`WholeBatchSource` generates one batch at a time, a step ahead of training. `PartialRolloutSource`
keeps prompts of several steps unfinished at once, and each step trains on the groups that are
complete first.
"""

import asyncio
import math
from abc import ABC, abstractmethod
from collections.abc import Awaitable
from dataclasses import dataclass, field
from typing import Any

from one_step_off.algorithms import advantages
from one_step_off.cluster.remote_calls import now
from one_step_off.config.schema import Config
from one_step_off.data.episodes import check_episodes
from one_step_off.data.samples import Batch, Prompt, PromptId, Sample
from one_step_off.data.staleness import assert_staleness
from one_step_off.data.visits import replaced_visits
from one_step_off.rollout.partial_rollouts import PartialRolloutPool
from one_step_off.rollout.replica_group import RolloutGroup
from one_step_off.rollout.replica_supervisor import NoReplica
from one_step_off.rollout.timeline import RolloutActivity

Generated = tuple[list[Sample], float]
"""Samples, and the seconds that they took."""


@dataclass
class RestoredBatch:
    """The finished samples of the first step, out of a checkpoint.

    Attributes:
        incarnation: of the trainer that made their weights.
    """

    samples: list[Sample]
    generate_s: float
    incarnation: int


@dataclass(eq=False)
class BatchSource(ABC):
    """Starts generation and hands out one batch per step, each token checked for its weight
    version.

    Attributes:
        stream: the prompts, see `PromptStream`.
        first_step: that this run trains.
        incarnation: of the trainer.
        restored: the batch of `first_step`, if a checkpoint had it.
        next_step: whose batch comes next.
        last_generate_s: how long the samples of the last batch took.
        activity: when the replicas last finished something.
        failure: set when no replica is left; then `batch` raises it.
    """

    cfg: Config
    rollout: RolloutGroup
    stream: Any
    first_step: int = 0
    incarnation: int = 0
    restored: RestoredBatch | None = None

    def __post_init__(self) -> None:
        # Without restored samples the first weights that the replicas get make the first batch.
        self.oldest_version = 0 if self.restored else self.first_step
        self.next_step = self.first_step
        self.last_generate_s = 0.0
        self.activity = RolloutActivity()
        self.failure: NoReplica | None = None

    async def batch(self, step: int) -> tuple[Batch, dict[str, float]]:
        """The batch of `step`, and metrics: seconds of generation and of the trainer's wait.

        Raises:
            NoReplica: no replica is left. Samples that are complete stay, for the checkpoint.
            StalenessError: a token was made by other weights than this step trains on.
            EpisodeError: a segment of an episode is missing.
        """
        begin = now()
        made_by = self.incarnation
        if self.restored is not None:
            made_by = self.restored.incarnation
            samples, generate_s = self.restored.samples, self.restored.generate_s
            self.restored = None
            self._raise_if_failed()
        else:
            samples, generate_s = await self._samples(step)
        wait_s = now() - begin
        self.last_generate_s = generate_s
        self.next_step = step + 1
        metrics = {"time/generate_s": generate_s, "time/wait_rollout_s": wait_s}
        batch = self._stamped(step, samples, made_by)
        metrics |= self._metrics(samples, step)
        assert_staleness(batch)
        check_episodes(samples)
        return batch, metrics

    @abstractmethod
    def launch(self, step: int, version: int, tasks: asyncio.TaskGroup) -> None:
        """Start generating the samples of `step` with the weights `version` that the replicas hold
        now."""

    @abstractmethod
    def ready(self, step: int) -> bool:
        """Whether the trainer should wait for the batch of `step` before the next sync, not after
        it."""

    @property
    @abstractmethod
    def is_generating(self) -> bool:
        """Whether samples of the next step are still to come."""

    @abstractmethod
    async def _samples(self, step: int) -> Generated:
        """Wait for the samples of `step`. Raises NoReplica."""

    @abstractmethod
    def _stamped(self, step: int, samples: list[Sample], made_by: int) -> Batch:
        """The samples as a batch, with the weights that may have made them. `made_by`: the
        incarnation."""

    def _metrics(self, samples: list[Sample], step: int) -> dict[str, float]:
        return {}

    def idle_seconds(self) -> float:
        """How long the replicas have had nothing to do."""
        return self.activity.idle_seconds()

    def stream_position(self, step: int, has_samples: bool) -> dict[str, Any]:
        """The data position for a checkpoint of `step`, which holds the samples of that step or
        not."""
        return self.stream.state_dict()

    def _begin_step(self, step: int) -> None:
        """Prompts are drawn for `step`. The results that the draw may know are those of steps that
        have ended however fast anything is, so that a resumed run draws the same prompts."""
        self.stream.begin_step(step, step - 1 - self.cfg.pipeline.staleness)

    def record(self, batch: Batch) -> dict[str, float]:
        """Take the results of a batch that was trained; returns metrics of its sources."""
        return self.stream.record(batch)

    def unfinished_prompts(self) -> list[PromptId]:
        """Prompts that the data position counts as used, and that must be generated again after a
        resume."""
        return []

    def fail(self, error: NoReplica) -> None:
        """No replica is left: `batch` raises this error, also where it waits already."""
        self.failure = error

    def _raise_if_failed(self) -> None:
        if self.failure is not None:
            raise self.failure

    async def or_fail(self, work: Awaitable[Generated]) -> Generated:
        """Await generation. Where no replica is left the trainer still ends its step, so NoReplica
        goes to `fail`."""
        try:
            return await work
        except NoReplica as e:
            self.fail(e)
            return [], 0.0


@dataclass(eq=False)
class WholeBatchSource(BatchSource):
    """Generates whole batches, each before the step that trains on it."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.pending: asyncio.Task[Generated] | None = None  # the samples of the next step
        self.position_before: dict[int, Any] = {}  # step -> the data position before its prompts

    def launch(self, step: int, version: int, tasks: asyncio.TaskGroup) -> None:
        """See `BatchSource.launch`."""
        self.position_before = {step: self.stream.state_dict()}
        self._begin_step(step)
        prompts = self.stream.next_batch()
        self.pending = tasks.create_task(self.or_fail(self._generate(step, prompts)))

    @property
    def is_generating(self) -> bool:
        """See `BatchSource.is_generating`."""
        return self.pending is not None and not self.pending.done()

    def ready(self, step: int) -> bool:
        """See `BatchSource.ready`: always, because the sync replaces the weights of the batch that
        is pending."""
        return True

    async def _samples(self, step: int) -> Generated:
        pending = self.pending
        self.pending = None
        if pending is None:  # the sync before found no replica, so nothing was launched
            self._raise_if_failed()
        generated = await pending
        self._raise_if_failed()
        return generated

    def _stamped(self, step: int, samples: list[Sample], made_by: int) -> Batch:
        version = max(self.oldest_version, step - self.cfg.pipeline.staleness)
        return Batch(step, samples, expected_stamp=(made_by, version))

    def stream_position(self, step: int, has_samples: bool) -> dict[str, Any]:
        """See `BatchSource.stream_position`."""
        if has_samples or step not in self.position_before:
            return self.stream.state_dict()
        return self.stream.position_without(self.position_before[step])

    async def _generate(self, step: int, prompts: list[Prompt]) -> Generated:
        """Generate these prompts; with dynamic sampling also replacements for uninformative
        ones."""
        sampling = self.rollout.train_sampling
        samples, seconds = await self.rollout.generate(prompts, f"step {step}", sampling)
        # Dynamic sampling (DAPO, arXiv:2503.14476, section 3.2). The last replacements stay,
        # informative or not, so that a step ends.
        for _ in range(self.cfg.algorithm.max_gen_batches - 1):
            uninformative = uninformative_prompts(samples)
            if not uninformative:
                break
            purpose = f"step {step}, instead of {len(uninformative)} prompts"
            replacements, more_seconds = await self.rollout.generate(
                self.stream.next_batch(len(uninformative)), purpose, sampling
            )
            removed = [s for s in samples if s.prompt_id in uninformative]
            self._note_replaced(replacements[0], uninformative, removed)
            samples = [s for s in samples if s.prompt_id not in uninformative] + replacements
            seconds += more_seconds
        self.activity.call_finished("generate", step, seconds)
        return samples, seconds

    def _note_replaced(
        self, carrier: Sample, prompts: list[PromptId], removed: list[Sample]
    ) -> None:
        """Let a sample carry which groups were replaced, for the ledger and for checkpoints.

        Of `removed`, samples that carried such notes themselves hand them on.
        """
        earlier = [prompt for s in removed for prompt in s.extra.get("replaces", ())]
        carrier.extra["replaces"] = earlier + [list(prompt) for prompt in prompts]
        visits = replaced_visits(removed) + self.stream.visits(removed)
        if visits:
            carrier.extra["replaced_visits"] = visits


def uninformative_prompts(samples: list[Sample]) -> list[PromptId]:
    """The prompts whose episodes all score alike, greedy responses aside. Groups with errors are
    not among them: they stay, to be counted and seen."""
    sampled = [s for s in samples if "greedy" not in s.extra]
    rewards = [s.reward for s in sampled]
    groups = [s.prompt_id for s in sampled]
    with_errors = {s.prompt_id for s in samples if "error" in s.extra}
    return [
        prompt
        for prompt in advantages.zero_variance_groups(rewards, groups)
        if prompt not in with_errors
    ]


@dataclass(eq=False)
class PartialRolloutSource(BatchSource):
    """Keeps prompts of several steps unfinished at once; each step takes the groups that are
    complete first.

    Attributes:
        to_repeat: the prompts of a checkpoint that were unfinished, and must be generated again.
    """

    to_repeat: list[Prompt] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.pool = PartialRolloutPool(self.cfg.data.train_batch_size, self.cfg.pipeline.max_carry)
        self.changed = asyncio.Event()  # a group is complete, or no replica is left

    def launch(self, step: int, version: int, tasks: asyncio.TaskGroup) -> None:
        """Fill the pool up to `rollout.oversample` batches for `step`, beside one that is still
        waited for, but not with more prompts than the run will train on."""
        groups_per_step = self.pool.groups_per_step
        steps_waited_for = step - self.next_step
        wanted = math.ceil((steps_waited_for + self.cfg.rollout.oversample) * groups_per_step)
        left_in_run = (self.stream.total_steps - self.next_step) * groups_per_step
        missing = max(0, min(wanted, left_in_run) - len(self.pool.unfinished))
        repeated = self.to_repeat[:missing]
        self.to_repeat = self.to_repeat[missing:]
        self._begin_step(step)
        prompts = repeated + self.stream.next_batch(missing - len(repeated))
        self.pool.begin(prompts, version, step)
        if prompts:
            tasks.create_task(self.or_fail(self._generate(step, prompts)))

    @property
    def is_generating(self) -> bool:
        """See `BatchSource.is_generating`."""
        return bool(self.pool.unfinished)

    def ready(self, step: int) -> bool:
        """See `BatchSource.ready`. Where the samples are not complete, the replicas get the newest
        weights first, and begin the next prompts."""
        return self.restored is not None or bool(self.pool.choose(step))

    async def _generate(self, step: int, prompts: list[Prompt]) -> Generated:
        samples, seconds = await self.rollout.generate(
            prompts, f"step {step}", self.rollout.train_sampling, self._on_group
        )
        self.activity.call_finished("generate", step, seconds)
        return samples, seconds

    def _on_group(self, samples: list[Sample]) -> None:
        self.pool.add_complete(samples)
        self.activity.prompt_finished()
        self.changed.set()

    async def _samples(self, step: int) -> Generated:
        while self.failure is None and not self.pool.choose(step):
            self.changed.clear()
            await self.changed.wait()
        self._raise_if_failed()
        # How long the replicas worked for these samples is known at the end of the step.
        return self.pool.take(step), 0.0

    def _stamped(self, step: int, samples: list[Sample], made_by: int) -> Batch:
        oldest_allowed = self.cfg.pipeline.staleness + self.pool.max_carry
        max_version_lag = min(step - self.oldest_version, oldest_allowed)
        return Batch(step, samples, expected_stamp=(made_by, step), max_version_lag=max_version_lag)

    def _metrics(self, samples: list[Sample], step: int) -> dict[str, float]:
        return self.pool.metrics(samples, step)

    def idle_seconds(self) -> float:
        """See `BatchSource.idle_seconds`: none while prompts are being generated."""
        return 0.0 if self.pool.generating else super().idle_seconds()

    def unfinished_prompts(self) -> list[PromptId]:
        """See `BatchSource.unfinished_prompts`."""
        return [*self.pool.unfinished, *(prompt.id for prompt in self.to_repeat)]

    def fail(self, error: NoReplica) -> None:
        """See `BatchSource.fail`."""
        super().fail(error)
        self.changed.set()
