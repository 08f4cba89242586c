"""The weight stream: dedicated process groups, packing, sending, receiving.

Trainer ranks send the pieces they own; every vLLM worker receives all of them and assembles whole tensors:

    plan = BucketPlan.build(pieces_of_each_sender, bucket_bytes)         once, the same on both sides
    Sender(plan, rank, ...).connect(epoch, n_receivers);               .send(tensors, version)
    Receiver(plan, index, ...).connect(epoch, addresses, n_receivers); .receive(load, version)

There is one group per sender, {sender} u receivers, made anew in every epoch, that is when receivers come or go. All
receivers and senders walk the buckets in the order of the plan; the senders' parts of a bucket arrive side by side. Receivers that are `near` a sender, on the same device, are not in its group: they read its buckets where
they lie (shared_link.py). Both ends have a thread for the wire: while bucket k travels, k+1 is packed and k-1 loaded.

The rule that keeps this and the trainer's own collectives from waiting for each other: a send calls no collective of
the trainer's and touches no default group; it runs on a thread, a group and, on GPUs, streams of its own, and reads
nothing but this rank's shard. So it goes on whatever the trainer's ranks wait for, and they go on whatever it waits for;
what a send waits for are receivers, which walk the buckets in one order and wait for nothing else. (Trainers that gather
a tensor, send it, and gather the next hang when one rank's next gather is queued behind another rank's send.) On a GPU
both also need a queue each: with CUDA_DEVICE_MAX_CONNECTIONS=1 a waiting send would hold up all that is launched later.
"""

import importlib
import itertools
import math
import os
import socket
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, nullcontext, suppress
from datetime import timedelta
from typing import Any, TypeVar

import psutil
import torch
import torch.distributed as dist

from one_step_off.cluster.bounded_waits import Aborted, AbortSignal, WorkerThread, wait_for_result
from one_step_off.cluster.network_link import NetworkLink, connect_limit
from one_step_off.weight_sync import delta
from one_step_off.weight_sync.bucket_plan import BucketPlan, Parts, Slot, SyncError, checksum
from one_step_off.weight_sync.shared_memory import SharedInlet, SharedOutlet

T = TypeVar("T")

GIVEN_UP = "given up, since "  # in the error of a process that did not fail by itself
ALL_CORES = "ONE_STEP_OFF_CORES"  # environment variable: those that a bound process could use before
MOST_SPANS = 200  # of one end in one sync; a picture of more shows nothing


def unpin() -> None:
    """Let this thread, and those that it starts, run on all cores that the run has. Where processes are bound to cores
    (`placement.pin_process`) the sync's threads are not: while one end of the stream works the other's core is free."""
    if cores := os.environ.get(ALL_CORES):
        os.sched_setaffinity(0, map(int, cores.split(",")))


def open_store(host_name: str, port: int, world_size: Any = None, is_master: bool = False, **how: Any) -> dist.Store:
    """A TCPStore whose server listens at its own address alone: torch's would at every one that the machine has."""
    if is_master:
        with suppress(OSError):  # not an address of this machine: torch's way
            listener = socket.create_server((host_name, port))
            port, how["master_listen_fd"] = listener.getsockname()[1], listener.detach()
    return dist.TCPStore(host_name, port, world_size, is_master, **how)


importlib.import_module("torch.distributed.rendezvous").TCPStore = open_store  # of init_process_group, vLLM's too


class _End:
    """What both ends share: where they stand, seconds per phase of one sync, and the bucket that a failure was in."""

    def __init__(self, plan: BucketPlan, index: int, device: torch.device, host: str, timeout_s: float) -> None:
        self.plan, self.index, self.device, self.host, self.timeout_s = plan, index, device, host, timeout_s
        self.who = f"{type(self).__name__.lower()} {self.index}"
        self.links: list[Any] = []
        self.signals: list[AbortSignal] = []  # one per sender's store that this end uses
        # Its streams too: what is queued on the compute stream must not hold up the wire, nor the other way round.
        self.stream = torch.cuda.Stream(self.device) if self.device.type == "cuda" else None
        self.wire = WorkerThread("weight-wire", self._at_home)
        self._begin()

    def _at_home(self) -> None:
        """On the wire's thread: CUDA's device and stream are kept per thread."""
        unpin()
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)
            torch.cuda.set_stream(torch.cuda.Stream(self.device))

    def _begin(self) -> None:
        self.seconds: dict[str, float] = {}
        self.each: list[list[float]] = []  # on the wire: [bucket, seconds]
        self.spans: list[list[Any]] = []  # for the timeline: [lane, phase, begin, end], of the clock on the wall
        self.bytes = self.changed = 0
        self.bucket = -1

    def _check_signals(self) -> None:
        for signal in self.signals:
            signal.check()

    def _until(self, deadline: float, function: Callable[..., T], *args: Any) -> T:
        """`function(*args)` on a thread of its own, since nothing else bounds the creation of a group or a store: the
        thread is given up at the deadline, or when the sync is. Also, gloo's threads may run where that one may."""
        thread = WorkerThread("weight-connect", self._at_home)
        made = thread.submit(function, *args)
        thread.stop()
        try:
            return wait_for_result(made, deadline - time.monotonic(), self._check_signals)
        except BaseException:
            if function is NetworkLink:
                made.add_done_callback(_close_late)
            raise

    def _join(self, store: dist.Store, rank: int, size: int, deadline: float) -> NetworkLink:
        left = deadline - time.monotonic()
        return self._until(deadline, NetworkLink, store, rank, size, self.device, self.host, self.timeout_s, left)

    def _on_wire(self, function: Callable[..., T], *args: Any) -> T:
        """`function(*args)` on the wire's thread. The waits in it have limits of their own; this one is for a transport
        that hangs outside of them."""
        return self._result(self.wire.submit(function, *args))

    def _result(self, future: Future[T]) -> T:
        return wait_for_result(future, 3 * self.timeout_s, self._check_signals)

    def give_up(self, error: BaseException) -> None:
        """Leave all groups because of `error`; every process that waits for this end fails soon, and names the cause."""
        reason = " ".join(str(error).split()) or type(error).__name__
        for signal in self.signals:
            with suppress(RuntimeError):  # the sender's process is gone, and its store with it
                signal.set(reason)
        self.close()
        self.wire.stop()
        self.wire = WorkerThread("weight-wire", self._at_home)  # the other one may hang

    def close(self) -> None:
        """Leave all groups; peers that wait for this end fail."""
        for link in self.links:
            link.close()
        for signal in self.signals:
            signal.close()
        self.links = []
        self.signals = []

    @contextmanager
    def _phase(self, name: str, bucket: int | None = None) -> Iterator[None]:
        start = time.perf_counter()
        try:
            yield
        except SyncError:
            raise
        except Exception as e:
            cause = next(iter(str(e).strip().splitlines()), type(e).__name__)
            traceback.clear_frames(e.__traceback__)  # they hold the group's work: see NetworkLink.close
            place = (self.bucket if bucket is None else bucket) + 1
            where = f"phase {name}, bucket {place} of {len(self.plan.buckets)}"
            given_up = GIVEN_UP if isinstance(e, Aborted) else ""
            raise SyncError(f"{self.who}, {where}: {given_up}{cause}") from e
        finally:
            if self.stream:  # or the time of what was launched would show in a later phase
                torch.cuda.current_stream().synchronize()
            self._timed("", name, time.perf_counter() - start)

    def _timed(self, lane: str, name: str, seconds: float) -> float:
        """Note a phase that has just ended."""
        now = time.time()
        if not lane:
            self.seconds[name] = self.seconds.get(name, 0.0) + seconds
        if len(self.spans) < MOST_SPANS:
            self.spans.append([lane, name, now - seconds, now])
        return seconds

    def _report(self) -> dict[str, Any]:
        return {**self.seconds, "bytes": float(self.bytes), "each": self.each, "spans": self.spans}


def _close_late(joining: Future) -> None:
    """A link that was made after the wait for it had ended."""
    if joining.exception() is None:
        joining.result().close()


def _open_client(host: str, port: int, timeout_s: float) -> dist.Store:
    """A sender's store, from a receiver's side."""
    return dist.TCPStore(host, port, is_master=False, timeout=timedelta(seconds=timeout_s))


class Sender(_End):
    """The sending end on one trainer rank: rank 0 of its group. `address`: (host, port) of its store. `full_every`: 0
    sends everything each time; n > 0 what changed since the last time, and everything every n-th. `keep`: hold what was
    sent in host memory, to send it again when the model has changed; `kept`: the version that is held, whole, or -1."""

    full_every, keep, kept = 0, False, -1

    def __init__(self, plan: BucketPlan, index: int, device: torch.device, host: str, timeout_s: float) -> None:
        super().__init__(plan, index, device, host, timeout_s)
        self.slots = [[slot for slot in b.slots if slot.sender == self.index] for b in self.plan.buckets]
        limit = timedelta(seconds=self.timeout_s)
        self.store = open_store(self.host, 0, is_master=True, wait_for_workers=False, timeout=limit)
        self.control = self.store.clone()  # for `abort`, while a send waits in the other one
        self.address = (self.host, self.store.port)
        self.sizes = [b.nbytes[self.index] for b in self.plan.buckets]
        self.buffers: list[torch.Tensor] = []
        self.base: list[torch.Tensor] = []  # what was sent last, bucket by bucket
        self.since_full = -1  # receivers hold nothing of it

    def connect(self, epoch: int, receivers: int, near: Sequence[int] = ()) -> None:
        """Form the group with `receivers` vLLM workers, which must call `Receiver.connect` meanwhile. `near`: the
        receivers that are on this sender's device. An earlier epoch's group is given up. Raises SyncError: not all are
        there within `connect_limit`, or the epoch was given up."""
        self.close()
        self.since_full = -1
        # A connection of its own: a group that is given up may still hold an earlier epoch's.
        store = dist.PrefixStore(f"{epoch}", self.store.clone())
        self.signals = [AbortSignal(store)]
        deadline = time.monotonic() + connect_limit(self.timeout_s, self.plan.senders, receivers)
        try:
            with self._phase("connect"):
                self._check_signals()
                self._connect(store, receivers, near, deadline)
        except BaseException as error:
            self.give_up(error)
            raise

    def _connect(self, store: dist.Store, receivers: int, near: Sequence[int], deadline: float) -> None:
        # Two buffers: the next bucket is packed while one is on the wire. Zeros, so that their pages are touched.
        room = [max(self.sizes, default=0)] * 2
        if near:
            self.links = [SharedOutlet(store, room, list(near), self.device)]
            self.buffers = self.links[0].buffers
        elif not self.buffers:
            self.buffers = [torch.zeros(n, dtype=torch.uint8, device=self.device) for n in room]
        if receivers > len(near):
            link = self._join(store, 0, receivers - len(near) + 1, deadline)
            self.links.append(link)
            for _ in range(2 if self.sizes[0] else 0):  # for the receivers' `raw`
                self._on_wire(self._measure, link)

    def _measure(self, link: NetworkLink) -> None:
        """Send the first bucket as it is, for receivers to measure the bare link."""
        link.publish(self.buffers[0][: self.sizes[0]])
        link.wait(self.timeout_s)

    def abort(self, epoch: int, reason: str) -> None:
        """From any thread: let every wait of an epoch end, at this sender and at its receivers."""
        signal = AbortSignal(dist.PrefixStore(f"{epoch}", self.control))
        signal.set(reason)
        signal.close()

    def send(self, tensors: Iterable[torch.Tensor], version: int) -> dict[str, Any]:
        """Send this rank's pieces, in the order of its plan, as weight version `version`; the `kept` one without
        looking at them. Returns seconds per phase (gather, checksum, encode, keep, wire), "bytes" that travelled, how many 16-bit words "changed" (NaN where all were sent)
        and "each" bucket's time on the wire. Raises SyncError naming this sender, phase and bucket; the group is given
        up then, and receivers do not wait for it any longer."""
        self._begin()
        try:
            if not self.links:
                raise SyncError(f"{self.who} is in no group; it must connect first")
            with torch.cuda.stream(self.stream) if self.stream else nullcontext():
                self._send(iter(tensors), version)
                return self._report() | {"changed": float(self.changed) if self.since_full else math.nan}
        except BaseException as error:
            self.since_full = -1  # what receivers hold is unknown
            self.give_up(error)
            raise

    def _send(self, data: Iterator[torch.Tensor], version: int) -> None:
        changes, again = self.full_every > 0, self.kept == version
        # The first of an epoch is full.
        self.since_full = (self.since_full + 1) % max(self.full_every, 1)
        if (changes or self.keep) and not self.base:
            pinned = self.device.type == "cuda"
            self.base = [torch.zeros(n, dtype=torch.uint8, pin_memory=pinned) for n in self.sizes]
        self.kept = version if again else -1
        sums = torch.zeros(len(self.plan.buckets), 2, dtype=torch.int64, device=self.device)
        with self._phase("header"):
            self._on_wire(self._carry, torch.tensor([self.plan.digest, version, int(changes)], device=self.device))
        buffers, flying = itertools.cycle(self.buffers), None
        for i, size in enumerate(self.sizes):
            if not size:  # a bucket may hold nothing of this sender
                continue
            self.bucket, flat = i, next(buffers)[:size]
            with self._phase("gather"):
                flat.copy_(self.base[i], non_blocking=True) if again else self._pack(flat, self.slots[i], data)
            with self._phase("checksum"):
                sums[i] = checksum(flat)
            payload = None
            if self.since_full:
                with self._phase("encode"):
                    payload, changed = delta.encode(flat, self.base[i].to(self.device, non_blocking=True))
                    self.changed += changed
            if self.base and not again:
                with self._phase("keep"):
                    self.base[i].copy_(flat, non_blocking=True)
            if payload is not None:
                flat = flat[: len(payload)].copy_(payload)
            size = [torch.tensor([len(flat)], device=self.device)] if changes else []
            self._settle(flying)
            flying = i, self.wire.submit(self._carry, *size, flat)
        self.tensor = None  # it may be a copy
        self._settle(flying)
        with self._phase("wire"):
            self._on_wire(self._carry, sums)
        self.kept = version if self.base else -1

    def _carry(self, *messages: torch.Tensor) -> float:
        """To every receiver; returns the seconds it took."""
        if self.stream:
            self.stream.synchronize()  # what packed them
        begin = time.perf_counter()
        for message in messages:
            for link in self.links:
                link.publish(message)
            for link in self.links:
                link.wait(self.timeout_s)
        self.bytes += sum(m.nbytes for m in messages if m.dtype == torch.uint8)
        return self._timed(" wire", "wire", time.perf_counter() - begin)

    def _settle(self, flying: tuple[int, Future] | None) -> None:
        """Until the bucket on the wire has reached everybody."""
        if flying:
            with self._phase("wire", flying[0]):
                self.each.append([flying[0], self._result(flying[1])])

    def _pack(self, flat: torch.Tensor, slots: list[Slot], data: Iterator[torch.Tensor]) -> None:
        for slot in slots:
            if slot.piece.start == slot.of.start:  # the others are strips of the same tensor
                self.tensor = next(data)
                if self.tensor.shape != slot.of.block:
                    shape, planned = tuple(self.tensor.shape), slot.of.block
                    raise SyncError(f"{self.who}: {slot.of.name} is {shape}, planned {planned}")
            slot.view(flat).copy_(slot.piece.place(self.tensor, slot.of.start), non_blocking=True)
            slot.seal(flat)


class Mirror:
    """What a receiver got from each sender last, bucket by bucket, in the checkpoint's layout: a copy of the model in
    host memory. What changed is applied here, where no engine has packed or fused anything."""

    def __init__(self, plan: BucketPlan, device: torch.device) -> None:
        self.plan, self.device = plan, device
        # A block for each bucket, not each part: large ones go back to the system when they are given up.
        self.flats = [torch.zeros(sum(b.nbytes), dtype=torch.uint8) for b in plan.buckets]

    def pin(self) -> None:
        """Make it faster to read for a GPU. Not at once: pinned memory would not be given back where a mirror turns out not
        to be needed."""
        for i, flat in enumerate(self.flats) if self.device.type == "cuda" else ():
            self.flats[i] = flat.pin_memory()

    def held(self, i: int) -> Parts:
        """Each sender's part of bucket `i` as it was sent last, to be changed."""
        return self.plan.buckets[i].parts(self.flats[i])

    def update(self, i: int, messages: Parts) -> Parts:
        """Each sender's part of bucket `i` after its message: uint8, on the receiver's device."""
        parts = self.held(i)
        for sender, message in messages.items():
            if len(message) == len(parts[sender]):  # a payload is shorter
                parts[sender].copy_(message)
            else:
                delta.apply(message.to(parts[sender].device), parts[sender])
        return {sender: part.to(self.device, non_blocking=True) for sender, part in parts.items()}


class Receiver(_End):
    """The receiving end in one vLLM worker. Where only changes travel it needs what it got before: a `mirror`, made by
    the first sync, or `live`, an object that has it in the model itself (`Mirror.update`, and `write(i)` in place of
    loading bucket `i`)."""

    mirror: Mirror | None = None
    live: Any = None

    def connect(self, epoch: int, addresses: Sequence[Any], receivers: int, near: Sequence[Any] = ()) -> None:
        """Join every sender's group, in the order of the plan. `addresses`: (host, port) each. `near`: per sender the
        receivers on its device. An earlier epoch's groups are given up, and what it was sent in them. Raises SyncError: not
        all is there within `connect_limit`, or the epoch was given up."""
        self.close()
        self.mirror = self.live = None
        deadline = time.monotonic() + connect_limit(self.timeout_s, len(addresses), receivers)
        try:
            with self._phase("connect"):
                for s, address in enumerate(addresses):
                    self._join_sender(epoch, address, receivers, near[s] if near else (), deadline)
                self._prepare_buffers()
                self._measure()
        except BaseException as error:
            self.give_up(error)
            raise

    def _join_sender(self, epoch: int, address: Any, receivers: int, near: Sequence[int], deadline: float) -> None:
        store = dist.PrefixStore(f"{epoch}", self._until(deadline, _open_client, *address, self.timeout_s))
        self.signals.append(AbortSignal(store))
        self._check_signals()
        far = [r for r in range(receivers) if r not in near]
        if self.index in far:
            self.links.append(self._join(store, 1 + far.index(self.index), len(far) + 1, deadline))
        else:
            inlet = self._until(deadline, SharedInlet, store, self.index, self.device, self.timeout_s)
            self.links.append(inlet)

    def _prepare_buffers(self) -> None:
        self.far = any(isinstance(link, NetworkLink) for link in self.links)
        where = self.device if self.far else "meta"  # where all is read out of the senders', there need be none
        # Two: one fills up while the other is loaded. And where tensors of several senders, or strips, are joined.
        self.buffers = [torch.zeros(self.plan.largest, dtype=torch.uint8, device=where) for _ in range(2)]
        self.room = torch.zeros(self.plan.room, dtype=torch.uint8, device=self.device)

    def _measure(self) -> None:
        """Seconds per byte of the bare link: the first bucket as it will travel, twice; the second time counts."""
        parts = self.plan.buckets[0].parts(self.buffers[0])
        far = {s: room for s, room in parts.items() if isinstance(self.links[s], NetworkLink)}
        for _ in range(2):
            begin = time.perf_counter()
            self._on_wire(self._take, far)
        self.raw = (time.perf_counter() - begin) / sum(map(len, far.values())) if len(far) == len(parts) else 0.0

    def receive(self, load: Callable[[list[tuple[str, torch.Tensor]]], None], version: int) -> dict[str, Any]:
        """Receive one sync and hand each bucket's whole tensors to `load`, or have `live` write them.

        The tensors are views into reused buffers: `load` must copy what it keeps. When this returns, the bytes equal
        the senders' by checksum; before that the model must not be used. Returns seconds per phase (wait, apply,
        verify, load), "bytes", "each" bucket's time on the wire, and "raw", the time that the bare link would take for all
        of them; `sums` (int64 [senders, buckets, 2]) are the checksums then. Raises SyncError: other plan or version, time limit, broken peer, or a checksum that differs; the groups are
        given up then."""
        self._begin()
        try:
            if not self.links:
                raise SyncError(f"{self.who} is in no group; it must connect first")
            self._receive(load, version)
        except BaseException as error:
            self.mirror = self.live = None
            self.give_up(error)
            raise
        return self._report() | {"raw": self.raw * self.bytes}

    def _receive(self, load: Callable[[list[tuple[str, torch.Tensor]]], None], version: int) -> None:
        buckets = self.plan.buckets
        changes = self._headers(version)
        if changes and not self.live and not self.mirror:
            self.mirror = Mirror(self.plan, self.device)
        base = self.live or self.mirror
        sums = torch.zeros(self.plan.senders, len(buckets), 2, dtype=torch.int64, device=self.device)
        coming = self.wire.submit(self._fill, 0, changes)
        for i, bucket in enumerate(buckets):
            self.bucket = i
            with self._phase("wait"):
                parts = self._result(coming)
                if i + 1 < len(buckets):
                    coming = self.wire.submit(self._fill, i + 1, changes)
            with self._phase("apply"):
                full = base.update(i, parts) if base else parts
            with self._phase("verify"):
                for s, part in full.items():
                    sums[s, i] = checksum(part)
            with self._phase("load"):
                if self.live:
                    self.live.write(i)
                elif (tensors := bucket.join(full, self.room)) and bucket.ends:
                    load(tensors)
                for s in parts:
                    self.links[s].release()
        self._check_sums(sums)
        self.sums = sums

    def _headers(self, version: int) -> bool:
        """Whether messages tell their size, after checking that every sender sends what is expected."""
        with self._phase("header"):
            headers = self._on_wire(self._numbers, range(self.plan.senders), 3)
        for s, header in headers.items():
            digest, sent, changes = header.tolist()
            if digest != self.plan.digest:
                raise SyncError(f"{self.who}: sender {s} follows another bucket plan")
            if sent != version:
                raise SyncError(f"{self.who}: sender {s} sends version {sent}, expected {version}")
        return bool(changes)

    def _fill(self, i: int, changes: bool) -> Parts:
        """On the wire's thread: what the senders have of bucket `i`, side by side, until it is released."""
        begin, rooms = time.perf_counter(), self.plan.buckets[i].parts(self.buffers[i % 2])
        if changes:
            sizes = self._numbers(rooms, 1)
            rooms = {s: room[: int(sizes[s])] for s, room in rooms.items()}
        parts = self._take(rooms)
        self.bytes += sum(map(len, parts.values()))
        seconds = self._timed(" wire", "wire", time.perf_counter() - begin)
        self.each += [[i, seconds]] * self.far
        return parts

    def _take(self, rooms: Parts) -> Parts:
        """The next message of each of these senders, of all at once: in its room, or of a near one where that has it."""
        links = self.links  # a thread that was given up and comes back late must not touch those of another epoch
        for s, room in rooms.items():
            links[s].ask(room)
        return {s: links[s].take(room) for s, room in rooms.items()}

    def _numbers(self, senders: Iterable[int], count: int) -> Parts:
        """The same of a message of a few numbers, int64 [count]."""
        return self._take({s: torch.zeros(count, dtype=torch.int64, device=self.device) for s in senders})

    def _check_sums(self, mine: torch.Tensor) -> None:
        """Compare with every sender's table; all are read first, so that no sender is left waiting for us."""
        theirs = torch.zeros_like(mine)
        with self._phase("verify"):
            self._on_wire(self._take, dict(enumerate(theirs)))
        wrong = (mine != theirs).any(dim=2).nonzero().tolist()
        if wrong:
            sender, bucket = wrong[0]
            where = f"bucket {bucket + 1} of {mine.shape[1]} from sender {sender}"
            raise SyncError(f"{self.who}, phase verify: checksum of {where} differs ({len(wrong)} buckets in all)")


def own_host(host: str) -> str:
    """`host`, or where it is empty (several nodes) the address by which other nodes reach this one."""
    from ray.util import get_node_ip_address

    return host or get_node_ip_address()


def use_interface_towards(host: str) -> None:
    """Let gloo use the network interface by which this process reaches `host`, unless GLOO_SOCKET_IFNAME names one. Left
    alone, it listens at the address of the machine's name, which many machines take for their loopback."""
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_DGRAM) as s:
        s.connect((host, 9))  # sends nothing
        mine = s.getsockname()[0]
    for name, addresses in psutil.net_if_addrs().items():
        if any(address.address.split("%")[0] == mine for address in addresses):
            os.environ.setdefault("GLOO_SOCKET_IFNAME", name)
