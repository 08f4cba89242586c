"""Whole batches between the syncs (`weight_sync.in_flight=wait`): which weights make which batch is
known in advance, see `one_step_off/config/sync_schedule.py`."""

import asyncio
import itertools
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from one_step_off.config.sync_schedule import is_sync_step, last_begun_batch, version_of_batch
from one_step_off.data.samples import Batch, Prompt, Sample
from one_step_off.rollout.batch_sources import (
    BatchSource,
    FinishedBatch,
    Generate,
    Generated,
    InFlight,
)
from one_step_off.rollout.dynamic_sampling import notes_of_replaced, uninformative_prompts
from one_step_off.rollout.prompt_router import OnGroup


@dataclass
class _BegunBatch:
    """A batch that is being generated.

    Attributes:
        task: ends when its samples are in `finished`, or no replica is left.
        position_before: the data position before its prompts; None: they are not drawn yet.
        half_complete: set when the next batch may follow: half of the prompts are complete, or no
            replica is left.
    """

    task: asyncio.Task | None = None
    position_before: dict[str, Any] | None = None
    half_complete: asyncio.Event = field(default_factory=asyncio.Event)


@dataclass(eq=False)
class ScheduledSource(BatchSource):
    """Generates whole batches. The replicas have nothing to do when they get new weights."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.begun: dict[int, _BegunBatch] = {}  # by step, those that are not complete
        self.first_to_begin = self.first_step + len(self.finished)
        self.next_to_begin = self.first_to_begin

    def launch(self, step: int, version: int, tasks: asyncio.TaskGroup) -> None:
        """See `BatchSource.launch`. Each batch follows when half of the one before is complete:
        generated all at once they would be complete all at once, and the trainer would wait for
        the first one as long as for the last. With dynamic sampling it follows when the one before
        is complete, because what that replaces decides which prompts the next one draws."""
        last = min(step, self.stream.total_steps - 1)
        is_dynamic = self.cfg.algorithm.max_gen_batches > 1
        before: _BegunBatch | None = None
        for new_step in range(self.next_to_begin, last + 1):
            begun = _BegunBatch()
            self.begun[new_step] = begun
            self.next_to_begin = new_step + 1
            if before is None:
                generate = partial(self._generate, new_step, self._draw(new_step))
            elif is_dynamic:
                generate = partial(self._draw_after, before.task, new_step)
            else:
                generate = partial(self._generate_after, before, new_step, self._draw(new_step))
            begun.task = tasks.create_task(self._finish(new_step, version, generate))
            before = begun

    def _draw(self, step: int) -> list[Prompt]:
        """The prompts of a batch that was begun."""
        self.begun[step].position_before = self.stream.state_dict()
        # The results that the draw may know are those of steps that have ended however fast
        # anything is, so that a resumed run draws the same prompts.
        self.stream.begin_step(step, step - 1 - self.staleness)
        return self.stream.next_batch()

    def ready(self, step: int) -> bool:
        """See `BatchSource.ready`: always, because the sync replaces the weights of the batches
        that are generated."""
        return True

    def needs_sync(self, step: int) -> bool:
        """See `BatchSource.needs_sync`. A run may begin between two steps of the schedule, after a
        checkpoint without samples: then batches are missing."""
        last = min(last_begun_batch(self.cfg, step), self.stream.total_steps - 1)
        return is_sync_step(self.cfg, step) or self.next_to_begin <= last

    async def complete(self, step: int) -> None:
        # Where the sync before found no replica, nothing was begun.
        if step in self.begun:
            await self.begun[step].task

    def as_batch(self, finished: FinishedBatch) -> Batch:
        stamp = (finished.attempt, self._expected_version(finished))
        return Batch(finished.step, finished.samples, expected_stamp=stamp)

    def _expected_version(self, finished: FinishedBatch) -> int:
        """By the schedule, whatever the weights were when the batch was begun. A run that resumes
        begins with the weights of its first step. Which ones made the batches of a checkpoint, the
        checkpoint says."""
        if finished.step < self.first_to_begin:
            return finished.version
        return max(self.first_step, version_of_batch(self.cfg, finished.step))

    async def settle(self) -> None:
        """See `BatchSource.settle`: all batches that were begun."""
        tasks = [begun.task for begun in self.begun.values() if begun.task is not None]
        if tasks:
            await asyncio.wait(tasks)

    def in_flight(self, step: int) -> tuple[InFlight, dict[str, Any]]:
        """See `BatchSource.in_flight`. Prompts of batches that are not complete are drawn again."""
        batches = self.finished_from(step)
        first_missing = step + len(batches)
        in_flight = InFlight(batches, past=self.restored.past)
        begun = self.begun.get(first_missing, _BegunBatch())
        if begun.position_before is not None:
            return in_flight, self.stream.position_without(begun.position_before)
        return in_flight, self.stream.state_dict()

    async def _finish(self, step: int, version: int, generate: Generate) -> None:
        """Put the samples of a batch into `finished`, as soon as they are complete."""
        generated = await self.stop_on_no_replica(generate)
        self.begun[step].half_complete.set()
        if generated is None:
            return
        samples, seconds = generated
        drawn_s = self.activity.call_finished("generate", step, seconds)
        if self.staleness > 1:
            # The batches of a sync overlap. The time that two of them share counts once.
            seconds = min(seconds, drawn_s)
        self.finished[step] = FinishedBatch(step, samples, version, self.attempt, seconds)
        del self.begun[step]

    async def _draw_after(self, before: asyncio.Task, step: int) -> Generated:
        """Draw and generate a batch when the one before is complete. Raises NoReplica."""
        await asyncio.wait([before])
        self.raise_if_failed()
        return await self._generate(step, self._draw(step))

    async def _generate_after(
        self, before: _BegunBatch, step: int, prompts: list[Prompt]
    ) -> Generated:
        """Generate these prompts when half of the batch before is complete. Raises NoReplica."""
        await before.half_complete.wait()
        self.raise_if_failed()
        return await self._generate(step, prompts)

    def _count_groups(self, step: int, prompts: int) -> OnGroup:
        """A callback that counts the complete prompts of a batch."""
        begun = self.begun[step]
        complete = itertools.count(1)

        def count(samples: list[Sample]) -> None:
            if next(complete) >= prompts / 2:
                begun.half_complete.set()

        return count

    async def _generate(self, step: int, prompts: list[Prompt]) -> Generated:
        """Generate these prompts; with dynamic sampling also replacements for uninformative
        ones."""
        sampling = self.rollout.train_sampling
        # To have each prompt's samples as they come costs more calls.
        on_group = [self._count_groups(step, len(prompts))] if self.staleness > 1 else []
        samples, seconds = await self.rollout.generate(prompts, f"step {step}", sampling, *on_group)
        # The last replacements stay, informative or not, so that a step ends.
        for _ in range(self.cfg.algorithm.max_gen_batches - 1):
            uninformative = uninformative_prompts(samples)
            if not uninformative:
                break
            purpose = f"step {step}, instead of {len(uninformative)} prompts"
            replacements, more_seconds = await self.rollout.generate(
                self.stream.next_batch(len(uninformative)), purpose, sampling
            )
            removed = [s for s in samples if s.prompt_id in uninformative]
            notes = notes_of_replaced(self.stream, uninformative, removed)
            replacements[0].extra.update(notes)
            samples = [s for s in samples if s.prompt_id not in uninformative] + replacements
            seconds += more_seconds
        return samples, seconds
