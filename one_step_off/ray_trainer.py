"""The pipeline: step N trains on samples that the weights of step N-1 generated.

    time ------------------------------------------------------------------------------>
    rollout | gen 0 (v0) | gen 1 (v0)      | sync v1 | gen 2 (v1)      | sync v2 | ...
    trainer |            | train 0: v0->v1 | sync v1 | train 1: v1->v2 | sync v2 | ...

The loop is `Pipeline._loop`; everything else in this file prepares a step or writes down what it did.
"""

import asyncio
import math
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from one_step_off.algorithms import advantages
from one_step_off.algorithms.core_algos import KLController
from one_step_off.checkpoint import TRAINED_ROLES, Checkpointer, write_batch
from one_step_off.cluster.errors import RoleError
from one_step_off.cluster.remote_calls import now, with_time_limit
from one_step_off.config.schema import Config
from one_step_off.data.samples import FAULT_METRICS, Batch, Prompt, Sample
from one_step_off.data.staleness import assert_staleness
from one_step_off.monitoring.tracker import Tracker
from one_step_off.rollout.partial_rollouts import Pool
from one_step_off.rollout.replica_group import NoReplica, RolloutGroup
from one_step_off.training.reward_models import mix
from one_step_off.training.trainer_group import TrainGroup
from one_step_off.weight_sync.coordinator import WeightSync

KEPT_BATCHES = 5


@dataclass
class Roles:
    """Who takes part; see `groups.py` for what each must be able to do. None: the run has no such role."""

    actor: TrainGroup
    rollout: RolloutGroup
    sync: WeightSync
    ref: TrainGroup | None = None
    critic: TrainGroup | None = None
    reward_model: Any = None


@dataclass
class Resumed:
    """Where a checkpoint left off: its step, and the finished samples of that step (None: generate them anew)."""

    step: int
    samples: list[Sample] | None
    generate_s: float
    kl_coef: float | None = None
    incarnation: int = 0  # which made the samples
    carried: list[Prompt] = field(default_factory=list)  # prompts that were under way besides


class Stopped(Exception):
    """The run was asked to stop and has done so, with or without a checkpoint."""


def first_cause(error: BaseException) -> BaseException:
    """The failure that began it all, out of the groups that asyncio wraps around it."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


def _parts(samples: list[Sample]) -> dict[str, np.ndarray] | None:
    """The parts of the rewards, name -> float64 [B], NaN where a sample lacks one, 0 if for an error; None where no
    sample has any."""
    found = [s.extra.get("reward_parts", {}) for s in samples]
    names = dict.fromkeys(name for one in found for name in one)
    blank = [0.0 if "error" in s.extra else np.nan for s in samples]
    return {
        name: np.array([one.get(name, x) for one, x in zip(found, blank, strict=True)])
        for name in names
    } or None


def _shaped(samples: list[Sample], cfg: Config) -> np.ndarray:
    """The rewards with the punishment of overlong responses, float64 [B]."""
    lengths, longest, own = (
        [len(s.response_ids) for s in samples],
        cfg.data.max_response_length,
        cfg.reward,
    )
    penalties = advantages.overlong_penalty(
        lengths, longest, own.overlong_buffer, own.overlong_penalty
    )
    return np.array([s.reward for s in samples]) + penalties


@dataclass(eq=False)
class Pipeline:
    """Runs the steps. `pipeline.staleness` 1 generates one step ahead of training, 0 in turns with it. `incarnation`: which
    life of the trainer this is; after one died, version numbers begin again."""

    cfg: Config
    roles: Roles
    stream: Any
    val: list[Prompt] | None
    tracker: Tracker
    checkpointer: Checkpointer | None = None
    resumed: Resumed | None = None
    incarnation: int = 0

    def __post_init__(self) -> None:
        cfg, roles, resumed = self.cfg, self.roles, self.resumed
        self.ahead = cfg.pipeline.staleness
        # Where another role shares the replicas' pool, they take turns, and nothing runs beside the sync.
        pools = list(cfg.placement.roles.values())
        self.overlap = (
            self.ahead
            and cfg.weight_sync.overlap
            and pools.count(cfg.placement.roles["rollout"]) == 1
        )
        # Prompts of several steps under way at once, see carry.py; None: each step waits for its own.
        self.pool = (
            Pool(cfg.data.train_batch_size, cfg.pipeline.max_carry)
            if cfg.pipeline.partial_rollout
            else None
        )
        self.landed, self.carried = asyncio.Event(), resumed.carried if resumed else []
        self.coming: asyncio.Future | None = (
            None  # the samples of the next step, where each step waits for its own
        )
        self.expected: Any = None  # the trainer's half of the next canary
        self.start = resumed.step if resumed else 0
        # Without samples in flight the first ones are made by the first weights there are.
        self.oldest = self.start if not (resumed and resumed.samples) else 0
        a = cfg.algorithm
        self.kl = KLController(a.kl_coef, a.kl_target, a.kl_horizon)
        if a.kl_target is not None and resumed and resumed.kl_coef is not None:
            self.kl.value = resumed.kl_coef
        self.synced = -1
        self.trained = self.collected = (
            self.start
        )  # the trainer's version; the step whose samples come next
        self.lost: NoReplica | None = None  # nothing can be generated any more
        self.positions: dict[int, Any] = {}  # step -> the data position before its first prompt
        self.canary: dict[str, float] = {}
        self.evaluation: asyncio.Task | None = None
        self.writing: list[asyncio.Task] = []  # a checkpoint, or none
        self.rollouts_ended = 0.0
        self.drawn: dict[str, float] = {}  # what, to when in the timeline
        self.last_generate_s = 0.0
        for role in filter(None, (roles.actor, roles.ref, roles.critic, roles.reward_model)):
            role.on_span = self.tracker.span
        self.empty = 0  # batches in a row of which all groups were dropped
        self.stopping = False  # set from outside: save at the next step's beginning and end

    async def fit(self) -> None:
        """Train `stream.total_steps` steps. The first failure anywhere cancels the rest and is raised."""
        self.roles.sync.on_trace = self.roles.rollout.on_trace = self.tracker.trace
        self.roles.rollout.on_message = self.tracker.log
        failure: BaseException | None = None
        try:
            async with asyncio.TaskGroup() as self.background:
                watch = self.background.create_task(self.roles.rollout.watch())
                try:
                    await self._loop(self.stream.total_steps)
                except NoReplica:  # the trainer has ended its step
                    if self.checkpointer and self.trained > self.start:
                        await self._save(self.trained, None)
                        await asyncio.gather(*self.writing)
                    raise
                watch.cancel()
        except BaseExceptionGroup as group:
            failure = first_cause(group)
        if failure is not None:
            await self.roles.sync.fail(failure)  # trainers may be waiting for the end of a sync
            raise failure  # not while the group is handled: it would hide the cause, another process's traceback
        if self.lost:
            raise self.lost

    async def _loop(self, total: int) -> None:
        if self.cfg.trainer.val_only:
            await self._sync(self.start)
            self._start_evaluation(self.start)
            return
        await self._begin(total)
        if self.start == total and all(e["val/version"] < total for e in self.tracker.evaluations):
            await self._finish(
                total
            )  # an earlier life was killed between its last step and its end
        for step in range(self.start, total):
            begin, batch = now(), None
            if self.ahead and not self._must_wait(step):
                batch, waited = await self._collect(step)
            await self._checkpoint(step, batch)
            renewal = self.background.create_task(self._renew(step, total))
            if not self.overlap:
                await renewal
            if batch is None:
                batch, waited = await self._collect(step)
            metrics = waited | await self._train(batch) | await renewal
            metrics["time/step_s"], self.trained = now() - begin, step + 1
            if self.pool:  # then replicas generate all the time, unless they hold new weights up or wait for them
                idle = metrics.get("time/sync_s", 0.0) + metrics.get("time/wait_trainer_s", 0.0)
                metrics["time/generate_s"] = max(0.0, metrics["time/step_s"] - idle)
            metrics |= {
                "restarts/replicas": self.roles.rollout.restarts,
                "restarts/trainer": self.incarnation,
            }
            try:
                if step + 1 == total:
                    await self._finish(total)
            finally:
                self.tracker.step(batch, step, metrics)
        if self.checkpointer and self.checkpointer.in_use:
            await self._save(total, None)

    def _must_wait(self, step: int) -> bool:
        """With partial rollouts: whether the samples of `step` are not complete, so that the replicas had better go on with
        the newest weights and begin the next prompts. A checkpoint needs them before that."""
        due = self.stopping or (
            self.checkpointer and step > self.start and self.checkpointer.is_due(step)
        )
        return bool(self.pool and not self.coming and not due and not self.pool.choose(step))

    async def _renew(self, step: int, total: int) -> dict[str, Any]:
        """What the replicas do at a step's beginning, beside the trainer if `weight_sync.overlap`: take v(step) over,
        then generate with it."""
        try:
            metrics = await self._sync(step)
        except (
            NoReplica
        ) as e:  # the trainer is to finish the step: a checkpoint can be written after it
            self.lost = e
            self.landed.set()
            await self.roles.sync.release(step)
            return {}
        if step and (freq := self.cfg.trainer.test_freq) > 0 and step % freq == 0:
            self._start_evaluation(step)
        if step + self.ahead < total:
            self._launch(step + self.ahead)
        return metrics

    async def _begin(self, total: int) -> None:
        """The rollouts before the first step: launched now, or those of the checkpoint."""
        if self.resumed and self.resumed.samples:
            self.coming = asyncio.get_running_loop().create_future()
            return self.coming.set_result((self.resumed.samples, self.resumed.generate_s))
        await self._sync(self.start)
        if self.cfg.trainer.val_before_train and not self.resumed:
            self._start_evaluation(0)
        if self.ahead and self.start < total:
            self._launch(self.start)

    async def _checkpoint(self, step: int, batch: Batch | None) -> None:
        """Write a checkpoint if due; end the run if asked to. Trainer and samples are both complete here."""
        if (
            self.checkpointer
            and step > self.start
            and (self.stopping or self.checkpointer.is_due(step))
        ):
            await self._save(step, batch)
        if self.stopping:
            await asyncio.gather(*self.writing)
            raise Stopped(f"step {step}")

    async def _save(self, step: int, batch: Batch | None) -> None:
        """Go on as soon as the trainers have copied their state; it is written meanwhile, one checkpoint at a time. Of one
        step there is one: the next would hold the same."""
        if self.evaluation is not None:
            await self.evaluation  # its result belongs to this side of the checkpoint
        begin = now()
        await asyncio.gather(*self.writing)
        if self.checkpointer.has(step):
            return
        stream = (
            self.stream.state_dict()
            if batch
            else self.positions.get(step, self.stream.state_dict())
        )
        state = {
            "stream": stream,
            "generate_s": self.last_generate_s if batch else 0.0,
            "kl_coef": self.kl.value,
        }
        state["carried"] = [
            *(self.pool.flights if self.pool else ()),
            *(p.id for p in self.carried),
        ]
        state |= {"evaluations": self.tracker.evaluations, "unwritten": self.tracker.unwritten}
        state["incarnation"] = self.incarnation
        written = await self.checkpointer.save(step, batch.samples if batch else None, state)
        stall = self.tracker.spans["checkpoint/stall_s"] = now() - begin
        self.writing = [self.background.create_task(self._write(step, begin, stall, written))]

    async def _write(self, step: int, begin: float, stall: float, written: Any) -> None:
        limit = self.cfg.trainer.step_timeout_s  # a file system that hangs answers nothing
        path, size = await with_time_limit(limit, f"checkpoint of step {step}, writing", written)
        took = now() - begin
        self.tracker.spans |= {"checkpoint/write_s": took, "checkpoint/bytes": float(size)}
        start = begin + self.tracker.epoch
        spans = [("checkpoint", "stall", 0.0, stall), ("checkpoint write", "write", stall, took)]
        self.tracker.trace([(lane, what, step, start + a, start + b) for lane, what, a, b in spans])
        waits = f"{size / 1e6:,.1f} MB in {took:.2f} s, training waited {stall:.2f} s"
        self.tracker.log(f"checkpoint of step {step} in {path} ({waits})")

    async def _finish(self, version: int) -> None:
        """The final sync serves the final evaluation."""
        if self.cfg.trainer.val_after_train and self.val:
            await self._sync(version)
            self._start_evaluation(version)
            await self.evaluation
            if self.lost:
                raise self.lost

    def _launch(self, step: int) -> None:
        """Start generating the samples of `step` with the weights that the replicas hold now."""
        if self.pool:
            return self._fill(step)
        self.positions = {step: self.stream.state_dict()}
        self.coming = self.background.create_task(
            self._unless_lost(self._generate(step, self.stream.next_batch()))
        )

    def _fill(self, step: int) -> None:
        """Bring what is under way up to `rollout.oversample` batches for `step`, beside one that is still waited for; but
        not beyond what the run will train on."""
        waiting, b = step - self.collected, self.pool.size
        wanted = math.ceil((waiting + self.cfg.rollout.oversample) * b)
        more = min(wanted, (self.stream.total_steps - self.collected) * b) - len(self.pool.flights)
        again, self.carried = self.carried[:more], self.carried[more:]
        prompts = again + self.stream.next_batch(more - len(again))
        self.pool.begin(prompts, self.synced, step)

        def land(samples: list[Sample]) -> None:
            self.pool.land(samples)
            self.rollouts_ended = now()
            self.landed.set()

        if prompts:
            self.background.create_task(self._unless_lost(self._generate(step, prompts, land)))

    async def _unless_lost(
        self, work: Awaitable[tuple[list[Sample], float]]
    ) -> tuple[list[Sample], float]:
        """Await generation; if no replica is left, `lost` tells so when the trainer has ended its step."""
        try:
            return await work
        except NoReplica as e:
            self.lost = e
            self.landed.set()
        return [], 0.0

    async def _generate(
        self, step: int, prompts: list[Prompt], *land: Callable
    ) -> tuple[list[Sample], float]:
        rollout = self.roles.rollout
        samples, seconds = await rollout.generate(
            prompts, f"step {step}", rollout.train_sampling, *land
        )
        for _ in range(self.cfg.algorithm.max_gen_batches - 1):
            # Dynamic sampling (DAPO, arXiv:2503.14476, section 3.2). The last ones stay, informative or not: bounded.
            sampled = [s for s in samples if "greedy" not in s.extra]
            dull = advantages.zero_variance_groups(
                [s.reward for s in sampled], [s.prompt_id for s in sampled]
            )
            wrong = {s.prompt_id for s in samples if "error" in s.extra}
            dull = [
                prompt for prompt in dull if prompt not in wrong
            ]  # those stay, to be counted and seen
            if not dull:
                break
            what = f"step {step}, in place of {len(dull)} prompts"
            more, took = await rollout.generate(
                self.stream.next_batch(len(dull)), what, rollout.train_sampling
            )
            more[0].extra["replaces"] = [list(prompt) for prompt in dull]
            samples, seconds = (
                [s for s in samples if s.prompt_id not in dull] + more,
                seconds + took,
            )
        self._rollouts_end("generate", step, seconds)
        return samples, seconds

    def _rollouts_end(self, what: str, step: int, seconds: float) -> None:
        """They took so long; the wait for their turn before that is not theirs. Of several at once each is drawn from where
        the one before ended."""
        begin = max(now() - seconds, self.drawn.get(what, 0.0))
        self.rollouts_ended = self.drawn[what] = now()
        self.tracker.span("rollout", what, step, begin, self.rollouts_ended)

    async def _collect(self, step: int) -> tuple[Batch, dict[str, float]]:
        """The batch of `step`, and how long the trainer waited for it. Raises NoReplica."""
        begin, coming, self.coming = now(), self.coming, None
        samples, seconds = await coming if coming else ([], 0.0)
        while not (coming or self.lost or self.pool.choose(step)):
            self.landed.clear()
            await self.landed.wait()
        if self.lost:  # what is complete stays in the pool, for the checkpoint
            raise self.lost
        if not coming:  # the first groups that are complete; how long the replicas worked is known at the step's end
            samples = self.pool.take(step)
        waited = now() - begin
        self.last_generate_s, self.collected = seconds, step + 1
        resumed = (
            self.resumed if self.resumed and self.resumed.samples and step == self.start else None
        )
        made_by = resumed.incarnation if resumed else self.incarnation
        found = {"time/generate_s": seconds, "time/wait_rollout_s": waited}
        batch = Batch(step, samples, expected_stamp=(made_by, max(self.oldest, step - self.ahead)))
        if self.pool:
            older = min(step - self.oldest, self.ahead + self.pool.max_carry)
            batch = Batch(step, samples, expected_stamp=(made_by, step), max_version_lag=older)
            found |= self.pool.figures(samples, step)
        assert_staleness(batch)
        return batch, found

    async def _sync(self, version: int) -> dict[str, float]:
        """Bring the replicas to `version`, unless they hold it. They generate nothing meanwhile."""
        if self.evaluation is not None:
            await self.evaluation
        idles = self.rollouts_ended and not (self.pool and self.pool.missing)
        idle = {"time/wait_trainer_s": now() - self.rollouts_ended if idles else 0.0}
        if self.synced == version:
            return idle | {"time/sync_s": 0.0, "sync/bytes": 0.0} | self.canary
        begin = now()
        metrics = await self.roles.sync((self.incarnation, version), self.expected)
        self.tracker.span("sync", "weights", version, begin, now())
        self.synced = version
        self.canary = {k: v for k, v in metrics.items() if k.startswith("canary/")}
        return idle | metrics

    async def _train(self, batch: Batch) -> dict[str, float]:
        """What the update needs, side by side; then advantages; then actor and critic side by side. Roles in different
        pools work at once, and those in one pool in turns: that is for the groups to see to."""
        begin, samples = now(), batch.samples
        await self._consult(batch)
        metrics = {
            name: float([s.extra.get("fault") for s in samples].count(name))
            for name in FAULT_METRICS
        }
        if self.cfg.reward.on_error == "drop":
            batch.drop({s.prompt_id for s in samples if "error" in s.extra})
        metrics["samples/dropped_groups"] = float(len({s.prompt_id for s in batch.dropped}))
        some = bool(batch.samples)  # without any the step counts, and nothing is learnt
        metrics |= self._advantages(batch) if some else {}
        prepared = now() - begin
        updates = [
            self.roles.actor.update(batch, some and batch.step >= self.cfg.trainer.critic_warmup)
        ]
        if self.roles.critic is not None:
            updates.append(self.roles.critic.update(batch, some))
        for found in await asyncio.gather(*updates):
            metrics |= found
        if batch.step == self.cfg.trainer.profile_step:
            self.tracker.log(
                f"torch's profile of step {batch.step} is in {self.tracker.folder / 'profile'}"
            )
        self._note_skipped(batch, metrics)
        # Now, because the next update may begin before the next sync has ended; and often the trainer idles now.
        self.expected = self.roles.sync.score_canary()
        waited = metrics.get(
            "actor/sync_wait_s", 0.0
        )  # for the weights to be sent: that is no training
        times = {"time/log_prob_s": prepared, "time/train_s": now() - begin - waited}
        return metrics | times | {"time/update_s": times["time/train_s"] - prepared}

    def _note_skipped(self, batch: Batch, metrics: dict[str, float]) -> None:
        """Keep the first batches of which an optimiser step was skipped, for --replay. Raises RoleError: too many in a
        row, or as many batches of which nothing was left."""
        folder = self.tracker.folder / f"skipped/step_{batch.step:06d}"
        skipped = any(metrics.get(f"{role}/skipped_updates") for role in TRAINED_ROLES)
        if skipped and len([*folder.parent.glob("*")]) < KEPT_BATCHES:
            write_batch(batch, folder)
            self.tracker.log(
                f"step {batch.step}: an optimiser step was skipped; look with --replay {folder}"
            )
        self.empty = 0 if batch.samples else self.empty + 1
        row = max(
            self.empty, *(metrics.get(f"{role}/skipped_in_a_row", 0) for role in TRAINED_ROLES)
        )
        if row >= self.cfg.trainer.max_skipped_updates:
            why = (
                "all groups were dropped"
                if self.empty
                else "a loss or gradient is not finite, or too large"
            )
            raise RoleError(
                f"step {batch.step}: trainer.max_skipped_updates={row:.0f} were skipped in a row: {why}"
            )

    async def _consult(self, batch: Batch) -> None:
        """Ask every role for its view of the samples, all at once. Greedy responses are scored and become baselines."""
        roles, calls, scored = self.roles, {}, batch.samples
        batch.samples = [s for s in scored if "greedy" not in s.extra]
        if roles.ref is not None:
            calls["ref_log_probs"] = roles.ref.log_prob(batch)
        if (
            "prob_squares"
            in advantages.ADVANTAGE_ESTIMATORS.find(self.cfg.algorithm.adv_estimator).needs
        ):
            calls["squares"] = roles.actor.log_prob_and_squares(batch)
        elif self.cfg.algorithm.old_log_probs == "recompute":
            calls["old_log_probs"] = roles.actor.log_prob(batch)
        if roles.critic is not None:
            calls["values"] = roles.critic.values(batch)
        if roles.reward_model is not None:
            calls["scores"] = roles.reward_model.rewards(replace(batch, samples=scored))
        for name, found in zip(calls, await asyncio.gather(*calls.values()), strict=True):
            if name == "scores":
                mix(scored, found, self.cfg)
            elif name == "squares":
                batch.old_log_probs, batch.prob_squares = (
                    [x[:, 0] for x in found],
                    [x[:, 1] for x in found],
                )
            else:
                setattr(batch, name, found)
        shaped = zip(scored, _shaped(scored, self.cfg).tolist(), strict=True)
        baselines = {
            s.prompt_id: {"baseline": reward} for s, reward in shaped if "greedy" in s.extra
        }
        for s in batch.samples if baselines else ():
            s.extra |= baselines.get(s.prompt_id, {})

    def _advantages(self, batch: Batch) -> dict[str, float]:
        """Fill in `advantages` and, with a critic's `values`, `returns`. Returns what there is to report."""
        a, samples, token_rewards, parts = (
            self.cfg.algorithm,
            batch.samples,
            None,
            _parts(batch.samples),
        )
        metrics = {
            f"reward/{name}/mean": float(np.nanmean(part)) for name, part in (parts or {}).items()
        }
        if a.filter_overlong:
            cut = [s.finish_reason == "length" for s in samples]
            masks = advantages.mask_overlong([s.loss_mask for s in samples], cut)
            samples = batch.samples = [
                replace(s, loss_mask=m) for s, m in zip(samples, masks, strict=True)
            ]
        # The policy about to be trained, where it was asked; else mu.
        log_probs = batch.old_log_probs or [s.log_probs for s in samples]
        if a.kl_in_reward:
            log_ratios = [
                own - ref for own, ref in zip(log_probs, batch.ref_log_probs, strict=True)
            ]
            token_rewards = [-self.kl.value * x for x in log_ratios]
            sums = [
                x[s.loss_mask].sum()
                for x, s in zip(log_ratios, samples, strict=True)
                if s.loss_mask.any()
            ]
            metrics |= {"kl/response": float(np.mean(sums or [0.0])), "kl/coef": self.kl.value}
            self.kl.update(metrics["kl/response"], len(samples))
        groups, masks = [s.prompt_id for s in samples], [s.loss_mask for s in samples]
        known = {"parts": parts, "values": batch.values, "prob_squares": batch.prob_squares}
        known["log_probs"] = log_probs
        if all("baseline" in s.extra for s in samples):
            known["baselines"] = np.array([s.extra["baseline"] for s in samples])
        trajectories = advantages.Trajectories(
            _shaped(samples, self.cfg), groups, masks, token_rewards, **known
        )
        how = advantages.Options(a.gamma, a.lam, a.norm_adv_by_std), a.whiten_adv
        batch.advantages, batch.returns = advantages.estimate_advantages(
            a.adv_estimator, trajectories, *how, **a.adv_kwargs
        )
        return metrics

    def _start_evaluation(self, version: int) -> None:
        """Evaluate the replicas' weights beside training; the next sync waits for it."""
        if self.val:
            self.evaluation = self.background.create_task(
                self._unless_lost(self._evaluate(version))
            )

    async def _evaluate(self, version: int) -> tuple[list[Sample], float]:
        rollout = self.roles.rollout
        samples, seconds = await rollout.generate(
            self.val, f"evaluation of v{version}", rollout.val_sampling
        )
        self._rollouts_end("evaluate", version, seconds)
        assert_staleness(Batch(-1, samples, expected_stamp=(self.incarnation, version)))
        self.tracker.evaluation(version, samples, seconds)
        return samples, seconds
