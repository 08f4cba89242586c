"""Prompts of several steps in progress at once (`weight_sync.in_flight` = recompute or keep): a
sync pauses them, and each step takes the groups that are complete first."""

import asyncio
from dataclasses import dataclass
from functools import partial
from typing import Any

from one_step_off.config.sync_schedule import prompts_allowed
from one_step_off.data.samples import Batch, Prompt, Sample
from one_step_off.rollout.batch_sources import BatchSource, FinishedBatch, Generated, InFlight
from one_step_off.rollout.dynamic_sampling import notes_of_replaced, uninformative_prompts
from one_step_off.rollout.prompt_pool import PooledPrompt, PromptPool


@dataclass(eq=False)
class PooledSource(BatchSource):
    """Hands out as many prompts as `prompts_allowed` says, so that the replicas have work between
    the steps too. Each begins when a replica has room for it."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.groups_per_step = self.cfg.data.train_batch_size
        self.pool = PromptPool(self.groups_per_step, self.staleness)
        self.pool.begin([entry for entry in self.restored.pool if entry.samples is not None])
        # Unfinished ones of a checkpoint are generated again.
        self.to_repeat = [entry for entry in self.restored.pool if entry.samples is None]
        self.version = 0  # that generates now
        self.tasks: asyncio.TaskGroup | None = None
        self.changed = asyncio.Event()  # a group is complete, or no replica is left

    def launch(self, step: int, version: int, tasks: asyncio.TaskGroup) -> None:
        """See `BatchSource.launch`. No more prompts begin than the run will train on."""
        self.version = version
        self.tasks = tasks
        for entry in self.pool.prompts.values():
            if not entry.has_begun and entry.samples is None:
                entry.version = version  # without a token it is due no earlier than new ones
        if step >= self.stream.total_steps:  # all prompts of the run have begun
            return
        trained = self.next_step * self.groups_per_step
        in_run = self.stream.total_steps * self.groups_per_step
        allowed = min(prompts_allowed(self.cfg, version), in_run)
        missing = max(0, allowed - trained - len(self.pool.prompts))
        repeated = self.to_repeat[:missing]
        self.to_repeat = self.to_repeat[missing:]
        for entry in repeated:
            entry.version = version
        # The results that the draw may know are those of steps that had ended at the sync.
        self.stream.begin_step(step, step - 2)
        begun = trained + len(self.pool.prompts) + len(repeated)
        new = [
            PooledPrompt(prompt, (begun + number) // self.groups_per_step, version)
            for number, prompt in enumerate(self.stream.next_batch(missing - len(repeated)))
        ]
        self._begin(f"step {step}", repeated + new)

    def _begin(self, purpose: str, entries: list[PooledPrompt]) -> None:
        self.pool.begin(entries)
        if entries:
            prompts = [entry.prompt for entry in entries]
            self.tasks.create_task(
                self.stop_on_no_replica(partial(self._generate, purpose, prompts))
            )

    @property
    def is_continuous(self) -> bool:
        """See `BatchSource.is_continuous`."""
        return True

    def ready(self, step: int) -> bool:
        """See `BatchSource.ready`. Where the samples are not complete, the replicas get the newest
        weights first, and begin the next prompts."""
        return step in self.finished or bool(self.pool.choose(step))

    def needs_sync(self, step: int) -> bool:
        """See `BatchSource.needs_sync`: at each step."""
        return True

    async def _generate(self, purpose: str, prompts: list[Prompt]) -> Generated:
        samples, seconds = await self.rollout.generate(
            prompts, purpose, self.rollout.train_sampling, self._on_group, self._on_begin
        )
        self.activity.call_finished("generate", self.version + 1, seconds)
        return samples, seconds

    def _on_begin(self, prompt: Prompt) -> None:
        # A prompt that a replica hands back keeps the version with which it had begun until another
        # one has a place for it and it begins here again. A step may wait for that place; nothing
        # becomes older, since what the first one had made is dropped.
        entry = self.pool.prompts[prompt.id]
        entry.version = self.version
        entry.has_begun = True

    def _on_group(self, samples: list[Sample]) -> None:
        entry = self.pool.add_complete(samples)
        self.activity.prompt_finished()
        if not self._replace(entry):
            self.changed.set()

    def _replace(self, entry: PooledPrompt) -> bool:
        """Dynamic sampling: begin another prompt in place of one whose samples all score alike. The
        last one of these stays, so that a step ends. Returns whether it was replaced."""
        times_replaced = len(entry.notes.get("replaces", ()))
        is_last = times_replaced >= self.cfg.algorithm.max_gen_batches - 1
        if is_last or not uninformative_prompts(entry.samples):
            return False
        self.pool.remove(entry)
        notes = notes_of_replaced(self.stream, [entry.prompt.id], entry.samples)
        (prompt,) = self.stream.next_batch(1)
        purpose = f"step {entry.turn}, instead of prompt {entry.prompt.id}"
        self._begin(purpose, [PooledPrompt(prompt, entry.turn, self.version, notes=notes)])
        return True

    async def complete(self, step: int) -> None:
        while self.failure is None and not self.pool.choose(step):
            self.changed.clear()
            await self.changed.wait()
        if self.failure is None:
            # How long the replicas worked for these samples is known at the end of the step.
            samples = self.pool.take(step)
            self.finished[step] = FinishedBatch(step, samples, step, self.attempt, 0.0)

    def as_batch(self, finished: FinishedBatch) -> Batch:
        step = finished.step
        oldest = 0 if self.restored.batches or self.restored.pool else self.first_step
        return Batch(
            step,
            finished.samples,
            expected_stamp=(self.attempt, step),
            max_version_lag=min(step - oldest, self.staleness),
            past=self.restored.past,
        )

    def batch_metrics(self, finished: FinishedBatch) -> dict[str, float]:
        return self.pool.metrics(finished.samples, finished.step)

    def idle_seconds(self) -> float:
        """See `BatchSource.idle_seconds`: none while prompts are being generated."""
        return 0.0 if self.pool.generating else super().idle_seconds()

    async def settle(self) -> None:
        """See `BatchSource.settle`: a checkpoint notes which prompts are unfinished."""

    def in_flight(self, step: int) -> tuple[InFlight, dict[str, Any]]:
        """See `BatchSource.in_flight`."""
        entries = [*self.pool.prompts.values(), *self.to_repeat]
        in_flight = InFlight(self.finished_from(step), entries, self.restored.past)
        return in_flight, self.stream.state_dict()

    def fail(self, error: Exception) -> None:
        """See `BatchSource.fail`."""
        super().fail(error)
        self.changed.set()
