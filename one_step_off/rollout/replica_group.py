"""The replicas as the pipeline sees them: a few awaitable methods, each with a time limit."""

import asyncio
from collections.abc import Callable, Collection
from contextlib import nullcontext
from typing import Any

from one_step_off.algorithms.advantages import ADVANTAGE_ESTIMATORS
from one_step_off.cluster.errors import PhaseTimeout, RoleError, SyncError
from one_step_off.cluster.remote_calls import call_all, name_failures, now, with_time_limit
from one_step_off.cluster.run_events import RunEvents
from one_step_off.config.placement import start_limit_s
from one_step_off.config.schema import Config
from one_step_off.data.episodes import in_batch_order
from one_step_off.data.samples import Prompt, Sample
from one_step_off.rollout.prompt_router import GenerationCall, OnGroup, PromptRouter
from one_step_off.rollout.replica_supervisor import ReplicaSupervisor
from one_step_off.rollout.sampling import Sampling
from one_step_off.rollout.timeline import ReplicaTimeline

STOP_S = 10.0  # for all engines to end in good order


class RolloutGroup:
    """All replicas of a run. `ReplicaSupervisor` keeps them alive, `PromptRouter` gives them
    prompts.

    Attributes:
        train_sampling: how samples for training are generated.
        val_sampling: how samples for evaluation are generated.
        has_answered: whether all replicas have started once. Before, one that does not answer may
            be starting; from then on it hangs.
    """

    def __init__(
        self,
        replicas: list[Any],
        cfg: Config,
        seeded: bool,
        pool_lock: Any = None,
        respawn: Callable[[int], Any] | None = None,
        events: RunEvents | None = None,
        lent: Collection[int] = (),
    ) -> None:
        """
        Args:
            replicas: Ray actors of `RolloutReplica`.
            seeded: every sample has a seed of its own, so that a run repeats.
            pool_lock: held while the replicas work, if other roles share their devices; None: no
                role does.
            respawn: see `ReplicaSupervisor`.
            events: receives the spans of each generation call, and what happens to replicas.
            lent: the numbers of the replicas on the trainer's devices, see `lending.py`.
        """
        self.cfg = cfg
        self.shares_pool = pool_lock is not None
        self.pool_lock = pool_lock or nullcontext()
        self.supervisor = ReplicaSupervisor(replicas, cfg, respawn, self.shares_pool, events, lent)
        self.events = self.supervisor.events
        self.timeline = ReplicaTimeline()
        routing = cfg.rollout.routing
        # Static routing gives all prompts out at once, and none would be left for lent replicas.
        static = routing == "static" or (routing == "auto" and seeded and not lent)
        self.router = PromptRouter(
            self.supervisor, self.timeline, static, cfg.agent.max_concurrency
        )
        self.train_sampling = train_sampling(cfg, seeded)
        self.val_sampling = val_sampling(cfg, seeded)
        self.has_answered = False

    @property
    def replicas(self) -> list[Any]:
        """The current process of each replica."""
        return self.supervisor.replicas

    @property
    def active(self) -> list[int]:
        """The replicas that take part in syncs."""
        return self.supervisor.active

    @property
    def serving(self) -> int:
        """How many replicas there are, without those that are being started or removed."""
        return sum(i not in self.supervisor.leaving for i in self.active)

    @property
    def restarts(self) -> int:
        """How many replicas were restarted."""
        return self.supervisor.restarts

    async def setup(self) -> None:
        """Load all engines. Lent replicas sleep when this returns, so that the trainers can load
        their models."""
        limit_s = start_limit_s(self.cfg, "rollout")
        started = await call_all(limit_s, "rollout", self.replicas, "start")
        for i, (max_sequences, child_processes) in enumerate(started):
            self.supervisor.child_processes[i] = child_processes
            self.router.replica_capacity = min(self.router.replica_capacity, max_sequences)
        lent = [self.replicas[i] for i in self.supervisor.lendable]
        limit_s = self.cfg.trainer.step_timeout_s
        await call_all(limit_s, "lent rollout", lent, "hand_device_back")
        self.has_answered = True

    async def watch(self) -> None:
        """Restart replicas that fail; see `ReplicaSupervisor.watch`."""
        await self.supervisor.watch()

    async def generate(
        self,
        prompts: list[Prompt],
        purpose: str,
        sampling: Sampling,
        on_group: OnGroup | None = None,
        on_begin: Callable[[Prompt], None] | None = None,
    ) -> tuple[list[Sample], float]:
        """Generate and score the samples of these prompts.

        Args:
            purpose: for messages and the timeline, as "step 3" or "evaluation of v2".
            on_group: receives each prompt's samples as soon as they are complete.
            on_begin: receives each prompt when it goes to a replica; with `on_group`.

        Returns:
            All samples, in the order of `prompts`, and the seconds that they took.

        Raises:
            NoReplica: all replicas have failed, and none could be restarted.
            PhaseTimeout: they took longer than `trainer.step_timeout_s`; samples for training than
                that of all steps that a prompt may take.
            Exception: what a replica raised that is still there.
        """
        request = GenerationCall(purpose, sampling, on_group, on_begin)
        steps = 1
        if sampling is self.train_sampling:
            steps = max(1, self.cfg.pipeline.staleness)
        if on_group is not None:
            steps += 1  # they begin while another step trains
        limit_s = steps * self.cfg.trainer.step_timeout_s
        async with self.pool_lock:
            begin = now()
            work = self.router.generate(prompts, request)
            samples = await with_time_limit(limit_s, f"{purpose}, rollout", work)
            seconds = now() - begin
        is_evaluation = sampling is self.val_sampling
        self.events.trace(self.timeline.finish(purpose, is_evaluation))
        return in_batch_order(samples, prompts), seconds

    async def sleep(self) -> None:
        """Free the devices for another role of their pool; the next sync wakes the replicas."""
        await call_all(self.cfg.trainer.step_timeout_s, "rollout", self.replicas, "sleep")

    async def stop(self) -> None:
        """End all engines; one that does not answer is left to be killed."""
        for task in self.supervisor.restart_tasks.values():
            task.cancel()
        answers = [self.replicas[i].stop.remote() for i in self.supervisor.members]
        await with_time_limit(
            STOP_S, "rollout, stop", asyncio.gather(*answers, return_exceptions=True)
        )


def train_sampling(cfg: Config, seeded: bool) -> Sampling:
    """How samples for training are generated: with a greedy response beside them if the estimator
    needs baselines."""
    estimator = ADVANTAGE_ESTIMATORS.find(cfg.algorithm.adv_estimator)
    return Sampling(
        cfg.rollout.n,
        cfg.rollout.temperature,
        cfg.trainer.seed if seeded else None,
        greedy="baselines" in estimator.needs,
    )


def val_sampling(cfg: Config, seeded: bool) -> Sampling:
    """How samples for evaluation are generated: by other seeds than for training, whatever the
    prompts' ids."""
    return Sampling(
        cfg.rollout.val_n,
        cfg.rollout.val_temperature,
        cfg.trainer.seed + 1 if seeded else None,
        cfg.rollout.val_top_p,
        cfg.rollout.val_max_response_length,
    )


DROP_S = 15.0
"""Seconds for a replica to drop its work. A sync whose trainers have died ends by itself meanwhile,
in about a second."""


async def reuse_engines(group: RolloutGroup, former: RolloutGroup, attempt: int) -> None:
    """Let the replicas of `former` serve in `group`, which has the same ones, with their loaded
    engines.

    Each drops what it holds of the attempt that has ended: requests, trajectories, episodes of
    external agents. From then on it refuses prompts and weights of earlier attempts, and it
    generates nothing before it has verified weights of the new one. A replica that does not do so
    in time is replaced, while the others serve.

    Args:
        group: of the new attempt.
        former: of the attempt that has ended.
        attempt: of the new attempt.
    """
    group.router.replica_capacity = former.router.replica_capacity
    group.supervisor.restarts = former.restarts
    for i, processes in enumerate(former.supervisor.child_processes):
        group.supervisor.child_processes[i] = processes
    numbers = group.supervisor.members
    reasons = await asyncio.gather(*(_drop_work(former, i, attempt) for i in numbers))
    for i, reason in zip(numbers, reasons, strict=True):
        if reason:
            group.supervisor.mark_failed(i, reason)
    if group.supervisor.endings:  # the trainers need the memory of lent replicas
        await asyncio.wait(group.supervisor.endings)
    group.has_answered = True
    kept = reasons.count("")
    group.events.log(f"{kept} of {len(reasons)} replicas were kept")


async def _drop_work(former: RolloutGroup, i: int, attempt: int) -> str:
    """Let a replica drop its work; returns why it cannot be kept, "" if it can."""
    if i in former.supervisor.restart_tasks:
        return "it was not running when the attempt ended"
    name = f"rollout {i}, drop_work"
    is_lent = i in former.supervisor.lent
    method = "hand_device_back" if is_lent else "drop_work"
    answer = getattr(former.replicas[i], method).remote(attempt)
    try:
        await with_time_limit(DROP_S, name, name_failures(name, answer))
    except (RoleError, SyncError, PhaseTimeout) as error:
        return str(error)
    return ""
