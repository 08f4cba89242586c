"""The trainer's side of the weight-sync benchmark's own arms: functions that Ray calls on the product's worker processes.

They know FSDP2 alone. `worker` is a rank of the actor, after its `setup`.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import gc
import os
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import save_file

from one_step_off.distributed_util import DedicatedGroup

ROOT = dist.BroadcastOptions()
ROOT.rootRank = 0


def process(worker: Any) -> int:
    """Its process id."""
    return os.getpid()


def metadata(worker: Any) -> list[tuple[str, str, list[int]]]:
    """Name, dtype on the wire and shape of every tensor, in the order of `whole` (no collective)."""
    return [
        (name, worker.cfg.model.dtype, list(p.shape)) for name, p in worker.model.named_parameters()
    ]


@torch.no_grad()
def whole(worker: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """Every tensor in the rollout's dtype, gathered one after the other (collective; all ranks get it)."""
    for name, parameter in worker.model.named_parameters():
        yield name, parameter.full_tensor().to(getattr(torch, worker.cfg.model.dtype))


def _rows(worker: Any) -> Iterator[torch.Tensor]:
    """This rank's part of each parameter, flat."""
    for parameter in worker.model.parameters():
        yield (parameter.to_local() if hasattr(parameter, "to_local") else parameter).view(-1)


@torch.no_grad()
def flip(worker: Any, every: int, version: int) -> None:
    """Make weights `version`: the sign of one in `every` elements changes, which the canary sees."""
    for local in _rows(worker):
        local[version % every :: every].neg_()
    worker.version = version


@torch.no_grad()
def nudge(worker: Any, share: float, version: int) -> None:
    """Make weights `version`: a `share` of the elements, anywhere, moves to a neighbouring bf16 value or the one after
    it, as an optimiser step at a learning rate of RL does; too little for the canary."""
    random = torch.Generator().manual_seed(1000 * version + worker.rank)
    factor = 1 + 2**-7 if version % 2 else 1 - 2**-7
    for local in _rows(worker):
        if count := round(share * len(local)):
            at = torch.randint(len(local), (count,), generator=random).to(local.device)
            local[at] = local[at] * factor
    worker.version = version


def select(worker: Any, arm: str, keys: dict[str, Any]) -> None:
    """Give the worker what `connect_sync` left in it for this arm, and the keys of weight_sync that the arm has."""
    state = vars(worker)
    kept = state.setdefault("bench_arms", {"": {k: v for k, v in state.items() if k != "version"}})
    plain, last = kept[""], state.get("bench_arm")
    if last:
        mine = ("version", "bench_arms", "bench_arm")
        kept[last] = {k: v for k, v in state.items() if k not in mine and v is not plain.get(k)}
    for name in kept.get(last, {}):
        del state[name]
    state.update(plain | kept.get(arm, {}) | {"bench_arm": arm})
    configure(worker.cfg, keys)


def forget(worker: Any, arm: str) -> None:
    """Free what the worker holds for this arm alone."""
    if hasattr(worker, "bench_arms"):
        select(worker, "", {})
        left = worker.bench_arms.pop(arm, {})
        if sender := left.get("sender"):
            leave(sender)
    give_back()


def leave(end: Any) -> None:
    """Close one end of the product's stream, and end its thread."""
    end.close()
    end.wire.stop()


def give_back() -> None:
    """Return what is free to the system."""
    gc.collect()
    with contextlib.suppress(AttributeError, OSError):  # another C library has no such call
        ctypes.CDLL("libc.so.6").malloc_trim(0)


def configure(cfg: Any, keys: dict[str, Any]) -> None:
    """Set these keys of weight_sync, and those of an earlier call back."""
    cfg.bench_plain = getattr(cfg, "bench_plain", cfg.weight_sync)
    cfg.weight_sync = dataclasses.replace(cfg.bench_plain, **keys)


def listen(worker: Any, host: str) -> int:
    """Open the store of the arms' own group (rank 0). Returns its port."""
    worker.bench_store = dist.TCPStore(host, 0, is_master=True, wait_for_workers=False)
    return worker.bench_store.port


def join(worker: Any, host: str, receivers: int, sizes: list[int], timeout_s: float) -> None:
    """Form the group {rank 0} u engines, and touch the buffer of the raw broadcast (rank 0)."""
    link = DedicatedGroup(
        worker.bench_store, 0, receivers + 1, worker.device, host, timeout_s, timeout_s
    )
    worker.bench_group = link.group
    worker.bench_sizes = sizes
    worker.bench_buffer = torch.ones(max(sizes), dtype=torch.uint8, device=worker.device)


def _settle(worker: Any) -> None:
    if worker.device.type == "cuda":
        torch.cuda.synchronize()


def raw(worker: Any) -> float:
    """Seconds for all buckets, one after the other, of one touched buffer (rank 0)."""
    begin = time.perf_counter()
    for size in worker.bench_sizes:
        worker.bench_group.broadcast([worker.bench_buffer[:size]], ROOT).wait()
    _settle(worker)
    return time.perf_counter() - begin


def send_each(worker: Any) -> dict[str, float]:
    """Gather and broadcast one tensor after the other (collective; rank 0 sends). Returns seconds: gather, send."""
    gather = send = 0.0
    mark = time.perf_counter()
    for _, tensor in whole(worker):
        gather, mark = gather + time.perf_counter() - mark, time.perf_counter()
        if worker.rank == 0:
            worker.bench_group.broadcast([tensor.contiguous()], ROOT).wait()
            _settle(worker)
        send, mark = send + time.perf_counter() - mark, time.perf_counter()
    return {"gather": gather, "send": send}


def write_file(worker: Any, folder: str) -> dict[str, float]:
    """Gather everything and write it as safetensors (collective; rank 0 writes). Returns seconds: gather, write."""
    begin = time.perf_counter()
    tensors = {name: tensor.cpu() for name, tensor in whole(worker) if worker.rank == 0}
    gathered = time.perf_counter()
    if worker.rank == 0:
        path = Path(folder, "model.safetensors")
        with contextlib.suppress(FileNotFoundError):
            path.unlink()  # the engine may have the old one mapped
        save_file(tensors, path)
    return {"gather": gathered - begin, "write": time.perf_counter() - gathered}


def address(worker: Any, host: str) -> int:
    """A free port of this process's node."""
    store = dist.TCPStore(
        host, 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=5)
    )
    return store.port
