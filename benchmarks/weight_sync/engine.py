"""The engine's side of the weight-sync benchmark's own arms: an extension of vLLM's worker, and of the replica."""

from __future__ import annotations

import os
import time
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from vllm.config import set_current_vllm_config
from vllm.distributed.parallel_state import get_tensor_model_parallel_rank
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.model_executor.model_loader.reload import (
    finalize_layerwise_reload,
    initialize_layerwise_reload,
)

from benchmarks.weight_sync.tied_head import repack_tied_head
from benchmarks.weight_sync.trainer import ROOT, give_back, leave
from benchmarks.weight_sync.vllm_transfer import TimedEngine
from one_step_off.distributed_util import DedicatedGroup
from one_step_off.weight_sync.vllm_receiver import SyncWorkerExtension


class BenchExtension(SyncWorkerExtension):
    """What `collective_rpc` reaches in each worker; phases come back as seconds."""

    def bench_process(self) -> int:
        """Its process id."""
        return os.getpid()

    def bench_engine(self, arm: str, vllms: bool = False) -> None:
        """From now on the arm's own transfer engine stands in its place: another of the product's, or vLLM's."""
        if not hasattr(self, "bench_engines"):
            self.bench_engines: dict[str, Any] = {}
        if arm not in self.bench_engines:
            own = (
                self.vllm_config.weight_transfer_config,
                self.vllm_config,
                self.device,
                self.model_runner.get_model(),
            )
            self.bench_engines[arm] = (
                TimedEngine(*own) if vllms else WeightTransferEngineFactory.create_engine(*own)
            )
        self.weight_transfer_engine = self.bench_engines[arm]

    def bench_forget(self, arm: str) -> None:
        """Free what the arm's engine holds."""
        engine = getattr(self, "bench_engines", {}).pop(arm, None)
        if self.weight_transfer_engine is engine:
            self.weight_transfer_engine = None
        if receiver := getattr(engine, "receiver", None):
            leave(receiver)
        del engine, receiver
        give_back()

    def bench_report(self) -> dict[str, float]:
        """Of the last update by the engine that stands there."""
        return self.weight_transfer_engine.report

    def bench_join(
        self, host: str, port: int, first: int, receivers: int, sizes: list[int], timeout_s: float
    ) -> None:
        """Join the group {trainer rank 0} u engines; `first`: this replica's first receiver."""
        rank = 1 + first + get_tensor_model_parallel_rank()
        self.bench_store = dist.TCPStore(host, port, timeout=timedelta(seconds=timeout_s))
        device = torch.device(self.device)
        self.bench_group = DedicatedGroup(
            self.bench_store, rank, receivers + 1, device, host, timeout_s, timeout_s
        ).group
        self.bench_sizes, self.bench_buffer = (
            sizes,
            torch.ones(max(sizes), dtype=torch.uint8, device=device),
        )

    def bench_broadcast(self, tensor: torch.Tensor) -> None:
        """Receive one; it is there when this returns."""
        self.bench_group.broadcast([tensor], ROOT).wait()
        if tensor.device.type == "cuda":
            torch.cuda.synchronize()

    def bench_raw(self) -> dict[str, float]:
        """The other end of `sync_trainer.raw`."""
        begin = time.perf_counter()
        for size in self.bench_sizes:
            self.bench_broadcast(self.bench_buffer[:size])
        return {"wire": time.perf_counter() - begin}

    def bench_each(self, tensors: list[list[Any]]) -> dict[str, float]:
        """The other end of `sync_trainer.send_each`: (name, dtype, shape) of each tensor to come."""
        model, seconds, mark = self.model_runner.get_model(), {}, time.perf_counter()

        def lap(phase: str) -> None:
            nonlocal mark
            seconds[phase], mark = (
                seconds.get(phase, 0.0) + time.perf_counter() - mark,
                time.perf_counter(),
            )

        with set_current_vllm_config(self.vllm_config):
            initialize_layerwise_reload(model)
            lap("prepare")
            for name, dtype, shape in tensors:
                tensor = torch.empty(shape, dtype=getattr(torch, dtype), device=self.device)
                self.bench_broadcast(tensor)
                lap("wire")
                model.load_weights([(name, tensor)])
                lap("load")
            finalize_layerwise_reload(model, self.vllm_config.model_config)
            repack_tied_head(model, self.vllm_config.model_config)
            lap("finish")
        return seconds

    def bench_reload(self, folder: str) -> dict[str, float]:
        """vLLM's `reload_weights` from a folder; and the tied lm_head, which it leaves."""
        begin = time.perf_counter()
        self.reload_weights(weights_path=folder)
        loaded = time.perf_counter()
        with set_current_vllm_config(self.vllm_config):
            repack_tied_head(self.model_runner.get_model(), self.vllm_config.model_config)
        return {"load": loaded - begin, "finish": time.perf_counter() - loaded}
