"""The weight sender of one trainer rank."""

import itertools
import math
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import nullcontext
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch
import torch.distributed as dist

from one_step_off.cluster.bounded_waits import AbortSignal
from one_step_off.cluster.errors import SyncError
from one_step_off.distributed_util import DedicatedGroup, connect_timeout, open_store
from one_step_off.weight_sync import delta
from one_step_off.weight_sync.bucket_plan import BucketPlan, checksum
from one_step_off.weight_sync.endpoint import MEASURED_TRANSFERS, SyncEndpoint
from one_step_off.weight_sync.launch_order import Step, send_steps
from one_step_off.weight_sync.sender_group_ends import GroupLeader, PiecePacker
from one_step_off.weight_sync.sender_groups import Section
from one_step_off.weight_sync.shared_memory import SharedBuffer, SharedMemorySender

SEND_BUFFERS = 2
"""The next bucket is packed while one is on the wire."""


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


class WeightSender(SyncEndpoint):
    """Sends the pieces of one trainer rank, or of the ranks of a sender group. It is rank 0 of the
    group with its receivers, and its store is the group's."""

    role = "sender"

    full_every = 0
    """0: every sync sends all bytes; n > 0: it sends what changed, and all bytes in every n-th
    sync."""
    keep_sent = False
    """Keep what was sent in host memory, to send it again after the model has changed."""
    kept_version: int | None = None
    """The version that is kept, completely; None: none."""
    leader: GroupLeader | None = None
    """Collects the other ranks' pieces, where this one leads a sender group."""

    def __init__(
        self, plan: BucketPlan, index: int, device: torch.device, host: str, timeout_s: float
    ) -> None:
        """As `SyncEndpoint`; also opens the store at which receivers meet, at `address` (host,
        port)."""
        super().__init__(plan, index, device, host, timeout_s)
        self.slots_of_bucket = [bucket.slots_of(index) for bucket in plan.buckets]
        self.part_sizes = [bucket.part_bytes[index] for bucket in plan.buckets]
        self.store = open_store(host, timeout_s)
        self.abort_store = self.store.clone()  # for `abort`, while a send waits in the other one
        self.address = (host, self.store.port)
        self.buffers: list[torch.Tensor] = []
        # For all epochs: a receiver that is killed never releases what it has mapped on a GPU.
        self.shared_buffers: list[SharedBuffer] = []
        self.kept_parts: list[torch.Tensor] = []  # what was sent last, bucket by bucket
        self.deltas_since_full: int | None = None  # None: receivers hold nothing of this epoch
        self.packer = PiecePacker(self.name)

    def close(self) -> None:
        """Leave all groups; receivers and members that wait for this sender fail."""
        super().close()
        if self.leader is not None:
            self.leader.links.close()

    def connect(self, epoch: int, receivers: int, same_device: Sequence[int] = ()) -> None:
        """Form the group with the vLLM workers, which must call `WeightReceiver.connect` meanwhile.

        An earlier epoch's group is closed.

        Args:
            epoch: counts the groups.
            receivers: how many there are.
            same_device: the numbers of those on this sender's device, which need no network.

        Raises:
            SyncError: not all joined within `connect_timeout`, or the epoch was aborted.
        """
        self.close()
        self.deltas_since_full = None
        # A separate connection: a group that was abandoned may still hold an earlier epoch's.
        store = dist.PrefixStore(f"{epoch}", self.store.clone())
        self.abort_signals = [AbortSignal(store)]
        limit_s = connect_timeout(self.timeout_s, self.plan.senders, receivers)
        deadline = time.monotonic() + limit_s
        try:
            with self._phase("connect"):
                self._check_abort_signals()
                if self.leader is not None:
                    # Before the deadline of the receivers: this one can name a missing member.
                    members_deadline = time.monotonic() + self.timeout_s
                    self.leader.links.accept(epoch, members_deadline, self._check_abort_signals)
                self._connect_transports(store, receivers, same_device, deadline)
                # Now, because pinned memory takes long to allocate.
                self._allocate_kept_parts()
        except BaseException as error:
            self.give_up(error)
            raise

    def abort(self, epoch: int, reason: str) -> None:
        """End every wait of an epoch, at this sender and at its receivers. For any thread."""
        signal = AbortSignal(dist.PrefixStore(f"{epoch}", self.abort_store))
        signal.set(reason)
        signal.close()

    def send(self, tensors: Iterable[torch.Tensor], version: int) -> dict[str, Any]:
        """Send this rank's pieces as weight version `version`.

        Args:
            tensors: the pieces' data, in the order of the plan; not read for `kept_version`.
            version: of the weights.

        Returns:
            Seconds per phase (gather, checksum, encode, keep, wire), "bytes" on the wire, "changed"
            16-bit words (NaN unless a delta was sent), "bucket_wire": [index, seconds on the wire]
            of each bucket, "spans", and on GPUs "communicator_bytes" of the groups.

        Raises:
            SyncError: names this sender, phase and bucket. The group is closed then, and receivers
                do not wait for it any longer.
        """
        self._begin_sync()
        try:
            if not self.transports:
                raise SyncError(f"{self.name} is in no group; it must connect first")
            with torch.cuda.stream(self.stream) if self.stream else nullcontext():
                kind = self._send_buckets(iter(tensors), version)
        except BaseException as error:
            self.deltas_since_full = None  # what receivers hold is unknown
            self.give_up(error)
            raise
        changed_words = math.nan
        if kind is SendKind.DELTA:
            changed_words = float(self.record.changed_words)
        return self._report() | {"changed": changed_words}

    def _connect_transports(
        self, store: dist.Store, receivers: int, same_device: Sequence[int], deadline: float
    ) -> None:
        """Open the shared-memory transport for receivers on the same device, and the group for the
        remote ones."""
        buffer_sizes = [max(self.part_sizes, default=0)] * SEND_BUFFERS
        if same_device:
            if not self.shared_buffers:
                self.shared_buffers = [SharedBuffer(size, self.device) for size in buffer_sizes]
            self.buffers = [buffer.tensor for buffer in self.shared_buffers]
            shared = SharedMemorySender(store, self.shared_buffers, list(same_device))
            self.transports = [shared]
        elif not self.buffers:
            # Zeros and not empty, so that the pages are touched before the first sync.
            self.buffers = [
                torch.zeros(size, dtype=torch.uint8, device=self.device) for size in buffer_sizes
            ]
        remote_receivers = receivers - len(same_device)
        if remote_receivers > 0:
            group = self._join_group(store, 0, remote_receivers + 1, deadline)
            self.transports.append(group)
            if self.part_sizes[0]:
                for _ in range(MEASURED_TRANSFERS):
                    self._on_wire(self._send_first_bucket, group)

    def _send_first_bucket(self, group: DedicatedGroup) -> None:
        """Send the first bucket without its content, for receivers to measure the bare link."""
        self._send_message(self.buffers[0][: self.part_sizes[0]], [group])

    def _choose_kind(self, version: int) -> SendKind:
        if version == self.kept_version:
            return SendKind.RESEND
        if self.full_every == 0 or self.deltas_since_full is None:
            return SendKind.FULL
        if self.deltas_since_full + 1 >= self.full_every:
            return SendKind.FULL
        return SendKind.DELTA

    def _count_send(self, kind: SendKind) -> None:
        if kind is SendKind.DELTA:
            self.deltas_since_full += 1
        else:
            self.deltas_since_full = 0

    def _send_buckets(self, tensors: Iterator[torch.Tensor], version: int) -> SendKind:
        """Send header, buckets and checksums; returns what was sent."""
        kind = self._choose_kind(version)
        self._count_send(kind)
        sends_deltas = self.full_every > 0
        self._allocate_kept_parts()
        if kind is not SendKind.RESEND:
            self.kept_version = None  # until all parts are kept
        if self.leader is not None:
            wants_data = kind is not SendKind.RESEND
            with self._phase("order"):
                self.leader.links.order((self.plan.digest, version, wants_data), self.timeout_s)
        header = [self.plan.digest, version, int(sends_deltas)]
        with self._phase("header"):
            self._on_wire(self._broadcast, torch.tensor(header, device=self.device))

        checksums = torch.zeros(len(self.plan.buckets), 2, dtype=torch.int64, device=self.device)
        buffers = itertools.cycle(self.buffers)
        on_wire: BucketOnWire | None = None
        for index, size in enumerate(self.part_sizes):
            if not size:  # the bucket holds nothing of this sender
                continue
            self.bucket_number = index + 1
            part = next(buffers)[:size]
            message = self._prepare_message(index, part, tensors, kind, checksums)
            messages = [message]
            if sends_deltas:
                size_message = torch.tensor([len(message)], device=self.device)
                messages = [size_message, message]
            self._finish_bucket(on_wire)
            on_wire = BucketOnWire(index, self.wire_thread.submit(self._broadcast, *messages))
        self.packer.tensor_in_work = None  # it may be a copy, whose memory is free now
        self._finish_bucket(on_wire)
        with self._phase("wire"):
            self._on_wire(self._broadcast, checksums)
        if self.kept_parts:
            self.kept_version = version
        return kind

    def _allocate_kept_parts(self) -> None:
        """Host memory for what was sent last, if it is needed and not there yet."""
        if self.kept_parts or not (self.full_every > 0 or self.keep_sent):
            return
        pinned = self.device.type == "cuda"
        for size in self.part_sizes:
            part = torch.zeros(size, dtype=torch.uint8, pin_memory=pinned)
            self.kept_parts.append(part)

    def _prepare_message(
        self,
        index: int,
        part: torch.Tensor,
        tensors: Iterator[torch.Tensor],
        kind: SendKind,
        checksums: torch.Tensor,
    ) -> torch.Tensor:
        """Fill `part` (uint8 [n], inside a send buffer) with the message of one bucket, and note
        its checksum.

        Returns:
            `part`, or its beginning if a delta payload is shorter.
        """
        with self._phase("gather"):
            if kind is SendKind.RESEND:
                part.copy_(self.kept_parts[index], non_blocking=True)
            else:
                self._pack(index, part, tensors)
        with self._phase("checksum"):
            checksums[index] = checksum(part)
        payload = None
        if kind is SendKind.DELTA:
            with self._phase("encode"):
                base = self.kept_parts[index].to(self.device, non_blocking=True)
                payload, changed_words = delta.encode(part, base)
                self.record.changed_words += changed_words
        if self.kept_parts and kind is not SendKind.RESEND:
            with self._phase("keep"):
                self.kept_parts[index].copy_(part, non_blocking=True)
        if payload is None:
            return part
        return part[: len(payload)].copy_(payload)

    def _pack(self, index: int, part: torch.Tensor, tensors: Iterator[torch.Tensor]) -> None:
        """Fill this sender's part of bucket `index`: with this rank's pieces, and with what the
        other members of its sender group have.

        Raises:
            SyncError: a tensor is not as planned.
            As `GroupLeader.collect`.
        """
        slots = self.slots_of_bucket[index]
        if self.leader is None:
            sections = [Section(slot, slot) for slot in slots]
        else:
            sections = self.leader.own_sections[index]
        self.packer.pack(sections, tensors, lambda section: section.place_in(part))
        for slot in slots:
            slot.zero_padding(part)
        if self.leader is not None:
            self.leader.collect(index, part, self.timeout_s)

    def _broadcast(self, *messages: torch.Tensor) -> float:
        """On the wire's thread: send messages to every receiver, one after another. Returns the
        seconds it took."""
        if self.stream:
            self.stream.synchronize()  # what packed them
        begin = time.perf_counter()
        for message in messages:
            self._send_message(message, self.transports)
        seconds = time.perf_counter() - begin
        for message in messages:
            if message.dtype == torch.uint8:  # bucket parts; all other messages are a few numbers
                self.record.wire_bytes += message.nbytes
        self.record.add_wire_span(seconds)
        return seconds

    def _send_message(self, message: torch.Tensor, transports: Sequence[Any]) -> None:
        """On the wire's thread: send one message over these transports, to all their receivers."""
        for step in send_steps(self.is_ordered):
            for transport in transports:
                if step is Step.AWAIT_RECEIVERS:
                    transport.await_receivers()
                elif step is Step.LAUNCH:
                    transport.start_send(message)
                else:
                    transport.wait(self.timeout_s)

    def _finish_bucket(self, on_wire: BucketOnWire | None) -> None:
        """Wait until the bucket on the wire has reached every receiver."""
        if on_wire is None:
            return
        with self._phase("wire", on_wire.index + 1):
            seconds = self._result_from_wire(on_wire.seconds)
            self.record.bucket_wire.append([on_wire.index, seconds])
