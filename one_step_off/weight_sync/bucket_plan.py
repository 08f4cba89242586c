"""Which bytes of the model travel in which bucket, the same on both ends of the weight stream; and their checksum."""

import hashlib
import itertools
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property

import networkx  # torch needs it too
import torch
import xxhash

from one_step_off.cluster.errors import SyncError
from one_step_off.weight_sync.weight_piece import WeightPiece

ALIGN = 16  # bytes; every dtype's view into a bucket is aligned
_LANES = 1024  # int64 words per checksum row


Parts = dict[int, torch.Tensor]
"""Each sender's part of a bucket: uint8 [n]."""


Pieces = list[list[WeightPiece]]
"""Of each sender or rank, in the order in which it yields their data."""


@dataclass(frozen=True)
class Slot:
    """A piece, or the strip of one, and where it lies in its sender's part of a bucket: bytes [offset, offset + nbytes),
    followed by zeros up to offset + padded. `source`: the piece as the sender has it."""

    piece: WeightPiece
    source: WeightPiece
    sender: int
    offset: int = 0

    @cached_property
    def nbytes(self) -> int:
        """Bytes of the piece."""
        return math.prod(self.piece.block_shape) * getattr(torch, self.piece.dtype).itemsize

    @property
    def padded(self) -> int:
        """Bytes up to where the next slot may begin."""
        return -(-self.nbytes // ALIGN) * ALIGN

    def view(self, part: torch.Tensor) -> torch.Tensor:
        """The piece as a tensor of its own shape and dtype, inside `part` (uint8 [n])."""
        flat = part[self.offset : self.offset + self.nbytes]
        return flat.view(getattr(torch, self.piece.dtype)).view(self.piece.block_shape)

    def seal(self, part: torch.Tensor) -> None:
        """Zero the bytes up to the next slot in `part`: they travel and are summed too, so both ends need the same."""
        part[self.offset + self.nbytes : self.offset + self.padded].zero_()


@dataclass
class Bucket:
    """Tensors that travel together, piece by piece in the order of rows; `nbytes[s]`: sender s's padded part."""

    slots: list[Slot]
    nbytes: list[int]
    joined: dict[str, int] = field(
        default_factory=dict
    )  # tensors of several slots -> where receivers join them
    ends: bool = True  # False: its one tensor goes on in the next bucket

    def parts(self, flat: torch.Tensor) -> Parts:
        """Room for all senders' parts, side by side in `flat`, uint8 [their bytes or more]."""
        return {
            s: part
            for s, part in enumerate(flat[: sum(self.nbytes)].split(self.nbytes))
            if len(part)
        }

    def whole(
        self, parts: Parts, room: torch.Tensor
    ) -> Iterator[tuple[str, torch.Tensor, list[Slot]]]:
        """Each tensor's name; the tensor, a view into its sender's part, or into `room` (uint8 [plan.room]) where it is
        joined there; and the slots that it is joined of."""
        for name, group in itertools.groupby(self.slots, key=lambda slot: slot.piece.name):
            slots = list(group)
            piece = slots[0].piece
            if name in self.joined:
                flat = room[self.joined[name] :].view(getattr(torch, piece.dtype))
                yield name, flat[: math.prod(piece.shape)].view(piece.shape), slots
            else:
                yield name, slots[0].view(parts[slots[0].sender]), []

    def join(self, parts: Parts, room: torch.Tensor) -> list[tuple[str, torch.Tensor]]:
        """Name and tensor as `whole` has them, joined from the senders' parts."""
        tensors = []
        for name, tensor, joined in self.whole(parts, room):
            for slot in joined:
                slot.piece.slice_of(tensor).copy_(slot.view(parts[slot.sender]))
            tensors.append((name, tensor))
        return tensors

    def split(self, parts: Parts, room: torch.Tensor) -> None:
        """The way back: make each sender's part what it would send, of tensors that lie where `whole` says."""
        for slot in self.slots:
            slot.seal(parts[slot.sender])
        for _, tensor, joined in self.whole(parts, room):
            for slot in joined:
                slot.view(parts[slot.sender]).copy_(slot.piece.slice_of(tensor))


@dataclass
class BucketPlan:
    """Built once on both sides; `digest` tells whether two sides hold the same plan. `room`: bytes that a receiver needs
    to join tensors of several slots."""

    buckets: list[Bucket]
    senders: int
    digest: int
    room: int

    @staticmethod
    def build(pieces: Pieces, bucket_bytes: int) -> "BucketPlan":
        """Fill buckets with whole tensors, in the order of `_merged`; one over `bucket_bytes` is cut into strips, each
        with a part of every sender's piece, and has its buckets for itself.

        Args:
            pieces: per sender its pieces, in the order in which it will yield their data, those of a tensor one after
                the other by their rows.
            bucket_bytes: the most a bucket holds, all senders' parts together (or one row or column of each).

        Raises:
            SyncError: the pieces do not cover every tensor exactly once, or disagree about shape, dtype or order.
        """
        buckets: list[Bucket] = []
        filled, room, joined = math.inf, 0, 0
        for parts in pieces_by_tensor(pieces):
            strips = _strips(parts, bucket_bytes)
            size, alone = sum(slot.padded for strip in strips for slot in strip), len(strips) > 1
            joins = alone or len(parts) > 1
            for i, strip in enumerate(strips):
                if alone or filled + size > bucket_bytes:
                    buckets.append(Bucket([], [0] * len(pieces), ends=i == len(strips) - 1))
                    filled = joined = 0
                if joins:
                    buckets[-1].joined[parts[0][1].name] = joined
                for slot in strip:
                    buckets[-1].slots.append(replace(slot, offset=buckets[-1].nbytes[slot.sender]))
                    buckets[-1].nbytes[slot.sender] += slot.padded
            joined += size if joins else 0
            room = max(room, joined)
            filled = math.inf if alone else filled + size
        digest = int.from_bytes(
            hashlib.blake2b(repr(buckets).encode(), digest_size=7).digest(), "big"
        )
        return BucketPlan(buckets, len(pieces), digest, room)

    @property
    def total_bytes(self) -> int:
        """Bytes on the wire per full sync and receiver."""
        return sum(sum(b.nbytes) for b in self.buckets)

    @property
    def largest(self) -> int:
        """Bytes of the largest bucket."""
        return max((sum(b.nbytes) for b in self.buckets), default=0)


def _strips(parts: list[tuple[int, WeightPiece]], limit: int) -> list[list[Slot]]:
    """One tensor, cut into as few strips as keep to `limit` bytes each."""
    longest = max(piece.stop - piece.start for _, piece in parts)
    fewest = max(1, min(longest, sum(Slot(p, p, s).nbytes for s, p in parts) // limit))
    for count in range(fewest, longest + 1):
        cuts = [[Slot(p.part(i, count), p, s) for s, p in parts] for i in range(count)]
        if max(sum(slot.padded for slot in cut) for cut in cuts) <= limit:
            break
    return [[slot for slot in cut if slot.nbytes] for cut in cuts]


def pieces_by_tensor(pieces: Pieces) -> list[list[tuple[int, WeightPiece]]]:
    """Per tensor its (sender, piece) in the order of rows, after checking (SyncError) that rows are covered once each;
    the tensors as `_merged` has them."""
    by_name: dict[str, list[tuple[int, WeightPiece]]] = {}
    for s, sent in enumerate(pieces):
        for p in sent:
            by_name.setdefault(p.name, []).append((s, p))
    for name, parts in by_name.items():
        parts.sort(key=lambda part: part[1].start)
        held = [piece for _, piece in parts]
        if len({(p.dtype, p.shape, p.dim) for p in held}) > 1:
            raise SyncError(
                f"weight plan: the senders disagree about dtype or shape of {name}, or how it is cut"
            )
        rows = held[0].shape[held[0].dim] if held[0].shape else 1
        starts, ends = [*(p.start for p in held), rows], [0, *(p.stop for p in held)]
        if starts != ends or len(set(ends)) <= len(held):
            found = ", ".join(f"{p.start} to {p.stop}" for p in held)
            raise SyncError(
                f"weight plan: of the {rows} rows of {name} some are missing or sent twice: {found} came"
            )
    return [by_name[name] for name in _merged(pieces)]


def pieces_of_senders(pieces: Pieces, how: str) -> dict[int, list[WeightPiece]]:
    """Rank -> the pieces that it sends, of those that hold any; with `how` = "gather" rank 0 sends all, whole."""
    if how == "sharded":
        return {rank: held for rank, held in enumerate(pieces) if held}
    firsts = (parts[0][1] for parts in pieces_by_tensor(pieces))
    return {0: [replace(p, start=0, stop=p.shape[0] if p.shape else 1, dim=0) for p in firsts]}


def _merged(pieces: Pieces) -> list[str]:
    """The names in an order that keeps every sender's own, and layers together as far as that allows: vLLM loads a
    layer when it has all of it, and holds copies of what came until then. Sender by sender, experts that are spread out
    would be held almost all at once."""
    graph = networkx.DiGraph()
    for sent in pieces:
        networkx.add_path(graph, dict.fromkeys(piece.name for piece in sent))

    try:
        layer = {name: int((re.search(r"\.(\d+)\.", name) or (0, -1))[1]) for name in graph}
        return list(networkx.lexicographical_topological_sort(graph, layer.get))
    except networkx.NetworkXUnfeasible as e:
        raise SyncError("weight plan: the senders have their pieces in different orders") from e


def checksum(flat: torch.Tensor) -> torch.Tensor:
    """Two int64 words over the bytes of a bucket, uint8 [n], n a multiple of 16; on its device. On CPUs XXH3 (128 bits).
    On GPUs sums mod 2^64 weighted by odd numbers along rows and along lanes: they change with any word's value, row or
    lane. No temporary as large as the bucket is made. Both ends of a stream are of one kind."""
    if flat.device.type == "cpu":
        return torch.frombuffer(bytearray(xxhash.xxh3_128_digest(flat.numpy())), dtype=torch.int64)
    return weighted_sums(flat)


def weighted_sums(flat: torch.Tensor) -> torch.Tensor:
    """The checksum of GPUs."""
    words = flat.view(torch.int64)
    whole = len(words) // _LANES * _LANES
    out = torch.zeros(2, dtype=torch.int64, device=flat.device)
    for block in (words[:whole].view(-1, _LANES), words[whole:].view(1, -1)):
        if block.numel():
            for i, sums in enumerate((block.sum(0), block.sum(1))):
                odd = torch.arange(1, 2 * len(sums), 2, dtype=torch.int64, device=flat.device)
                out[i] = out[i] * 31 + (sums * odd).sum()
    return out
