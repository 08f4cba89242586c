"""Which ranks send, and what each of the others gives to its sender.

Every sender has a group with all receivers, so a receiver would hold one communicator per trainer
rank. `weight_sync.max_senders` bounds that: the ranks are divided into groups of neighbors, which
means within a node first. The first rank of a group, its leader, sends the pieces of all its
members; rows that lie side by side leave as one piece. So plans and receivers do not grow with the
number of ranks either. `member_link.py` brings the members' pieces to the leader.
"""

import itertools
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext, suppress
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

import torch

from one_step_off.cluster.bounded_waits import POLL_INTERVAL_S, Aborted
from one_step_off.cluster.errors import GIVEN_UP, SyncError
from one_step_off.weight_sync import member_link
from one_step_off.weight_sync.bound_copies import BoundCopies
from one_step_off.weight_sync.bucket_plan import BucketPlan, BucketSlot, Pieces, pieces_by_tensor
from one_step_off.weight_sync.gpu_queue import GpuQueue, open_queue
from one_step_off.weight_sync.report import TransferRecord
from one_step_off.weight_sync.weight_piece import WeightPiece


@dataclass(frozen=True)
class SenderGroup:
    """Neighboring ranks whose pieces one of them sends."""

    ranks: tuple[int, ...]
    """The leader first."""
    pieces: list[WeightPiece]
    """What the leader sends: the pieces of all members, joined where they lie side by side."""

    @property
    def leader(self) -> int:
        """The rank that sends."""
        return self.ranks[0]

    @property
    def members(self) -> tuple[int, ...]:
        """The ranks that give their pieces to the leader."""
        return self.ranks[1:]


def form_groups(pieces: Pieces, max_senders: int) -> list[SenderGroup]:
    """The senders and their groups, in the order of their ranks. Ranks without pieces are in none.

    Args:
        pieces: per rank the pieces that it owns.
        max_senders: weight_sync.max_senders; 0: as many as there are ranks.

    Raises:
        SyncError: as `pieces_by_tensor`.
    """
    owners = [rank for rank, owned in enumerate(pieces) if owned]
    if max_senders == 0 or len(owners) <= max_senders:
        return [SenderGroup((rank,), pieces[rank]) for rank in owners]
    borders = [len(owners) * i // max_senders for i in range(max_senders + 1)]
    group_of_owner: list[int] = []
    for group, (start, stop) in enumerate(itertools.pairwise(borders)):
        group_of_owner += [group] * (stop - start)
    pieces_of_group: Pieces = [[] for _ in range(max_senders)]
    for parts in pieces_by_tensor([pieces[rank] for rank in owners]):
        for group, joined in _join_neighbors(parts, group_of_owner):
            pieces_of_group[group].append(joined)
    groups = []
    for group, (start, stop) in enumerate(itertools.pairwise(borders)):
        groups.append(SenderGroup(tuple(owners[start:stop]), pieces_of_group[group]))
    return groups


def _join_neighbors(
    parts: list[tuple[int, WeightPiece]], group_of_owner: list[int]
) -> Iterator[tuple[int, WeightPiece]]:
    """(group, piece): one tensor's pieces, of which those that follow one another in one group are
    joined. `parts`: (owner, piece) in the order of rows, without gaps."""
    for group, run in itertools.groupby(parts, key=lambda part: group_of_owner[part[0]]):
        run_pieces = [piece for _, piece in run]
        yield group, replace(run_pieces[0], stop=run_pieces[-1].stop)


@dataclass(frozen=True)
class RankShard:
    """What one rank has of a slot of its group."""

    slot: BucketSlot
    """Of the group, in the leader's part of a bucket."""
    own: BucketSlot
    """The rank's part of it; its offset is that in the rank's message of this bucket."""

    @property
    def begins_its_piece(self) -> bool:
        """Whether it is the first one of the rank's piece."""
        return self.own.piece.start == self.own.source.start

    def place_in(self, part: torch.Tensor) -> torch.Tensor:
        """Where the rank's data belongs in the leader's part: a view of `part` (uint8 [n])."""
        return self.own.piece.slice_of(self.slot.view(part), self.slot.piece.start)


def shards_of_rank(
    plan: BucketPlan, sender: int, pieces: list[WeightPiece]
) -> list[list[RankShard]]:
    """Per bucket what a rank has of its group's part, in the order in which the rank yields its
    data.

    Args:
        plan: of all senders.
        sender: the index of the rank's group.
        pieces: the rank's own.
    """
    pieces_of_tensor: dict[str, list[WeightPiece]] = {}
    for piece in pieces:
        pieces_of_tensor.setdefault(piece.name, []).append(piece)
    shards_of_bucket = []
    for bucket in plan.buckets:
        shards: list[RankShard] = []
        offset = 0
        for slot in bucket.slots_of(sender):
            for piece in pieces_of_tensor.get(slot.piece.name, ()):
                start = max(piece.start, slot.piece.start)
                stop = min(piece.stop, slot.piece.stop)
                if start < stop:
                    own = BucketSlot(replace(piece, start=start, stop=stop), piece, sender, offset)
                    shards.append(RankShard(slot, own))
                    offset += own.padded_bytes
        shards_of_bucket.append(shards)
    return shards_of_bucket


def message_bytes(shards: list[RankShard]) -> int:
    """Bytes of a rank's message of one bucket."""
    if not shards:
        return 0
    last = shards[-1].own
    return last.offset + last.padded_bytes


class PiecePacker:
    """Copies a rank's pieces out of its tensors into buffers, bucket by bucket.

    Tensors that stay where they are, a list, are bound to the buffers once. Others are made one at
    a time, for instance merged with an adapter, and are copied as they come.
    """

    def __init__(
        self,
        name: str,
        shards_of_bucket: list[list[RankShard]],
        place_of: Callable[[RankShard, torch.Tensor], torch.Tensor],
        paddings_of: Callable[[int, torch.Tensor], list[torch.Tensor]],
    ) -> None:
        """
        Args:
            name: of the rank or sender, in errors.
            shards_of_bucket: the rank's, in the order in which it has its data.
            place_of: where a shard's data goes in a buffer, uint8 [n].
            paddings_of: what must be zero in a buffer, by the index of its bucket.
        """
        self.name = name
        self.shards_of_bucket = shards_of_bucket
        self.place_of = place_of
        self.paddings_of = paddings_of
        self.live: list[torch.Tensor] | None = None
        self.coming: Iterator[torch.Tensor] = iter(())
        self.tensor_in_work: torch.Tensor | None = None  # of which a strip is still to be packed
        # By bucket and the address of the buffer.
        self.bound: dict[tuple[int, int], BoundCopies] = {}
        self.places: dict[tuple[int, int], BoundPlaces] = {}

    def start(self, tensors: Iterable[torch.Tensor]) -> None:
        """Take the data of the next sync.

        Args:
            tensors: the data of the rank's pieces. The same list as before has the same memory.

        Raises:
            SyncError: a tensor of a list is not as planned.
        """
        self.tensor_in_work = None
        if tensors is self.live:
            return
        self.bound.clear()
        self.live = None
        if isinstance(tensors, list):
            sources = [
                shard.own.source
                for shards in self.shards_of_bucket
                for shard in shards
                if shard.begins_its_piece
            ]
            for source, tensor in zip(sources, tensors, strict=True):
                self._check_shape(source, tensor)
            self.live = tensors
        else:
            self.coming = iter(tensors)

    def pack(self, index: int, buffer: torch.Tensor) -> None:
        """Copy the rank's data of bucket `index` into `buffer` (uint8 [n]), and zero its paddings.

        Raises:
            SyncError: a tensor is not as planned.
        """
        key = (index, buffer.data_ptr())
        if key not in self.places:
            shards = self.shards_of_bucket[index]
            places = [self.place_of(shard, buffer) for shard in shards]
            self.places[key] = BoundPlaces(places, BoundCopies((), self.paddings_of(index, buffer)))
        if self.live is None:
            self._pack_coming(index, self.places[key])
            return
        if key not in self.bound:
            pairs = zip(self.places[key].views, self._live_sources(index), strict=True)
            self.bound[key] = BoundCopies(pairs, self.places[key].zeros.paddings)
        self.bound[key].write()

    def end(self) -> None:
        """The tensor in work may be a copy, whose memory is free now."""
        self.tensor_in_work = None
        self.coming = iter(())

    def _pack_coming(self, index: int, places: "BoundPlaces") -> None:
        """Copy the shards of tensors that are made one at a time."""
        for shard, place in zip(self.shards_of_bucket[index], places.views, strict=True):
            own = shard.own
            if shard.begins_its_piece:
                self.tensor_in_work = next(self.coming)
                self._check_shape(own.source, self.tensor_in_work)
            source = own.piece.slice_of(self.tensor_in_work, own.source.start)
            place.copy_(source, non_blocking=True)
        places.zeros.write()

    def _live_sources(self, index: int) -> Iterator[torch.Tensor]:
        """The data of a bucket's shards, in the live tensors."""
        number = self._first_source[index]
        for shard in self.shards_of_bucket[index]:
            if shard.begins_its_piece:
                number += 1
            own = shard.own
            yield own.piece.slice_of(self.live[number], own.source.start)

    @cached_property
    def _first_source(self) -> list[int]:
        """Per bucket the number of the tensor that a strip at its beginning continues."""
        number = -1
        first = []
        for shards in self.shards_of_bucket:
            first.append(number)
            number += sum(shard.begins_its_piece for shard in shards)
        return first

    def _check_shape(self, source: WeightPiece, tensor: torch.Tensor) -> None:
        if tensor.shape != source.block_shape:
            shape = tuple(tensor.shape)
            raise SyncError(f"{self.name}: {source.name} is {shape}, planned {source.block_shape}")


class BoundPlaces(NamedTuple):
    """Where the shards of a bucket go in one buffer."""

    views: list[torch.Tensor]
    zeros: BoundCopies
    """Zeroes the buffer's paddings."""


class GroupLeader:
    """Collects the pieces of a sender group's members, bucket by bucket."""

    def __init__(
        self,
        plan: BucketPlan,
        sender: int,
        group: SenderGroup,
        pieces: Pieces,
        device: torch.device,
        host: str,
    ) -> None:
        """Allocate the buffers and listen for the members.

        Args:
            plan: of all senders.
            sender: the index of this group.
            group: of this leader.
            pieces: of each of `group.ranks`.
            device: of the leader's buckets.
            host: the address at which it listens.
        """
        leader_pieces, *member_pieces = pieces
        self.device = device
        self.own_shards = shards_of_rank(plan, sender, leader_pieces)
        # Per bucket the shards of those members that have some.
        self.member_shards: list[dict[int, list[RankShard]]] = [{} for _ in plan.buckets]
        for rank, owned in zip(group.members, member_pieces, strict=True):
            for index, shards in enumerate(shards_of_rank(plan, sender, owned)):
                if shards:
                    self.member_shards[index][rank] = shards
        largest = 0
        for shards_of_member in self.member_shards:
            sizes = map(message_bytes, shards_of_member.values())
            largest = max(largest, *sizes, 0)
        on_gpu = device.type == "cuda"
        self.host_buffer = torch.zeros(largest, dtype=torch.uint8, pin_memory=on_gpu)
        self.device_buffer = self.host_buffer
        if on_gpu:
            self.device_buffer = torch.zeros(largest, dtype=torch.uint8, device=device)
        # By member, bucket and the address of the part.
        self.bound: dict[tuple[int, int, int], BoundCopies] = {}
        self.links = member_link.MemberLinks(host, group.members)

    def collect(
        self, index: int, part: torch.Tensor, limit_s: float, queue: GpuQueue | None
    ) -> None:
        """Fill the members' shards of bucket `index` in `part` (uint8 [n]).

        Args:
            index: of the bucket.
            part: the group's part of it.
            limit_s: for the message of one member.
            queue: of the sender; None: on CPUs.

        Raises:
            As `MemberLinks.receive`.
        """
        for rank, shards in self.member_shards[index].items():
            size = message_bytes(shards)
            self.links.receive(rank, index, self.host_buffer[:size], limit_s)
            message = self.device_buffer[:size]
            if self.device_buffer is not self.host_buffer:
                message.copy_(self.host_buffer[:size], non_blocking=True)
            key = (rank, index, part.data_ptr())
            if key not in self.bound:
                pairs = [(shard.place_in(part), shard.own.view(message)) for shard in shards]
                self.bound[key] = BoundCopies(pairs)
            self.bound[key].write()
            if queue:
                # The next message takes the place of this one. This stream waits for nothing else.
                queue.wait(queue.mark())


def _place_in_message(shard: RankShard, message: torch.Tensor) -> torch.Tensor:
    """Where a shard lies in its member's message."""
    return shard.own.view(message)


class GroupMember:
    """A rank that gives its pieces to the leader of its group. It is in no group with receivers."""

    def __init__(
        self,
        plan: BucketPlan,
        sender: int,
        pieces: list[WeightPiece],
        rank: int,
        device: torch.device,
        timeout_s: float,
        limit_s: float,
    ) -> None:
        """Allocate the buffers; nothing is connected yet.

        Args:
            plan: of all senders.
            sender: the index of this rank's group.
            pieces: of this rank.
            rank: of the trainer.
            device: of the pieces.
            timeout_s: weight_sync.timeout_s, to connect.
            limit_s: for the leader to read a message. Meanwhile it sends what other ranks have, so
                this is the limit of a whole sync.
        """
        self.plan = plan
        self.rank = rank
        self.name = f"member {rank} of sender {sender}"
        self.timeout_s = timeout_s
        self.limit_s = limit_s
        self.shards_of_bucket = shards_of_rank(plan, sender, pieces)
        largest = max(map(message_bytes, self.shards_of_bucket), default=0)
        on_gpu = device.type == "cuda"
        self.host_buffer = torch.zeros(largest, dtype=torch.uint8, pin_memory=on_gpu)
        self.buffer = self.host_buffer
        self.queue = open_queue(device)
        if on_gpu:
            self.buffer = torch.zeros(largest, dtype=torch.uint8, device=device)
        self.packer = PiecePacker(
            self.name, self.shards_of_bucket, _place_in_message, self._paddings_of
        )
        self.link: member_link.Link | None = None
        self.lock = threading.Lock()
        self.aborted: dict[int, str] = {}  # epoch -> reason
        self.epoch = 0
        self.phase = "connect"
        self.bucket_number = 0

    def connect(self, epoch: int, address: member_link.LeaderAddress) -> None:
        """Join the leader in a new epoch; an earlier epoch's link is closed.

        Raises:
            SyncError: the leader is gone, or the epoch was aborted.
        """
        self.close()
        self.epoch = epoch
        self.phase = "connect"
        self.bucket_number = 0
        try:
            self._check()
            link = member_link.connect_to_leader(
                address, epoch, self.rank, self.timeout_s, self._check
            )
            self.link = link
            self._check()  # an abort may have come before there was a link to close
        except Exception as error:
            self.close()
            raise self._named(error) from error

    def send(
        self, tensors: Iterable[torch.Tensor], version: int, held_version: int
    ) -> dict[str, Any]:
        """Give the leader this rank's pieces as weight version `version`, if it asks for them.

        Args:
            tensors: the pieces' data, in the order of the plan.
            version: of the weights that are sent.
            held_version: of `tensors`.

        Returns:
            As `WeightSender.send`. All bytes count at the leader.

        Raises:
            SyncError: names this rank, phase and bucket. The link is closed then.
        """
        record = TransferRecord()
        self.phase = "order"
        self.bucket_number = 0
        link = self.link
        try:
            if link is None:
                raise SyncError(f"{self.name} has no link to its leader; it must connect first")
            with self.queue.use() if self.queue else nullcontext():
                self._send_buckets(link, tensors, version, held_version, record)
        except Exception as error:
            named = self._named(error)
            self._give_up(link, str(named))
            raise named from error
        return record.report() | {"changed": 0.0}

    def abort(self, epoch: int, reason: str) -> None:
        """End this rank's waits of an epoch. For any thread."""
        with self.lock:
            self.aborted = {epoch: reason}
        if self.epoch == epoch and self.link is not None:
            self.link.close()

    def close(self) -> None:
        """Break the link; the leader fails if it waits for this rank."""
        if self.link is not None:
            self.link.close()
        self.link = None

    def _send_buckets(
        self,
        link: member_link.Link,
        tensors: Iterable[torch.Tensor],
        version: int,
        held_version: int,
        record: TransferRecord,
    ) -> None:
        digest, sent_version, wants_data = member_link.receive_order(link, self.limit_s)
        if (digest, sent_version) != (self.plan.digest, version):
            raise SyncError(
                f"{self.name}: its leader sends version {sent_version}, expected {version}, "
                "or follows another bucket plan"
            )
        if not wants_data:
            return
        if held_version != version:
            raise SyncError(f"{self.name} holds version {held_version}, asked to send {version}")
        self.phase = "gather"
        self.packer.start(tensors)
        for index, shards in enumerate(self.shards_of_bucket):
            if not shards:
                continue
            self.bucket_number = index + 1
            self.phase = "gather"
            begin = time.perf_counter()
            message = self._pack(index)
            record.add_phase("gather", time.perf_counter() - begin)
            self.phase = "send"
            member_link.send_message(link, index, message, self.limit_s)

        self.packer.end()

    def _pack(self, index: int) -> torch.Tensor:
        """This rank's message of one bucket, in host memory."""
        size = message_bytes(self.shards_of_bucket[index])
        buffer = self.buffer[:size]
        self.packer.pack(index, buffer)
        message = self.host_buffer[:size]
        if self.queue:
            message.copy_(buffer, non_blocking=True)
            self.queue.wait(self.queue.mark())
        return message

    def _paddings_of(self, index: int, message: torch.Tensor) -> list[torch.Tensor]:
        return [shard.own.padding(message) for shard in self.shards_of_bucket[index]]

    def _give_up(self, link: member_link.Link | None, reason: str) -> None:
        """Close the link, and tell the leader why."""
        if link is not None:
            # Not for long: the leader may not read any more.
            with suppress(OSError, Aborted):
                member_link.send_failure(link, reason, POLL_INTERVAL_S)
        self.close()

    def _check(self) -> None:
        """Raises Aborted: this epoch was aborted."""
        with self.lock:
            reason = self.aborted.get(self.epoch)
        if reason is not None:
            raise Aborted(reason)

    def _named(self, error: Exception) -> SyncError:
        """The SyncError that names this rank and the place."""
        if isinstance(error, SyncError):
            return error
        lines = str(error).strip().splitlines()
        cause = lines[0] if lines else type(error).__name__
        if isinstance(error, (Aborted, ConnectionError)):
            # A leader that ends the link gave up, or died: then the driver finds it.
            cause = f"{GIVEN_UP}{cause}"
        bucket = f"bucket {self.bucket_number} of {len(self.plan.buckets)}"
        return SyncError(f"{self.name}, phase {self.phase}, {bucket}: {cause}")
