"""The supervised steps of a run: each trains the actor on the answers of one batch of rows.

Step N makes v(N+1) out of v(N), as in the pipeline of `ray_trainer.py`, which has the same
checkpoints, interrupts and restarts. There are no rollouts and no weight sync.
"""

import asyncio
from dataclasses import dataclass
from typing import Any

import numpy as np

from one_step_off.checkpoint import Checkpointer
from one_step_off.checkpoint.checkpointer import BackgroundWrites
from one_step_off.checkpoint.skipped_updates import check_skipped_in_a_row
from one_step_off.cluster.remote_calls import now
from one_step_off.config.errors import first_cause
from one_step_off.config.schema import Config
from one_step_off.data.samples import Batch
from one_step_off.data.supervised_data import SupervisedRow
from one_step_off.monitoring.supervised_tracker import SupervisedTracker
from one_step_off.ray_trainer import Stopped
from one_step_off.training.trainer_group import WorkerGroup


@dataclass
class SupervisedGroups:
    """The groups of processes that take part in a supervised run."""

    actor: WorkerGroup
    rollout: None = None
    sync: None = None


class SupervisedPipeline:
    """Runs the supervised steps of one attempt.

    Attributes:
        stopping: the run saves and stops at the next step's beginning or end; set from outside, or
            since a callback has asked for it.
    """

    def __init__(
        self,
        cfg: Config,
        roles: SupervisedGroups,
        stream: Any,
        val: list[SupervisedRow] | None,
        tracker: SupervisedTracker,
        checkpointer: Checkpointer | None = None,
        start: int = 0,
        attempt: int = 0,
    ) -> None:
        """
        Args:
            stream: the rows of training, a `PromptStream` of `SupervisedRow`s.
            val: the held-out rows; None: there are none.
            start: the first step to train; above 0: the actor has a checkpoint's weights.
            attempt: the number of the attempt.
        """
        self.cfg = cfg
        self.actor = roles.actor
        self.stream = stream
        self.val = val
        self.tracker = tracker
        self.checkpointer = checkpointer
        self.start = start
        self.attempt = attempt
        self.writes = BackgroundWrites(tracker, cfg.trainer.step_timeout_s)
        self.stopping = False

    async def fit(self) -> None:
        """Train `stream.total_steps` steps. The first failure anywhere cancels the rest and is
        raised."""
        failure: BaseException | None = None
        try:
            async with asyncio.TaskGroup() as self.background:
                await self._loop(self.stream.total_steps)
        except BaseExceptionGroup as group:
            failure = first_cause(group)
        if failure is not None:
            raise failure

    async def _loop(self, total_steps: int) -> None:
        trainer = self.cfg.trainer
        if trainer.val_only:
            await self._evaluate(self.start)
            return
        if trainer.val_before_train and self.start == 0:
            await self._evaluate(0)
        if self.start == total_steps and not self._was_evaluated(total_steps):
            # An earlier attempt was killed between its last step and its end.
            await self._evaluate_at_the_end(total_steps)
        for step in range(self.start, total_steps):
            await self._step(step, total_steps)
        if self.checkpointer and self.checkpointer.in_use:
            await self._save(total_steps)

    async def _step(self, step: int, total_steps: int) -> None:
        begin = now()
        # Checkpoint v(step) when due, then evaluate it when due.
        await self._checkpoint_if_due(step)
        test_freq = self.cfg.trainer.test_freq
        if step > 0 and test_freq > 0 and step % test_freq == 0:
            await self._evaluate(step)
        batch = self._batch(step, self.stream.next_batch())
        metrics = await self.actor.update(batch)
        metrics["time/step_s"] = now() - begin
        metrics["restarts/trainer"] = float(self.attempt)
        check_skipped_in_a_row(self.cfg, step, metrics)
        try:
            if step + 1 == total_steps:
                await self._evaluate_at_the_end(total_steps)
        finally:
            self.tracker.step(batch, step, metrics)
            self.stopping |= self.tracker.callbacks.stop_requested

    def _batch(self, version: int, rows: list[SupervisedRow]) -> Batch:
        """Rows as the trainers take them, at the weights `version`."""
        stamp = (self.attempt, version)
        return Batch(version, [row.sample(stamp) for row in rows], stamp)

    # --- evaluation -------------------------------------------------------------------------------

    async def _evaluate(self, version: int) -> None:
        """The mean loss of the held-out answers' tokens at the weights `version`."""
        if not self.val:
            return
        begin = now()
        batch = self._batch(version, self.val)
        log_probs = await self.actor.log_prob(batch)
        total = 0.0
        tokens = 0
        for sample, values in zip(batch.samples, log_probs, strict=True):
            total -= float(values[sample.loss_mask].sum(dtype=np.float64))
            tokens += int(sample.loss_mask.sum())
        self.tracker.held_out_loss(version, total / tokens, tokens, len(self.val), now() - begin)

    def _was_evaluated(self, version: int) -> bool:
        return any(row["val/version"] >= version for row in self.tracker.evaluations)

    async def _evaluate_at_the_end(self, version: int) -> None:
        if self.cfg.trainer.val_after_train:
            await self._evaluate(version)

    # --- checkpoints ------------------------------------------------------------------------------

    async def _checkpoint_if_due(self, step: int) -> None:
        """Write a checkpoint if due. Raises Stopped if the run was asked to stop."""
        is_new = self.checkpointer is not None and step > self.start
        if is_new and (self.stopping or self.checkpointer.is_due(step)):
            await self._save(step)
        if self.stopping:
            await self.writes.finished()
            raise Stopped(f"step {step}")

    async def _save(self, step: int) -> None:
        """Save a checkpoint, unless this step has one; see `BackgroundWrites.save`."""
        state = {"stream": self.stream.state_dict(), "incarnation": self.attempt}
        await self.writes.save(self.checkpointer, step, lambda: (None, state), self.background)
