"""The replica of the weight-sync benchmark: the product's, with more methods to call."""

from __future__ import annotations

import time
from typing import Any

from benchmarks.weight_sync.trainer import set_weight_sync_keys
from one_step_off.data.samples import PolicyVersion
from one_step_off.rollout.replica import RolloutReplica


def slowest(reports: list[dict[str, float]]) -> dict[str, float]:
    """The largest value of each key of the first report."""
    return {key: max(report.get(key, 0.0) for report in reports) for key in reports[0]}


class BenchmarkReplica(RolloutReplica):
    """The product's replica, and the calls of the benchmark's arms.

    The last five methods have the names and arguments that vLLM's `RayVLLMWeightSyncClient` calls.
    """

    engine: Any

    @property
    def first_receiver(self) -> int:
        """The number of its first worker among those of all replicas."""
        return self.index * self.cfg.rollout.tensor_parallel_size

    async def use_arm(self, arm: str, keys: dict[str, Any], vllms: bool) -> None:
        """Install an arm. See `team.Team.use_arm`."""
        set_weight_sync_keys(self.cfg, keys)
        await self.call_workers("bench_use_engine", arm, vllms)

    async def join_group(
        self, host: str, port: int, receivers: int, bucket_bytes: list[int], timeout_s: float
    ) -> None:
        """All workers join the benchmark's own group. See `trainer.join_group`."""
        first = self.first_receiver
        await self.call_workers(
            "bench_join_group", host, port, first, receivers, bucket_bytes, timeout_s
        )

    async def update_by(self, method: str, *args: Any) -> dict[str, float]:
        """Pause, call every worker, resume. Returns seconds per phase, those of the slowest
        worker.
        """
        pause_s = await self._pause()
        reports = await self.call_workers(method, *args)
        await self.engine.llm.resume_generation()
        return {"pause": pause_s} | slowest(reports)

    async def _pause(self) -> float:
        begin = time.perf_counter()
        await self.engine.llm.pause_generation(mode="wait", clear_cache=True)
        return time.perf_counter() - begin

    async def restamp(self, stamp: PolicyVersion) -> None:
        """Give the weights another version without changing them: a sync that costs nothing."""
        await self.engine.llm.update_weight_version(f"{stamp[0]}.{stamp[1]}")
        self.stamp = stamp

    async def report(self) -> dict[str, float]:
        """Seconds per phase of the last update by vLLM's own engine."""
        return {"pause": self.pause_s} | slowest(await self.call_workers("bench_report"))

    async def init_weight_transfer_engine(self, request: Any) -> None:
        """As AsyncLLM's. vLLM's client sends the same request to all replicas, so the rank is
        added.
        """
        request.init_info["rank_offset"] += self.first_receiver
        await self.engine.llm.init_weight_transfer_engine(request)

    async def start_weight_update(self) -> None:
        """As AsyncLLM's, after a pause.

        Without the pause an engine step between the three calls would use half-loaded layers.
        """
        self.pause_s = await self._pause()
        await self.engine.llm.start_weight_update()

    async def update_weights(self, request: Any) -> None:
        """As AsyncLLM's."""
        await self.engine.llm.update_weights(request)

    async def finish_weight_update(self) -> None:
        """As AsyncLLM's, and generation resumes."""
        await self.engine.llm.finish_weight_update()
        await self.engine.llm.resume_generation()

    async def update_weight_version(self, version: str) -> None:
        """As AsyncLLM's."""
        await self.engine.llm.update_weight_version(version)
