"""The weight stream: dedicated process groups, the bucket plan, packing, sending, receiving, checksums.

Trainer ranks send the pieces they own; every vLLM worker receives all of them and assembles whole tensors:

    plan = BucketPlan.build(pieces_of_each_sender, bucket_bytes)         once, the same on both sides
    Sender(plan, rank, ...).connect(n_receivers);               .send(tensors, version)
    Receiver(plan, index, ...).connect(addresses, n_receivers); .receive(load, version)

There is one group per sender, {sender} u receivers, on a store of its own: no default group is touched, and a send
calls no collective of the trainer's, so it cannot interleave with FSDP's. All receivers walk buckets, and within a
bucket the senders, in the order of the plan; each sender walks its own buckets in that order too. Receivers that are
`near` a sender, on the same device, are not in its group: they read its buckets where they lie (shared_link.py).
"""

import graphlib
import hashlib
import heapq
import itertools
import math
import re
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

from one_step_off.shared_link import SharedInlet, SharedOutlet
from one_step_off.workers import WeightPiece

_ALIGN = 16  # bytes; every dtype's view into a bucket is aligned
_LANES = 1024  # int64 words per checksum row


class SyncError(RuntimeError):
    """A weight sync that is not complete and exact. The replica that received it must not be used again."""


@dataclass(frozen=True)
class Slot:
    """Where one piece lies in its sender's part of a bucket: bytes [offset, offset + nbytes)."""

    piece: WeightPiece
    sender: int
    offset: int
    nbytes: int

    def view(self, part: torch.Tensor) -> torch.Tensor:
        """The piece as a tensor of its own shape and dtype, inside `part` (uint8 [n])."""
        flat = part[self.offset : self.offset + self.nbytes].view(getattr(torch, self.piece.dtype))
        return flat.view(self.piece.block)


@dataclass
class Bucket:
    """Whole tensors that travel together, piece by piece in the order of rows; `nbytes[s]`: sender s's padded part."""

    slots: list[Slot]
    nbytes: list[int]


@dataclass
class BucketPlan:
    """Which bytes travel in which bucket. Built once; `digest` tells whether two sides hold the same plan."""

    buckets: list[Bucket]
    senders: int
    digest: int

    @staticmethod
    def build(pieces: list[list[WeightPiece]], bucket_bytes: int) -> "BucketPlan":
        """Fill buckets with whole tensors, in the order of `_merged`. A tensor over `bucket_bytes` gets one of its own.

        Args:
            pieces: per sender its pieces, in the order in which it will yield their data.
            bucket_bytes: the size to aim for, all senders' parts together.

        Raises:
            SyncError: the pieces do not cover every tensor exactly once, or disagree about shape, dtype or order.
        """
        buckets: list[Bucket] = []
        filled = math.inf
        order: list[list[WeightPiece]] = [[] for _ in pieces]
        for parts in _covered(pieces):
            size = sum(_bytes(piece) for _, piece in parts)
            if filled + size > bucket_bytes:
                buckets.append(Bucket([], [0] * len(pieces)))
                filled = 0
            filled += size
            bucket = buckets[-1]
            for s, piece in parts:
                slot = Slot(piece, s, bucket.nbytes[s], _bytes(piece))
                bucket.slots.append(slot)
                bucket.nbytes[s] += -(-slot.nbytes // _ALIGN) * _ALIGN
                order[s].append(piece)
        if order != pieces:
            # Data comes without names, so it would be taken for another tensor of the same shape.
            raise SyncError("weight plan: the senders have their pieces in different orders")
        text = repr(buckets)
        digest = int.from_bytes(hashlib.blake2b(text.encode(), digest_size=7).digest(), "big")
        return BucketPlan(buckets, len(pieces), digest)

    @property
    def total_bytes(self) -> int:
        """Bytes on the wire per sync and receiver."""
        return sum(sum(b.nbytes) for b in self.buckets)


def _bytes(piece: WeightPiece) -> int:
    return math.prod(piece.block) * getattr(torch, piece.dtype).itemsize


def _covered(pieces: list[list[WeightPiece]]) -> list[list[tuple[int, WeightPiece]]]:
    """Per tensor its (sender, piece) in the order of rows, after checking that rows are covered once each; the tensors
    as `_merged` has them."""
    by_name: dict[str, list[tuple[int, WeightPiece]]] = {}
    for s, sent in enumerate(pieces):
        for p in sent:
            by_name.setdefault(p.name, []).append((s, p))
    for name, parts in by_name.items():
        parts.sort(key=lambda part: part[1].start)
        first, at = parts[0][1], 0
        for _, p in parts:
            if (p.dtype, p.shape, p.dim) != (first.dtype, first.shape, first.dim):
                raise SyncError(f"weight plan: the senders disagree about dtype or shape of {name}, or how it is cut")
            if p.start != at or p.stop <= p.start:
                raise SyncError(f"weight plan: rows of {name} around {at} are missing or sent twice")
            at = p.stop
        rows = first.shape[first.dim] if first.shape else 1
        if at != rows:
            raise SyncError(f"weight plan: {name} has {rows} rows, but only {at} are sent")
    return [by_name[name] for name in _merged(pieces)]


def _merged(pieces: list[list[WeightPiece]]) -> list[str]:
    """The names in an order that keeps every sender's own, and layers together as far as that allows: vLLM loads a
    layer when it has all of it, and holds copies of what came until then. Sender by sender, experts that are spread out
    would be held almost all at once."""
    sorter: graphlib.TopologicalSorter[str] = graphlib.TopologicalSorter()
    place: dict[str, int] = {}
    for sent in pieces:
        names = list(dict.fromkeys(piece.name for piece in sent))
        for i, name in enumerate(names):
            sorter.add(name, *names[max(0, i - 1) : i])
            place.setdefault(name, len(place))
    try:
        sorter.prepare()
    except graphlib.CycleError as e:
        raise SyncError("weight plan: the senders have their pieces in different orders") from e
    ready: list[tuple[int, int, str]] = []
    merged: list[str] = []
    while sorter.is_active():
        for name in sorter.get_ready():
            layer = re.search(r"\.(\d+)\.", name)
            heapq.heappush(ready, (int(layer[1]) if layer else -1, place[name], name))
        merged.append(heapq.heappop(ready)[2])
        sorter.done(merged[-1])
    return merged


def checksum(flat: torch.Tensor) -> torch.Tensor:
    """Two int64 words over the bytes of a bucket; they change with any word's value, row or lane. `flat` is uint8 [n],
    n a multiple of 16. The words (int64 [2], on its device) are sums weighted by odd numbers along rows and along
    lanes, mod 2^64. No temporary as large as the bucket is made."""
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


def _broadcast(group: dist.ProcessGroup, tensor: torch.Tensor) -> dist.Work:
    options = dist.BroadcastOptions()
    options.rootRank = 0
    options.rootTensor = 0
    return group.broadcast([tensor], options)


def _wait(work: dist.Work, device: torch.device, timeout_s: float) -> None:
    """Wait on the host until a broadcast has ended. gloo keeps the limit itself; NCCL's `wait` only orders streams.
    Raises RuntimeError: not within `timeout_s`, or the transport failed."""
    if device.type == "cuda":
        deadline = time.monotonic() + timeout_s
        while not work.is_completed():
            if time.monotonic() > deadline:
                raise RuntimeError(f"no answer in {timeout_s:g} s")
            time.sleep(1e-4)
    work.wait()


class NetworkLink:
    """Either end of a sender's group; the sender may go on while a broadcast is on its way, and a receiver waits.
    `buffer` (uint8, receivers only): where buckets arrive."""

    def __init__(
        self, group: dist.ProcessGroup, device: torch.device, timeout_s: float, buffer: torch.Tensor | None = None
    ) -> None:
        self.group, self.device, self.timeout_s, self.buffer = group, device, timeout_s, buffer

    def publish(self, tensor: torch.Tensor) -> None:
        """Begin to send a tensor; it must stay as it is until `wait` has returned."""
        self.work = _broadcast(self.group, tensor)

    def wait(self, timeout_s: float) -> None:
        """Until what was published has gone. Raises RuntimeError after `timeout_s`."""
        _wait(self.work, self.device, timeout_s)

    def fill(self, tensor: torch.Tensor) -> None:
        """Receive a tensor."""
        self.publish(tensor)
        self.wait(self.timeout_s)

    def bucket(self, size: int) -> torch.Tensor:
        """Receive a bucket: uint8 [size], as it is until the next one."""
        self.fill(self.buffer[:size])
        return self.buffer[:size]

    def release(self) -> None:
        """The buffer is this side's own: there is nobody to tell."""


@dataclass
class _End:
    """What both ends share: where they stand, seconds per phase of one sync, and the bucket that a failure was in."""

    plan: BucketPlan
    index: int
    device: torch.device
    host: str
    timeout_s: float

    def __post_init__(self) -> None:
        self.who = f"{type(self).__name__.lower()} {self.index}"
        self._begin()

    def _begin(self) -> None:
        self.seconds: dict[str, float] = {}
        self.bucket = -1

    def _largest(self, sender: int) -> int:
        """Bytes of the largest part of a sender."""
        return max((b.nbytes[sender] for b in self.plan.buckets), default=0)

    def _buffer(self, sender: int) -> torch.Tensor:
        """Room for it. Zeros, so that the pages are touched now."""
        return torch.zeros(self._largest(sender), dtype=torch.uint8, device=self.device)

    def _join(
        self, store: dist.Store, sender: int, rank: int, size: int, buffer: torch.Tensor | None = None
    ) -> NetworkLink:
        group = make_group(store, f"sync{sender}", rank, size, self.device, self.host, self.timeout_s)
        return NetworkLink(group, self.device, self.timeout_s, buffer)

    @contextmanager
    def _phase(self, name: str) -> Iterator[None]:
        start = time.perf_counter()
        try:
            yield
        except SyncError:
            raise
        except Exception as e:
            cause = next(iter(str(e).strip().splitlines()), type(e).__name__)
            where = f"phase {name}, bucket {self.bucket + 1} of {len(self.plan.buckets)}"
            raise SyncError(f"{self.who}, {where}: {cause}") from e
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - start


class Sender(_End):
    """The sending end on one trainer rank: rank 0 of its group. `address`: (host, port) of its store."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.slots = [[slot for slot in b.slots if slot.sender == self.index] for b in self.plan.buckets]
        limit = timedelta(seconds=self.timeout_s)
        self.store = dist.TCPStore(self.host, 0, is_master=True, wait_for_workers=False, timeout=limit)
        self.address = (self.host, self.store.port)

    def connect(self, receivers: int, near: Sequence[int] = ()) -> None:
        """Form the group with `receivers` vLLM workers, which must call `Receiver.connect` meanwhile. `near`: the
        receivers that are on this sender's device."""
        with self._phase("connect"):
            self.outlets: list[NetworkLink | SharedOutlet] = []
            # Two buffers: the next bucket is packed while one is on the wire.
            if near:
                size = self._largest(self.index)
                self.outlets = [SharedOutlet(self.store, [size, size], list(near), self.device)]
                self.buffers = self.outlets[0].buffers
            else:
                self.buffers = [self._buffer(self.index), self._buffer(self.index)]
            if receivers > len(near):
                self.outlets.append(self._join(self.store, self.index, 0, receivers - len(near) + 1))

    def send(self, tensors: Iterable[torch.Tensor], version: int) -> dict[str, float]:
        """Send this rank's pieces, in the order of its plan, as weight version `version`. Returns seconds per phase
        (pack, wire) and "bytes". Raises SyncError naming this sender, phase and bucket."""
        self._begin()
        data, buffers = iter(tensors), itertools.cycle(self.buffers)
        sums = torch.zeros(len(self.plan.buckets), 2, dtype=torch.int64, device=self.device)
        with self._phase("header"):
            header = torch.tensor([self.plan.digest, version], dtype=torch.int64, device=self.device)
            self._publish(header)
            self._settle()
        for i, bucket in enumerate(self.plan.buckets):
            self.bucket = i
            if size := bucket.nbytes[self.index]:  # a bucket may hold nothing of this sender
                flat = next(buffers)[:size]
                with self._phase("pack"):
                    self._pack(flat, self.slots[i], data)
                    sums[i] = checksum(flat)
                with self._phase("wire"):
                    self._settle()
                    self._publish(flat)
        with self._phase("wire"):
            self._settle()
            self._publish(sums)
            self._settle()
        return {**self.seconds, "bytes": float(sum(b.nbytes[self.index] for b in self.plan.buckets))}

    def _publish(self, tensor: torch.Tensor) -> None:
        for outlet in self.outlets:
            outlet.publish(tensor)

    def _settle(self) -> None:
        """Until the last tensor published has reached everybody."""
        for outlet in self.outlets:
            outlet.wait(self.timeout_s)

    def _pack(self, flat: torch.Tensor, slots: list[Slot], data: Iterator[torch.Tensor]) -> None:
        for slot in slots:
            tensor, view = next(data), slot.view(flat)
            if (tensor.shape, tensor.dtype) != (view.shape, view.dtype):
                raise SyncError(
                    f"{self.who}: {slot.piece.name} is {tuple(tensor.shape)} {tensor.dtype}, "
                    f"planned {tuple(view.shape)} {view.dtype}"
                )
            view.copy_(tensor, non_blocking=True)


class Receiver(_End):
    """The receiving end in one vLLM worker."""

    def connect(
        self, addresses: list[tuple[str, int]], receivers: int, near: Sequence[Sequence[int]] | None = None
    ) -> None:
        """Join every sender's group, in the order of the plan. `near`: per sender the receivers on its device."""
        self.inlets: list[NetworkLink | SharedInlet] = []
        for s, (host, port) in enumerate(addresses):
            with self._phase("connect"):
                store = dist.TCPStore(host, port, is_master=False, timeout=timedelta(seconds=self.timeout_s))
                far = [r for r in range(receivers) if not (near and r in near[s])]
                if self.index in far:
                    rank = 1 + far.index(self.index)
                    self.inlets.append(self._join(store, s, rank, len(far) + 1, self._buffer(s)))
                else:
                    self.inlets.append(SharedInlet(store, self.index, self.device, self.timeout_s))

    def receive(self, load: Callable[[list[tuple[str, torch.Tensor]]], None], version: int) -> dict[str, float]:
        """Receive one sync and hand each bucket's whole tensors to `load`.

        The tensors are views into reused buffers: `load` must copy what it keeps. When this returns, the bytes equal
        the senders' by checksum; before that the model must not be used. Returns seconds per phase (wire, load, verify)
        and "bytes". Raises SyncError: other plan or version, time limit, broken peer, or a checksum that differs."""
        self._begin()
        header = torch.zeros(2, dtype=torch.int64, device=self.device)
        for s, inlet in enumerate(self.inlets):
            with self._phase("header"):
                inlet.fill(header)
            digest, sent = header.tolist()
            if digest != self.plan.digest:
                raise SyncError(f"{self.who}: sender {s} follows another bucket plan")
            if sent != version:
                raise SyncError(f"{self.who}: sender {s} sends version {sent}, expected {version}")
        sums = torch.zeros(self.plan.senders, len(self.plan.buckets), 2, dtype=torch.int64, device=self.device)
        for i, bucket in enumerate(self.plan.buckets):
            self.bucket, parts = i, {}
            for s, size in enumerate(bucket.nbytes):
                if size:
                    with self._phase("wire"):
                        parts[s] = self.inlets[s].bucket(size)
                    with self._phase("verify"):
                        sums[s, i] = checksum(parts[s])
            with self._phase("load"):
                tensors = itertools.groupby(bucket.slots, key=lambda slot: slot.piece.name)
                load([(name, _assemble(parts, slots)) for name, slots in tensors])
                for s in parts:
                    self.inlets[s].release()
        self._check_sums(sums)
        return {**self.seconds, "bytes": float(self.plan.total_bytes)}

    def _check_sums(self, mine: torch.Tensor) -> None:
        """Compare with every sender's table; all are read first, so that no sender is left waiting for us."""
        theirs = torch.zeros_like(mine)
        with self._phase("verify"):
            for inlet, table in zip(self.inlets, theirs, strict=True):
                inlet.fill(table)
        wrong = (mine != theirs).any(dim=2).nonzero().tolist()
        if wrong:
            sender, bucket = wrong[0]
            raise SyncError(
                f"{self.who}, phase verify: checksum of bucket {bucket + 1} of {mine.shape[1]} "
                f"from sender {sender} differs ({len(wrong)} buckets in all)"
            )


def _assemble(parts: dict[int, torch.Tensor], slots: Iterable[Slot]) -> torch.Tensor:
    """A whole tensor: a view where one sender owns all of it, else pieces joined in order."""
    slots = list(slots)
    pieces = [slot.view(parts[slot.sender]) for slot in slots]
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces, slots[0].piece.dim)


def own_host(host: str) -> str:
    """`host`, or where it is empty (several nodes) the address by which other nodes reach this one."""
    from ray.util import get_node_ip_address

    return host or get_node_ip_address()


class SendingEnd:
    """Mixed into a training worker's process: its end of the weight sync, over `weight_plan` and `weight_tensors`."""

    def open_sender(
        self, pieces: list[list[WeightPiece]], bucket_bytes: int, host: str, timeout_s: float
    ) -> tuple[str, int]:
        """Build the plan over all senders' pieces, this one's among them, and listen. Returns (host, port)."""
        plan, index = BucketPlan.build(pieces, bucket_bytes), pieces.index(self.weight_plan())
        self.sender = Sender(plan, index, torch.device(self.device), own_host(host), timeout_s)
        return self.sender.address

    def connect_sync(self, receivers: int, near: list[list[int]]) -> None:
        """Form this sender's group; the receivers join meanwhile. `near`: per sender the receivers on its device."""
        self.sender.connect(receivers, near[self.sender.index])

    def send_weights(self, version: int) -> dict[str, float]:
        """As `Sender.send`; it refuses (SyncError) if the worker is at another version."""
        if version != self.version:
            raise SyncError(f"sender {self.sender.index} holds version {self.version}, asked to send {version}")
        return self.sender.send(self.weight_tensors(), version)
