"""A stand-in for a GPU's streams and events over CPU tensors, and counts of what a sync asks of the
device: waits of the host, and operations that would launch kernels."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from one_step_off.weight_sync import (
    delta,
    launch_order,
    receiver,
    sender,
    sender_groups,
    stream_peer,
)
from one_step_off.weight_sync.bucket_plan import weighted_sums
from one_step_off.weight_sync.gpu_queue import GpuQueue
from one_step_off.weight_sync.sender import KEEP_THREAD
from one_step_off.weight_sync.stream_peer import StreamPeer

HOST_READS = {
    "cpu", "item", "tolist", "nonzero", "masked_select", "equal",
    "__bool__", "__int__", "__float__", "__index__",
}  # fmt: skip
"""Functions of torch that wait for a GPU to see a tensor's content."""

NO_KERNELS = {"aten::empty.memory_format", "aten::empty_strided", "aten::_local_scalar_dense"}
"""Beside views."""


class SyncCounts:
    """What senders and receivers did, by side: "sender", "receiver", or "keep" for the thread of a
    sender after the sync."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.host_waits: dict[str, Counter[str]] = {}
        self.kernels: dict[str, Counter[str]] = {}
        self.thread = threading.local()

    def note(self, table: dict[str, Counter[str]], what: str) -> None:
        side = getattr(self.thread, "side", None)
        if side is not None:
            with self.lock:
                table.setdefault(side, Counter())[what] += 1

    def clear(self) -> None:
        self.host_waits.clear()
        self.kernels.clear()

    @contextmanager
    def of(self, side: str) -> Iterator[None]:
        """Count what this thread does as this side's."""
        with ExitStack() as stack:
            self.enter(side, stack)
            yield

    def enter(self, side: str, stack: ExitStack | None = None) -> None:
        """As `of`; without a stack for the rest of the thread."""
        self.thread.side = side
        for mode in (_HostReads(self), _Kernels(self)):
            mode.__enter__() if stack is None else stack.enter_context(mode)


class _HostReads(TorchFunctionMode):
    def __init__(self, counts: SyncCounts) -> None:
        super().__init__()
        self.counts = counts

    def __torch_function__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        name = getattr(func, "__name__", "")
        reads = name in HOST_READS
        if name == "__getitem__":  # by a mask, whose count the host must know
            reads = isinstance(args[1], torch.Tensor) and args[1].dtype == torch.bool
        if name == "tensor":
            reads = "pin_memory" not in (kwargs or {})  # a copy from other memory is waited for
        if name == "to":  # to pinned memory, or from it, nobody waits
            reads = "cpu" in map(str, args[1:2]) and "non_blocking" not in (kwargs or {})
        if reads:
            self.counts.note(self.counts.host_waits, name)
        return func(*args, **(kwargs or {}))


class _Kernels(TorchDispatchMode):
    def __init__(self, counts: SyncCounts) -> None:
        super().__init__()
        self.counts = counts

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        aliases = [argument.alias_info for argument in func._schema.arguments]
        is_view = any(alias is not None and not alias.is_write for alias in aliases)
        is_empty = bool(args) and isinstance(args[0], torch.Tensor) and not args[0].numel()
        if not is_view and not is_empty and func.name() not in NO_KERNELS:
            self.counts.note(self.counts.kernels, func.name())
        return func(*args, **(kwargs or {}))


HostCopy = tuple[torch.Tensor, torch.Tensor]
"""A copy in host memory, and the numbers of the device."""


class StandInMark:
    """As torch.cuda.Event: its time is not known before the host has waited for it, or for a later
    one of its thread. Nor are copies to the host that were begun before it."""

    def __init__(self, recorded: list[StandInMark], copies: list[HostCopy]) -> None:
        self.is_reached = False
        self.copies = copies
        self.before = recorded  # by this thread
        self.number = len(recorded)
        recorded.append(self)

    def synchronize(self) -> None:
        for mark in self.before[: self.number + 1]:
            mark.is_reached = True
            for copy, numbers in mark.copies:
                copy.copy_(numbers)
            mark.copies = []

    def elapsed_time(self, end: StandInMark) -> float:
        if not (self.is_reached and end.is_reached):
            raise RuntimeError("Both events must be completed before calculating elapsed time")
        return 1.0


class StandInQueue(GpuQueue):
    """A GPU's queue over CPU tensors, which have done all work when a call returns."""

    def __init__(self, counts: SyncCounts) -> None:
        self.counts = counts
        self.thread = threading.local()

    def use(self) -> AbstractContextManager:
        return nullcontext()

    def mark(self) -> Any:
        self._prepare_thread()
        copies = self.thread.copies
        self.thread.copies = []
        return StandInMark(self.thread.marks, copies)

    def _prepare_thread(self) -> None:
        if not hasattr(self.thread, "marks"):
            self.thread.marks = []
            self.thread.copies = []

    def host_copy(self, numbers: torch.Tensor) -> torch.Tensor:
        """Zeros until the host has waited for a later mark of this thread."""
        self._prepare_thread()
        copy = torch.zeros_like(numbers)
        self.thread.copies.append((copy, numbers))
        return copy

    def wait(self, mark: Any) -> None:
        if not mark.is_reached:
            self.counts.note(self.counts.host_waits, "mark")
        super().wait(mark)


def as_on_a_gpu(monkeypatch: pytest.MonkeyPatch, counts: SyncCounts) -> None:
    """From now on new senders and receivers of CPU tensors work as those of GPUs do."""
    prepare_thread = StreamPeer.prepare_thread

    def prepare(peer: StreamPeer) -> None:
        prepare_thread(peer)
        is_keeping = threading.current_thread().name == KEEP_THREAD
        counts.enter("keep" if is_keeping else peer.role)

    for module in (stream_peer, sender_groups):
        monkeypatch.setattr(module, "open_queue", lambda device: StandInQueue(counts))
    for module in (sender, receiver):
        monkeypatch.setattr(module, "checksum", weighted_sums)
    monkeypatch.setattr(StreamPeer, "prepare_thread", prepare)
    monkeypatch.setattr(
        StreamPeer, "_host_copy", lambda peer, numbers: peer.queue.host_copy(numbers)
    )
    monkeypatch.setitem(launch_order.IS_ORDERED, "cpu", True)
    monkeypatch.setitem(delta._COUNTS_FIRST, "cpu", True)
