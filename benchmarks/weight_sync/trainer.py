"""The trainer's side of the benchmark's own arms: functions that Ray calls on the product's
workers.

They support FSDP2 only. `worker` is a rank of the actor, after its `setup`.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import gc
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import save_file

from one_step_off.distributed_util import DedicatedGroup

FROM_RANK_0 = dist.BroadcastOptions()
FROM_RANK_0.rootRank = 0

SHARED_ATTRIBUTES = ("version", "bench_arms")
"""Attributes of a worker that all arms share: its weight version, and what follows here."""


@dataclass
class ArmAttributes:
    """Which attributes each arm has set on a worker.

    Attributes:
        common: the attributes before any arm ran.
        of_arm: arm -> those that it set, while another arm is selected.
        selected: the arm whose attributes the worker has now; empty: none.
    """

    common: dict[str, Any]
    of_arm: dict[str, dict[str, Any]] = field(default_factory=dict)
    selected: str = ""


def process_id(worker: Any) -> int:
    """The id of the worker's process."""
    return os.getpid()


def metadata(worker: Any) -> list[tuple[str, str, list[int]]]:
    """Name, sent dtype and shape of every tensor, in the order of `gathered` (no collective)."""
    dtype = worker.cfg.model.dtype
    return [(name, dtype, list(p.shape)) for name, p in worker.model.named_parameters()]


@torch.no_grad()
def gathered(worker: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """Name and whole tensor in the rollout's dtype, one after the other (collective)."""
    dtype = getattr(torch, worker.cfg.model.dtype)
    for name, parameter in worker.model.named_parameters():
        yield name, parameter.full_tensor().to(dtype)


def _local_parameters(worker: Any) -> Iterator[torch.Tensor]:
    """This rank's part of each parameter, flat."""
    for parameter in worker.model.parameters():
        local = parameter.to_local() if hasattr(parameter, "to_local") else parameter
        yield local.view(-1)


@torch.no_grad()
def flip_signs(worker: Any, every: int, version: int) -> None:
    """Make weights `version`: one in `every` elements changes its sign, which the canary
    detects.
    """
    for local in _local_parameters(worker):
        local[version % every :: every].neg_()
    worker.version = version


@torch.no_grad()
def nudge(worker: Any, share: float, version: int) -> None:
    """Make weights `version`, as an optimizer step at a learning rate of RL does.

    A `share` of the elements, at random positions, moves by one or two bf16 values. That is too
    little for the canary to detect.
    """
    random = torch.Generator().manual_seed(1000 * version + worker.rank)
    factor = 1 + 2**-7 if version % 2 else 1 - 2**-7
    for local in _local_parameters(worker):
        count = round(share * len(local))
        if count:
            positions = torch.randint(len(local), (count,), generator=random).to(local.device)
            local[positions] = local[positions] * factor
    worker.version = version


def _put_away(worker: Any, attributes: ArmAttributes) -> None:
    """Take from the worker what the selected arm has set, and keep it for later."""
    if not attributes.selected:
        return
    state = vars(worker)
    own = {
        name: value
        for name, value in state.items()
        if name not in SHARED_ATTRIBUTES and value is not attributes.common.get(name)
    }
    for name in own:
        del state[name]
    attributes.of_arm[attributes.selected] = own


def select_arm(worker: Any, arm: str, keys: dict[str, Any]) -> None:
    """Give the worker the attributes that `connect_sync` set on it for this arm.

    Args:
        worker: a rank of the actor.
        arm: its name; empty: no arm.
        keys: of weight_sync, which the arm sets.
    """
    state = vars(worker)
    if not hasattr(worker, "bench_arms"):
        common = {name: value for name, value in state.items() if name != "version"}
        worker.bench_arms = ArmAttributes(common)
    attributes: ArmAttributes = worker.bench_arms
    _put_away(worker, attributes)
    state.update(attributes.common)
    state.update(attributes.of_arm.get(arm, {}))
    attributes.selected = arm
    set_weight_sync_keys(worker.cfg, keys)


def forget_arm(worker: Any, arm: str) -> None:
    """Free what the worker holds for this arm alone."""
    if hasattr(worker, "bench_arms"):
        select_arm(worker, "", {})
        own = worker.bench_arms.of_arm.pop(arm, {})
        sender = own.get("sender")
        if sender:
            close_endpoint(sender)
    return_free_memory()


def close_endpoint(endpoint: Any) -> None:
    """Close a weight sender or receiver of the product, and end its thread."""
    endpoint.close()
    endpoint.wire_thread.stop()


def return_free_memory() -> None:
    """Return free memory to the system."""
    gc.collect()
    # Another C library than glibc has no such call.
    with contextlib.suppress(AttributeError, OSError):
        ctypes.CDLL("libc.so.6").malloc_trim(0)


def set_weight_sync_keys(cfg: Any, keys: dict[str, Any]) -> None:
    """Set these keys of weight_sync, and all others as they were before the first call."""
    if not hasattr(cfg, "bench_weight_sync"):
        cfg.bench_weight_sync = cfg.weight_sync
    cfg.weight_sync = dataclasses.replace(cfg.bench_weight_sync, **keys)


def listen(worker: Any, host: str) -> int:
    """Open the store of the benchmark's own group (rank 0). Returns its port."""
    worker.bench_store = dist.TCPStore(host, 0, is_master=True, wait_for_workers=False)
    return worker.bench_store.port


def join_group(
    worker: Any, host: str, receivers: int, bucket_bytes: list[int], timeout_s: float
) -> None:
    """Form the group of rank 0 and all engines, and touch the buffer of the raw broadcast (rank 0).

    Args:
        worker: rank 0 of the actor.
        host: where the store listens.
        receivers: vLLM workers of all replicas.
        bucket_bytes: size of each bucket of the raw broadcast.
        timeout_s: for connecting, and for each message.
    """
    dedicated = DedicatedGroup(
        worker.bench_store, 0, receivers + 1, worker.device, host, timeout_s, timeout_s
    )
    worker.bench_group = dedicated.group
    worker.bench_bucket_bytes = bucket_bytes
    worker.bench_buffer = torch.ones(max(bucket_bytes), dtype=torch.uint8, device=worker.device)


def _wait_for_device(worker: Any) -> None:
    if worker.device.type == "cuda":
        torch.cuda.synchronize()


def broadcast_raw(worker: Any) -> float:
    """Broadcast one touched buffer for every bucket (rank 0). Returns seconds."""
    begin = time.perf_counter()
    for size in worker.bench_bucket_bytes:
        worker.bench_group.broadcast([worker.bench_buffer[:size]], FROM_RANK_0).wait()
    _wait_for_device(worker)
    return time.perf_counter() - begin


def send_each_tensor(worker: Any) -> dict[str, float]:
    """Gather and broadcast one tensor after the other (collective; rank 0 sends).

    Returns:
        Seconds: "gather" and "send".
    """
    gather_s = 0.0
    send_s = 0.0
    begin = time.perf_counter()
    for _, tensor in gathered(worker):
        gather_end = time.perf_counter()
        gather_s += gather_end - begin
        if worker.rank == 0:
            worker.bench_group.broadcast([tensor.contiguous()], FROM_RANK_0).wait()
            _wait_for_device(worker)
        begin = time.perf_counter()
        send_s += begin - gather_end
    return {"gather": gather_s, "send": send_s}


def write_file(worker: Any, folder: str) -> dict[str, float]:
    """Gather everything and write it as safetensors (collective; rank 0 writes).

    Returns:
        Seconds: "gather" and "write".
    """
    begin = time.perf_counter()
    tensors = {}
    for name, tensor in gathered(worker):
        if worker.rank == 0:
            tensors[name] = tensor.cpu()
    gather_end = time.perf_counter()
    if worker.rank == 0:
        path = Path(folder, "model.safetensors")
        # Not overwritten: the engine may have the old file mapped.
        path.unlink(missing_ok=True)
        save_file(tensors, path)
    return {"gather": gather_end - begin, "write": time.perf_counter() - gather_end}


def free_port(worker: Any, host: str) -> int:
    """A free port of this process's node."""
    timeout = timedelta(seconds=5)
    store = dist.TCPStore(host, 0, is_master=True, wait_for_workers=False, timeout=timeout)
    return store.port
