"""Weights arrive bit by bit: full syncs and deltas, over a group and over shared memory.

The real `WeightSender` and `WeightReceiver`, in processes of their own. Both make the same weights
from the same seed, so the receiver compares with what the sender must have sent.
"""

import math
import pickle
import time
from typing import Any

import torch
import torch.distributed as dist
from torch.multiprocessing.reductions import reduce_tensor

from one_step_off.config import allocator
from one_step_off.distributed_util import connect_store, open_store
from one_step_off.tools.gpu_check.check import CheckFailed, Context, Figures
from one_step_off.tools.gpu_check.peers import HOST, Failed, all_results, run_peers
from one_step_off.weight_sync.bucket_plan import BucketPlan
from one_step_off.weight_sync.receiver import WeightReceiver
from one_step_off.weight_sync.sender import WeightSender
from one_step_off.weight_sync.weight_piece import WeightPiece

Shapes = dict[str, tuple[int, ...]]
Weights = dict[str, torch.Tensor]

SMALL: Shapes = {"embed": (1031, 64), "norm": (64,), "scalar": (), "up": (256, 64, 2), "end": (5,)}
"""A few hundred KB, in several buckets, one of which holds strips of a tensor."""

BUCKET_BYTES = 64 << 10
LARGE_BUCKET_BYTES = {"cpu": 64 << 20, "cuda": 512 << 20}
"""Two buckets or more of `large`; a run has about as large ones."""

TIMEOUT_S = 60.0
START_S = 60.0
VERSIONS = 4
FULL_EVERY = 3
"""Of the syncs with deltas: full, delta, delta, full."""

MAX_SHARE_OF_FULL = 0.25
"""Of a full sync's bytes: a delta of so few changed words is far smaller."""

CHANGED_SHARE = 0.02
"""Of the words, from version to version: about what an optimizer step changes in bf16."""


def large(context: Context) -> Shapes:
    """About 1 GB in bf16 on GPUs, 10 MB on CPUs."""
    layers = 24 if context.is_cuda else 2
    width = 4096 if context.is_cuda else 1024
    return {f"layer.{i}.weight": (width + 1, width) for i in range(layers)} | SMALL


def pieces(shapes: Shapes) -> list[list[WeightPiece]]:
    """All tensors, whole, of one sender."""
    whole = []
    for name, shape in shapes.items():
        whole.append(WeightPiece(name, "bfloat16", shape, 0, shape[0] if shape else 1))
    return [whole]


def noise_bytes(size: int, seed: int, device: torch.device) -> torch.Tensor:
    """uint8 [size], the same on every device of a kind."""
    words = torch.arange(size // 4, dtype=torch.int64, device=device)
    mixed = (words * 2_654_435_761 + seed * 97_003) ^ (words >> 7)
    return mixed.to(torch.int32).view(torch.uint8)


def versions(shapes: Shapes, count: int, device: torch.device) -> list[Weights]:
    """bf16 weights of versions 0 to count - 1. From one to the next CHANGED_SHARE of the words
    change."""
    # On the CPU: generators of two kinds of device give other numbers.
    generator = torch.Generator().manual_seed(0)
    weights = {}
    for name, shape in shapes.items():
        weights[name] = torch.randn(shape, generator=generator).to(torch.bfloat16)
    made = []
    for version in range(count):
        if version:
            for tensor in weights.values():
                _change(tensor, version, generator)
        made.append({name: tensor.clone().to(device) for name, tensor in weights.items()})
    return made


def _change(tensor: torch.Tensor, version: int, generator: torch.Generator) -> None:
    words = tensor.view(-1).view(torch.int16)
    count = max(1, int(CHANGED_SHARE * words.numel()))
    chosen = torch.randint(words.numel(), (count,), generator=generator)
    words[chosen] ^= version


def new_receiver(
    store: dist.Store, index: int, device: torch.device, shapes: Shapes, timeout_s: float
) -> tuple[WeightReceiver, tuple[str, int]]:
    """A receiver, and the sender's address, which the sender has put into the store."""
    plan = BucketPlan.build(pieces(shapes), _bucket_bytes(shapes, device))
    address = (HOST, int(store.get("address")))
    return WeightReceiver(plan, index, device, HOST, timeout_s), address


def _bucket_bytes(shapes: Shapes, device: torch.device) -> int:
    return BUCKET_BYTES if shapes == SMALL else LARGE_BUCKET_BYTES[device.type]


# ---- the checks ----------------------------------------------------------------------------------


def network(context: Context) -> Figures:
    """Over a dedicated group: gloo on CPUs, NCCL between two GPUs."""
    return _exchange(context, same_device=False)


def shared_memory(context: Context) -> Figures:
    """Between two processes on one device: shared memory on CPUs, CUDA IPC on a GPU."""
    return _exchange(context, same_device=True)


def shared_expandable(context: Context) -> Figures:
    """Does torch share expandable segments between processes here? The program refuses them beside
    CUDA IPC, so this fails only where wrong bytes arrive."""
    store = open_store(HOST, START_S)
    variables = dict.fromkeys(allocator.VARIABLES[:2], f"{allocator.EXPANDABLE}:True")
    jobs = [(_lend, (context.device, store.port)), (_borrow, (context.device, store.port))]
    lender, borrower = run_peers(jobs, context.limit_s - START_S / 4, variables)
    if borrower is True:
        return {"expandable segments": "shared, exactly"}
    if borrower is False:
        raise CheckFailed("expandable segments share wrong bytes")
    failed = lender if isinstance(lender, Failed) else borrower
    return {"expandable segments": f"not shared: {failed.reason}"}


def _lend(device_type: str, port: int) -> None:
    """Share a buffer as `SharedBuffer` does, without its refusal."""
    device = _device(device_type, 0)
    store = connect_store(HOST, port, START_S)
    buffer = noise_bytes(BUCKET_BYTES, 0, device)
    store.set("handle", pickle.dumps(reduce_tensor(buffer)))
    store.get("done")


def _borrow(device_type: str, port: int) -> bool:
    """Whether the lender's bytes are there."""
    device = _device(device_type, 0)
    store = connect_store(HOST, port, START_S)
    try:
        rebuild, arguments = pickle.loads(store.get("handle"))
        return torch.equal(rebuild(*arguments), noise_bytes(BUCKET_BYTES, 0, device))
    finally:
        store.set("done", "")


def _exchange(context: Context, same_device: bool) -> Figures:
    """Full syncs, then syncs with deltas. Raises CheckFailed: a bit differs."""
    figures: Figures = {}
    shapes = large(context)
    for kind, full_every in (("full", 0), ("delta", FULL_EVERY)):
        jobs, _store = _jobs(context, same_device, shapes, full_every)
        results = all_results(
            run_peers(jobs, context.limit_s / 2), [f"sender, {kind}", f"receiver, {kind}"]
        )
        sent, received = results
        if kind == "delta":
            _require_deltas(sent)
        figures[f"{kind}: MB per sync"] = " ".join(
            f"{report['bytes'] / 1e6:.3f}" for report in sent
        )
        figures[f"{kind}: GB/s"] = _rate(kind, received)
    return figures


def _rate(kind: str, received: list[dict[str, float]]) -> float:
    """GB of weights, sent or not, per second of the last sync of this kind: "full" or "delta"."""
    # The last of the syncs with deltas is a full one.
    report = received[FULL_EVERY - 1 if kind == "delta" else -1]
    return report["bytes"] / 1e9 / report["seconds"]


def _require_deltas(sent: list[dict[str, Any]]) -> None:
    """Raises CheckFailed: a sync that must send a delta has sent all weights."""
    full = sent[0]["bytes"]
    for version in range(1, FULL_EVERY):
        report = sent[version]
        if math.isnan(report["changed"]) or not report["bytes"] < full * MAX_SHARE_OF_FULL:
            raise CheckFailed(
                f"version {version} was no delta: {report['bytes']:.0f} bytes, in full {full:.0f}"
            )


def _jobs(
    context: Context, same_device: bool, shapes: Shapes, full_every: int
) -> tuple[list[Any], dist.TCPStore]:
    """The two processes of an exchange, and the store at which they meet."""
    store = open_store(HOST, START_S)
    _KEPT_STORES.append(store)
    common = (context.device, store.port, shapes, same_device, full_every)
    return [(_send, common), (_receive, common)], store


_KEPT_STORES: list[dist.TCPStore] = []
"""A store's server ends with its last reference."""


def _device(device_type: str, index: int) -> torch.device:
    if device_type == "cpu":
        return torch.device("cpu")
    index %= torch.cuda.device_count()  # ranks may share a GPU
    torch.cuda.set_device(index)
    return torch.device("cuda", index)


def _send(
    device_type: str, port: int, shapes: Shapes, same_device: bool, full_every: int
) -> list[dict[str, Any]]:
    device = _device(device_type, 0)
    store = connect_store(HOST, port, START_S)
    plan = BucketPlan.build(pieces(shapes), _bucket_bytes(shapes, device))
    sender = WeightSender(plan, 0, device, HOST, TIMEOUT_S)
    sender.full_every = full_every
    made = versions(shapes, VERSIONS, device)
    store.set("address", str(sender.address[1]))
    sender.connect(1, 1, [0] if same_device else [])
    reports = []
    for version, weights in enumerate(made):
        report = sender.send(list(weights.values()), version)
        reports.append({"bytes": report["bytes"], "changed": report["changed"]})
    store.get("done")  # the receiver maps this process's memory until then
    return reports


def _receive(
    device_type: str, port: int, shapes: Shapes, same_device: bool, full_every: int
) -> list[dict[str, float]]:
    device = _device(device_type, 0 if same_device else 1)
    store = connect_store(HOST, port, START_S)
    receiver, address = new_receiver(store, 0, device, shapes, TIMEOUT_S)
    expected = versions(shapes, VERSIONS, device)
    receiver.connect(1, [address], 1, [[0]] if same_device else ())
    reports = []
    try:
        for version, weights in enumerate(expected):
            received: Weights = {}
            begin = time.perf_counter()
            receiver.receive(_keep_in(received), version)
            seconds = time.perf_counter() - begin
            _compare(received, weights, version)
            reports.append({"bytes": float(receiver.plan.total_bytes), "seconds": seconds})
    finally:
        store.set("done", "")
    return reports


def _keep_in(target: Weights) -> Any:
    """A `load` that keeps copies."""

    def load(tensors: list[tuple[str, torch.Tensor]]) -> None:
        for name, tensor in tensors:
            target[name] = tensor.clone()

    return load


def _compare(received: Weights, sent: Weights, version: int) -> None:
    if received.keys() != sent.keys():
        raise CheckFailed(f"version {version} differs: other tensors arrived than were sent")
    for name, tensor in sent.items():
        same = torch.equal(received[name].view(torch.int16), tensor.view(torch.int16))
        if not same:
            raise CheckFailed(f"version {version} differs: {name} is not what was sent")
