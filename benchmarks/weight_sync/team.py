"""The trainer ranks and engines that all arms share."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import numpy as np

from benchmarks.weight_sync import trainer
from one_step_off.cluster.errors import SyncError
from one_step_off.cluster.remote_calls import call_all
from one_step_off.ray_trainer import RunGroups
from one_step_off.rollout.replica_group import RolloutGroup
from one_step_off.training.trainer_group import WorkerGroup
from one_step_off.weight_sync.bucket_plan import BucketPlan
from one_step_off.weight_sync.coordinator import WeightSync

TIMEOUT_S = 600.0


class Team:
    """The processes of a run.

    Args:
        roles: trainer group, rollout group and weight sync.
        device: "cpu" or "cuda".
        canary: token sequences that engine and trainer score.
        host: where the processes connect to one another.
    """

    actor: WorkerGroup
    rollout: RolloutGroup
    sync: WeightSync

    def __init__(self, roles: RunGroups, device: str, canary: list[np.ndarray], host: str) -> None:
        self.actor = roles.actor
        self.rollout = roles.rollout
        self.sync = roles.sync
        self.device = device
        self.canary = canary
        self.host = host
        self.ranks = self.actor.ranks
        self.replicas = self.rollout.replicas
        self.cfg = self.actor.cfg
        self.bucket_bytes: list[int] = []
        self.total_bytes = 0
        self.receivers = len(self.replicas) * self.cfg.rollout.tensor_parallel_size

    async def join_group(self) -> None:
        """Form the group of trainer rank 0 and all engines, for the arms without a group of their
        own.
        """
        plans = await self.call_rank_methods("weight_plan")
        bucket = self.cfg.weight_sync.bucket_mb << 20
        self.total_bytes = BucketPlan.build([plan for plan in plans if plan], bucket).total_bytes
        full_buckets, rest = divmod(self.total_bytes, bucket)
        self.bucket_bytes = [bucket] * full_buckets
        if rest:
            self.bucket_bytes.append(rest)
        port = await self.run_on_rank_0(trainer.listen, self.host)
        arguments = (self.receivers, self.bucket_bytes, TIMEOUT_S)
        await asyncio.gather(
            self.run_on_rank_0(trainer.join_group, self.host, *arguments),
            self.call_replicas("join_group", self.host, port, *arguments),
        )

    async def call_rank_methods(self, method: str, *args: Any) -> list[Any]:
        """Call a method of every trainer rank."""
        return await call_all(TIMEOUT_S, "trainer rank", self.ranks, method, *args)

    async def run_on_ranks(self, function: Callable[..., Any], *args: Any) -> list[Any]:
        """Call `function(worker, *args)` in every trainer rank."""
        return await self.call_rank_methods("__ray_call__", function, *args)

    async def run_on_rank_0(self, function: Callable[..., Any], *args: Any) -> Any:
        """Call `function(worker, *args)` in trainer rank 0."""
        rank_0 = self.ranks[:1]
        answers = await call_all(TIMEOUT_S, "trainer rank", rank_0, "__ray_call__", function, *args)
        return answers[0]

    async def call_replicas(self, method: str, *args: Any) -> list[Any]:
        """Call a method of every replica."""
        return await call_all(TIMEOUT_S, "rollout", self.replicas, method, *args)

    async def use_arm(self, arm: str, keys: dict[str, Any], vllms: bool = False) -> None:
        """Give every process what it holds for this arm.

        Args:
            arm: its name.
            keys: of weight_sync, which the arm sets.
            vllms: the arm uses vLLM's own transfer engine.
        """
        await self.run_on_ranks(trainer.select_arm, arm, keys)
        await self.call_replicas("use_arm", arm, keys, vllms)

    async def forget_arm(self, arm: str) -> None:
        """Every process frees what it holds for this arm."""
        await asyncio.gather(
            self.run_on_ranks(trainer.forget_arm, arm),
            self.call_replicas("call_workers", "bench_forget", arm),
        )

    async def canary_difference(self, version: int) -> float | None:
        """The largest difference of log-probs of engines and trainer on the canary, in nats.

        None: it is larger than the product's limit, so the engines hold other weights.
        """
        try:
            trainer_scores = await self.sync.score_canary()
            replicas = self.rollout.active
            metrics = await self.sync._check_canary((0, version), trainer_scores, replicas, False)
        except SyncError:
            return None
        return metrics["canary/logprob_diff_max"]
