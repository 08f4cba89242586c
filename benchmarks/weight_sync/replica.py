"""The replica of the weight-sync benchmark: the product's, with more to call."""

from __future__ import annotations

import time
from typing import Any

from benchmarks.weight_sync.trainer import configure
from one_step_off.data.samples import Stamp
from one_step_off.rollout.vllm_replica import RolloutReplica


class BenchReplica(RolloutReplica):
    """The last five methods have the names and arguments that vLLM's `RayVLLMWeightSyncClient` calls."""

    @property
    def first_receiver(self) -> int:
        """The number of its first worker among those of all replicas."""
        return self.index * self.cfg.rollout.tensor_parallel_size

    async def use(self, arm: str, keys: dict[str, Any], vllms: bool) -> None:
        """As `sync_arms.Team.use`."""
        configure(self.cfg, keys)
        await self.rpc("bench_engine", arm, vllms)

    async def rpc(self, method: str, *args: Any) -> list[Any]:
        """Every worker's answer."""
        return await self.engine.collective_rpc(method, args=args)

    async def join(
        self, host: str, port: int, receivers: int, sizes: list[int], timeout_s: float
    ) -> None:
        """All workers join the benchmark's own group."""
        await self.rpc("bench_join", host, port, self.first_receiver, receivers, sizes, timeout_s)

    async def updated(self, method: str, *args: Any) -> dict[str, float]:
        """Pause, call every worker, resume. Returns seconds per phase, the slowest worker's."""
        pause = await self._pause()
        reports = await self.rpc(method, *args)
        await self.engine.resume_generation()
        return {"pause": pause} | slowest(reports)

    async def _pause(self) -> float:
        begin = time.perf_counter()
        await self.engine.pause_generation(mode="wait", clear_cache=True)
        return time.perf_counter() - begin

    async def restamp(self, stamp: Stamp) -> None:
        """Say that the weights are of another version, without any: the stand-in for a sync that costs nothing."""
        await self.engine.update_weight_version(f"{stamp[0]}.{stamp[1]}")
        self.stamp = stamp

    async def report(self) -> dict[str, float]:
        """Of the last update by vLLM's own engine."""
        return {"pause": self.pause_s} | slowest(await self.rpc("bench_report"))

    async def init_weight_transfer_engine(self, request: Any) -> None:
        """The stock client sends the same to all replicas; their ranks follow one another."""
        request.init_info["rank_offset"] += self.first_receiver
        await self.engine.init_weight_transfer_engine(request)

    async def start_weight_update(self) -> None:
        """Generation must pause for it: an engine step amid the three calls would meet half-loaded layers."""
        self.pause_s = await self._pause()
        await self.engine.start_weight_update()

    async def update_weights(self, request: Any) -> None:
        """As AsyncLLM's."""
        await self.engine.update_weights(request)

    async def finish_weight_update(self) -> None:
        """As AsyncLLM's, and generation goes on."""
        await self.engine.finish_weight_update()
        await self.engine.resume_generation()

    async def update_weight_version(self, version: str) -> None:
        """As AsyncLLM's."""
        await self.engine.update_weight_version(version)


def slowest(reports: list[dict[str, float]]) -> dict[str, float]:
    """The largest value of each key."""
    return {key: max(report.get(key, 0.0) for report in reports) for key in reports[0]}
