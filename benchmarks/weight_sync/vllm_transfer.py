"""vLLM's own weight transfer for the benchmark: its NCCL engine, on CPUs with gloo instead of NCCL.

On CPUs three things are replaced: `PyNcclCommunicator` by `GlooCommunicator`, the streams by ones
that do nothing, and two calls of `torch.accelerator`, which fail without an accelerator. Packing,
buffers, order, loading and the three calls are vLLM's.
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

from benchmarks.weight_sync import trainer
from benchmarks.weight_sync.tied_head import repack_tied_head
from one_step_off.distributed_util import DedicatedGroup

TIMEOUT_S = 300.0
STORE_TIMEOUT = timedelta(seconds=60)


class GlooCommunicator:
    """The two methods of `PyNcclCommunicator` that the engines use.

    Attributes:
        seconds: in broadcasts, since the caller set it to 0.
    """

    def __init__(self, host: str, port: int, rank: int, size: int) -> None:
        self.store = dist.TCPStore(
            host, port, is_master=rank == 0, wait_for_workers=False, timeout=STORE_TIMEOUT
        )
        device = torch.device("cpu")
        dedicated = DedicatedGroup(self.store, rank, size, device, host, TIMEOUT_S, TIMEOUT_S)
        self.group = dedicated.group
        self.seconds = 0.0

    def broadcast(self, tensor: torch.Tensor, src: int, stream: Any = None) -> None:
        """Broadcast and wait for the end. NCCL's method only enqueues the broadcast."""
        begin = time.perf_counter()
        self.group.broadcast([tensor], trainer.FROM_RANK_0).wait()
        self.seconds += time.perf_counter() - begin

    def destroy(self) -> None:
        """The group ends with the process."""


class NoStream:
    """A CUDA stream on a machine without CUDA."""

    def synchronize(self) -> None:
        """Nothing is asynchronous."""


@contextlib.contextmanager
def stand_ins(device: torch.device) -> Iterator[None]:
    """vLLM's transfer code without CUDA. On a GPU nothing is replaced."""
    if device.type == "cuda":
        yield
        return
    replacements = [
        (torch.accelerator, "current_device_index", lambda: 0),
        (torch.accelerator, "synchronize", lambda: None),
        (packed_tensor, "_get_streams", lambda device, count: (NoStream(),) * count),
        (
            nccl_common,
            "stateless_init_process_group",
            lambda host, port, rank, size, device: GlooCommunicator(host, port, rank, size),
        ),
    ]
    with contextlib.ExitStack() as stack:
        for owner, name, replacement in replacements:
            stack.enter_context(mock.patch.object(owner, name, replacement))
        yield


class Source(WeightSource):
    """The trainer's tensors, gathered one by one in the rollout's dtype.

    vLLM's `ModuleSource` does the same without the dtype.

    Attributes:
        seconds: in gathering, since the caller set it to 0.
    """

    def __init__(self, worker: Any) -> None:
        self.worker = worker
        self.seconds = 0.0

    def metadata(self) -> list[ParamMeta]:
        """As declared to the engines."""
        return [
            ParamMeta(name, getattr(torch, dtype), tuple(shape))
            for name, dtype, shape in trainer.metadata(self.worker)
        ]

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        begin = time.perf_counter()
        for pair in trainer.gathered(self.worker):
            self.seconds += time.perf_counter() - begin
            yield pair
            begin = time.perf_counter()


def trainer_engine(worker: Any, host: str, port: int, receivers: int, replicas: list[Any]) -> Any:
    """vLLM's trainer engine on one rank, from its own factory with its own Ray client
    (collective).
    """
    info = NCCLTrainerInitInfo(host, port, receivers + 1, rank=worker.rank)
    with stand_ins(worker.device):
        client = RayVLLMWeightSyncClient(replicas)
        return WeightTransferTrainerFactory.trainer_init(info, client=client, source=Source(worker))


def send(worker: Any) -> dict[str, float]:
    """`send_weights`, timed. Returns seconds: "gather" and "send"."""
    engine = worker.bench_vllm
    engine.source.seconds = 0.0
    begin = time.perf_counter()
    with stand_ins(worker.device):
        engine.send_weights()
    seconds = time.perf_counter() - begin
    return {"gather": engine.source.seconds, "send": seconds - engine.source.seconds}


class TimedEngine(NCCLWeightTransferEngine):
    """vLLM's engine in a worker, with its phases timed.

    Attributes:
        report: seconds of each phase of the last update. On GPUs, where broadcasts are only
            enqueued, "wire" is 0 and "load" has both.
    """

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
        communicator: Any = self.model_update_group
        communicator.seconds = 0.0
        with stand_ins(self.device):
            super().update_weights(update_info)
        seconds = time.perf_counter() - begin
        self.report["wire"] = communicator.seconds
        self.report["load"] = seconds - communicator.seconds

    def finish_weight_update(self) -> None:
        """As vLLM's, and a tied lm_head, which vLLM's reload leaves at the old weights on CPUs."""
        begin = time.perf_counter()
        super().finish_weight_update()
        repack_tied_head(self.model, self.model_config)
        self.report["finish"] = time.perf_counter() - begin
