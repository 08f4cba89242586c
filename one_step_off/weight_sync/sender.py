"""The weight sender of one trainer rank."""

import itertools
import math
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import nullcontext
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from one_step_off.cluster.bounded_waits import AbortSignal
from one_step_off.cluster.errors import SyncError
from one_step_off.distributed_util import DedicatedGroup, connect_limit, open_store
from one_step_off.weight_sync import delta
from one_step_off.weight_sync.bucket_plan import BucketPlan, Slot, checksum
from one_step_off.weight_sync.endpoint import _End
from one_step_off.weight_sync.shared_memory import SharedMemorySender


class WeightSender(_End):
    """The sending end on one trainer rank: rank 0 of its group. `address`: (host, port) of its store. `full_every`: 0
    sends everything each time; n > 0 what changed since the last time, and everything every n-th. `keep`: hold what was
    sent in host memory, to send it again when the model has changed; `kept`: the version that is held, whole, or -1."""

    role = "sender"
    full_every, keep, kept = 0, False, -1

    def __init__(
        self, plan: BucketPlan, index: int, device: torch.device, host: str, timeout_s: float
    ) -> None:
        super().__init__(plan, index, device, host, timeout_s)
        self.slots = [
            [slot for slot in b.slots if slot.sender == self.index] for b in self.plan.buckets
        ]
        limit = timedelta(seconds=self.timeout_s)
        self.store = open_store(self.host, 0, is_master=True, wait_for_workers=False, timeout=limit)
        self.control = self.store.clone()  # for `abort`, while a send waits in the other one
        self.address = (self.host, self.store.port)
        self.sizes = [b.nbytes[self.index] for b in self.plan.buckets]
        self.buffers: list[torch.Tensor] = []
        self.base: list[torch.Tensor] = []  # what was sent last, bucket by bucket
        self.since_full = -1  # receivers hold nothing of it

    def connect(self, epoch: int, receivers: int, near: Sequence[int] = ()) -> None:
        """Form the group with `receivers` vLLM workers, which must call `WeightReceiver.connect` meanwhile. `near`: the
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

    def _connect(
        self, store: dist.Store, receivers: int, near: Sequence[int], deadline: float
    ) -> None:
        # Two buffers: the next bucket is packed while one is on the wire. Zeros, so that their pages are touched.
        room = [max(self.sizes, default=0)] * 2
        if near:
            self.links = [SharedMemorySender(store, room, list(near), self.device)]
            self.buffers = self.links[0].buffers
        elif not self.buffers:
            self.buffers = [torch.zeros(n, dtype=torch.uint8, device=self.device) for n in room]
        if receivers > len(near):
            link = self._join(store, 0, receivers - len(near) + 1, deadline)
            self.links.append(link)
            for _ in range(2 if self.sizes[0] else 0):  # for the receivers' `raw`
                self._on_wire(self._measure, link)

    def _measure(self, link: DedicatedGroup) -> None:
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
        and "bucket_wire" bucket's time on the wire. Raises SyncError naming this sender, phase and bucket; the group is given
        up then, and receivers do not wait for it any longer."""
        self._begin()
        try:
            if not self.links:
                raise SyncError(f"{self.who} is in no group; it must connect first")
            with torch.cuda.stream(self.stream) if self.stream else nullcontext():
                self._send(iter(tensors), version)
                return self._report() | {
                    "changed": float(self.changed) if self.since_full else math.nan
                }
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
            self._on_wire(
                self._carry,
                torch.tensor([self.plan.digest, version, int(changes)], device=self.device),
            )
        buffers, flying = itertools.cycle(self.buffers), None
        for i, size in enumerate(self.sizes):
            if not size:  # a bucket may hold nothing of this sender
                continue
            self.bucket, flat = i, next(buffers)[:size]
            with self._phase("gather"):
                flat.copy_(self.base[i], non_blocking=True) if again else self._pack(
                    flat, self.slots[i], data
                )
            with self._phase("checksum"):
                sums[i] = checksum(flat)
            payload = None
            if self.since_full:
                with self._phase("encode"):
                    payload, changed = delta.encode(
                        flat, self.base[i].to(self.device, non_blocking=True)
                    )
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
            if slot.piece.start == slot.source.start:  # the others are strips of the same tensor
                self.tensor = next(data)
                if self.tensor.shape != slot.source.block_shape:
                    shape, planned = tuple(self.tensor.shape), slot.source.block_shape
                    raise SyncError(f"{self.who}: {slot.source.name} is {shape}, planned {planned}")
            slot.view(flat).copy_(
                slot.piece.slice_of(self.tensor, slot.source.start), non_blocking=True
            )
            slot.seal(flat)
