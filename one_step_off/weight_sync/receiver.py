"""The weight receiver in one vLLM worker."""

import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from one_step_off.cluster.bounded_waits import AbortSignal
from one_step_off.cluster.errors import SyncError
from one_step_off.distributed_util import DedicatedGroup, _open_client, connect_limit
from one_step_off.weight_sync.bucket_plan import Parts, checksum
from one_step_off.weight_sync.endpoint import _End
from one_step_off.weight_sync.mirror import Mirror
from one_step_off.weight_sync.shared_memory import SharedMemoryReceiver


class WeightReceiver(_End):
    """The receiving end in one vLLM worker. Where only changes travel it needs what it got before: a `mirror`, made by
    the first sync, or `live`, an object that has it in the model itself (`Mirror.update`, and `write(i)` in place of
    loading bucket `i`)."""

    role = "receiver"
    mirror: Mirror | None = None
    live: Any = None

    def connect(
        self, epoch: int, addresses: Sequence[Any], receivers: int, near: Sequence[Any] = ()
    ) -> None:
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

    def _join_sender(
        self, epoch: int, address: Any, receivers: int, near: Sequence[int], deadline: float
    ) -> None:
        store = dist.PrefixStore(
            f"{epoch}", self._until(deadline, _open_client, *address, self.timeout_s)
        )
        self.signals.append(AbortSignal(store))
        self._check_signals()
        far = [r for r in range(receivers) if r not in near]
        if self.index in far:
            self.links.append(self._join(store, 1 + far.index(self.index), len(far) + 1, deadline))
        else:
            inlet = self._until(
                deadline, SharedMemoryReceiver, store, self.index, self.device, self.timeout_s
            )
            self.links.append(inlet)

    def _prepare_buffers(self) -> None:
        self.far = any(isinstance(link, DedicatedGroup) for link in self.links)
        where = (
            self.device if self.far else "meta"
        )  # where all is read out of the senders', there need be none
        # Two: one fills up while the other is loaded. And where tensors of several senders, or strips, are joined.
        self.buffers = [
            torch.zeros(self.plan.largest, dtype=torch.uint8, device=where) for _ in range(2)
        ]
        self.room = torch.zeros(self.plan.room, dtype=torch.uint8, device=self.device)

    def _measure(self) -> None:
        """Seconds per byte of the bare link: the first bucket as it will travel, twice; the second time counts."""
        parts = self.plan.buckets[0].parts(self.buffers[0])
        far = {s: room for s, room in parts.items() if isinstance(self.links[s], DedicatedGroup)}
        for _ in range(2):
            begin = time.perf_counter()
            self._on_wire(self._take, far)
        self.raw = (
            (time.perf_counter() - begin) / sum(map(len, far.values()))
            if len(far) == len(parts)
            else 0.0
        )

    def receive(
        self, load: Callable[[list[tuple[str, torch.Tensor]]], None], version: int
    ) -> dict[str, Any]:
        """Receive one sync and hand each bucket's whole tensors to `load`, or have `live` write them.

        The tensors are views into reused buffers: `load` must copy what it keeps. When this returns, the bytes equal
        the senders' by checksum; before that the model must not be used. Returns seconds per phase (wait, apply,
        verify, load), "bytes", "bucket_wire" bucket's time on the wire, and "bare_wire", the time that the bare link would take for all
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
        return self._report() | {"bare_wire": self.raw * self.bytes}

    def _receive(
        self, load: Callable[[list[tuple[str, torch.Tensor]]], None], version: int
    ) -> None:
        buckets = self.plan.buckets
        changes = self._headers(version)
        if changes and not self.live and not self.mirror:
            self.mirror = Mirror(self.plan, self.device)
        base = self.live or self.mirror
        sums = torch.zeros(
            self.plan.senders, len(buckets), 2, dtype=torch.int64, device=self.device
        )
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
        links = (
            self.links
        )  # a thread that was given up and comes back late must not touch those of another epoch
        for s, room in rooms.items():
            links[s].ask(room)
        return {s: links[s].take(room) for s, room in rooms.items()}

    def _numbers(self, senders: Iterable[int], count: int) -> Parts:
        """The same of a message of a few numbers, int64 [count]."""
        return self._take(
            {s: torch.zeros(count, dtype=torch.int64, device=self.device) for s in senders}
        )

    def _check_sums(self, mine: torch.Tensor) -> None:
        """Compare with every sender's table; all are read first, so that no sender is left waiting for us."""
        theirs = torch.zeros_like(mine)
        with self._phase("verify"):
            self._on_wire(self._take, dict(enumerate(theirs)))
        wrong = (mine != theirs).any(dim=2).nonzero().tolist()
        if wrong:
            sender, bucket = wrong[0]
            where = f"bucket {bucket + 1} of {mine.shape[1]} from sender {sender}"
            raise SyncError(
                f"{self.who}, phase verify: checksum of {where} differs ({len(wrong)} buckets in all)"
            )
