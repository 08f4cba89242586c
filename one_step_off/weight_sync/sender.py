"""The weight sender of one trainer rank."""

import itertools
import math
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch
import torch.distributed as dist

from one_step_off.cluster.bounded_waits import AbortSignal, WorkerThread
from one_step_off.cluster.core_binding import unpin
from one_step_off.cluster.errors import SyncError
from one_step_off.distributed_util import connect_timeout
from one_step_off.weight_sync import delta
from one_step_off.weight_sync.bound_copies import BoundCopies
from one_step_off.weight_sync.bucket_plan import BucketPlan, checksum
from one_step_off.weight_sync.gpu_queue import Mark
from one_step_off.weight_sync.launch_order import Step, send_steps
from one_step_off.weight_sync.routes import ALL_RECEIVERS, Message, Routes, ShardsOfReceivers
from one_step_off.weight_sync.sender_groups import GroupLeader, PiecePacker, RankShard
from one_step_off.weight_sync.stream_peer import MEASURED_TRANSFERS, StreamPeer
from one_step_off.weight_sync.transports.same_device import SharedBuffer, SharedMemorySender
from one_step_off.weight_sync.transports.transport import SendEnd, Transport

Messages = dict[int, torch.Tensor]
"""Set of receivers -> what goes to it."""


class SendKind(Enum):
    """What one sync sends."""

    FULL = "full"
    """All bytes of the model."""
    DELTA = "delta"
    """What changed since the last sync of the same epoch."""
    RESEND = "resend"
    """All bytes of the version that was sent last, from the sender's copy in host memory."""


@dataclass
class BucketOnWire:
    """A bucket that the wire's thread is sending."""

    index: int
    seconds: Future[float]
    """The time on the wire, when it has reached every receiver."""


@dataclass
class SendProgress:
    """One sync of one sender."""

    version: int
    kind: SendKind
    routes: Routes
    sharded_only: bool
    keeps: bool
    """Each part is copied to host memory as it is packed."""
    messages_of_bucket: list[list[Message]]
    buffers: "itertools.cycle[tuple[torch.Tensor, torch.Tensor]]"
    """For a part and for what is cut out of it."""
    checksums: Messages
    """Of each set of receivers int64 [buckets, 2], on the device."""
    filled: list[tuple[int, int]]
    """Index and bytes of each part that is not empty."""


KEEP_THREAD = "weight-keep"
"""The name of the thread that copies what was sent to host memory."""

SEND_BUFFERS = 2
"""The next bucket is packed while one is on the wire."""


class WeightSender(StreamPeer):
    """Sends the pieces of one trainer rank, or of the ranks of a sender group. It is rank 0 of each
    group with its receivers, and its store is the groups'."""

    role = "sender"

    full_every = 0
    """0: every sync sends all bytes; n > 0: it sends what changed, and all bytes in every n-th
    sync, or when the caller wants that."""
    keep_sent = False
    """Keep what was sent in host memory, to send it again after the model has changed."""
    kept_version: int | None = None
    """The version that is kept, completely; None: none."""
    leader: GroupLeader | None = None
    """Collects the other ranks' pieces, where this one leads a sender group."""

    def __init__(
        self,
        plan: BucketPlan,
        index: int,
        device: torch.device,
        host: str,
        timeout_s: float,
        transport: Transport | None = None,
    ) -> None:
        """As `StreamPeer`; also opens the store at which receivers meet, at `address`."""
        super().__init__(plan, index, device, host, timeout_s, transport)
        self.ends_of_set: dict[int, list[SendEnd]] = {}
        self.whole_routes = Routes(plan, 0)
        self.shard_routes: Routes | None = None  # None: what receivers keep is not known
        self.cut_buffers: list[torch.Tensor] = []  # messages, where they are no whole parts
        self.slots_of_bucket = [bucket.slots_of(index) for bucket in plan.buckets]
        self.part_sizes = [bucket.part_bytes[index] for bucket in plan.buckets]
        self.store, self.address = self.transport.open_store(host, index, timeout_s)
        self.abort_store = self.store.clone()  # for `abort`, while a send waits in the other one
        self.buffers: list[torch.Tensor] = []
        # For all epochs: a receiver that is killed never releases what it has mapped on a GPU.
        self.shared_buffers: list[SharedBuffer] = []
        self.kept_parts: list[torch.Tensor] = []  # what was sent last, bucket by bucket
        self.deltas_since_full: int | None = None  # None: receivers hold nothing of this epoch
        self.packer = self._new_packer()
        # By bucket, set of receivers, and the addresses of the part and the message.
        self.bound_cuts: dict[tuple[int, int, int, int], BoundCopies] = {}
        # Deltas on GPUs: the part as it was sent last, and what is cut out of it.
        self.base_buffer = torch.zeros(0, dtype=torch.uint8, device=device)
        self.base_cut_buffer = self.base_buffer
        self.keeping: Future[None] | None = None

    def close(self) -> None:
        """Leave all groups; receivers and members that wait for this sender fail."""
        super().close()
        if self.leader is not None:
            self.leader.links.close()

    def connect(
        self,
        epoch: int,
        receivers: int,
        same_device: Sequence[int] = (),
        kept: ShardsOfReceivers | None = None,
    ) -> None:
        """Form the groups with the vLLM workers, which must call `WeightReceiver.connect`
        meanwhile.

        An earlier epoch's groups are closed.

        Args:
            epoch: counts the groups.
            receivers: how many there are.
            same_device: the numbers of those on this sender's device, which need no network.
            kept: which blocks the receivers keep; None: not known, they can only get whole tensors.

        Raises:
            SyncError: not all joined within `connect_timeout`, or the epoch was aborted.
        """
        self.finish_keeping()  # it reads the buffers
        self.close()
        self.deltas_since_full = None
        # A separate connection: a group that was abandoned may still hold an earlier epoch's.
        store = dist.PrefixStore(f"{epoch}", self.store.clone())
        self.abort_signals = [AbortSignal(store)]
        self._prepare_routes(receivers, kept)
        self.packer = self._new_packer()
        self.bound_cuts = {}
        routes = self.shard_routes or self.whole_routes
        groups = self.plan.senders * len(routes.sets)
        limit_s = connect_timeout(self.timeout_s, groups, receivers)
        deadline = time.monotonic() + limit_s
        try:
            with self._phase("connect"):
                self._check_abort_signals()
                if self.leader is not None:
                    # Before the deadline of the receivers: this one can name a missing member.
                    members_deadline = time.monotonic() + self.timeout_s
                    self.leader.links.accept(epoch, members_deadline, self._check_abort_signals)
                self._open_streams(epoch, store, same_device, deadline)
                self._measure_link()
                # Now, because pinned memory takes long to allocate.
                self._allocate_kept_parts()
                self._wait_for_device()  # the buffers are zeroed on another stream
        except BaseException as error:
            self.give_up(error)
            raise

    def share_kept(self, other: "WeightSender") -> None:
        """Let this sender send again what `other`, of the same plan, has sent last."""
        other.finish_keeping()
        self.kept_parts = other.kept_parts
        self.kept_version = other.kept_version

    def abort(self, epoch: int, reason: str) -> None:
        """End every wait of an epoch, at this sender and at its receivers. For any thread."""
        signal = AbortSignal(dist.PrefixStore(f"{epoch}", self.abort_store))
        signal.set(reason)
        signal.close()

    def send(
        self,
        tensors: Iterable[torch.Tensor],
        version: int,
        sharded_only: bool = False,
        wants_full: bool = False,
    ) -> dict[str, Any]:
        """Send this rank's pieces as weight version `version`.

        On GPUs what was sent is copied to host memory afterwards: the tensors must not change
        before `finish_keeping`.

        Args:
            tensors: the pieces' data, in the order of the plan; not read for `kept_version`. A list
                has tensors that stay where they are, and is the same one in each sync until they
                move.
            version: of the weights.
            sharded_only: each receiver gets its own blocks, in place of whole tensors; all
                senders and receivers must agree.
            wants_full: all bytes, also where a delta could be sent.

        Returns:
            Seconds per phase (gather, checksum, encode, keep, wire), "bytes" on the wire, "changed"
            16-bit words (NaN unless a delta was sent), "bucket_wire": [index, seconds on the wire]
            of each bucket, "spans", and on GPUs "communicator_bytes" of the groups.

        Raises:
            SyncError: names this sender, phase and bucket. The group is closed then, and receivers
                do not wait for it any longer.
        """
        with self._giving_up_on_errors():
            self.finish_keeping()
            progress = self._begin_send(tensors, version, sharded_only, wants_full)
            self._send_buckets(progress)
            self._end_send(progress)
        changed_words = math.nan
        if progress.kind is SendKind.DELTA:
            changed_words = float(self.record.changed_words)
        return self._report() | {"changed": changed_words}

    @contextmanager
    def _giving_up_on_errors(self) -> Iterator[None]:
        """Around a send: after an error the groups are closed."""
        try:
            if not self.ends:
                raise SyncError(f"{self.name} is in no group; it must connect first")
            with self.queue.use() if self.queue else nullcontext():
                yield
        except BaseException as error:
            self.deltas_since_full = None  # what receivers hold is unknown
            self.give_up(error)
            raise

    def _prepare_routes(self, receivers: int, kept: ShardsOfReceivers | None) -> None:
        """Find what goes to which receivers, and allocate the buffers for what must be cut."""
        self.whole_routes = Routes(self.plan, receivers)
        self.shard_routes = None if kept is None else Routes.of_shard_blocks(self.plan, kept)
        largest = 0
        if self.shard_routes is not None:
            for messages in self.shard_routes.messages_of_sender(self.index):
                cut = [message.nbytes for message in messages if not message.is_whole_part]
                largest = max(largest, sum(cut))
        if not self.cut_buffers or len(self.cut_buffers[0]) < largest:
            self.cut_buffers = [
                torch.zeros(largest, dtype=torch.uint8, device=self.device)
                for _ in range(SEND_BUFFERS)
            ]

    def _open_streams(
        self, epoch: int, store: dist.Store, same_device: Sequence[int], deadline: float
    ) -> None:
        """Open the stream in shared memory to receivers on the same device, and one to each set of
        remote ones."""
        self.ends_of_set = {}
        routes = self.shard_routes or self.whole_routes
        for number in routes.sets_of_sender(self.index):
            receivers = routes.sets[number]
            self.ends_of_set[number] = []
            if number == ALL_RECEIVERS:
                self._open_buffers(store, same_device)
                receivers = [r for r in receivers if r not in same_device]
            if receivers:
                stream = self._describe_stream(self.index, epoch, store, tuple(receivers), number)
                end = self._open_end(deadline, self.transport.open_sender, stream)
                self.ends_of_set[number].append(end)

    def _open_buffers(self, store: dist.Store, same_device: Sequence[int]) -> None:
        """Allocate the buffers of this sender's parts, shared with receivers on the same device."""
        buffer_sizes = [max(self.part_sizes, default=0)] * SEND_BUFFERS
        if same_device:
            if not self.shared_buffers:
                self.shared_buffers = [SharedBuffer(size, self.device) for size in buffer_sizes]
            self.buffers = [buffer.tensor for buffer in self.shared_buffers]
            shared = SharedMemorySender(store, self.shared_buffers, list(same_device))
            self.ends.append(shared)
            self.ends_of_set[ALL_RECEIVERS].append(shared)
        elif not self.buffers:
            # Zeros and not empty, so that the pages are touched before the first sync.
            self.buffers = [
                torch.zeros(size, dtype=torch.uint8, device=self.device) for size in buffer_sizes
            ]

    def _measure_link(self) -> None:
        """Send the first bucket without its content, for receivers to measure the bare link."""
        if not self.part_sizes[0]:
            return
        remote = [
            end
            for end in self.ends_of_set[ALL_RECEIVERS]
            if not isinstance(end, SharedMemorySender)
        ]
        for _ in range(MEASURED_TRANSFERS if remote else 0):
            first = {ALL_RECEIVERS: self.buffers[0][: self.part_sizes[0]]}
            self._on_wire(self._send_messages, first, {ALL_RECEIVERS: remote})

    def _choose_kind(self, version: int, wants_full: bool) -> SendKind:
        if version == self.kept_version:
            return SendKind.RESEND
        if wants_full or self.full_every == 0 or self.deltas_since_full is None:
            return SendKind.FULL
        if self.deltas_since_full + 1 >= self.full_every:
            return SendKind.FULL
        return SendKind.DELTA

    def _count_send(self, kind: SendKind) -> None:
        if kind is SendKind.DELTA:
            self.deltas_since_full += 1
        else:
            self.deltas_since_full = 0

    def _begin_send(
        self,
        tensors: Iterable[torch.Tensor],
        version: int,
        sharded_only: bool,
        wants_full: bool,
    ) -> SendProgress:
        """Choose what to send, and send the header."""
        self._begin_sync()
        routes = self.shard_routes if sharded_only else self.whole_routes
        if routes is None:
            raise SyncError(f"{self.name} does not know what the receivers keep")
        kind = self._choose_kind(version, wants_full)
        self._count_send(kind)
        sends_deltas = self.full_every > 0
        self._allocate_kept_parts()
        if kind is not SendKind.RESEND:
            self.kept_version = None  # until all parts are kept
            with self._phase("gather"):
                self.packer.start(tensors)
        if self.leader is not None:
            wants_data = kind is not SendKind.RESEND
            with self._phase("order"):
                self.leader.links.order((self.plan.digest, version, wants_data), self.timeout_s)
        header = self._numbers(self.plan.digest, version, int(sends_deltas), int(sharded_only))
        with self._phase("header"):
            self._on_wire(self._broadcast, None, {ALL_RECEIVERS: header})
        return SendProgress(
            version=version,
            kind=kind,
            routes=routes,
            sharded_only=sharded_only,
            keeps=bool(self.kept_parts) and kind is not SendKind.RESEND and not self._keeps_later(),
            messages_of_bucket=routes.messages_of_sender(self.index),
            buffers=itertools.cycle(zip(self.buffers, self.cut_buffers, strict=True)),
            checksums=self._zero_checksums(routes),
            filled=[(index, size) for index, size in enumerate(self.part_sizes) if size],
        )

    def _send_buckets(self, progress: SendProgress) -> None:
        """Send all buckets, and then their checksums."""
        on_wire: BucketOnWire | None = None
        checksums: Messages = {}
        for index, size in progress.filled:
            self.bucket_number = index + 1
            part_buffer, cut_buffer = next(progress.buffers)
            part = part_buffer[:size]
            if self._packs_into_kept_parts():
                part = self.kept_parts[index]
            self._fill_part(index, part, progress)
            sent = self._prepare_messages(index, part, cut_buffer, progress)
            if (index, size) == progress.filled[-1]:
                # Before the last wait for the device, so that they need none of their own.
                for number, sums in progress.checksums.items():
                    checksums[number] = self._host_copy(sums)
            packed = self.queue.mark() if self.queue else None  # a CPU has packed it already
            self._finish_bucket(on_wire)
            seconds = self.wire_thread.submit(self._broadcast, packed, *sent)
            on_wire = BucketOnWire(index, seconds)
        self._finish_bucket(on_wire)
        if not progress.filled:  # receivers wait for them all the same
            checksums = {number: sums.cpu() for number, sums in progress.checksums.items()}
        with self._phase("wire"):
            self._on_wire(self._broadcast, None, checksums)

    def _end_send(self, progress: SendProgress) -> None:
        """Keep what was sent."""
        self.packer.end()
        if not self.kept_parts or progress.kind is SendKind.RESEND:
            return
        if progress.keeps:
            self.kept_version = progress.version
        else:
            thread = WorkerThread(KEEP_THREAD, unpin)
            self.keeping = thread.submit(self._keep, progress.version)
            thread.stop()  # afterwards: a thread that waits would hold this sender's memory

    def _keeps_later(self) -> bool:
        """Whether what was sent is copied to host memory after the sync, while replicas generate
        with it: on GPUs, out of tensors that still hold it. A leader does not have its members'."""
        return self.queue is not None and self.leader is None and self.packer.live is not None

    def _keep(self, version: int) -> None:
        """On its own thread: pack every part again, into the send buffers, and copy it to host
        memory. Nothing else uses the sync's stream meanwhile."""
        parts = zip(self.part_sizes, itertools.cycle(self.buffers))
        with self.queue.use() if self.queue else nullcontext():
            for index, (size, buffer) in enumerate(parts):
                part = buffer[:size]
                self.packer.pack(index, part)
                self.kept_parts[index].copy_(part, non_blocking=True)
            self._wait_for_device()
        self.kept_version = version

    def finish_keeping(self) -> None:
        """Wait until what was sent last is in host memory: from then on the weights may change.

        Raises:
            SyncError: it is not there in three times the time limit, or could not be copied.
        """
        keeping = self.keeping  # another thread may come here, too
        if keeping is None:
            return
        try:
            keeping.result(3 * self.timeout_s)
        except Exception as error:
            raise SyncError(self._failure_message("keep", 0, error)) from error
        self.keeping = None

    def _zero_checksums(self, routes: Routes) -> Messages:
        """Per set of receivers int64 [buckets, 2]."""
        checksums = {}
        for number in routes.sets_of_sender(self.index):
            checksums[number] = torch.zeros(
                len(self.plan.buckets), 2, dtype=torch.int64, device=self.device
            )
        return checksums

    def _allocate_kept_parts(self) -> None:
        """Host memory for what is sent, if it is needed and not there yet."""
        if self.kept_parts or not (self.full_every > 0 or self.keep_sent):
            return
        pinned = self.device.type == "cuda"
        for size in self.part_sizes:
            part = torch.zeros(size, dtype=torch.uint8, pin_memory=pinned)
            self.kept_parts.append(part)

    def _packs_into_kept_parts(self) -> bool:
        """Whether parts are packed where they are kept, and sent from there.

        Not where deltas are made, which compare a part with the kept one. Not on GPUs, where parts
        are kept in host memory, and not where receivers read the send buffers themselves.
        """
        makes_deltas = self.full_every > 0
        is_on_cpu = self.device.type == "cpu"
        return bool(self.kept_parts) and is_on_cpu and not (makes_deltas or self.shared_buffers)

    def _fill_part(self, index: int, part: torch.Tensor, progress: SendProgress) -> None:
        """Put this sender's part of one bucket into `part` (uint8 [n])."""
        with self._phase("gather"):
            if progress.kind is not SendKind.RESEND:
                self._pack(index, part)
            elif part is not self.kept_parts[index]:
                part.copy_(self.kept_parts[index], non_blocking=True)

    def _prepare_messages(
        self, index: int, part: torch.Tensor, cut_buffer: torch.Tensor, progress: SendProgress
    ) -> list[Messages]:
        """What goes to the receivers for one bucket; notes the checksums, and keeps the part.

        Returns:
            The messages; with deltas before them the number of bytes of each.
        """
        kind = progress.kind
        routed = progress.messages_of_bucket[index]
        with self._phase("cut"):
            messages = self._cut(index, part, routed, cut_buffer)
        with self._phase("checksum"):
            for number, message in messages.items():
                checksum(message, progress.checksums[number][index])
        payloads: Messages = {}
        if kind is SendKind.DELTA:
            with self._phase("encode"):
                payloads = self._encode_deltas(index, routed, messages)
        if progress.keeps:
            kept_part = self.kept_parts[index]
            if part is not kept_part:
                with self._phase("keep"):
                    kept_part.copy_(part, non_blocking=True)
        for number, payload in payloads.items():
            # Only now: a message may be the part itself.
            messages[number] = messages[number][: len(payload)].copy_(payload)
        if self.full_every == 0:
            return [messages]
        sizes = {number: self._numbers(len(message)) for number, message in messages.items()}
        return [sizes, messages]

    def _numbers(self, *values: int) -> torch.Tensor:
        """A message of a few numbers, int64, in host memory. It is pinned on GPUs, so that no
        thread waits for its copy to the device."""
        pinned = self.device.type == "cuda"
        return torch.tensor(values, dtype=torch.int64, pin_memory=pinned)

    def _cut(
        self, index: int, part: torch.Tensor, routed: list[Message], buffer: torch.Tensor
    ) -> Messages:
        """The messages of one bucket, side by side in `buffer` where they are no whole parts."""
        messages = {}
        begin = 0
        for message in routed:
            messages[message.receivers] = part
            if not message.is_whole_part:
                end = begin + message.nbytes
                cut = buffer[begin:end]
                begin = end
                key = (index, message.receivers, part.data_ptr(), cut.data_ptr())
                if key not in self.bound_cuts:
                    self.bound_cuts[key] = message.bind_cut(part, cut)
                self.bound_cuts[key].write()
                messages[message.receivers] = cut
        return messages

    def _encode_deltas(self, index: int, routed: list[Message], messages: Messages) -> Messages:
        """Payloads of what changed since the bucket was sent last, where they are shorter."""
        base = self._base(index)
        if len(self.base_cut_buffer) < len(self.cut_buffers[0]):
            self.base_cut_buffer = torch.zeros_like(self.cut_buffers[0])
        bases = self._cut(index, base, routed, self.base_cut_buffer)
        payloads = {}
        for number, message in messages.items():
            payload, changed_words = delta.encode(message, bases[number])
            self.record.changed_words += changed_words
            if payload is not None:
                payloads[number] = payload
        return payloads

    def _base(self, index: int) -> torch.Tensor:
        """This sender's part of a bucket as it was sent last, on its device."""
        kept_part = self.kept_parts[index]
        if self.queue is None:
            return kept_part
        if not len(self.base_buffer):
            self.base_buffer = torch.zeros_like(self.buffers[0])
        return self.base_buffer[: len(kept_part)].copy_(kept_part, non_blocking=True)

    def _new_packer(self) -> PiecePacker:
        """Of this rank's own pieces. Its places are those of one connection's buffers."""
        if self.leader is None:
            shards_of_bucket = [[RankShard(slot, slot) for slot in s] for s in self.slots_of_bucket]
        else:
            self.leader.bound.clear()
            shards_of_bucket = self.leader.own_shards
        return PiecePacker(self.name, shards_of_bucket, RankShard.place_in, self._paddings_of)

    def _paddings_of(self, index: int, part: torch.Tensor) -> list[torch.Tensor]:
        return [slot.padding(part) for slot in self.slots_of_bucket[index]]

    def _pack(self, index: int, part: torch.Tensor) -> None:
        """Fill this sender's part of bucket `index`: with this rank's pieces, and with what the
        other members of its sender group have.

        Raises:
            SyncError: a tensor is not as planned.
            As `GroupLeader.collect`.
        """
        self.packer.pack(index, part)
        if self.leader is not None:
            self.leader.collect(index, part, self.timeout_s, self.queue)

    def _broadcast(self, packed: Mark | None, *messages: Messages) -> float:
        """On the wire's thread: send messages to sets of receivers, one after another. Returns the
        seconds it took. `packed`: when the device has reached this mark, they are complete; None:
        they are."""
        if self.queue and packed:
            self.queue.wait(packed)
        begin = time.perf_counter()
        for message_of_set in messages:
            self._send_messages(message_of_set, self.ends_of_set)
        seconds = time.perf_counter() - begin
        for message_of_set in messages:
            for message in message_of_set.values():
                if message.dtype == torch.uint8:  # all others are a few numbers
                    self.record.wire_bytes += message.nbytes
        self.record.add_wire_span(seconds)
        return seconds

    def _send_messages(self, messages: Messages, ends_of_set: dict[int, list[SendEnd]]) -> None:
        """On the wire's thread: send one message to each of these sets of receivers, given by
        turns. Buckets are on the device, numbers in host memory."""
        under_way = []  # no message may change or be freed before its end has finished it
        for step, number in send_steps(messages, self.is_ordered):
            for end in ends_of_set[number]:
                if step is Step.AWAIT_RECEIVERS:
                    end.await_receivers()
                elif step is Step.LAUNCH:
                    message = messages[number]
                    if not isinstance(end, SharedMemorySender):
                        message = message.to(self.device, non_blocking=True)
                    under_way.append(message)
                    end.start_send(message)
                else:
                    end.wait(self.timeout_s)

    def _finish_bucket(self, on_wire: BucketOnWire | None) -> None:
        """Wait until the bucket on the wire has reached every receiver."""
        if on_wire is None:
            return
        with self._phase("wire", on_wire.index + 1):
            seconds = self._result_from_wire(on_wire.seconds)
            self.record.bucket_wire.append([on_wire.index, seconds])
