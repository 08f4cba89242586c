"""The engine's side of the benchmark's own arms: an extension of vLLM's worker."""

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
from benchmarks.weight_sync.trainer import FROM_RANK_0, close_endpoint, return_free_memory
from benchmarks.weight_sync.vllm_transfer import TimedEngine
from one_step_off.distributed_util import DedicatedGroup
from one_step_off.engines.vllm.worker_extension import SyncWorkerExtension


class PhaseTimer:
    """Adds the time since the last call to a phase."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self.begin = time.perf_counter()

    def end_phase(self, phase: str) -> None:
        """Add the seconds since the last phase ended."""
        now = time.perf_counter()
        self.seconds[phase] = self.seconds.get(phase, 0.0) + now - self.begin
        self.begin = now


class BenchmarkExtension(SyncWorkerExtension):
    """What `collective_rpc` calls in each vLLM worker. Phases are returned as seconds.

    The methods and attributes start with `bench_`: vLLM refuses an extension whose names its worker
    has.
    """

    def bench_process_id(self) -> int:
        """The id of the worker's process."""
        return os.getpid()

    def bench_use_engine(self, arm: str, vllms: bool = False) -> None:
        """Install the transfer engine of an arm: another one of the product, or vLLM's
        (`vllms`).
        """
        if not hasattr(self, "bench_engines"):
            self.bench_engines: dict[str, Any] = {}
        if arm not in self.bench_engines:
            create = TimedEngine if vllms else WeightTransferEngineFactory.create_engine
            self.bench_engines[arm] = create(
                self.vllm_config.weight_transfer_config,
                self.vllm_config,
                self.device,
                self.model_runner.get_model(),
            )
        self.weight_transfer_engine = self.bench_engines[arm]

    def bench_forget(self, arm: str) -> None:
        """Free what the arm's engine holds."""
        engine = getattr(self, "bench_engines", {}).pop(arm, None)
        if self.weight_transfer_engine is engine:
            self.weight_transfer_engine = None
        receiver = getattr(engine, "receiver", None)
        if receiver:
            close_endpoint(receiver)
        # The last references, so that the memory is free when it is returned.
        del engine, receiver
        return_free_memory()

    def bench_report(self) -> dict[str, float]:
        """The report of the last update by the installed engine."""
        return self.weight_transfer_engine.report

    def bench_join_group(
        self,
        host: str,
        port: int,
        first_receiver: int,
        receivers: int,
        bucket_bytes: list[int],
        timeout_s: float,
    ) -> None:
        """Join the group of trainer rank 0 and all engines.

        Args:
            host: of the group's store.
            port: of the group's store.
            first_receiver: number of this replica's first worker among those of all replicas.
            receivers: workers of all replicas.
            bucket_bytes: size of each bucket of the raw broadcast.
            timeout_s: for connecting, and for each message.
        """
        rank = 1 + first_receiver + get_tensor_model_parallel_rank()
        device = torch.device(self.device)
        self.bench_store = dist.TCPStore(host, port, timeout=timedelta(seconds=timeout_s))
        dedicated = DedicatedGroup(
            self.bench_store, rank, receivers + 1, device, host, timeout_s, timeout_s
        )
        self.bench_group = dedicated.group
        self.bench_bucket_bytes = bucket_bytes
        self.bench_buffer = torch.ones(max(bucket_bytes), dtype=torch.uint8, device=device)

    def bench_receive(self, tensor: torch.Tensor) -> None:
        """Receive a tensor and wait until it is complete."""
        self.bench_group.broadcast([tensor], FROM_RANK_0).wait()
        if tensor.device.type == "cuda":
            torch.cuda.synchronize()

    def bench_receive_raw(self) -> dict[str, float]:
        """The receiver of `trainer.broadcast_raw`."""
        begin = time.perf_counter()
        for size in self.bench_bucket_bytes:
            self.bench_receive(self.bench_buffer[:size])
        return {"wire": time.perf_counter() - begin}

    def bench_receive_each(self, tensors: list[list[Any]]) -> dict[str, float]:
        """The receiver of `trainer.send_each_tensor`. `tensors`: name, dtype and shape of each."""
        model = self.model_runner.get_model()
        timer = PhaseTimer()
        with set_current_vllm_config(self.vllm_config):
            initialize_layerwise_reload(model)
            timer.end_phase("prepare")
            for name, dtype, shape in tensors:
                tensor = torch.empty(shape, dtype=getattr(torch, dtype), device=self.device)
                self.bench_receive(tensor)
                timer.end_phase("wire")
                model.load_weights([(name, tensor)])
                timer.end_phase("load")
            finalize_layerwise_reload(model, self.vllm_config.model_config)
            repack_tied_head(model, self.vllm_config.model_config)
            timer.end_phase("finish")
        return timer.seconds

    def bench_reload(self, folder: str) -> dict[str, float]:
        """vLLM's `reload_weights` from a folder, and the tied lm_head, which it leaves."""
        timer = PhaseTimer()
        self.reload_weights(weights_path=folder)
        timer.end_phase("load")
        with set_current_vllm_config(self.vllm_config):
            repack_tied_head(self.model_runner.get_model(), self.vllm_config.model_config)
        timer.end_phase("finish")
        return timer.seconds
