"""The weight receiver in one vLLM worker."""

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

from one_step_off.cluster.bounded_waits import AbortSignal
from one_step_off.cluster.errors import SyncError
from one_step_off.distributed_util import connect_timeout
from one_step_off.weight_sync.bucket_plan import BucketPlan, Parts, checksum
from one_step_off.weight_sync.delta import Mirror
from one_step_off.weight_sync.in_place_writer import InPlaceWriter, Layout
from one_step_off.weight_sync.launch_order import Step, receive_steps
from one_step_off.weight_sync.routes import ALL_RECEIVERS, Routes, ShardsOfReceivers
from one_step_off.weight_sync.stream_peer import MEASURED_TRANSFERS, StreamPeer
from one_step_off.weight_sync.transports.same_device import SharedMemoryReceiver, map_sender
from one_step_off.weight_sync.transports.transport import ReceiveEnd, Transport

RECEIVE_BUFFERS = 2
"""One is filled while the other is loaded."""


LoadTensors = Callable[[list[tuple[str, torch.Tensor]]], None]
"""Receives the whole tensors of a bucket, by their names."""


class WeightReceiver(StreamPeer):
    """Receives the pieces of all senders, and assembles whole tensors; or, when it is known what
    this worker keeps, only that, and writes it into the model.

    Deltas apply to what was received before. It is held in `mirror`, which the first sync with
    deltas of whole tensors creates, or in the model itself.
    """

    role = "receiver"

    mirror: Mirror | None = None
    layout: Layout | None = None
    """Where the model keeps what; set by the caller when it is proved. None: not known."""
    in_place_writer: InPlaceWriter | None = None

    def __init__(
        self,
        plan: BucketPlan,
        index: int,
        device: torch.device,
        host: str,
        timeout_s: float,
        transport: Transport | None = None,
    ) -> None:
        """As `StreamPeer`."""
        super().__init__(plan, index, device, host, timeout_s, transport)
        self.buffers: list[torch.Tensor] = []
        self.whole_routes = Routes(plan, 0)
        self.shard_routes: Routes | None = None
        self.end_of_stream: dict[int, ReceiveEnd] = {}
        self.join_buffer = torch.zeros(0, dtype=torch.uint8)
        self.uses_network = False
        self.wire_seconds_per_byte = 0.0  # of the bare link; 0: not measured

    def connect(
        self,
        epoch: int,
        addresses: Sequence[Any],
        receivers: int,
        same_device: Sequence[Sequence[int]] = (),
        kept: ShardsOfReceivers | None = None,
    ) -> None:
        """Join every sender's groups, in the order of the plan.

        An earlier epoch's groups are closed, and what was received in them is forgotten.

        Args:
            epoch: counts the groups.
            addresses: of each sender's store.
            receivers: how many there are.
            same_device: per sender the receivers on its device; empty: none.
            kept: as `WeightSender.connect`.

        Raises:
            SyncError: not all joined within `connect_timeout`, or the epoch was aborted.
        """
        self.close()
        self._forget_received()
        self.whole_routes = Routes(self.plan, receivers)
        self.shard_routes = None if kept is None else Routes.of_shard_blocks(self.plan, kept)
        routes = self.shard_routes or self.whole_routes
        groups = len(addresses) * len(routes.sets)
        limit_s = connect_timeout(self.timeout_s, groups, receivers)
        deadline = time.monotonic() + limit_s
        try:
            with self._phase("connect"):
                for sender, address in enumerate(addresses):
                    neighbors = same_device[sender] if same_device else ()
                    self._join_sender(sender, epoch, address, neighbors, deadline)
                self._prepare_buffers()
                self._wait_for_device()  # the buffers are zeroed on another stream
                self._measure_link()
        except BaseException as error:
            self.give_up(error)
            raise

    def receive(
        self, load: LoadTensors, version: int, sharded_only: bool = False
    ) -> dict[str, Any]:
        """Receive one sync. Each bucket's whole tensors go to `load`; with `sharded_only`, what
        this worker keeps goes into the model.

        When this returns, the bytes equal the senders' by checksum; before that the model must not
        be used.

        Args:
            load: receives views into reused buffers, so it must copy what it keeps.
            version: that the senders must send.
            sharded_only: as `WeightSender.send`; `layout` must be set.

        Returns:
            Seconds per phase (wait, apply, verify, load), "bytes", "bucket_wire": [index, seconds
            on the wire] of each bucket, "spans", "bare_wire": the seconds that the bare link would
            take for all bytes (0: not measured), and on GPUs "communicator_bytes" of the groups.

        Raises:
            SyncError: another plan or version, a time limit, a broken peer, or a checksum that
                differs. The groups are closed then.
        """
        self._begin_sync()
        with self._giving_up_on_errors():
            if sharded_only:
                self._receive_shards(version)
            else:
                self._receive_whole(load, version)
        bare_wire = self.wire_seconds_per_byte * self.record.wire_bytes
        return self._report() | {"bare_wire": bare_wire}

    @contextmanager
    def _giving_up_on_errors(self) -> Iterator[None]:
        """Around a sync: after an error the groups are closed, and what was received is
        forgotten."""
        try:
            if not self.ends:
                raise SyncError(f"{self.name} is in no group; it must connect first")
            yield
        except BaseException as error:
            self._forget_received()
            self.give_up(error)
            raise

    def _forget_received(self) -> None:
        self.mirror = None
        self.in_place_writer = None

    def _join_sender(
        self,
        sender: int,
        epoch: int,
        address: Any,
        same_device: Sequence[int],
        deadline: float,
    ) -> None:
        """Connect to one sender. `same_device`: the receivers on its device."""
        connect_store = self.transport.connect_store
        sender_store = self._call_until(deadline, connect_store, address, self.timeout_s)
        store = dist.PrefixStore(f"{epoch}", sender_store)
        self.abort_signals.append(AbortSignal(store))
        self._check_abort_signals()
        routes = self.shard_routes or self.whole_routes
        for number in routes.sets_of_sender(sender):
            members = list(routes.sets[number])
            if number == ALL_RECEIVERS:
                members = [receiver for receiver in members if receiver not in same_device]
            stream = self._describe_stream(sender, epoch, store, tuple(members), number)
            if self.index in members:
                open_end = self.transport.open_receiver
            elif number == ALL_RECEIVERS:
                open_end = map_sender
            else:
                continue
            end = self._open_end(deadline, open_end, stream, self.index)
            self.end_of_stream[routes.stream_number(sender, number)] = end

    def close(self) -> None:
        """Leave all groups; peers that wait for this receiver fail."""
        super().close()
        # Not cleared: a thread that was abandoned may come back late and look here.
        self.end_of_stream = {}

    def _is_remote(self, sender: int) -> bool:
        """Whether a sender's data comes over the network."""
        return not isinstance(self.end_of_stream[sender], SharedMemoryReceiver)

    def _prepare_buffers(self) -> None:
        self.uses_network = any(self._is_remote(sender) for sender in range(self.plan.senders))
        # Without a network all buckets are read from the senders' buffers: no memory is needed
        # here.
        buffer_device = self.device if self.uses_network else "meta"
        largest = self.plan.largest_bucket_bytes
        if self.shard_routes is not None:
            for messages in self.shard_routes.messages_of_receiver(self.index):
                largest = max(largest, sum(message.nbytes for message in messages))
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

    def _receive_whole(self, load: LoadTensors, version: int) -> None:
        """Receive whole tensors, and load them."""
        has_deltas = self._receive_headers(version, sharded_only=False)
        if has_deltas and self.mirror is None:
            self.mirror = Mirror(self.plan, self.device)
        self.in_place_writer = None  # deltas apply to the last sync, and that was of another kind

        def apply(index: int, messages: Parts) -> Parts:
            return self.mirror.update(index, messages) if self.mirror else messages

        def store(index: int, parts: Parts) -> None:
            bucket = self.plan.buckets[index]
            tensors = bucket.join(parts, self.join_buffer)
            if tensors and bucket.completes_tensors:
                load(tensors)

        self._receive_buckets(self.whole_routes, has_deltas, apply, store)

    def _receive_shards(self, version: int) -> None:
        """Receive what this worker keeps, and write it into the model."""
        routes = self.shard_routes
        if routes is None or self.layout is None:
            raise SyncError(f"{self.name} cannot write into its model: nothing proves its layout")
        has_deltas = self._receive_headers(version, sharded_only=True)
        messages_of_bucket = routes.messages_of_receiver(self.index)
        if self.in_place_writer is None:
            self.in_place_writer = InPlaceWriter(messages_of_bucket, self.layout, self.device)
        self.in_place_writer.start()
        self.mirror = None
        model = self.in_place_writer

        def apply(index: int, messages: Parts) -> Parts:
            whole = model.update(index, list(messages.values()))
            return dict(zip(messages, whole, strict=True))

        def store(index: int, parts: Parts) -> None:
            model.write(index, list(parts.values()))

        self._receive_buckets(routes, has_deltas, apply, store)

    def _sizes_of_buckets(self, routes: Routes) -> list[dict[int, int]]:
        """Per bucket: stream -> bytes of its full message."""
        sizes_of_bucket = []
        for messages in routes.messages_of_receiver(self.index):
            sizes = {}
            for message in messages:
                sizes[routes.stream_number(message.sender, message.receivers)] = message.nbytes
            sizes_of_bucket.append(sizes)
        return sizes_of_bucket

    def _receive_buckets(
        self,
        routes: Routes,
        has_deltas: bool,
        apply: Callable[[int, Parts], Parts],
        store: Callable[[int, Parts], None],
    ) -> None:
        """Receive all buckets, and compare their checksums.

        Args:
            routes: of this sync.
            has_deltas: messages may be deltas.
            apply: makes the messages of a bucket whole.
            store: puts a bucket where it belongs, and copies what it keeps.
        """
        sizes_of_bucket = self._sizes_of_buckets(routes)
        checksums: Parts = {}
        for sender, receivers in routes.streams_of_receiver(self.index):
            checksums[routes.stream_number(sender, receivers)] = torch.zeros(
                len(sizes_of_bucket), 2, dtype=torch.int64, device=self.device
            )

        def start(index: int) -> Future[Parts]:
            sizes = sizes_of_bucket[index]
            buffer = self.buffers[index % RECEIVE_BUFFERS]
            return self.wire_thread.submit(self._receive_bucket, index, sizes, has_deltas, buffer)

        next_messages = start(0)
        last = len(sizes_of_bucket) - 1
        for index in range(len(sizes_of_bucket)):
            self.bucket_number = index + 1
            with self._phase("wait"):
                messages = self._result_from_wire(next_messages)
                if index < last:
                    next_messages = start(index + 1)
            with self._phase("apply"):
                parts = apply(index, messages)
            with self._phase("verify"):
                for stream, part in parts.items():
                    checksum(part, checksums[stream][index])
            with self._phase("load"):
                store(index, parts)
            if index == last:
                # Before the last wait for the device, so that they need none of their own.
                checksums = {s: self._host_copy(sums) for s, sums in checksums.items()}
            with self._naming_failures("load"):
                self._free(messages)
        self._verify_checksums(checksums)

    def _free(self, messages: Parts) -> None:
        """The senders may overwrite these messages, and the next ones may take their buffers."""
        self._wait_for_device()
        for stream in messages:
            self.end_of_stream[stream].free()

    def _receive_headers(self, version: int, sharded_only: bool) -> bool:
        """Whether messages may be deltas and so announce their size, after checking every sender's
        header.

        Raises:
            SyncError: a sender follows another plan, or sends another version or other parts.
        """
        with self._phase("header"):
            headers = self._on_wire(self._receive_numbers, range(self.plan.senders), (4,))
        has_deltas = 0
        for sender, header in headers.items():
            digest, sent_version, has_deltas, sends_sharded_only = header.numpy().tolist()
            if digest != self.plan.digest:
                raise SyncError(f"{self.name}: sender {sender} follows another bucket plan")
            if sent_version != version:
                raise SyncError(
                    f"{self.name}: sender {sender} sends version {sent_version}, expected {version}"
                )
            if bool(sends_sharded_only) != sharded_only:
                raise SyncError(
                    f"{self.name}: sender {sender} and this receiver do not agree whether whole "
                    "tensors travel"
                )
        return bool(has_deltas)

    def _receive_bucket(
        self, index: int, sizes: dict[int, int], has_deltas: bool, buffer: torch.Tensor
    ) -> Parts:
        """On the wire's thread: the messages of one bucket, valid until they are freed.

        Args:
            index: of the bucket.
            sizes: stream -> bytes of its full message.
            has_deltas: they may be shorter.
            buffer: for all of them, uint8 [n].
        """
        begin = time.perf_counter()
        buffer = buffer[: sum(sizes.values())]
        targets = dict(zip(sizes, buffer.split(list(sizes.values())), strict=True))
        if has_deltas:
            for stream, size in self._receive_numbers(targets, (1,)).items():
                targets[stream] = targets[stream][: int(size.numpy()[0])]
        messages = self._receive_messages(targets)
        seconds = time.perf_counter() - begin
        self.record.wire_bytes += sum(len(message) for message in messages.values())
        self.record.add_wire_span(seconds)
        if self.uses_network:
            self.record.bucket_wire.append([index, seconds])
        return messages

    def _receive_messages(self, targets: Parts) -> Parts:
        """On the wire's thread: the next message of each of these streams.

        Args:
            targets: stream -> where its message goes, in the same order at all receivers.

        Returns:
            Stream -> its message: `targets`, or a view of its buffer if the sender is on the same
            device.
        """
        # A thread that was abandoned and comes back late must not touch the ends of another epoch.
        end_of_stream = self.end_of_stream
        messages = {}
        for step, stream in receive_steps(targets, self.is_ordered):
            end = end_of_stream[stream]
            if step is Step.ANNOUNCE:
                end.announce()
            elif step is Step.LAUNCH:
                end.start_receive(targets[stream])
            else:
                messages[stream] = end.finish_receive(targets[stream])
        return messages

    def _receive_numbers(self, streams: Iterable[int], shape: tuple[int, ...]) -> Parts:
        """On the wire's thread: a message of a few numbers from each of these streams, int64
        [shape] in host memory."""
        targets = {}
        on_device = []
        for stream in streams:
            device = "cpu"  # a sender on the same device puts them into its store
            if self._is_remote(stream):
                device = self.device
                on_device.append(stream)
            targets[stream] = torch.zeros(shape, dtype=torch.int64, device=device)
        numbers = self._receive_messages(targets)
        if on_device:
            # One wait for all of them.
            together = torch.stack([numbers[stream] for stream in on_device]).cpu()
            numbers |= zip(on_device, together, strict=True)
        return numbers

    def _verify_checksums(self, received: Parts) -> None:
        """Compare with every sender's checksums. All are read first, so that no sender waits for
        this receiver.

        Args:
            received: stream -> int64 [buckets, 2], in host memory.

        Raises:
            SyncError: one differs; names the first such bucket and its sender.
        """
        buckets = len(self.plan.buckets)
        with self._naming_failures("verify"):
            begin = time.perf_counter()
            sent = self._on_wire(self._receive_numbers, received, (buckets, 2))
            self.record.add_phase("verify", time.perf_counter() - begin)
        different = []
        for stream, sums in received.items():
            sender = stream % self.plan.senders
            differs = (sums.numpy() != sent[stream].numpy()).any(axis=1)
            different += [(index, sender) for index in range(buckets) if differs[index]]
        if different:
            index, sender = min(different)
            bucket = f"bucket {index + 1} of {len(self.plan.buckets)} from sender {sender}"
            raise SyncError(
                f"{self.name}, phase verify: checksum of {bucket} differs "
                f"({len(different)} buckets in all)"
            )
