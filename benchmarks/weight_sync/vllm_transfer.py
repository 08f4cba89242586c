"""vLLM's own weight transfer for the benchmark: its NCCL engine, on CPUs with gloo in the place of its communicator.

What is replaced on CPUs: `PyNcclCommunicator` by `GlooCommunicator`, the streams by ones that do nothing, and two calls
of `torch.accelerator`, which fail without one. Packing, buffers, order, loading and the three calls are vLLM's.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from datetime import timedelta
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from vllm.distributed.weight_transfer import nccl_common, packed_tensor
from vllm.distributed.weight_transfer.base import ParamMeta, WeightSource
from vllm.distributed.weight_transfer.clients import RayVLLMWeightSyncClient
from vllm.distributed.weight_transfer.factory import WeightTransferTrainerFactory
from vllm.distributed.weight_transfer.nccl_engine import (
    NCCLTrainerInitInfo,
    NCCLWeightTransferEngine,
)

from benchmarks.weight_sync import trainer as sync_trainer
from benchmarks.weight_sync.tied_head import repack_tied_head
from one_step_off.distributed_util import DedicatedGroup

TIMEOUT_S = 300.0


class GlooCommunicator:
    """The two methods that the engines use; `seconds`: in broadcasts, since it was set to 0."""

    def __init__(self, host: str, port: int, rank: int, size: int) -> None:
        self.store = dist.TCPStore(
            host, port, is_master=rank == 0, wait_for_workers=False, timeout=timedelta(seconds=60)
        )
        self.group = DedicatedGroup(
            self.store, rank, size, torch.device("cpu"), host, TIMEOUT_S, TIMEOUT_S
        ).group
        self.seconds = 0.0

    def broadcast(self, tensor: torch.Tensor, src: int, stream: Any = None) -> None:
        """Blocks, where NCCL's would only be enqueued."""
        begin = time.perf_counter()
        self.group.broadcast([tensor], sync_trainer.ROOT).wait()
        self.seconds += time.perf_counter() - begin

    def destroy(self) -> None:
        """The group ends with the process."""


class NoStream:
    """A CUDA stream where there is none."""

    def synchronize(self) -> None:
        """Nothing is asynchronous."""


@contextlib.contextmanager
def stand_ins(device: torch.device) -> Iterator[None]:
    """vLLM's transfer code without CUDA; on a GPU nothing is replaced."""
    if device.type == "cuda":
        yield
        return
    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.object(torch.accelerator, "current_device_index", lambda: 0))
        stack.enter_context(mock.patch.object(torch.accelerator, "synchronize", lambda: None))
        streams = mock.patch.object(
            packed_tensor, "_get_streams", lambda device, n: (NoStream(),) * n
        )
        stack.enter_context(streams)
        gloo = mock.patch.object(
            nccl_common,
            "stateless_init_process_group",
            lambda h, p, rank, size, device: GlooCommunicator(h, p, rank, size),
        )
        stack.enter_context(gloo)
        yield


class Source(WeightSource):
    """The trainer's tensors, gathered one by one in the rollout's dtype, as vLLM's `ModuleSource` does without the
    dtype. `seconds`: in gathering, since it was set to 0."""

    def __init__(self, worker: Any) -> None:
        self.worker, self.seconds = worker, 0.0

    def metadata(self) -> list[ParamMeta]:
        """As declared to the engines."""
        return [
            ParamMeta(n, getattr(torch, d), tuple(s))
            for n, d, s in sync_trainer.metadata(self.worker)
        ]

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        mark = time.perf_counter()
        for pair in sync_trainer.whole(self.worker):
            self.seconds += time.perf_counter() - mark
            yield pair
            mark = time.perf_counter()


def trainer_engine(worker: Any, host: str, port: int, receivers: int, replicas: list[Any]) -> Any:
    """vLLM's trainer engine on one rank, by its own factory and its own Ray client (collective)."""
    info = NCCLTrainerInitInfo(host, port, receivers + 1, rank=worker.rank)
    with stand_ins(worker.device):
        client = RayVLLMWeightSyncClient(replicas)
        return WeightTransferTrainerFactory.trainer_init(info, client=client, source=Source(worker))


def send(worker: Any) -> dict[str, float]:
    """`send_weights`, timed."""
    engine, begin = worker.bench_vllm, time.perf_counter()
    engine.source.seconds = 0.0
    with stand_ins(worker.device):
        engine.send_weights()
    return {
        "gather": engine.source.seconds,
        "send": time.perf_counter() - begin - engine.source.seconds,
    }


class TimedEngine(NCCLWeightTransferEngine):
    """The receiving end, with its phases timed: `report`, seconds. On GPUs, where broadcasts are only enqueued,
    "wire" is 0 and "load" has both."""

    def init_transfer_engine(self, init_info: Any) -> None:
        """As vLLM's."""
        with stand_ins(self.device):
            super().init_transfer_engine(init_info)

    def start_weight_update(self) -> None:
        """As vLLM's."""
        begin = time.perf_counter()
        super().start_weight_update()
        self.report = {"prepare": time.perf_counter() - begin}

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """As vLLM's."""
        begin = time.perf_counter()
        comm: Any = self.model_update_group
        comm.seconds = 0.0
        with stand_ins(self.device):
            super().update_weights(update_info)
        self.report |= {"wire": comm.seconds, "load": time.perf_counter() - begin - comm.seconds}

    def finish_weight_update(self) -> None:
        """As vLLM's; and a tied lm_head, which its reload leaves at the old weights on CPUs."""
        begin = time.perf_counter()
        super().finish_weight_update()
        repack_tied_head(self.model, self.model_config)
        self.report["finish"] = time.perf_counter() - begin
