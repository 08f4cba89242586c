"""The weight stream: dedicated process groups, the bucket plan, packing, sending, receiving, checksums.

Trainer ranks send the rows they own; every vLLM worker receives all of them and assembles whole tensors:

    plan = BucketPlan.build(pieces_of_each_sender, bucket_bytes)         once, the same object on both sides
    sender:    Sender(plan, rank, device).listen() -> address;  .connect(n_receivers);  .send(tensors, version)
    receiver:  Receiver(plan, index, device).connect(addresses, n_receivers);           .receive(load, version)

There is one group per sender, {sender} u receivers, on a store of its own. No process's default group is
touched, no two trainer ranks share a group here, and a send calls no collective of the trainer's: so the
order of FSDP's collectives cannot interleave with it. All receivers walk buckets, and within a bucket the
senders, in the order of the plan; each sender walks its own buckets in that order too.
"""

from __future__ import annotations

import hashlib
import math
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta

import torch
import torch.distributed as dist

from one_step_off.workers import WeightPiece

_ALIGN = 16  # bytes; every dtype's view into a bucket is aligned
_LANES = 1024  # int64 words per checksum row


class SyncError(RuntimeError):
    """A weight sync that is not complete and exact. The replica that received it must not be used again."""


def dtype_of(name: str) -> torch.dtype:
    """The torch dtype called `name`, as "bfloat16"."""
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise SyncError(f"weight plan: unknown dtype {name!r}")
    return dtype


@dataclass(frozen=True)
class Slot:
    """Where one piece lies in its sender's part of a bucket: bytes [offset, offset + nbytes)."""

    piece: WeightPiece
    offset: int
    nbytes: int


@dataclass(frozen=True)
class Bucket:
    """Whole tensors that travel together. `slots[s]` are the pieces of sender s, `nbytes[s]` its padded size."""

    names: tuple[str, ...]
    slots: tuple[tuple[Slot, ...], ...]
    nbytes: tuple[int, ...]


@dataclass(frozen=True)
class BucketPlan:
    """Which bytes travel in which bucket. Built once; `digest` tells whether two sides hold the same plan."""

    buckets: tuple[Bucket, ...]
    senders: int
    digest: int = field(compare=False)

    @staticmethod
    def build(pieces: list[list[WeightPiece]], bucket_bytes: int) -> BucketPlan:
        """Fill buckets with whole tensors, in the senders' order, up to `bucket_bytes` each.

        A tensor larger than that gets a bucket of its own.

        Args:
            pieces: per sender its pieces, in the order in which it will yield their data.
            bucket_bytes: aim for the size of a bucket, all senders' parts together.

        Raises:
            SyncError: the pieces do not cover every tensor exactly once, or disagree about shape or dtype.
        """
        whole = _check_cover(pieces)
        buckets: list[list[str]] = []
        filled = math.inf
        for name, (dtype, shape) in whole.items():
            size = math.prod(shape) * dtype_of(dtype).itemsize
            if filled + size > bucket_bytes:
                buckets.append([])
                filled = 0
            buckets[-1].append(name)
            filled += size
        built = tuple(_lay_out(names, pieces) for names in buckets)
        text = repr([(b.names, b.slots) for b in built])
        digest = int.from_bytes(hashlib.blake2b(text.encode(), digest_size=7).digest(), "big")
        return BucketPlan(built, len(pieces), digest)

    @property
    def total_bytes(self) -> int:
        """Bytes on the wire per sync and receiver."""
        return sum(sum(b.nbytes) for b in self.buckets)

    def names(self) -> list[str]:
        """All tensors, in the order in which they travel."""
        return [n for b in self.buckets for n in b.names]


def _check_cover(pieces: list[list[WeightPiece]]) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Name -> (dtype, shape) in order of travel, after checking that rows are covered once each."""
    by_name: dict[str, list[WeightPiece]] = {}
    for sent in pieces:
        for p in sent:
            by_name.setdefault(p.name, []).append(p)
    for name, parts in by_name.items():
        first = parts[0]
        if any((p.dtype, p.shape) != (first.dtype, first.shape) for p in parts):
            raise SyncError(f"weight plan: the senders disagree about dtype or shape of {name}")
        at = 0
        for p in sorted(parts, key=lambda p: p.start):
            if p.start != at or p.stop <= p.start:
                raise SyncError(f"weight plan: rows of {name} around {at} are missing or sent twice")
            at = p.stop
        rows = first.shape[0] if first.shape else 1
        if at != rows:
            raise SyncError(f"weight plan: {name} has {rows} rows, but only {at} are sent")
    return {name: (parts[0].dtype, parts[0].shape) for name, parts in by_name.items()}


def _lay_out(names: list[str], pieces: list[list[WeightPiece]]) -> Bucket:
    wanted = set(names)
    slots, sizes = [], []
    for sent in pieces:
        mine, offset = [], 0
        for p in sent:
            if p.name in wanted:
                nbytes = (p.stop - p.start) * math.prod(p.shape[1:]) * dtype_of(p.dtype).itemsize
                mine.append(Slot(p, offset, nbytes))
                offset += -(-nbytes // _ALIGN) * _ALIGN
        slots.append(tuple(mine))
        sizes.append(offset)
    return Bucket(tuple(names), tuple(slots), tuple(sizes))


def checksum(flat: torch.Tensor) -> torch.Tensor:
    """Two int64 words over the bytes of a bucket; they change with any word's value, row or lane.

    Args:
        flat: uint8 [n] on any device, n a multiple of 16.

    Returns:
        int64 [2] on the same device: sums weighted by odd numbers along rows and along lanes, mod 2^64.
        No temporary as large as the bucket is made.
    """
    words = flat.view(torch.int64)
    whole = len(words) // _LANES * _LANES
    out = torch.zeros(2, dtype=torch.int64, device=flat.device)
    for block in (words[:whole].view(-1, _LANES), words[whole:].view(1, -1)):
        if block.numel():
            for i, sums in enumerate((block.sum(0), block.sum(1))):
                odd = torch.arange(1, 2 * len(sums), 2, dtype=torch.int64, device=flat.device)
                out[i] = out[i] * 31 + (sums * odd).sum()
    return out


def make_group(
    store: dist.Store, name: str, rank: int, size: int, device: torch.device, host: str, timeout_s: float
) -> dist.ProcessGroup:
    """A process group on a store of its own: NCCL for CUDA, gloo for CPU. Blocks until all `size` ranks are there."""
    scoped = dist.PrefixStore(name, store)
    if device.type == "cuda":
        options = dist.ProcessGroupNCCL.Options()
        # Our own limit (`_wait`) comes first: NCCL's watchdog would take the whole process down without a word.
        options._timeout = timedelta(seconds=10 * timeout_s + 600)
        group = dist.ProcessGroupNCCL(scoped, rank, size, options)
    else:
        options = dist.ProcessGroupGloo._Options()
        options._devices = [dist.ProcessGroupGloo.create_device(hostname=host)]
        options._timeout = timedelta(seconds=timeout_s)
        group = dist.ProcessGroupGloo(scoped, rank, size, options)
    # NCCL connects at the first transfer; it belongs to this phase and not to the first sync.
    _wait(_broadcast(group, torch.zeros(1, device=device)), device, timeout_s)
    return group


class _Stopwatch:
    """Seconds per phase of one sync, and the phase and bucket that a failure happened in."""

    def __init__(self, who: str, buckets: int) -> None:
        self.who, self.buckets = who, buckets
        self.reset()

    def reset(self) -> None:
        self.seconds: dict[str, float] = {}
        self.bucket = -1

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        start = time.perf_counter()
        try:
            yield
        except SyncError:
            raise
        except Exception as e:
            cause = str(e).strip().splitlines()[0] if str(e).strip() else type(e).__name__
            raise SyncError(f"{self.who}, phase {name}, bucket {self.bucket + 1} of {self.buckets}: {cause}") from e
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - start


def _broadcast(group: dist.ProcessGroup, tensor: torch.Tensor) -> dist.Work:
    options = dist.BroadcastOptions()
    options.rootRank = 0
    options.rootTensor = 0
    return group.broadcast([tensor], options)


def _wait(work: dist.Work, device: torch.device, timeout_s: float) -> None:
    """Wait on the host until a broadcast has ended. gloo keeps the limit itself; NCCL's `wait` only orders streams.

    Raises:
        RuntimeError: not within `timeout_s`, or the transport failed.
    """
    if device.type == "cuda":
        deadline = time.monotonic() + timeout_s
        while not work.is_completed():
            if time.monotonic() > deadline:
                raise RuntimeError(f"no answer in {timeout_s:g} s")
            time.sleep(1e-4)
    work.wait()


class Sender:
    """The sending end on one trainer rank. Sender s is rank 0 of group s; receivers are ranks 1..R."""

    def __init__(self, plan: BucketPlan, index: int, device: torch.device, host: str, timeout_s: float) -> None:
        self.plan, self.index, self.device, self.host, self.timeout_s = plan, index, device, host, timeout_s
        self.watch = _Stopwatch(f"sender {index}", len(plan.buckets))
        self.group: dist.ProcessGroup | None = None
        self.store: dist.TCPStore | None = None
        largest = max((b.nbytes[index] for b in plan.buckets), default=0)
        # Two buffers: the next bucket is packed while one is on the wire. Zeros, so that the pages are touched now.
        self.buffers = [torch.zeros(largest, dtype=torch.uint8, device=device) for _ in range(2)]
        self.sums = torch.zeros(len(plan.buckets), 2, dtype=torch.int64, device=device)

    def listen(self) -> tuple[str, int]:
        """Open this sender's store; returns its (host, port)."""
        self.store = dist.TCPStore(
            self.host, 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=self.timeout_s)
        )
        return self.host, self.store.port

    def connect(self, receivers: int) -> None:
        """Form the group with `receivers` vLLM workers. They must call `Receiver.connect` meanwhile."""
        with self.watch.phase("connect"):
            self.group = make_group(
                self.store, f"sync{self.index}", 0, receivers + 1, self.device, self.host, self.timeout_s
            )

    def send(self, tensors: Iterable[torch.Tensor], version: int) -> dict[str, float]:
        """Send this rank's pieces, in the order of its plan, as weight version `version`.

        Returns:
            Seconds per phase (pack, wire) and "bytes".

        Raises:
            SyncError: names this sender, the phase and the bucket.
        """
        watch, data = self.watch, iter(tensors)
        watch.reset()
        pending: dist.Work | None = None
        sent = 0  # counted, since a bucket may hold nothing of this sender: the two buffers must alternate
        with watch.phase("header"):
            header = torch.tensor([self.plan.digest, version], dtype=torch.int64, device=self.device)
            _wait(_broadcast(self.group, header), self.device, self.timeout_s)
        for watch.bucket, bucket in enumerate(self.plan.buckets):
            size = bucket.nbytes[self.index]
            if not size:
                continue
            flat = self.buffers[sent % 2][:size]
            sent += 1
            with watch.phase("pack"):
                self._pack(flat, bucket.slots[self.index], data)
                self.sums[watch.bucket] = checksum(flat)
            with watch.phase("wire"):
                if pending is not None:
                    _wait(pending, self.device, self.timeout_s)
                pending = _broadcast(self.group, flat)
        with watch.phase("wire"):
            if pending is not None:
                _wait(pending, self.device, self.timeout_s)
            _wait(_broadcast(self.group, self.sums), self.device, self.timeout_s)
        return {**watch.seconds, "bytes": float(sum(b.nbytes[self.index] for b in self.plan.buckets))}

    def _pack(self, flat: torch.Tensor, slots: tuple[Slot, ...], data: Iterator[torch.Tensor]) -> None:
        for slot in slots:
            tensor = next(data)
            piece = slot.piece
            shape = (piece.stop - piece.start, *piece.shape[1:]) if piece.shape else ()
            if tuple(tensor.shape) != shape or tensor.dtype != dtype_of(piece.dtype):
                raise SyncError(
                    f"sender {self.index}: {piece.name} is {tuple(tensor.shape)} {tensor.dtype}, planned {shape} {piece.dtype}"
                )
            view = flat[slot.offset : slot.offset + slot.nbytes].view(tensor.dtype)
            view.view(shape).copy_(tensor, non_blocking=True)


class Receiver:
    """The receiving end in one vLLM worker."""

    def __init__(self, plan: BucketPlan, index: int, device: torch.device, host: str, timeout_s: float) -> None:
        self.plan, self.index, self.device, self.host, self.timeout_s = plan, index, device, host, timeout_s
        self.watch = _Stopwatch(f"receiver {index}", len(plan.buckets))
        self.groups: list[dist.ProcessGroup] = []
        self.buffers = [
            torch.zeros(max((b.nbytes[s] for b in plan.buckets), default=0), dtype=torch.uint8, device=device)
            for s in range(plan.senders)
        ]

    def connect(self, addresses: list[tuple[str, int]], receivers: int) -> None:
        """Join every sender's group, in the order of the plan."""
        for s, (host, port) in enumerate(addresses):
            with self.watch.phase("connect"):
                store = dist.TCPStore(host, port, is_master=False, timeout=timedelta(seconds=self.timeout_s))
                self.groups.append(
                    make_group(store, f"sync{s}", self.index + 1, receivers + 1, self.device, self.host, self.timeout_s)
                )

    def receive(self, load: Callable[[list[tuple[str, torch.Tensor]]], None], version: int) -> dict[str, float]:
        """Receive one sync and hand each bucket's whole tensors to `load`.

        The tensors are views into reused buffers: `load` must copy what it keeps. When this returns, the bytes
        equal the senders' by checksum; before that the model must not be used.

        Returns:
            Seconds per phase (wire, load, verify) and "bytes".

        Raises:
            SyncError: other plan or version, time limit, broken peer, or a checksum that differs.
        """
        watch = self.watch
        watch.reset()
        for s, group in enumerate(self.groups):
            self._check_header(s, group, version)
        mine = torch.zeros(self.plan.senders, len(self.plan.buckets), 2, dtype=torch.int64, device=self.device)
        for watch.bucket, bucket in enumerate(self.plan.buckets):
            for s, size in enumerate(bucket.nbytes):
                if size:
                    flat = self.buffers[s][:size]
                    with watch.phase("wire"):
                        _wait(_broadcast(self.groups[s], flat), self.device, self.timeout_s)
                    with watch.phase("verify"):
                        mine[s, watch.bucket] = checksum(flat)
            with watch.phase("load"):
                load(self._assemble(bucket))
        self._check_sums(mine)
        return {**watch.seconds, "bytes": float(self.plan.total_bytes)}

    def _check_header(self, s: int, group: dist.ProcessGroup, version: int) -> None:
        header = torch.zeros(2, dtype=torch.int64, device=self.device)
        with self.watch.phase("header"):
            _wait(_broadcast(group, header), self.device, self.timeout_s)
        digest, sent = header.tolist()
        if digest != self.plan.digest:
            raise SyncError(f"receiver {self.index}: sender {s} follows another bucket plan")
        if sent != version:
            raise SyncError(f"receiver {self.index}: sender {s} sends version {sent}, expected {version}")

    def _check_sums(self, mine: torch.Tensor) -> None:
        """Compare with every sender's table; all are read first, so that no sender is left waiting for us."""
        theirs = torch.zeros_like(mine)
        with self.watch.phase("verify"):
            for s, group in enumerate(self.groups):
                _wait(_broadcast(group, theirs[s]), self.device, self.timeout_s)
        wrong = (mine != theirs).any(dim=2).nonzero().tolist()
        if wrong:
            sender, bucket = wrong[0]
            raise SyncError(
                f"receiver {self.index}, phase verify: checksum of bucket {bucket + 1} of {mine.shape[1]} "
                f"from sender {sender} differs ({len(wrong)} buckets in all)"
            )

    def _assemble(self, bucket: Bucket) -> list[tuple[str, torch.Tensor]]:
        """Whole tensors of a bucket: views where one sender owns all rows, else rows joined in order."""
        parts: dict[str, list[tuple[WeightPiece, torch.Tensor]]] = {n: [] for n in bucket.names}
        for s, slots in enumerate(bucket.slots):
            for slot in slots:
                p = slot.piece
                flat = self.buffers[s][slot.offset : slot.offset + slot.nbytes].view(dtype_of(p.dtype))
                shape = (p.stop - p.start, *p.shape[1:]) if p.shape else ()
                parts[p.name].append((p, flat.view(shape)))
        out = []
        for name, owned in parts.items():
            owned.sort(key=lambda part: part[0].start)
            out.append((name, owned[0][1] if len(owned) == 1 else torch.cat([t for _, t in owned])))
        return out

    def close(self) -> None:
        """Leave all groups. Safe to call twice."""
        self.groups = []


class SendingEnd:
    """Mixed into a training worker's process: its end of the weight sync, over `weight_plan` and `weight_tensors`."""

    sender: Sender | None = None

    def open_sender(
        self, pieces: list[list[WeightPiece]], index: int, bucket_bytes: int, host: str, timeout_s: float
    ) -> tuple[str, int]:
        """Build the plan over all senders' pieces and listen as sender `index`. Returns (host, port)."""
        plan = BucketPlan.build(pieces, bucket_bytes)
        if not host:  # several nodes: the address by which the others reach this one
            from ray.util import get_node_ip_address

            host = get_node_ip_address()
        self.sender = Sender(plan, index, torch.device(self.device), host, timeout_s)
        return self.sender.listen()

    def connect_sync(self, receivers: int) -> None:
        """Form this sender's group; the receivers join meanwhile."""
        self.sender.connect(receivers)

    def send_weights(self, version: int) -> dict[str, float]:
        """Send this rank's rows as `version`. Returns seconds per phase and bytes.

        Raises:
            SyncError: the worker is at another version, or the transfer broke.
        """
        if version != self.version:
            raise SyncError(f"sender {self.sender.index} holds version {self.version}, asked to send {version}")
        return self.sender.send(self.weight_tensors(), version)
