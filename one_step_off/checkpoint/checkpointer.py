"""Writing checkpoints. A checkpoint of step N holds everything that a run needs to resume exactly.

That is the trainer at v(N), the samples that were generated for step N and later ones (with
versions that no longer exist anywhere), and the data position after them. A pool's unfinished
prompts are noted, and generated again. All are there once these samples have come and before v(N)
is sent.

    checkpoints/step_000006/
        state.json        step, attempt, data position, evaluations without a row in the
                          metrics, the fixed keys, and which batch or prompt the samples are of
        stream.npz        what was measured of each prompt, where the draw depends on it
        samples.npz       per-token arrays of all samples, one after the other, and their lengths
        samples.jsonl     the other fields of each sample
        actor/ ...        of each role that learns: weights and optimizer, by torch's distributed
                          checkpoint or Megatron's
        actor_rank_0.npz  counters and RNG state of each of its ranks
        manifest.json     format, size and checksum (XXH3-128) of every other file, name and shape
                          of every parameter

A checkpoint is written under another name and renamed when it is complete, so it exists whole or
not at all. The trainers copy their state to host memory and continue training while it is written.
"""

import asyncio
import os
import shutil
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from one_step_off.checkpoint.files import (
    check_samples,
    read_samples,
    read_state,
    without_arrays,
    write_samples,
    write_state,
)
from one_step_off.checkpoint.finding import finished, fixed_keys, folder_of
from one_step_off.checkpoint.manifest import parameter_shapes, write_manifest
from one_step_off.cluster.remote_calls import now, observed, with_time_limit
from one_step_off.config.errors import as_config_error
from one_step_off.config.plain_values import plain_value
from one_step_off.config.schema import Config
from one_step_off.data.samples import Sample
from one_step_off.training.written_files import FileFacts

TRIAL_PREFIX = ".step_trial_"
"""Of the folder of `try_to_write`; one that a killed run left is removed as an unfinished
checkpoint is."""


def _flush_to_disk(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    os.fsync(descriptor)
    os.close(descriptor)


class Checkpointer:
    """Writes the checkpoints of one run. The last `trainer.keep_checkpoints` stay, and the best by
    `trainer.keep_best`."""

    def __init__(self, cfg: Config, save_trainer: Callable[[str], Awaitable[Awaitable]]) -> None:
        """`save_trainer`: async (path) -> awaitable. When it returns, the trainers have copied
        their state; when its result has been awaited, that state is written, and it gives the
        `FileFacts` of each role (or nothing: then all files are read here)."""
        self.cfg = cfg
        self.save_trainer = save_trainer
        self.folder = folder_of(cfg)
        self.shapes = parameter_shapes(cfg)

    def is_due(self, step: int) -> bool:
        """Every `trainer.save_freq` steps; the start of a run needs no checkpoint."""
        save_freq = self.cfg.trainer.save_freq
        return save_freq > 0 and step > 0 and step % save_freq == 0

    def has(self, step: int) -> bool:
        """Whether there is a checkpoint of this step. It is this run's own: see `put_aside`."""
        return (self.folder / f"step_{step:06d}").exists()

    @property
    def in_use(self) -> bool:
        """Whether this run writes checkpoints, or has some. Then its end is a checkpoint too:
        without it the finished run would be resumed from an earlier step."""
        return self.cfg.trainer.save_freq > 0 or bool(finished(self.folder))

    async def save(
        self, step: int, samples: list[Sample] | None, state: dict[str, Any]
    ) -> Awaitable[tuple[Path, int]]:
        """Take the checkpoint of `step`. Training may continue when this returns.

        Args:
            samples: that were generated and not trained; None where none are in flight.
            state: what `state.json` holds beside the step and the fixed keys.

        Returns:
            An awaitable of the checkpoint's folder and its bytes. Once awaited, the checkpoint is
            complete and on the disk.
        """
        unfinished = self._new_folder(step)
        step_facts = {
            "step": step,
            "has_samples": samples is not None,
            "fixed": fixed_keys(self.cfg),
        }
        write_state(step_facts | state, unfinished)
        copying_trainer = self.save_trainer(str(unfinished.resolve()))
        if samples:
            # Awaited here: the step that is about to begin changes the samples.
            writing_samples = asyncio.to_thread(write_samples, samples, unfinished)
            writing_trainer, _ = await asyncio.gather(copying_trainer, writing_samples)
        else:
            writing_trainer = await copying_trainer
        scores = self._scores(state)

        async def finish() -> tuple[Path, int]:
            known: FileFacts = {}
            for facts in await writing_trainer or ():
                known |= facts
            return await asyncio.to_thread(self._commit, unfinished, scores, known)

        return finish()

    def try_to_write(self, samples: list[Sample], state: dict[str, Any]) -> None:
        """Write and read back what a checkpoint holds beside the trainers' files, and remove it, so
        that a run whose checkpoints would fail does so in its first step.

        Raises:
            ConfigError: what cannot be written, and where.
        """
        trial = self.folder / f"{TRIAL_PREFIX}{os.getpid()}"
        fix = "a checkpoint holds text, finite numbers, and lists and mappings of these"
        try:
            with as_config_error(f"checkpoints in {self.folder} cannot be written", fix):
                trial.mkdir(parents=True)
                check_samples(samples)
                plain_value(without_arrays(state), "state")
                write_state(state, trial)
                read_state(trial)
                if samples:
                    write_samples(samples, trial)
                    read_samples(trial)
        finally:
            shutil.rmtree(trial, ignore_errors=True)

    def _new_folder(self, step: int) -> Path:
        """An empty folder for an unfinished checkpoint; those that earlier runs left are
        removed."""
        for abandoned in self.folder.glob(".step_*"):
            shutil.rmtree(abandoned, ignore_errors=True)
        folder = self.folder / f".step_{step:06d}.unfinished"
        folder.mkdir(parents=True)
        return folder

    def _scores(self, state: dict[str, Any]) -> dict[str, float]:
        """Checkpoint name -> the metric `trainer.keep_best` of the evaluation of its weights."""
        metric = self.cfg.trainer.keep_best
        scores = {}
        for evaluation in state.get("evaluations", ()):
            if metric in evaluation:
                scores[f"step_{evaluation['val/version']:06.0f}"] = evaluation[metric]
        return scores

    def _commit(
        self, unfinished: Path, scores: dict[str, float], known: FileFacts
    ) -> tuple[Path, int]:
        """Write the manifest, flush everything to the disk, rename, and remove old checkpoints."""
        manifest = write_manifest(unfinished, self.shapes, known)
        for path in unfinished.rglob("*"):
            _flush_to_disk(path)
        _flush_to_disk(unfinished)
        target = self.folder / unfinished.stem.removeprefix(".")
        unfinished.rename(target)
        _flush_to_disk(self.folder)
        self._remove_old(scores)
        return target, sum(manifest["bytes"].values())

    def _remove_old(self, scores: dict[str, float]) -> None:
        checkpoints = finished(self.folder)
        kept = set(checkpoints[-self.cfg.trainer.keep_checkpoints :])
        scored = [path for path in checkpoints if path.name in scores]
        if scored:
            by_score = sorted(scored, key=lambda path: scores[path.name])
            kept.add(by_score[-1])
        for path in checkpoints:
            if path not in kept:
                shutil.rmtree(path, ignore_errors=True)


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
            tasks: where the writing continues.
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
