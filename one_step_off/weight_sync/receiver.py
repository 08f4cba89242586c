"""The weight receiver in one vLLM worker."""

import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from one_step_off.cluster.bounded_waits import AbortSignal
from one_step_off.cluster.errors import SyncError
from one_step_off.distributed_util import DedicatedGroup, connect_store, connect_timeout
from one_step_off.weight_sync.bucket_plan import BucketPlan, Parts, checksum
from one_step_off.weight_sync.endpoint import MEASURED_TRANSFERS, SyncEndpoint
from one_step_off.weight_sync.in_place import InPlaceModel
from one_step_off.weight_sync.launch_order import Step, receive_steps
from one_step_off.weight_sync.mirror import Mirror
from one_step_off.weight_sync.shared_memory import SharedMemoryReceiver

RECEIVE_BUFFERS = 2
"""One is filled while the other is loaded."""

LoadTensors = Callable[[list[tuple[str, torch.Tensor]]], None]
"""Receives the whole tensors of a bucket, by their names."""


class WeightReceiver(SyncEndpoint):
    """Receives the pieces of all senders, and assembles whole tensors.

    Deltas apply to what was received before. It is held in `mirror`, which the first sync with
    deltas creates, or in the model itself: `in_place`, which the caller sets.
    """

    role = "receiver"

    mirror: Mirror | None = None
    in_place: InPlaceModel | None = None

    def __init__(
        self, plan: BucketPlan, index: int, device: torch.device, host: str, timeout_s: float
    ) -> None:
        """As `SyncEndpoint`."""
        super().__init__(plan, index, device, host, timeout_s)
        self.buffers: list[torch.Tensor] = []
        self.join_buffer = torch.zeros(0, dtype=torch.uint8)
        self.uses_network = False
        self.wire_seconds_per_byte = 0.0  # of the bare link; 0: not measured
        self.checksums: torch.Tensor | None = None  # int64 [senders, buckets, 2] of the last sync

    def connect(
        self,
        epoch: int,
        addresses: Sequence[Any],
        receivers: int,
        same_device: Sequence[Sequence[int]] = (),
    ) -> None:
        """Join every sender's group, in the order of the plan.

        An earlier epoch's groups are closed, and what was received in them is forgotten.

        Args:
            epoch: counts the groups.
            addresses: (host, port) of each sender's store.
            receivers: how many there are.
            same_device: per sender the receivers on its device; empty: none.

        Raises:
            SyncError: not all joined within `connect_timeout`, or the epoch was aborted.
        """
        self.close()
        self._forget_received()
        limit_s = connect_timeout(self.timeout_s, len(addresses), receivers)
        deadline = time.monotonic() + limit_s
        try:
            with self._phase("connect"):
                for sender, address in enumerate(addresses):
                    neighbors = same_device[sender] if same_device else ()
                    self._join_sender(epoch, address, receivers, neighbors, deadline)
                self._prepare_buffers()
                self._measure_link()
        except BaseException as error:
            self.give_up(error)
            raise

    def receive(self, load: LoadTensors, version: int) -> dict[str, Any]:
        """Receive one sync. Each bucket's whole tensors go to `load`, or into the model if
        `in_place` is set.

        When this returns, the bytes equal the senders' by checksum; before that the model must not
        be used.

        Args:
            load: receives views into reused buffers, so it must copy what it keeps.
            version: that the senders must send.

        Returns:
            Seconds per phase (wait, apply, verify, load), "bytes", "bucket_wire": [index, seconds
            on the wire] of each bucket, "spans", "bare_wire": the seconds that the bare link would
            take for all bytes (0: not measured), and on GPUs "communicator_bytes" of the groups.

        Raises:
            SyncError: another plan or version, a time limit, a broken peer, or a checksum that
                differs. The groups are closed then.
        """
        self._begin_sync()
        try:
            if not self.transports:
                raise SyncError(f"{self.name} is in no group; it must connect first")
            self._receive_buckets(load, version)
        except BaseException as error:
            self._forget_received()
            self.give_up(error)
            raise
        bare_wire = self.wire_seconds_per_byte * self.record.wire_bytes
        return self._report() | {"bare_wire": bare_wire}

    def _forget_received(self) -> None:
        self.mirror = None
        self.in_place = None

    def _join_sender(
        self,
        epoch: int,
        address: Any,
        receivers: int,
        same_device: Sequence[int],
        deadline: float,
    ) -> None:
        """Connect to one sender. `same_device`: the receivers on its device."""
        sender_store = self._call_until(deadline, connect_store, *address, self.timeout_s)
        store = dist.PrefixStore(f"{epoch}", sender_store)
        self.abort_signals.append(AbortSignal(store))
        self._check_abort_signals()
        remote = [receiver for receiver in range(receivers) if receiver not in same_device]
        if self.index in remote:
            rank = 1 + remote.index(self.index)
            transport = self._join_group(store, rank, len(remote) + 1, deadline)
        else:
            transport = self._call_until(
                deadline, SharedMemoryReceiver, store, self.index, self.device, self.timeout_s
            )
        self.transports.append(transport)

    def _is_remote(self, sender: int) -> bool:
        """Whether a sender's data comes over the network."""
        return isinstance(self.transports[sender], DedicatedGroup)

    def _prepare_buffers(self) -> None:
        self.uses_network = any(self._is_remote(sender) for sender in range(self.plan.senders))
        # Without a network all buckets are read from the senders' buffers: no memory is needed
        # here.
        buffer_device = self.device if self.uses_network else "meta"
        largest = self.plan.largest_bucket_bytes
        self.buffers = [
            torch.zeros(largest, dtype=torch.uint8, device=buffer_device)
            for _ in range(RECEIVE_BUFFERS)
        ]
        self.join_buffer = torch.zeros(self.plan.join_bytes, dtype=torch.uint8, device=self.device)

    def _measure_link(self) -> None:
        """Seconds per byte of the bare link: the first bucket as it will travel, MEASURED_TRANSFERS
        times; the last time counts. Not measured if a sender with a part of it is on the same
        device."""
        parts = self.plan.buckets[0].split_parts(self.buffers[0])
        remote_parts = {sender: part for sender, part in parts.items() if self._is_remote(sender)}
        seconds = 0.0
        for _ in range(MEASURED_TRANSFERS):
            begin = time.perf_counter()
            self._on_wire(self._receive_messages, remote_parts)
            seconds = time.perf_counter() - begin
        self.wire_seconds_per_byte = 0.0
        if len(remote_parts) == len(parts):
            remote_bytes = sum(len(part) for part in remote_parts.values())
            self.wire_seconds_per_byte = seconds / remote_bytes

    def _receive_buckets(self, load: LoadTensors, version: int) -> None:
        buckets = self.plan.buckets
        has_deltas = self._receive_headers(version)
        if has_deltas and not self.in_place and not self.mirror:
            self.mirror = Mirror(self.plan, self.device)
        checksums = torch.zeros(
            self.plan.senders, len(buckets), 2, dtype=torch.int64, device=self.device
        )
        next_parts = self.wire_thread.submit(self._receive_bucket, 0, has_deltas)
        for index in range(len(buckets)):
            self.bucket_number = index + 1
            with self._phase("wait"):
                messages = self._result_from_wire(next_parts)
                if index + 1 < len(buckets):
                    next_parts = self.wire_thread.submit(
                        self._receive_bucket, index + 1, has_deltas
                    )
            with self._phase("apply"):
                parts = self._apply(index, messages)
            with self._phase("verify"):
                for sender, part in parts.items():
                    checksums[sender, index] = checksum(part)
            with self._phase("load"):
                self._load_bucket(index, parts, load)
                for sender in messages:
                    self.transports[sender].release()
        self._verify_checksums(checksums)
        self.checksums = checksums

    def _receive_headers(self, version: int) -> bool:
        """Whether messages may be deltas and so announce their size, after checking every sender's
        header.

        Raises:
            SyncError: a sender follows another plan or sends another version.
        """
        with self._phase("header"):
            headers = self._on_wire(self._receive_numbers, range(self.plan.senders), 3)
        has_deltas = 0
        for sender, header in headers.items():
            digest, sent_version, has_deltas = header.tolist()
            if digest != self.plan.digest:
                raise SyncError(f"{self.name}: sender {sender} follows another bucket plan")
            if sent_version != version:
                raise SyncError(
                    f"{self.name}: sender {sender} sends version {sent_version}, expected {version}"
                )
        return bool(has_deltas)

    def _receive_bucket(self, index: int, has_deltas: bool) -> Parts:
        """On the wire's thread: the senders' messages of one bucket, valid until they are
        released."""
        begin = time.perf_counter()
        buffer = self.buffers[index % RECEIVE_BUFFERS]
        targets = self.plan.buckets[index].split_parts(buffer)
        if has_deltas:
            sizes = self._receive_numbers(targets, 1)
            targets = {sender: target[: int(sizes[sender])] for sender, target in targets.items()}
        messages = self._receive_messages(targets)
        seconds = time.perf_counter() - begin
        self.record.wire_bytes += sum(len(message) for message in messages.values())
        self.record.add_wire_span(seconds)
        if self.uses_network:
            self.record.bucket_wire.append([index, seconds])
        return messages

    def _receive_messages(self, targets: Parts) -> Parts:
        """On the wire's thread: the next message of each of these senders.

        Args:
            targets: sender -> where its message goes, in the same order at all receivers.

        Returns:
            Sender -> its message: `targets`, or a view of its buffer if the sender is on the same
            device.
        """
        # A thread that was abandoned and comes back late must not touch the transports of another
        # epoch.
        transports = self.transports
        messages = {}
        for step, sender in receive_steps(targets, self.is_ordered):
            transport = transports[sender]
            if step is Step.ANNOUNCE:
                transport.announce()
            elif step is Step.LAUNCH:
                transport.start_receive(targets[sender])
            else:
                messages[sender] = transport.finish_receive(targets[sender])
        return messages

    def _receive_numbers(self, senders: Iterable[int], count: int) -> Parts:
        """On the wire's thread: a message of a few numbers from each of these senders, int64
        [count]."""
        targets = {}
        for sender in senders:
            targets[sender] = torch.zeros(count, dtype=torch.int64, device=self.device)
        return self._receive_messages(targets)

    def _apply(self, index: int, messages: Parts) -> Parts:
        """Each sender's whole part of a bucket, after its message."""
        delta_base = self.in_place or self.mirror
        if delta_base is None:
            return messages
        return delta_base.update(index, messages)

    def _load_bucket(self, index: int, parts: Parts, load: LoadTensors) -> None:
        if self.in_place:
            self.in_place.write(index)
            return
        bucket = self.plan.buckets[index]
        tensors = bucket.join(parts, self.join_buffer)
        if tensors and bucket.completes_tensors:
            load(tensors)

    def _verify_checksums(self, received: torch.Tensor) -> None:
        """Compare with every sender's checksums. All are read first, so that no sender waits for
        this receiver.

        Args:
            received: int64 [senders, buckets, 2].

        Raises:
            SyncError: one differs; names the first such bucket and its sender.
        """
        with self._phase("verify"):  # synchronizes: the wire's thread has a stream of its own
            sent = torch.zeros_like(received)
        with self._phase("verify"):
            self._on_wire(self._receive_messages, dict(enumerate(sent)))
        different = (received != sent).any(dim=2).nonzero().tolist()
        if different:
            sender, index = different[0]
            bucket = f"bucket {index + 1} of {received.shape[1]} from sender {sender}"
            raise SyncError(
                f"{self.name}, phase verify: checksum of {bucket} differs "
                f"({len(different)} buckets in all)"
            )
