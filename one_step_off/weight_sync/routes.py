"""Which bytes of each bucket go to which receivers.

A sender packs the weights that it owns into buckets, in the order of the bucket plan. In the first
sync it sends whole buckets to all receivers. When every receiver has reported which blocks it
keeps, a bucket is cut into shards: each is a block that one set of receivers keeps. The shards of
one set make one message.
Blocks that all receivers keep (norms, for instance) are broadcast to all. A slice of one
tensor-parallel rank goes to that rank of every replica.

Receivers of one kind keep the same blocks: the same tensor-parallel rank of each replica.
"""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from one_step_off.cluster.errors import SyncError
from one_step_off.weight_sync.bound_copies import BoundCopies
from one_step_off.weight_sync.bucket_plan import ALIGNMENT, Bucket, BucketPlan, BucketSlot
from one_step_off.weight_sync.shard_blocks import Block, ShardBlocks

ALL_RECEIVERS = 0
"""The number of the set of all receivers."""


@dataclass(frozen=True)
class ShardsOfReceivers:
    """Which blocks the receivers of an epoch keep."""

    blocks: tuple[ShardBlocks, ...]
    """By kind."""
    kind_of_receiver: tuple[int, ...]

    def keeps_all(self, shapes: dict[str, tuple[int, ...]]) -> bool:
        """Whether every receiver keeps all of every tensor."""
        (first, *others) = self.blocks
        return not others and all(
            first.get(name) == (Block.whole(shape),) for name, shape in shapes.items()
        )

    @staticmethod
    def by_kind(blocks_of_receiver: Sequence[ShardBlocks]) -> "ShardsOfReceivers":
        """Receivers that keep the same are of one kind."""
        kinds: list[ShardBlocks] = []
        kind_of_receiver = []
        for blocks in blocks_of_receiver:
            if blocks not in kinds:
                kinds.append(blocks)
            kind_of_receiver.append(kinds.index(blocks))
        return ShardsOfReceivers(tuple(kinds), tuple(kind_of_receiver))


class Shard(NamedTuple):
    """A block of a slot that one set of receivers keeps.

    A model of thousands of experts has a million of them, so this is no dataclass, which takes
    three times as long to create.
    """

    slot: BucketSlot
    block: Block
    nbytes: int
    """Of the block."""
    offset: int
    """In its message, where that is not the sender's whole part."""

    @property
    def padded_bytes(self) -> int:
        """Bytes up to where the next shard may begin."""
        return _padded(self.nbytes)

    def in_part(self, part: torch.Tensor) -> torch.Tensor:
        """The block as a view into its sender's part of the bucket (uint8 [n])."""
        return self.block.slice_of(self.slot.view(part), self.slot.piece.block.start)

    def in_message(self, message: torch.Tensor) -> torch.Tensor:
        """The block as a view into its message (uint8 [n])."""
        flat = message[self.offset : self.offset + self.nbytes]
        return flat.view(self.slot.dtype).view(self.block.shape)


@dataclass(frozen=True)
class Message:
    """What one sender sends of one bucket to one set of receivers."""

    sender: int
    receivers: int
    """The number of the set."""
    shards: tuple[Shard, ...]
    """What receivers keep of it."""
    nbytes: int
    is_whole_part: bool
    """It is the sender's part of the bucket, as the plan has it; nothing is cut."""

    def views(self, message: torch.Tensor) -> list[torch.Tensor]:
        """The shards as views into the message (uint8 [nbytes])."""
        if self.is_whole_part:
            return [shard.in_part(message) for shard in self.shards]
        return [shard.in_message(message) for shard in self.shards]

    def bind_cut(self, part: torch.Tensor, message: torch.Tensor) -> BoundCopies:
        """What copies the shards from the sender's part of the bucket (uint8 [part_bytes]) into
        the message (uint8 [nbytes]). Not for a whole part, which is the message."""
        pairs = [(shard.in_message(message), shard.in_part(part)) for shard in self.shards]
        return BoundCopies(pairs, self.paddings(message))

    def paddings(self, message: torch.Tensor) -> list[torch.Tensor]:
        """The bytes that belong to no shard: they count in the checksum, and must be zeros."""
        if self.is_whole_part:
            return [shard.slot.padding(message) for shard in self.shards]
        return [
            message[shard.offset + shard.nbytes : shard.offset + shard.padded_bytes]
            for shard in self.shards
        ]


class Routes:
    """The messages of all buckets.

    Attributes:
        sets: the receivers of each set; the first one has all of them.
        rounds: the numbers of the sets. No two sets of a round share a receiver.
        messages: per bucket.
    """

    sets: list[tuple[int, ...]]
    rounds: list[list[int]]
    messages: list[list[Message]]

    def __init__(self, plan: BucketPlan, receivers: int) -> None:
        """Every part goes to all receivers; see `of_shard_blocks` for the other way."""
        self.senders = plan.senders
        self._number_rounds([[tuple(range(receivers))]])
        self.messages = []
        for bucket in plan.buckets:
            self.messages.append([_whole_part(bucket, s, ()) for s in _senders_of(bucket)])

    @staticmethod
    def of_shard_blocks(plan: BucketPlan, kept: ShardsOfReceivers) -> "Routes":
        """Each receiver gets what it keeps.

        Raises:
            SyncError: a receiver keeps something that no rank sends.
        """
        _check_all_is_sent(plan, kept)
        routes = Routes(plan, len(kept.kind_of_receiver))
        cutter = _Cutter(kept.blocks)
        sent = (slot.piece for bucket in plan.buckets for slot in bucket.slots)
        if kept.keeps_all({piece.name: piece.shape for piece in sent}):
            for index, bucket in enumerate(plan.buckets):
                shards_of_sender = _shards_of_whole_parts(bucket, cutter)
                routes.messages[index] = [
                    _whole_part(bucket, sender, tuple(shards_of_sender.get(sender, ())))
                    for sender in _senders_of(bucket)
                ]
            return routes
        routes._number_sets(plan, cutter, kept)
        for index, bucket in enumerate(plan.buckets):
            routes.messages[index] = list(routes._cut_messages(bucket, cutter))
        return routes

    def sets_of_sender(self, sender: int) -> list[int]:
        """The sets to which a sender sends, by turns: that of all receivers, and those for which it
        has messages."""
        used = {ALL_RECEIVERS}
        for messages in self.messages:
            used.update(message.receivers for message in messages if message.sender == sender)
        return sorted(used, key=lambda number: self.turn(sender, number))

    def streams_of_receiver(self, receiver: int) -> list[tuple[int, int]]:
        """(sender, set) of all that a receiver gets, by turns."""
        streams = []
        for sender in range(self.senders):
            for number in self.sets_of_sender(sender):
                if receiver in self.sets[number]:
                    streams.append((sender, number))
        return sorted(streams, key=lambda stream: self.turn(*stream))

    def turn(self, sender: int, receivers: int) -> tuple[int, int]:
        """When a sender's message of a bucket to a set of receivers is due.

        In one turn a sender sends to one set and a receiver gets from one sender. The turns of a
        round pair each sender with each set: with two senders and two sets the first turn has
        0 -> 0 and 1 -> 1, the second one 0 -> 1 and 1 -> 0.
        """
        number, place = self._place_of_set[receivers]
        pairs_at_once = max(self.senders, len(self.rounds[number]))
        return number, (place - sender) % pairs_at_once

    def stream_number(self, sender: int, receivers: int) -> int:
        """A number for a sender's stream to a set of receivers; that to all receivers has the
        sender's own number."""
        return sender + self.senders * receivers

    def messages_of_receiver(self, receiver: int) -> list[list[Message]]:
        """Per bucket the messages that a receiver gets, by turns."""
        own = {number for number, members in enumerate(self.sets) if receiver in members}
        return [
            sorted((m for m in messages if m.receivers in own), key=self._turn_of)
            for messages in self.messages
        ]

    def messages_of_sender(self, sender: int) -> list[list[Message]]:
        """Per bucket the messages of a sender, by turns."""
        return [
            sorted((m for m in messages if m.sender == sender), key=self._turn_of)
            for messages in self.messages
        ]

    def _turn_of(self, message: Message) -> tuple[int, int]:
        return self.turn(message.sender, message.receivers)

    def _number_rounds(self, rounds: list[list[tuple[int, ...]]]) -> None:
        """Fill `sets` and `rounds`. `rounds`: the receivers of each set of each round."""
        self.sets = []
        self.rounds = []
        self._place_of_set: list[tuple[int, int]] = []  # (round, place in it)
        for together in rounds:
            self.rounds.append([])
            for place, members in enumerate(together):
                self._place_of_set.append((len(self.rounds) - 1, place))
                self.rounds[-1].append(len(self.sets))
                self.sets.append(members)

    def _number_sets(self, plan: BucketPlan, cutter: "_Cutter", kept: ShardsOfReceivers) -> None:
        """Fill `sets` and `rounds`: each set into the first round without any of its kinds."""
        every_kind = tuple(range(len(kept.blocks)))
        kinds_of_sets = cutter.kinds_of_sets(plan) - {every_kind}
        rounds: list[list[tuple[int, ...]]] = [[every_kind]]
        for kinds in sorted(kinds_of_sets):
            for together in rounds[1:]:
                if not any(set(kinds) & set(other) for other in together):
                    together.append(kinds)
                    break
            else:
                rounds.append([kinds])
        members_of_rounds: list[list[tuple[int, ...]]] = []
        for together in rounds:
            members_of_rounds.append([])
            for kinds in together:
                members = [r for r, kind in enumerate(kept.kind_of_receiver) if kind in kinds]
                members_of_rounds[-1].append(tuple(members))
        self._number_rounds(members_of_rounds)
        self._number_of_kinds = {
            kinds: number for number, kinds in enumerate(itertools.chain(*rounds))
        }

    def _cut_messages(self, bucket: Bucket, cutter: "_Cutter") -> Iterator[Message]:
        """The messages of one bucket."""
        shards_of_message: dict[tuple[int, int], list[Shard]] = {}
        size_of_message: dict[tuple[int, int], int] = {}
        for slot in bucket.slots:
            itemsize = slot.dtype.itemsize
            for block, numbers, kinds in cutter.cut(slot):
                key = (slot.sender, self._number_of_kinds[kinds])
                offset = size_of_message.get(key, 0)
                size = numbers * itemsize
                shards_of_message.setdefault(key, []).append(Shard(slot, block, size, offset))
                size_of_message[key] = offset + _padded(size)
        for key in sorted(shards_of_message):
            sender, number = key
            own = tuple(shards_of_message[key])
            yield Message(sender, number, own, size_of_message[key], is_whole_part=False)


def _padded(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT


def _senders_of(bucket: Bucket) -> list[int]:
    """The senders with a part of a bucket."""
    return [sender for sender, size in enumerate(bucket.part_bytes) if size]


def _whole_part(bucket: Bucket, sender: int, shards: tuple[Shard, ...]) -> Message:
    return Message(sender, ALL_RECEIVERS, shards, bucket.part_bytes[sender], is_whole_part=True)


def _shards_of_whole_parts(bucket: Bucket, cutter: "_Cutter") -> dict[int, list[Shard]]:
    """Per sender the shards of its part, where nothing of the part is left out."""
    shards: dict[int, list[Shard]] = {}
    for slot in bucket.slots:
        for block, numbers, _ in cutter.cut(slot):
            shard = Shard(slot, block, numbers * slot.dtype.itemsize, 0)
            shards.setdefault(slot.sender, []).append(shard)
    return shards


class _Cut(NamedTuple):
    """A block that a slot is cut into."""

    block: Block
    numbers: int
    """In the block."""
    kinds: tuple[int, ...]
    """The kinds of receivers that keep it."""


class _Cutter:
    """Cuts slots at the borders of what receivers keep.

    Layers are alike, and so are experts: what was found for one tensor is used again for each one
    of the same shape of which the same blocks are kept.
    """

    def __init__(self, kept: tuple[ShardBlocks, ...]) -> None:
        """`kept`: by kind."""
        self.kept = kept
        self.pattern_of_tensor: dict[str, int] = {}
        self.number_of_pattern: dict[tuple, int] = {}
        self.cuts: dict[tuple[int, int, int, int], list[_Cut]] = {}

    def cut(self, slot: BucketSlot) -> list[_Cut]:
        """The blocks of a slot, without those that no receiver keeps."""
        piece = slot.piece
        pattern = self.pattern_of_tensor.get(piece.name)
        if pattern is None:
            kept = tuple(blocks.get(piece.name, ()) for blocks in self.kept)
            key = (piece.shape, kept)
            pattern = self.number_of_pattern.setdefault(key, len(self.number_of_pattern))
            self.pattern_of_tensor[piece.name] = pattern
        place = (pattern, piece.dim, piece.start, piece.stop)
        if place not in self.cuts:
            self.cuts[place] = list(self._cut(piece.name, piece.block))
        return self.cuts[place]

    def kinds_of_sets(self, plan: BucketPlan) -> set[tuple[int, ...]]:
        """The kinds of all blocks of a plan."""
        for bucket in plan.buckets:
            for slot in bucket.slots:
                self.cut(slot)
        return {cut.kinds for cuts in self.cuts.values() for cut in cuts}

    def _cut(self, name: str, own: Block) -> Iterator[_Cut]:
        """The blocks of a slot that holds `own` of a tensor."""
        if not own.numel:
            return
        kept_of_kind = [_clip(blocks.get(name, ()), own) for blocks in self.kept]
        if all(blocks == (own,) for blocks in kept_of_kind):
            yield _Cut(own, own.numel, tuple(range(len(self.kept))))
            return
        for block in _grid(own, itertools.chain(*kept_of_kind)):
            kinds = tuple(
                kind
                for kind, blocks in enumerate(kept_of_kind)
                if any(other.contains(block) for other in blocks)
            )
            if kinds:
                yield _Cut(block, block.numel, kinds)


def _clip(blocks: Sequence[Block], own: Block) -> tuple[Block, ...]:
    """What lies inside `own`."""
    clipped = (block.intersect(own) for block in blocks)
    return tuple(block for block in clipped if block is not None)


def _grid(own: Block, blocks: Iterator[Block]) -> Iterator[Block]:
    """`own`, cut at all borders of blocks inside it."""
    borders = [{start, stop} for start, stop in zip(own.start, own.stop, strict=True)]
    for block in blocks:
        for dim, found in enumerate(borders):
            found.update((block.start[dim], block.stop[dim]))
    ranges = [itertools.pairwise(sorted(found)) for found in borders]
    for sides in itertools.product(*ranges):
        yield Block(tuple(start for start, _ in sides), tuple(stop for _, stop in sides))


def _check_all_is_sent(plan: BucketPlan, kept: ShardsOfReceivers) -> None:
    sent = {slot.piece.name for bucket in plan.buckets for slot in bucket.slots}
    for blocks in kept.blocks:
        missing = [name for name, own in blocks.items() if own and name not in sent]
        if missing:
            raise SyncError(f"weight plan: a receiver keeps {missing[0]}, which no rank sends")
