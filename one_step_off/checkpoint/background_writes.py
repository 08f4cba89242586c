"""Writes one checkpoint at a time while training continues, and reports when it is on the disk."""

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from one_step_off.checkpoint.checkpointer import Checkpointer
from one_step_off.cluster.remote_calls import now, observed, with_time_limit
from one_step_off.data.samples import Sample

Contents = tuple[list[Sample] | None, dict[str, Any]]
"""`samples` and `state` of `Checkpointer.save`."""


class BackgroundWrites:
    """The checkpoints of one attempt.

    Attributes:
        writing: the write that is under way; None before the first.
    """

    def __init__(self, tracker: Any, limit_s: float) -> None:
        """
        Args:
            tracker: the `Tracker` of the run.
            limit_s: for the disk: a file system that hangs answers nothing.
        """
        self.tracker = tracker
        self.limit_s = limit_s
        self.writing: asyncio.Task | None = None

    async def finished(self) -> None:
        """Wait until what was saved is on the disk. Raises what its writing raised."""
        if self.writing is not None:
            await self.writing

    async def try_to_write(
        self, checkpointer: Checkpointer, samples: list[Sample], state: dict[str, Any]
    ) -> None:
        """See `Checkpointer.try_to_write`; within the time limit of a write."""
        trial = asyncio.to_thread(checkpointer.try_to_write, samples, self._with_common(state))
        await with_time_limit(self.limit_s, "trial of a checkpoint", trial)

    def _with_common(self, state: dict[str, Any]) -> dict[str, Any]:
        """The state with what is common to all runs."""
        tracker = self.tracker
        return state | {"evaluations": tracker.evaluations, "unwritten": tracker.unwritten}

    async def save(
        self,
        checkpointer: Checkpointer,
        step: int,
        contents: Callable[[], Contents],
        tasks: asyncio.TaskGroup,
    ) -> None:
        """Save a checkpoint, unless this step has one. Returns as soon as the trainers have copied
        their state.

        Args:
            contents: what it holds; asked when the checkpoint before is on the disk.
            tasks: where the writing goes on.
        """
        begin = now()
        await self.finished()
        if checkpointer.has(step):
            return
        samples, state = contents()
        writing = observed(await checkpointer.save(step, samples, self._with_common(state)))
        stall_s = now() - begin
        self.tracker.spans["checkpoint/stall_s"] = stall_s
        self.writing = tasks.create_task(self._finish(step, begin, stall_s, writing))
        self.writing.add_done_callback(lambda _: writing.cancel())  # a task that never began

    async def _finish(
        self, step: int, begin: float, stall_s: float, writing: Awaitable[tuple[Path, int]]
    ) -> None:
        """Wait until a checkpoint is on the disk, and report it. `begin`: when it began, in seconds
        of `now`."""
        what = f"checkpoint of step {step}, writing"
        path, size = await with_time_limit(self.limit_s, what, writing)
        write_s = now() - begin
        self.tracker.spans["checkpoint/write_s"] = write_s
        self.tracker.spans["checkpoint/bytes"] = float(size)
        start = begin + self.tracker.epoch
        self.tracker.trace(
            [
                ("checkpoint", "stall", step, start, start + stall_s),
                ("checkpoint write", "write", step, start + stall_s, start + write_s),
            ]
        )
        times = f"{size / 1e6:,.1f} MB in {write_s:.2f} s, training waited {stall_s:.2f} s"
        self.tracker.log(f"checkpoint of step {step} in {path} ({times})")
