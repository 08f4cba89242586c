"""What the weight sender and the weight receiver share: ends of streams, abort signals, the wire's
thread, time by phase.

Trainer ranks send the pieces that they own; every vLLM worker receives all of them and assembles
whole tensors:

    # Once, the same on both sides:
    plan = BucketPlan.build(pieces_of_each_sender, bucket_bytes)
    # On each trainer rank:
    sender = WeightSender(plan, rank, ...)
    sender.connect(epoch, receivers)
    sender.send(tensors, version)
    # In each vLLM worker:
    receiver = WeightReceiver(plan, index, ...)
    receiver.connect(epoch, addresses, receivers)
    receiver.receive(load, version)

There is one group per sender, with all receivers. It is created again in every epoch, that is, when
receivers come or go. All receivers and senders walk the buckets in the order of the plan. On CPUs
the senders' parts of a bucket arrive side by side, on GPUs one after another. Receivers on the same
device as a sender are not in its group: they read its buckets directly (same_device.py). Both
ends have a thread for the wire: while bucket k travels, k+1 is packed and k-1 is loaded.

Two things keep this and the trainer's own collectives from waiting for each other:

- A send calls no collective of the trainer and uses no default group. It runs on a thread, a group
  and, on GPUs, streams of its own, and reads only this rank's shard. So it continues whatever the
  trainer's threads wait for, and they continue whatever it waits for. (Trainers that gather a
  tensor, send it, and gather the next hang when one rank's next gather is queued behind another
  rank's send.)
- Streams share hardware queues, so threads and streams alone are not enough on GPUs. There a
  broadcast is launched only when all its receivers are ready, and a receiver takes one at a time:
  launch_order.py has the rules and why they suffice, with one queue too.
"""

import time
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from one_step_off.cluster.bounded_waits import (
    Aborted,
    AbortSignal,
    WorkerThread,
    reason_of,
    wait_for_result,
)
from one_step_off.cluster.core_binding import unpin
from one_step_off.cluster.errors import GIVEN_UP, SyncError
from one_step_off.distributed_util import DedicatedGroup
from one_step_off.weight_sync.bucket_plan import BucketPlan
from one_step_off.weight_sync.gpu_queue import open_queue
from one_step_off.weight_sync.launch_order import IS_ORDERED
from one_step_off.weight_sync.report import DEVICE_PHASES, TransferRecord
from one_step_off.weight_sync.transports.collective import Collective
from one_step_off.weight_sync.transports.transport import (
    ReceiveEnd,
    SendEnd,
    Stream,
    Transport,
)

T = TypeVar("T")
End = TypeVar("End", SendEnd, ReceiveEnd)

MEASURED_TRANSFERS = 2
"""Transfers of the first bucket in `connect`, by which receivers measure the bare link; the second
one counts."""


class StreamPeer:
    """The base of `WeightSender` and `WeightReceiver`."""

    role = "endpoint"  # in error messages

    def __init__(
        self,
        plan: BucketPlan,
        index: int,
        device: torch.device,
        host: str,
        timeout_s: float,
        transport: Transport | None = None,
    ) -> None:
        """Start the wire's thread; nothing is connected yet.

        Args:
            plan: the same at all endpoints.
            index: of this sender or receiver; a receiver's may change from epoch to epoch.
            device: of the buckets.
            host: the address at which this endpoint listens.
            timeout_s: weight_sync.timeout_s, for one message.
            transport: how messages travel; None: in process groups of their own.
        """
        self.plan = plan
        self.index = index
        self.device = device
        self.host = host
        self.timeout_s = timeout_s
        self.is_ordered = IS_ORDERED[device.type]
        self.transport = transport or Collective()
        self.ends: list[Any] = []  # SendEnd or ReceiveEnd of each stream
        self.abort_signals: list[AbortSignal] = []  # one per sender's store that this endpoint uses
        self.queue = open_queue(device)
        self.wire_thread = self._start_wire_thread()
        self._begin_sync()

    @property
    def name(self) -> str:
        """In error messages: "sender 0" or "receiver 3"."""
        return f"{self.role} {self.index}"

    def close(self) -> None:
        """Leave all groups; peers that wait for this endpoint fail."""
        for end in self.ends:
            end.close()
        for signal in self.abort_signals:
            signal.close()
        self.ends = []
        self.abort_signals = []

    def give_up(self, error: BaseException) -> None:
        """Leave all groups because of `error`. Every process that waits for this endpoint fails
        soon, and names the cause."""
        for signal in self.abort_signals:
            with suppress(RuntimeError):  # the sender's process is gone, and its store with it
                signal.set(reason_of(error))
        self.close()
        self.wire_thread.stop()
        self.wire_thread = self._start_wire_thread()  # the old thread may hang

    def _begin_sync(self) -> None:
        self.record = TransferRecord()
        self.bucket_number = 0  # of the bucket in work, counted from 1; 0 before the first

    def _start_wire_thread(self) -> WorkerThread:
        return WorkerThread("weight-wire", self.prepare_thread)

    def prepare_thread(self) -> None:
        """Runs first on a new thread: CUDA's device and stream are kept per thread."""
        unpin()
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)
            torch.cuda.set_stream(torch.cuda.Stream(self.device))

    def _report(self) -> dict[str, Any]:
        """What was measured during the sync, and on GPUs the memory of the groups."""
        if self.queue and self.record.marked:
            self.queue.wait(self.record.marked[-1][2])
            self.record.read_marks(self.queue)
        report = self.record.report()
        if self.device.type == "cuda":
            groups = [end for end in self.ends if isinstance(end, DedicatedGroup)]
            report["communicator_bytes"] = sum(group.communicator_bytes() for group in groups)
        return report

    def _wait_for_device(self) -> None:
        """Wait until a GPU has done what this thread has launched: another process, or the wire,
        may touch it then."""
        if self.queue:
            self.queue.wait(self.queue.mark())

    def _host_copy(self, numbers: torch.Tensor) -> torch.Tensor:
        """A few numbers of the device in host memory: there when the device was waited for. On CPUs
        `numbers` itself."""
        if self.device.type != "cuda":
            return numbers
        copy = torch.empty_like(numbers, device="cpu", pin_memory=True)
        return copy.copy_(numbers, non_blocking=True)

    def _check_abort_signals(self) -> None:
        """Raises Aborted, DistNetworkError: as `AbortSignal.check`."""
        for signal in self.abort_signals:
            signal.check()

    def _on_wire(self, function: Callable[..., T], *args: Any) -> T:
        """`function(*args)` on the wire's thread."""
        return self._result_from_wire(self.wire_thread.submit(function, *args))

    def _result_from_wire(self, future: Future[T]) -> T:
        """The result of a call on the wire's thread. Waits inside the call have limits of their
        own; the limit here is for a transport that hangs outside of them."""
        return wait_for_result(future, 3 * self.timeout_s, self._check_abort_signals)

    def _call_until(
        self,
        deadline: float,
        function: Callable[..., T],
        *args: Any,
        discard: Callable[[Future], None] | None = None,
    ) -> T:
        """`function(*args)` on a thread of its own, since nothing else bounds the creation of a
        group or a store.

        gloo's threads, which such a call starts, may run on all cores then.

        Args:
            deadline: by `time.monotonic`; the thread is abandoned then, or when the sync is
                aborted.
            function: the call.
            args: of the call.
            discard: receives the future of an abandoned call when it ends.

        Raises:
            TimeoutError: not by the deadline.
            Aborted, DistNetworkError: as `AbortSignal.check`.
        """
        thread = WorkerThread("weight-connect", self.prepare_thread)
        future = thread.submit(function, *args)
        thread.stop()
        try:
            return wait_for_result(future, deadline - time.monotonic(), self._check_abort_signals)
        except BaseException:
            if discard is not None:
                future.add_done_callback(discard)
            raise

    def _describe_stream(
        self, sender: int, epoch: int, store: dist.Store, receivers: tuple[int, ...], number: int
    ) -> Stream:
        """What both ends of a stream know, but for its time limit. `number`: of the set of
        receivers."""
        return Stream(
            sender=sender,
            receivers=receivers,
            name=f"set{number}/" if number else "",
            epoch=epoch,
            store=store,
            device=self.device,
            host=self.host,
            timeout_s=self.timeout_s,
            connect_timeout_s=0.0,
        )

    def _open_end(
        self, deadline: float, open_end: Callable[..., End], stream: Stream, *args: Any
    ) -> End:
        """Open one end of a stream; raises as `_call_until`. `open_end`: a method of the transport;
        it gets the stream and `args`."""
        stream = replace(stream, connect_timeout_s=deadline - time.monotonic())
        end = self._call_until(deadline, open_end, stream, *args, discard=_close_late_end)
        self.ends.append(end)
        return end

    @contextmanager
    def _phase(self, name: str, bucket_number: int | None = None) -> Iterator[None]:
        """Time the block as a phase, and raise its failures as SyncError with the place.

        Args:
            name: of the phase.
            bucket_number: for the message; None: the bucket in work.
        """
        on_gpu = self.queue is not None and name in DEVICE_PHASES
        begin = self.queue.mark() if on_gpu else time.perf_counter()
        with self._naming_failures(name, bucket_number):
            yield
        if on_gpu:
            self.record.mark_phase(name, begin, self.queue.mark())
        else:
            self.record.add_phase(name, time.perf_counter() - begin)

    @contextmanager
    def _naming_failures(self, phase: str, bucket_number: int | None = None) -> Iterator[None]:
        """Raise failures of the block as SyncError with the place; arguments as `_phase`."""
        try:
            yield
        except SyncError:
            raise
        except Exception as error:
            # The frames refer to the group's work, and gloo keeps its connections as long as
            # anything does: see DedicatedGroup.close.
            traceback.clear_frames(error.__traceback__)
            if bucket_number is None:
                bucket_number = self.bucket_number
            raise SyncError(self._failure_message(phase, bucket_number, error)) from error

    def _failure_message(self, phase: str, bucket_number: int, error: Exception) -> str:
        lines = str(error).strip().splitlines()
        cause = lines[0] if lines else type(error).__name__
        if isinstance(error, Aborted):
            cause = f"{GIVEN_UP}{cause}"
        bucket = f"bucket {bucket_number} of {len(self.plan.buckets)}"
        return f"{self.name}, phase {phase}, {bucket}: {cause}"


def _close_late_end(opening: Future) -> None:
    """Close an end that was opened after the wait for it had ended."""
    if opening.exception() is None:
        opening.result().close()
