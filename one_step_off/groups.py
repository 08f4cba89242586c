"""The groups of processes as the pipeline sees them: a few awaitable methods, each with a time limit.

`TrainGroup` is a role with a model on one or more ranks, `RolloutGroup` the vLLM replicas, and `WeightSync`
the bridge between the two. The pipeline is tested with stand-ins that have the same methods.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable
from typing import Any, TypeVar

import numpy as np

from one_step_off.config import Config
from one_step_off.distributed_util import SyncError
from one_step_off.samples import Batch, Prompt, Sample, Stamp
from one_step_off.vllm_rollout import Sampling

T = TypeVar("T")


class PhaseTimeout(RuntimeError):
    """A phase took longer than its limit."""


async def within(limit_s: float, what: str, work: Awaitable[T]) -> T:
    """Await `work`; raises PhaseTimeout naming `what` after `limit_s` seconds."""
    try:
        return await asyncio.wait_for(_await(work), limit_s)
    except TimeoutError as e:
        raise PhaseTimeout(f"{what}: no answer in {limit_s:g} s") from e


async def _await(work: Awaitable[T]) -> T:
    return await work


async def every(limit_s: float, what: str, actors: list[Any], method: str, *args: Any) -> list[Any]:
    """Call a method on all actors at once and await all; the first failure is raised at once."""
    calls = (_await(getattr(a, method).remote(*args)) for a in actors)
    return await within(limit_s, f"{what}, {method}", asyncio.gather(*calls))


class TrainGroup:
    """All ranks of one role. Their methods are collective: every call goes to every rank."""

    def __init__(self, role: str, ranks: list[Any], cfg: Config) -> None:
        self.role, self.ranks, self.cfg = role, ranks, cfg
        self.limit = cfg.trainer.step_timeout_s

    async def setup(self) -> dict[str, Any]:
        """Form the role's process group and load the model on every rank; returns rank 0's facts."""
        limit = self.cfg.trainer.start_timeout_s
        host, port = await within(limit, f"{self.role} rank 0", self.ranks[0].free_address.remote())
        await every(limit, self.role, self.ranks, "rendezvous", host, port)
        return (await every(limit, self.role, self.ranks, "setup"))[0]

    async def update(self, batch: Batch) -> dict[str, float]:
        """One training step on all ranks; returns metrics, among them "time/train_s" (the slowest rank's)."""
        begin = time.perf_counter()
        metrics = await every(self.limit, f"step {batch.step}, {self.role}", self.ranks, "update", _put(batch))
        return metrics[0] | {"time/train_s": time.perf_counter() - begin}

    async def log_prob(self, batch: Batch) -> list[np.ndarray]:
        """Log-probs (nats) of all response tokens at the current weights: one float32 [R] per sample."""
        parts = await every(self.limit, f"step {batch.step}, {self.role}", self.ranks, "log_prob", _put(batch))
        merged = {i: array for part in parts for i, array in part.items()}
        return [merged[i] for i in range(len(batch.samples))]

    async def score(self, sequences: list[np.ndarray]) -> list[np.ndarray]:
        """The trainer's half of the canary: log-probs of every token but the first, at temperature 1."""
        return (await every(self.limit, f"canary, {self.role}", self.ranks, "score", sequences))[0]

    async def save_state(self, folder: str) -> None:
        """Write the role's part of a checkpoint."""
        await every(self.limit, f"checkpoint, {self.role}", self.ranks, "save_state", folder)

    async def load_state(self, folder: str) -> None:
        """Go to a checkpoint's state; after `setup`."""
        await every(self.limit, f"checkpoint, {self.role}", self.ranks, "load_state", folder)

    async def save_hf(self, path: str) -> None:
        """Write a Hugging Face checkpoint."""
        await every(self.limit, self.role, self.ranks, "save_hf", path)


def _put(batch: Batch) -> Any:
    """Into Ray's object store once, however many ranks read it."""
    import ray

    return ray.put(batch)


class RolloutGroup:
    """The vLLM replicas. Prompts go to them in turn, so that a run's routing depends on nothing but its data."""

    def __init__(self, replicas: list[Any], cfg: Config, seeded: bool) -> None:
        self.replicas, self.cfg = replicas, cfg
        self.train = Sampling(cfg.rollout.n, cfg.rollout.temperature, cfg.trainer.seed if seeded else None)
        # Held-out samples draw other seeds than training, whatever their prompts' ids.
        self.val = Sampling(cfg.rollout.val_n, cfg.rollout.val_temperature, cfg.trainer.seed + 1 if seeded else None)

    async def setup(self) -> None:
        """Load all engines."""
        await every(self.cfg.trainer.start_timeout_s, "rollout", self.replicas, "start")

    async def generate(self, prompts: list[Prompt], what: str, sampling: Sampling) -> tuple[list[Sample], float]:
        """All samples in the order of `prompts`, and the seconds of the slowest replica."""
        shares = [prompts[i :: len(self.replicas)] for i in range(len(self.replicas))]
        calls = [_await(r.rollout.remote(s, sampling)) for r, s in zip(self.replicas, shares, strict=True) if s]
        parts = await within(self.cfg.trainer.step_timeout_s, f"{what}, rollout", asyncio.gather(*calls))
        position = {p.id: i for i, p in enumerate(prompts)}
        samples = sorted((s for part, _ in parts for s in part), key=lambda s: (position[s.prompt_id], s.index))
        return samples, max(seconds for _, seconds in parts)

    async def score(self, sequences: list[np.ndarray]) -> list[list[np.ndarray]]:
        """Each replica's half of the canary."""
        return await every(self.cfg.trainer.step_timeout_s, "canary, rollout", self.replicas, "score", sequences)

    async def stop(self) -> None:
        """End all engines; what does not answer is left to be killed."""
        await every(15.0, "rollout", self.replicas, "stop")


class WeightSync:
    """The trainer's weights into every replica: verified by checksum, by name and by canary, or the run stops."""

    def __init__(self, actor: TrainGroup, rollout: RolloutGroup, canary: list[np.ndarray], host: str) -> None:
        self.actor, self.rollout, self.canary, self.host = actor, rollout, canary, host
        self.cfg = actor.cfg.weight_sync
        dtype = actor.cfg.model.dtype
        self.tolerance = self.cfg.canary_tolerance or {"float32": 1e-3, "bfloat16": 1.0}[dtype]

    async def connect(self) -> None:
        """Exchange the metadata and form all groups, once."""
        limit = self.cfg.timeout_s
        plans = await every(limit, "weight sync", self.actor.ranks, "weight_plan")
        senders = [(rank, plan) for rank, plan in zip(self.actor.ranks, plans, strict=True) if plan]
        self.senders, pieces = [rank for rank, _ in senders], [plan for _, plan in senders]
        bucket_bytes = self.cfg.bucket_mb << 20
        addresses = await within(
            limit,
            "weight sync, listen",
            asyncio.gather(
                *(
                    _await(rank.open_sender.remote(pieces, i, bucket_bytes, self.host, limit))
                    for i, rank in enumerate(self.senders)
                )
            ),
        )
        width = self.rollout.cfg.rollout.tensor_parallel_size
        receivers = width * len(self.rollout.replicas)
        info = {
            "pieces": [[[p.name, p.dtype, list(p.shape), p.start, p.stop] for p in plan] for plan in pieces],
            "bucket_bytes": bucket_bytes,
            "addresses": [list(a) for a in addresses],
            "receivers": receivers,
            "host": self.host,
            "timeout_s": limit,
        }
        joins = [rank.connect_sync.remote(receivers) for rank in self.senders]
        joins += [
            r.connect_sync.remote(info | {"first_receiver": i * width}) for i, r in enumerate(self.rollout.replicas)
        ]
        await within(2 * limit, "weight sync, connect", asyncio.gather(*map(_await, joins)))

    async def __call__(self, stamp: Stamp) -> dict[str, float]:
        """Bring every replica to `stamp`. Returns metrics: sync/bytes, sync/gb_per_s, seconds per phase, canary.

        Raises:
            SyncError or PhaseTimeout, naming who, which phase, bucket and version.
        """
        begin = time.perf_counter()
        calls = [_await(rank.send_weights.remote(stamp[1])) for rank in self.senders]
        sends = len(calls)
        calls += [_await(r.sync.remote(stamp)) for r in self.rollout.replicas]
        # Each wait inside has the limit timeout_s; this one is for what hangs outside of those.
        limit = 2 * self.cfg.timeout_s
        reports = await within(limit, f"weight sync of version {stamp[1]}", asyncio.gather(*calls))
        seconds = time.perf_counter() - begin
        sent, received = reports[:sends], reports[sends:]
        metrics = {"time/sync_s": seconds, "sync/bytes": sum(r["bytes"] for r in sent)}
        metrics["sync/gb_per_s"] = metrics["sync/bytes"] / seconds / 1e9
        metrics |= {f"sync/{k}_s": max(r[k] for r in sent) for k in ("pack",)}
        metrics |= {
            f"sync/{k}_s": max(r.get(k, 0.0) for r in received)
            for k in ("pause", "prepare", "wire", "load", "verify", "finish")
        }
        begin = time.perf_counter()
        metrics["canary/logprob_diff_max"] = await self._check_canary(stamp)
        return metrics | {"time/canary_s": time.perf_counter() - begin}

    async def _check_canary(self, stamp: Stamp) -> float:
        trainer, replicas = await asyncio.gather(self.actor.score(self.canary), self.rollout.score(self.canary))
        worst = 0.0
        for i, replica in enumerate(replicas):
            diff = max(float(np.abs(a - b).max()) for a, b in zip(trainer, replica, strict=True))
            if not diff <= self.tolerance:  # NaN fails too
                raise SyncError(
                    f"canary after the sync of version {stamp[1]}: rollout replica {i} and the trainer differ by "
                    f"{diff:.3g} nats on the same tokens, more than weight_sync.canary_tolerance {self.tolerance:g}"
                )
            worst = max(worst, diff)
        return worst
