"""What a sender and a receiver share: links, abort signals, the wire thread, timing by phase.

Trainer ranks send the pieces they own; every vLLM worker receives all of them and assembles whole tensors:

    plan = BucketPlan.build(pieces_of_each_sender, bucket_bytes)         once, the same on both sides
    WeightSender(plan, rank, ...).connect(epoch, n_receivers);               .send(tensors, version)
    WeightReceiver(plan, index, ...).connect(epoch, addresses, n_receivers); .receive(load, version)

There is one group per sender, {sender} u receivers, made anew in every epoch, that is when receivers come or go. All
receivers and senders walk the buckets in the order of the plan; the senders' parts of a bucket arrive side by side. Receivers that are `near` a sender, on the same device, are not in its group: they read its buckets where
they lie (shared_memory.py). Both ends have a thread for the wire: while bucket k travels, k+1 is packed and k-1 loaded.

The rule that keeps this and the trainer's own collectives from waiting for each other: a send calls no collective of
the trainer's and touches no default group; it runs on a thread, a group and, on GPUs, streams of its own, and reads
nothing but this rank's shard. So it goes on whatever the trainer's ranks wait for, and they go on whatever it waits for;
what a send waits for are receivers, which walk the buckets in one order and wait for nothing else. (Trainers that gather
a tensor, send it, and gather the next hang when one rank's next gather is queued behind another rank's send.) On a GPU
both also need a queue each: with CUDA_DEVICE_MAX_CONNECTIONS=1 a waiting send would hold up all that is launched later.
"""

import time
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from one_step_off.cluster.bounded_waits import Aborted, AbortSignal, WorkerThread, wait_for_result
from one_step_off.cluster.core_binding import unpin
from one_step_off.cluster.errors import GIVEN_UP, SyncError
from one_step_off.distributed_util import DedicatedGroup
from one_step_off.weight_sync.bucket_plan import BucketPlan

T = TypeVar("T")


MOST_SPANS = 200  # of one end in one sync; a picture of more shows nothing


class _End:
    """What both ends share: where they stand, seconds per phase of one sync, and the bucket that a failure was in."""

    role = "endpoint"  # in error messages

    def __init__(
        self, plan: BucketPlan, index: int, device: torch.device, host: str, timeout_s: float
    ) -> None:
        self.plan, self.index, self.device, self.host, self.timeout_s = (
            plan,
            index,
            device,
            host,
            timeout_s,
        )
        self.who = f"{self.role} {self.index}"
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
        self.spans: list[
            list[Any]
        ] = []  # for the timeline: [lane, phase, begin, end], of the clock on the wall
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
            if function is DedicatedGroup:
                made.add_done_callback(_close_late)
            raise

    def _join(self, store: dist.Store, rank: int, size: int, deadline: float) -> DedicatedGroup:
        left = deadline - time.monotonic()
        return self._until(
            deadline,
            DedicatedGroup,
            store,
            rank,
            size,
            self.device,
            self.host,
            self.timeout_s,
            left,
        )

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
            traceback.clear_frames(
                e.__traceback__
            )  # they hold the group's work: see DedicatedGroup.close
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
        return {
            **self.seconds,
            "bytes": float(self.bytes),
            "bucket_wire": self.each,
            "spans": self.spans,
        }


def _close_late(joining: Future) -> None:
    """A link that was made after the wait for it had ended."""
    if joining.exception() is None:
        joining.result().close()
