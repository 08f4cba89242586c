"""A stand-in for a GPU's streams and events over CPU tensors, and counts of what a sync asks of the
device: waits of the host, and operations that would launch kernels."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

HOST_READS = {
    "cpu", "item", "tolist", "nonzero", "masked_select", "equal",
    "__bool__", "__int__", "__float__", "__index__",
}  # fmt: skip
"""Functions of torch that wait for a GPU to see a tensor's content."""

NO_KERNELS = {"aten::empty.memory_format", "aten::empty_strided", "aten::_local_scalar_dense"}
"""Beside views."""


class SyncCounts:
    """What senders and receivers did, by side: "sender" or "receiver"."""

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
        if name == "tensor":  # from memory that is not pinned
            reads = True
        if name == "to":
            reads = "cpu" in map(str, args[1:2])
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


class StandInEvent:
    """As torch.cuda.Event: its time is not known before the host has waited for it, or for a later
    one of its stream."""

    numbers = Counter()  # per stream: events recorded
    reached = Counter()  # per stream: the last one that the host has waited for

    def __init__(self, counts: SyncCounts, stream: object) -> None:
        self.counts = counts
        self.stream = stream
        StandInEvent.numbers[stream] += 1
        self.number = StandInEvent.numbers[stream]

    def synchronize(self) -> None:
        self.counts.note(self.counts.host_waits, "event")
        reached = StandInEvent.reached
        reached[self.stream] = max(reached[self.stream], self.number)

    def elapsed_time(self, end: StandInEvent) -> float:
        for event in (self, end):
            if event.number > StandInEvent.reached[event.stream]:
                raise RuntimeError("Both events must be completed before calculating elapsed time")
        return 1.0


Prepare = Callable[[Any], None]
