"""From shards to buckets: which bytes of the model travel in which bucket, and the buckets'
checksums.

Both ends of the weight stream build the same plan from the same pieces, once.
"""

import hashlib
import itertools
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache

import networkx  # torch needs it too
import torch
import xxhash

from one_step_off.cluster.errors import SyncError
from one_step_off.weight_sync.weight_piece import WeightPiece

ALIGNMENT = 16
"""Bytes; every dtype's view into a bucket is aligned."""

_LANES = 1024
"""int64 words per row of the GPU checksum."""

_CACHED_WEIGHTS = 1024
"""Sizes of messages whose weights are kept: each takes a 512th of its message."""

MIN_BUCKET_MB = 64
"""The default on CPUs, and the least on GPUs."""

MAX_BUCKET_MB = 1024
"""The most that is chosen on GPUs. There each bucket has a fixed cost on the host, of about a
millisecond."""

_BUCKETS_OF_TRAINER = 128
"""A bucket is at most such a part of what a trainer may use."""
_BUCKETS_OF_RECEIVER = 8
"""And such a part of what a replica has beside its engine: two buckets that it receives, one more
in which rows of several senders are joined, and the communicators."""

Parts = dict[int, torch.Tensor]
"""Sender -> its part of a bucket: uint8 [n]."""

Pieces = list[list[WeightPiece]]
"""Per sender or rank its pieces, in the order in which it yields their data."""


@dataclass(frozen=True)
class BucketSlot:
    """A piece or a strip of one, and where it lies in its sender's part of a bucket.

    It takes the bytes [offset, offset + nbytes), followed by zeros up to offset + padded_bytes.
    """

    piece: WeightPiece
    source: WeightPiece
    """The piece as the sender has it, of which `piece` is a strip or the whole."""
    sender: int
    offset: int = 0

    @cached_property
    def nbytes(self) -> int:
        """Bytes of the piece."""
        return math.prod(self.piece.block_shape) * self.dtype.itemsize

    @property
    def padded_bytes(self) -> int:
        """Bytes up to where the next slot may begin."""
        return -(-self.nbytes // ALIGNMENT) * ALIGNMENT

    @property
    def dtype(self) -> torch.dtype:
        """Of the piece, on the wire."""
        return getattr(torch, self.piece.dtype)

    def view(self, part: torch.Tensor) -> torch.Tensor:
        """The piece as a tensor with its shape and dtype, inside `part` (uint8 [n])."""
        flat = part[self.offset : self.offset + self.nbytes]
        return flat.view(self.dtype).view(self.piece.block_shape)

    def padding(self, part: torch.Tensor) -> torch.Tensor:
        """The bytes up to the next slot in `part`. They travel and count in the checksum, so they
        must be zeros at both ends."""
        return part[self.offset + self.nbytes : self.offset + self.padded_bytes]


@dataclass
class Bucket:
    """Tensors that travel together, piece by piece in the order of their rows."""

    slots: list[BucketSlot]
    part_bytes: list[int]
    """Per sender the padded bytes of its part."""
    join_offsets: dict[str, int] = field(default_factory=dict)
    """Name of each tensor with several slots -> its offset in the receiver's join buffer."""
    completes_tensors: bool = True
    """False: its only tensor continues in the next bucket."""

    @property
    def nbytes(self) -> int:
        """Bytes of all senders' parts."""
        return sum(self.part_bytes)

    def slots_of(self, sender: int) -> list[BucketSlot]:
        """The slots of one sender's part."""
        return [slot for slot in self.slots if slot.sender == sender]

    def split_parts(self, flat: torch.Tensor) -> Parts:
        """Views of all senders' parts, side by side in `flat`: uint8 [nbytes or more]. Empty parts
        are left out."""
        views = flat[: self.nbytes].split(self.part_bytes)
        return {sender: part for sender, part in enumerate(views) if len(part)}

    def tensors(
        self, parts: Parts, join_buffer: torch.Tensor
    ) -> Iterator[tuple[str, torch.Tensor, list[BucketSlot]]]:
        """Where the bucket's whole tensors lie.

        Args:
            parts: of all senders.
            join_buffer: uint8 [plan.join_bytes].

        Yields:
            The tensor's name; the tensor, which is a view into its sender's part, or into
            `join_buffer` if several slots are joined there; and these slots.
        """
        for name, group in itertools.groupby(self.slots, key=lambda slot: slot.piece.name):
            slots = list(group)
            piece = slots[0].piece
            if name in self.join_offsets:
                flat = join_buffer[self.join_offsets[name] :].view(getattr(torch, piece.dtype))
                yield name, flat[: math.prod(piece.shape)].view(piece.shape), slots
            else:
                yield name, slots[0].view(parts[slots[0].sender]), []

    def join(self, parts: Parts, join_buffer: torch.Tensor) -> list[tuple[str, torch.Tensor]]:
        """Name and tensor as in `tensors`, after the slots have been joined from the senders'
        parts."""
        named_tensors = []
        for name, tensor, joined_slots in self.tensors(parts, join_buffer):
            for slot in joined_slots:
                slot.piece.slice_of(tensor).copy_(slot.view(parts[slot.sender]))
            named_tensors.append((name, tensor))
        return named_tensors


@dataclass
class BucketPlan:
    """The buckets of one model, in the order in which they travel."""

    buckets: list[Bucket]
    senders: int
    digest: int
    """Equal at two ends that hold the same plan."""
    join_bytes: int
    """Bytes that a receiver needs to join tensors with several slots."""

    @staticmethod
    def build(pieces: Pieces, bucket_bytes: int) -> "BucketPlan":
        """Fill buckets with whole tensors, in the order of `pieces_by_tensor`.

        A tensor over `bucket_bytes` is cut into strips, each with a strip of every sender's piece.
        It has its buckets for itself.

        Args:
            pieces: per sender its pieces, in the order in which it will yield their data; those of
                one tensor follow one another in the order of their rows.
            bucket_bytes: the most that a bucket holds, of all senders together (or one row or
                column of each).

        Raises:
            SyncError: the pieces do not cover every tensor exactly once, or disagree about shape,
                dtype or order.
        """
        builder = _PlanBuilder(len(pieces), bucket_bytes)
        for parts in pieces_by_tensor(pieces):
            builder.add_tensor(parts)
        digest = hashlib.blake2b(repr(builder.buckets).encode(), digest_size=7).digest()
        return BucketPlan(
            builder.buckets, len(pieces), int.from_bytes(digest, "big"), builder.join_bytes
        )

    @property
    def total_bytes(self) -> int:
        """Bytes on the wire per full sync and receiver."""
        return sum(bucket.nbytes for bucket in self.buckets)

    @property
    def largest_bucket_bytes(self) -> int:
        """Bytes of the largest bucket."""
        return max((bucket.nbytes for bucket in self.buckets), default=0)


class _PlanBuilder:
    """Puts one tensor after the other into buckets."""

    def __init__(self, senders: int, bucket_bytes: int) -> None:
        self.senders = senders
        self.bucket_bytes = bucket_bytes
        self.buckets: list[Bucket] = []
        self.join_bytes = 0  # the largest need of any bucket
        self.open_bytes: int | None = None  # in the last bucket; None: it takes no more tensors
        self.joined_bytes = 0  # of the last bucket, in the join buffer

    def add_tensor(self, parts: list[tuple[int, WeightPiece]]) -> None:
        """Add one tensor. `parts`: its (sender, piece), in the order of rows."""
        strips = _cut_into_strips(parts, self.bucket_bytes)
        name = parts[0][1].name
        if len(strips) > 1:
            self._add_strips(name, strips)
        else:
            self._add_whole(name, strips[0], needs_join=len(parts) > 1)

    def _add_whole(self, name: str, slots: list[BucketSlot], needs_join: bool) -> None:
        """Into the last bucket, or into a new one if it does not fit."""
        size = sum(slot.padded_bytes for slot in slots)
        if self.open_bytes is None or self.open_bytes + size > self.bucket_bytes:
            self._start_bucket(completes_tensors=True)
        self._append(name, slots, needs_join)
        self.open_bytes = (self.open_bytes or 0) + size
        if needs_join:
            self._reserve_join(size)

    def _add_strips(self, name: str, strips: list[list[BucketSlot]]) -> None:
        """Each strip into a new bucket. All are joined at the beginning of the join buffer."""
        last = len(strips) - 1
        for i, slots in enumerate(strips):
            self._start_bucket(completes_tensors=i == last)
            self._append(name, slots, needs_join=True)
        self._reserve_join(sum(slot.padded_bytes for slots in strips for slot in slots))
        self.open_bytes = None

    def _start_bucket(self, completes_tensors: bool) -> None:
        bucket = Bucket([], [0] * self.senders, completes_tensors=completes_tensors)
        self.buckets.append(bucket)
        self.open_bytes = 0
        self.joined_bytes = 0

    def _append(self, name: str, slots: list[BucketSlot], needs_join: bool) -> None:
        bucket = self.buckets[-1]
        if needs_join:
            bucket.join_offsets[name] = self.joined_bytes
        for slot in slots:
            bucket.slots.append(replace(slot, offset=bucket.part_bytes[slot.sender]))
            bucket.part_bytes[slot.sender] += slot.padded_bytes

    def _reserve_join(self, size: int) -> None:
        self.joined_bytes += size
        self.join_bytes = max(self.join_bytes, self.joined_bytes)


def automatic_bucket_mb(trainer_bytes: int, receiver_bytes: int) -> int:
    """weight_sync.bucket_mb=null, in MiB: a power of two, since torch takes pinned memory in those.

    Args:
        trainer_bytes: what a trainer may use of its GPU's memory; 0 for a CPU.
        receiver_bytes: what a replica has beside its engine.
    """
    most_bytes = min(trainer_bytes // _BUCKETS_OF_TRAINER, receiver_bytes // _BUCKETS_OF_RECEIVER)
    share_mb = 1 << max((most_bytes >> 20).bit_length() - 1, 0)
    return min(max(share_mb, MIN_BUCKET_MB), MAX_BUCKET_MB)


def _cut_into_strips(parts: list[tuple[int, WeightPiece]], limit: int) -> list[list[BucketSlot]]:
    """Cut one tensor into as few strips as possible, so that each has at most `limit` bytes (or one
    row)."""
    most_rows = max(piece.stop - piece.start for _, piece in parts)
    total_bytes = sum(BucketSlot(piece, piece, sender).nbytes for sender, piece in parts)
    fewest = max(1, min(most_rows, total_bytes // limit))
    for count in range(fewest, most_rows + 1):
        strips = [_strip_slots(parts, i, count) for i in range(count)]
        largest = max(sum(slot.padded_bytes for slot in strip) for strip in strips)
        if largest <= limit:
            break
    return [[slot for slot in strip if slot.nbytes] for strip in strips]


def _strip_slots(parts: list[tuple[int, WeightPiece]], i: int, count: int) -> list[BucketSlot]:
    """The `i`-th of `count` strips of one tensor: a strip of each sender's piece."""
    return [BucketSlot(piece.strip(i, count), piece, sender) for sender, piece in parts]


def pieces_by_tensor(pieces: Pieces) -> list[list[tuple[int, WeightPiece]]]:
    """Per tensor its (sender, piece), in the order of rows; the tensors in the order of
    `_merged_order`.

    Raises:
        SyncError: the rows of a tensor are not covered exactly once, or the senders disagree about
            it.
    """
    parts_of: dict[str, list[tuple[int, WeightPiece]]] = {}
    for sender, sent in enumerate(pieces):
        for piece in sent:
            parts_of.setdefault(piece.name, []).append((sender, piece))
    for name, parts in parts_of.items():
        parts.sort(key=lambda part: part[1].start)
        _check_coverage(name, [piece for _, piece in parts])
    return [parts_of[name] for name in _merged_order(pieces)]


def _check_coverage(name: str, pieces: list[WeightPiece]) -> None:
    """Raises SyncError: the pieces of one tensor, sorted by `start`, do not cover its rows once
    each."""
    if len({(piece.dtype, piece.shape, piece.dim) for piece in pieces}) > 1:
        raise SyncError(
            f"weight plan: the senders disagree about dtype or shape of {name}, or how it is cut"
        )
    first = pieces[0]
    rows = first.shape[first.dim] if first.shape else 1
    starts = [piece.start for piece in pieces]
    stops = [piece.stop for piece in pieces]
    gapless = [*starts, rows] == [0, *stops]
    has_empty_piece = len({0, *stops}) <= len(pieces)
    if not gapless or has_empty_piece:
        ranges = ", ".join(f"{piece.start} to {piece.stop}" for piece in pieces)
        raise SyncError(
            f"weight plan: of the {rows} rows of {name} some are missing or sent twice: "
            f"{ranges} came"
        )


def _merged_order(pieces: Pieces) -> list[str]:
    """The names in an order that keeps every sender's own order, and layers together as far as that
    allows.

    vLLM loads a layer when it has all of it, and holds copies of the parts that came before. In an
    order sender by sender, experts that are distributed over the senders would be held almost all
    at once.
    """
    graph = networkx.DiGraph()
    # Most ranks have the same names in the same order: each order counts once.
    orders = {tuple(dict.fromkeys(piece.name for piece in sent)): None for sent in pieces}
    for names in orders:
        networkx.add_path(graph, names)
    layers = {name: _layer_of(name) for name in graph}
    try:
        return list(networkx.lexicographical_topological_sort(graph, layers.get))
    except networkx.NetworkXUnfeasible as error:
        raise SyncError("weight plan: the senders have their pieces in different orders") from error


def _layer_of(name: str) -> int:
    """The number of the layer in a tensor's name; -1: it has none."""
    match = re.search(r"\.(\d+)\.", name)
    return int(match[1]) if match else -1


def checksum(flat: torch.Tensor, words: torch.Tensor | None = None) -> torch.Tensor:
    """Two int64 words over the bytes of a bucket, on its device. Both ends of a stream have the
    same kind of device.

    On CPUs XXH3 (128 bits), on GPUs `weighted_sums`.

    Args:
        flat: uint8 [n], n a multiple of 16.
        words: where to write them, int64 [2]; None: a new tensor.
    """
    if flat.device.type != "cpu":
        return weighted_sums(flat, words)
    digest = xxhash.xxh3_128_digest(flat.numpy())
    sums = torch.frombuffer(bytearray(digest), dtype=torch.int64)
    return sums if words is None else words.copy_(sums)


def weighted_sums(flat: torch.Tensor, words: torch.Tensor | None = None) -> torch.Tensor:
    """The checksum on GPUs; arguments as `checksum`.

    The int64 words of `flat` are laid in rows of _LANES, the last one filled up with zeros. The
    first sum weights each by the odd number 2 * lane + 1, the second one by 2 * row + 1, both mod
    2^64. So they change with the value, the row or the lane of any word. No temporary is as large
    as the bucket, and five kernels do it.
    """
    numbers = flat.view(torch.int64)
    whole_rows = len(numbers) // _LANES
    rows = numbers[: whole_rows * _LANES].view(whole_rows, _LANES)
    rest = numbers[whole_rows * _LANES :]
    sums = torch.cat([rows.sum(0), rows.sum(1), rest])
    weights = _checksum_weights(whole_rows, len(rest), flat.device)
    return torch.sum(weights * sums, dim=1, out=words)


@lru_cache(maxsize=_CACHED_WEIGHTS)
def _checksum_weights(rows: int, rest: int, device: torch.device) -> torch.Tensor:
    """int64 [2, lanes + rows + rest]: of the lanes' sums, the rows' sums and the words of the last
    row, for the first and for the second checksum."""
    weights = torch.zeros(2, _LANES + rows + rest, dtype=torch.int64)
    lane_weights = torch.arange(1, 2 * _LANES + 1, 2)
    weights[0, :_LANES] = lane_weights
    weights[1, _LANES : _LANES + rows] = torch.arange(1, 2 * rows + 1, 2)
    weights[0, _LANES + rows :] = lane_weights[:rest]
    weights[1, _LANES + rows :] = 2 * rows + 1
    return weights.to(device)
