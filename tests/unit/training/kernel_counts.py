"""Counts the kernels that torch's operators start, and the bytes that they read and write: on a GPU
each would be a launch and that much traffic, if nothing is compiled."""

from __future__ import annotations

import collections
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


@dataclass
class KernelCounts:
    """What ran: kernels by operator, bytes read and written, and the largest tensor that any of
    them wrote, in elements, by dtype."""

    kernels: collections.Counter = field(default_factory=collections.Counter)
    bytes_moved: int = 0
    largest: collections.Counter = field(default_factory=collections.Counter)


class _Counting(TorchDispatchMode):
    def __init__(self, counts: KernelCounts) -> None:
        super().__init__()
        self.counts = counts

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        output = func(*args, **(kwargs or {}))
        written = [x for x in tree_leaves(output) if isinstance(x, Tensor)]
        if func.is_view or _allocates(func):
            return output
        read = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        counts = self.counts
        counts.kernels[func.overloadpacket.__name__] += 1
        counts.bytes_moved += sum(x.numel() * x.element_size() for x in read + written)
        for tensor in written:
            largest = max(counts.largest[tensor.dtype], tensor.numel())
            counts.largest[tensor.dtype] = largest
        return output


def _allocates(func: Any) -> bool:
    return func.overloadpacket.__name__.startswith(("empty", "new_empty", "detach"))


@contextmanager
def counted_kernels():
    """Yields KernelCounts of what runs inside, backward passes included."""
    counts = KernelCounts()
    with _Counting(counts):
        yield counts
