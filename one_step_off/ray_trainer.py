"""The pipeline: step N trains on samples that the weights of step N-1 generated.

    time ------------------------------------------------------------------------------>
    rollout | gen 0 (v0) | gen 1 (v0)      | sync v1 | gen 2 (v1)      | sync v2 | ...
    trainer |            | train 0: v0->v1 | sync v1 | train 1: v1->v2 | sync v2 | ...

With `pipeline.staleness` above 1 generation runs further ahead: see
`one_step_off/config/sync_schedule.py`.
Read `Pipeline._loop`, `_step` and `_train`: the rest of this file prepares a step or records what
it did.
"""

import asyncio
from collections.abc import Awaitable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from one_step_off.algorithms.advantages import ADVANTAGE_ESTIMATORS
from one_step_off.algorithms.batch_advantages import (
    fill_advantages,
    make_kl_controller,
    set_baselines,
)
from one_step_off.checkpoint import Checkpointer
from one_step_off.checkpoint.checkpointer import BackgroundWrites, Contents
from one_step_off.checkpoint.in_flight import samples_and_state
from one_step_off.checkpoint.skipped_updates import SkippedUpdates
from one_step_off.cluster.remote_calls import now
from one_step_off.cluster.run_events import RunEvents
from one_step_off.config.errors import first_cause
from one_step_off.config.schema import Config
from one_step_off.config.sync_schedule import (
    is_sync_step,
    last_begun_batch,
    sync_period,
    waits_for_requests,
)
from one_step_off.data.episodes import one_per_episode
from one_step_off.data.samples import FAULT_METRICS, Batch, Prompt, Sample
from one_step_off.data.staleness import age_shares, assert_staleness
from one_step_off.monitoring.tracker import Tracker
from one_step_off.rollout.batch_sources import BatchSource, InFlight, own_source
from one_step_off.rollout.lending import Lending
from one_step_off.rollout.pooled_batches import PooledSource
from one_step_off.rollout.replica_group import RolloutGroup
from one_step_off.rollout.replica_supervisor import NoReplica
from one_step_off.rollout.scheduled_batches import ScheduledSource
from one_step_off.training.reward_models import mix
from one_step_off.training.trainer_group import WorkerGroup
from one_step_off.weight_sync.coordinator import WeightSync
from one_step_off.weight_sync.overlap import SyncOverlap
from one_step_off.weight_sync.versions import VersionTable

NO_SYNC = {"time/wait_trainer_s": 0.0, "time/sync_s": 0.0, "sync/bytes": 0.0}
"""The metrics of a step at which no weights are sent."""


@dataclass
class RunGroups:
    """What the pipeline calls: the group of each role, and the weight sync. None: the run has no
    such role."""

    actor: WorkerGroup
    rollout: RolloutGroup
    sync: WeightSync
    ref: WorkerGroup | None = None
    critic: WorkerGroup | None = None
    reward_model: Any = None
    teacher: Any = None


@dataclass
class Resumed:
    """The state of the pipeline in a checkpoint.

    Attributes:
        step: the first step to train.
        in_flight: what was generated or begun and not trained.
        kl_coef: the adapted KL coefficient.
    """

    step: int
    in_flight: InFlight = field(default_factory=InFlight)
    kl_coef: float | None = None


class Stopped(Exception):
    """The run was asked to stop and has done so, with or without a checkpoint."""


class Pipeline:
    """Runs the steps of one attempt.

    Attributes:
        batches: where the batches come from.
        stopping: the run saves and stops at the next step's beginning or end; set from outside, or
            since a callback has asked for it.
    """

    def __init__(
        self,
        cfg: Config,
        roles: RunGroups,
        stream: Any,
        val: list[Prompt] | None,
        tracker: Tracker,
        checkpointer: Checkpointer | None = None,
        resumed: Resumed | None = None,
        attempt: int = 0,
    ) -> None:
        """
        Args:
            stream: the prompts of training, see `PromptStream`.
            val: the prompts of evaluation.
            resumed: what a checkpoint held; None: the run begins.
            attempt: of the trainer. After a trainer has died, version numbers begin again in a
                new attempt.
        """
        self.cfg = cfg
        self.roles = roles
        self.stream = stream
        self.val = val
        self.tracker = tracker
        self.checkpointer = checkpointer
        self.resumed = resumed
        self.attempt = attempt
        self.start = resumed.step if resumed else 0
        self.runs_ahead = bool(cfg.pipeline.staleness)
        self.sync_overlap = SyncOverlap(cfg)
        self.batches = batch_source(cfg, roles.rollout, stream, resumed, attempt, tracker)
        self.lending = Lending(cfg, roles.rollout)
        self.kl_controller = make_kl_controller(cfg, resumed.kl_coef if resumed else None)
        self.expected_canary: Any = None  # the trainer's half of the next canary
        self.canary_metrics: dict[str, float] = {}
        self.evaluation: asyncio.Task | None = None
        self.writes = BackgroundWrites(tracker, cfg.trainer.step_timeout_s)
        self.skipped_updates = SkippedUpdates(cfg, tracker)
        self.stopping = False

    @property
    def versions(self) -> VersionTable:
        """Which weights are where."""
        return self.roles.sync.versions

    async def fit(self) -> None:
        """Train `stream.total_steps` steps. The first failure anywhere cancels the rest and is
        raised."""
        self.versions.begin(self.attempt, self.start)
        failure: BaseException | None = None
        try:
            async with asyncio.TaskGroup() as self.background:
                watch = self.background.create_task(self.roles.rollout.watch())
                try:
                    await self._loop(self.stream.total_steps)
                except NoReplica:  # the trainer has ended its step
                    await self._save_before_failing()
                    raise
                watch.cancel()
        except BaseExceptionGroup as group:
            failure = first_cause(group)
        if failure is not None:
            await self.roles.sync.fail(failure)  # trainers may be waiting for the end of a sync
            # Not raised while the group is handled: it would hide the cause, another process's
            # traceback.
            raise failure
        if self.batches.failure is not None:
            raise self.batches.failure

    # --- the loop ---------------------------------------------------------------------------------

    async def _loop(self, total_steps: int) -> None:
        if self.cfg.trainer.val_only:
            await self._sync(self.start)
            self._start_evaluation(self.start)
            return
        await self._start_rollouts(total_steps)
        if self.start == total_steps and not self._was_evaluated(total_steps):
            # An earlier attempt was killed between its last step and its end.
            await self._final_evaluation(total_steps)
        for step in range(self.start, total_steps):
            await self._step(step, total_steps)
        if self.checkpointer and self.checkpointer.in_use:
            await self._save(total_steps)

    async def _step(self, step: int, total_steps: int) -> None:
        begin = now()
        overlapped = self.sync_overlap.begin_step()
        batch = None
        # Wait for the rollouts of this step, made with v(step - 1) or older weights; with
        # placement.lend the trainer's devices generate too meanwhile.
        if self.runs_ahead and not self._sync_goes_first(step):
            async with self.lending.while_waiting(step, self.expected_canary):
                batch, batch_metrics = await self.batches.batch(step)
            batch_metrics |= self.lending.metrics
        # Checkpoint when due: the trainer's v(step) and these samples are both complete here.
        await self._checkpoint_if_due(step)
        # Sync v(step) into every replica, then launch evaluation when due, then the rollouts of the
        # next steps. With staleness above 1 some steps have no sync.
        synced = self.background.create_task(self._sync_and_launch(step))
        if not overlapped:
            await synced
        if batch is None:
            batch, batch_metrics = await self.batches.batch(step)
        if self.checkpointer and step == self.start:
            _, state = self._contents(step)
            await self.writes.try_to_write(self.checkpointer, batch.samples, state)
        # Log-probs and values, advantages, then the updates: v(step) -> v(step + 1).
        train_metrics = await self._train(batch)
        train_metrics |= self.batches.record(batch)
        metrics = batch_metrics | train_metrics | await synced
        metrics["time/step_s"] = now() - begin
        self.versions.step_ended(step)
        if self.batches.is_continuous:
            metrics["time/generate_s"] = generation_seconds(metrics)
        metrics |= self.sync_overlap.end_step(metrics)
        metrics["restarts/replicas"] = self.roles.rollout.restarts
        metrics["rollout/replicas"] = self.roles.rollout.serving
        metrics["restarts/trainer"] = self.attempt
        try:
            if step + 1 == total_steps:
                await self._final_evaluation(total_steps)
        finally:
            self.tracker.step(batch, step, metrics)
            self.stopping |= self.tracker.callbacks.stop_requested

    async def _train(self, batch: Batch) -> dict[str, float]:
        """Train on a batch; returns the metrics. Roles in different pools work at once, and roles
        in one pool take turns: their groups see to that."""
        begin = now()
        samples = batch.samples
        await self._infer(batch)
        metrics = count_faults(samples)
        if self.cfg.reward.on_error == "drop":
            batch.drop({sample.prompt_id for sample in samples if "error" in sample.extra})
        metrics["samples/dropped_groups"] = float(len({s.prompt_id for s in batch.dropped}))
        metrics |= age_shares(batch, self.cfg.pipeline.staleness)
        if batch.samples:
            metrics |= fill_advantages(batch, self.cfg, self.kl_controller)
        log_prob_s = now() - begin
        metrics |= await self._update(batch)
        self.skipped_updates.check(batch, metrics)
        self._prepare_sync(batch.step + 1)
        # The wait until the weights were sent and accepted is no training.
        train_s = now() - begin - metrics.get("actor/sync_wait_s", 0.0)
        metrics["time/log_prob_s"] = log_prob_s
        metrics["time/train_s"] = train_s
        metrics["time/update_s"] = train_s - log_prob_s
        return metrics

    async def _infer(self, batch: Batch) -> None:
        """Ask every role for its view of the samples, all at once. Greedy responses are scored and
        become baselines."""
        roles = self.roles
        with_greedy = batch.samples
        batch.samples = [sample for sample in with_greedy if "greedy" not in sample.extra]
        batch.greedy = [sample for sample in with_greedy if "greedy" in sample.extra]
        estimator = ADVANTAGE_ESTIMATORS.find(self.cfg.algorithm.adv_estimator)
        calls: dict[str, Awaitable[Any]] = {}
        if roles.ref is not None:
            calls["ref_log_probs"] = roles.ref.log_prob(batch)
        if "prob_squares" in estimator.needs:
            calls["log_probs_and_squares"] = roles.actor.log_prob_and_squares(batch)
        elif self.cfg.algorithm.old_log_probs == "recompute":
            calls["old_log_probs"] = roles.actor.log_prob(batch)
        if roles.critic is not None:
            calls["values"] = roles.critic.values(batch)
        if roles.reward_model is not None:
            calls["scores"] = roles.reward_model.rewards(replace(batch, samples=with_greedy))
        if roles.teacher is not None:
            calls["teacher"] = roles.teacher.outputs(batch)
        answers = dict(zip(calls, await asyncio.gather(*calls.values()), strict=True))
        if "scores" in answers:
            mix(with_greedy, answers.pop("scores"), self.cfg)
        if "log_probs_and_squares" in answers:
            columns = answers.pop("log_probs_and_squares")
            batch.old_log_probs = [column[:, 0] for column in columns]
            batch.prob_squares = [column[:, 1] for column in columns]
        batch.set_columns(answers)
        set_baselines(batch.samples, with_greedy, self.cfg)

    async def _update(self, batch: Batch) -> dict[str, float]:
        """Update actor and critic side by side. An empty batch counts as a step, and changes no
        weights."""
        has_samples = bool(batch.samples)
        warmed_up = batch.step >= self.cfg.trainer.critic_warmup
        updates = [self.roles.actor.update(batch, has_samples and warmed_up)]
        if self.roles.critic is not None:
            updates.append(self.roles.critic.update(batch, has_samples))
        metrics: dict[str, float] = {}
        for role_metrics in await asyncio.gather(*updates):
            metrics |= role_metrics
        if batch.step == self.cfg.trainer.profile_step:
            folder = self.tracker.folder / "profile"
            self.tracker.log(f"torch's profile of step {batch.step} is in {folder}")
        return metrics

    # --- rollouts and weight sync -----------------------------------------------------------------

    def _sync_goes_first(self, step: int) -> bool:
        """With a pool: whether the samples of `step` are not complete, so that the replicas should
        get the newest weights and begin the next prompts first. A checkpoint needs the samples
        before the sync."""
        return not self._checkpoint_due(step) and not self.batches.ready(step)

    async def _start_rollouts(self, total_steps: int) -> None:
        """Launch the rollouts before the first step, unless the checkpoint had them."""
        if self.batches.has_first_batch:
            return
        await self._sync(self.start)
        if self.cfg.trainer.val_before_train and not self.resumed:
            self._start_evaluation(0)
        if self.runs_ahead and self.start < total_steps:
            self.batches.launch(self.start, self.versions.synced, self.background)

    async def _sync_and_launch(self, step: int) -> dict[str, Any]:
        """What the replicas do at a step's beginning, beside the trainer where they overlap:
        receive v(step), then generate with it. Returns the metrics of the sync."""
        if not self.batches.needs_sync(step):
            await self.roles.sync.release(step)
            return NO_SYNC
        try:
            metrics = await self._sync(step)
        except NoReplica as e:
            # The trainer still ends its step, so that a checkpoint can be written after it.
            self.batches.fail(e)
            await self.roles.sync.release(step)
            return {}
        if self._evaluation_due(step):
            self._start_evaluation(step)
        last_begun = last_begun_batch(self.cfg, step)
        self.batches.launch(last_begun, self.versions.synced, self.background)
        return metrics

    async def _sync(self, version: int) -> dict[str, float]:
        """Bring the replicas to `version`, unless they hold it. They generate nothing meanwhile."""
        if self.evaluation is not None:
            await self.evaluation
        metrics = {"time/wait_trainer_s": self.batches.idle_seconds()}
        if self.versions.synced == version:
            self.batches.activity.sync_ended()
            return NO_SYNC | metrics | self.canary_metrics
        begin = now()
        sync_metrics = await self.roles.sync((self.attempt, version), self.expected_canary)
        self.tracker.span("sync", "weights", version, begin, now())
        self.batches.activity.sync_ended()
        if self.batches.is_continuous and not metrics["time/wait_trainer_s"]:
            # They generate again while the canary is scored.
            metrics["time/rollout_paused_s"] = sync_metrics.get("sync/paused_s", 0.0)
        self.versions.sync_ended(version)
        self.canary_metrics = {
            name: value for name, value in sync_metrics.items() if name.startswith("canary/")
        }
        return metrics | sync_metrics

    def _prepare_sync(self, version: int) -> None:
        """The trainer has made `version`: do what its sync can do before the replicas pause. Not
        all versions are sent."""
        is_last = version == self.stream.total_steps
        if not is_last and not is_sync_step(self.cfg, version):
            self.expected_canary = None
            return
        # Scored now, before the next update changes the weights.
        self.expected_canary = self.roles.sync.score_canary()

    # --- evaluation -------------------------------------------------------------------------------

    def _evaluation_due(self, step: int) -> bool:
        """Every `trainer.test_freq` steps. Where the replicas do not get the weights of that step,
        they evaluate the next ones that they get."""
        test_freq = self.cfg.trainer.test_freq
        if step == 0 or test_freq < 1 or not is_sync_step(self.cfg, step):
            return False
        return step % test_freq < sync_period(self.cfg)

    def _start_evaluation(self, version: int) -> None:
        """Evaluate the replicas' weights beside training; the next sync waits for the end."""
        if self.val:
            work = self.batches.stop_on_no_replica(partial(self._evaluate, version))
            self.evaluation = self.background.create_task(work)

    async def _evaluate(self, version: int) -> tuple[list[Sample], float]:
        rollout = self.roles.rollout
        samples, seconds = await rollout.generate(
            self.val, f"evaluation of v{version}", rollout.val_sampling
        )
        self.batches.activity.call_finished("evaluate", version, seconds)
        assert_staleness(Batch(-1, samples, expected_stamp=(self.attempt, version)))
        self.tracker.evaluation(version, samples, seconds)
        return samples, seconds

    def _was_evaluated(self, version: int) -> bool:
        return any(row["val/version"] >= version for row in self.tracker.evaluations)

    async def _final_evaluation(self, version: int) -> None:
        """Sync the last version, and evaluate it."""
        if self.cfg.trainer.val_after_train and self.val:
            await self._sync(version)
            self._start_evaluation(version)
            await self.evaluation
            if self.batches.failure is not None:
                raise self.batches.failure

    # --- checkpoints ------------------------------------------------------------------------------

    def _checkpoint_due(self, step: int) -> bool:
        if self.checkpointer is None or step == self.start:
            return self.stopping
        return self.stopping or self.checkpointer.is_due(step)

    async def _checkpoint_if_due(self, step: int) -> None:
        """Write a checkpoint if due. Raises Stopped if the run was asked to stop."""
        if self.checkpointer and step > self.start and self._checkpoint_due(step):
            await self.batches.settle()
            await self._save(step)
        if self.stopping:
            await self.writes.finished()
            raise Stopped(f"step {step}")

    async def _save_before_failing(self) -> None:
        """No replica is left: save the steps that were trained, and what is complete."""
        trained = self.versions.trained
        if self.checkpointer and trained > self.start:
            await self._save(trained)
            await self.writes.finished()

    async def _save(self, step: int) -> None:
        """Save a checkpoint, unless this step has one; see `BackgroundWrites.save`."""
        if self.evaluation is not None:
            await self.evaluation  # its result belongs to this side of the checkpoint
        await self.writes.save(
            self.checkpointer, step, lambda: self._contents(step), self.background
        )

    def _contents(self, step: int) -> Contents:
        in_flight, stream_position = self.batches.in_flight(step)
        samples, state = samples_and_state(in_flight)
        state |= {
            "stream": stream_position,
            "kl_coef": self.kl_controller.value,
            "incarnation": self.attempt,
        }
        return samples, state


def batch_source(
    cfg: Config,
    rollout: RolloutGroup,
    stream: Any,
    resumed: Resumed | None,
    attempt: int,
    events: RunEvents,
) -> BatchSource:
    """The user's own source; else whole batches, or a pool of prompts where a sync pauses
    requests. Raises ConfigError: see `own_source`."""
    first_step = resumed.step if resumed else 0
    restored = resumed.in_flight if resumed else InFlight()
    source: type[BatchSource] = ScheduledSource if waits_for_requests(cfg) else PooledSource
    source = own_source(cfg) or source
    return source(cfg, rollout, stream, first_step, attempt, restored, events)


def count_faults(samples: list[Sample]) -> dict[str, float]:
    """How many episodes have each fault."""
    faults = [sample.extra.get("fault") for sample in one_per_episode(samples)]
    return {name: float(faults.count(name)) for name in FAULT_METRICS}


def generation_seconds(metrics: dict[str, float]) -> float:
    """Where the replicas generate throughout a step: all of it but for syncs and waits for new
    weights."""
    sync_s = metrics.get("time/sync_s", 0.0)
    paused_s = metrics.get("time/rollout_paused_s", sync_s)
    idle_s = paused_s + metrics.get("time/wait_trainer_s", 0.0)
    return max(0.0, metrics["time/step_s"] - idle_s)
