"""Counts what would make the host wait for a GPU, in code that runs on CPUs.

Not seen: copies to a `torch.device`, or by `copy_`, which look the same in host memory as on a GPU.
"""

import collections
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

READING_METHODS = ("cpu", "numpy", "tolist", "item", "__array__")
"""Methods of tensors that copy to the host."""

READING_OPERATORS = (
    *("_local_scalar_dense", "equal", "allclose", "is_nonzero"),
    *("nonzero", "masked_select", "_unique2", "unique_dim", "repeat_interleave", "bincount"),
)
"""Operators that read a value, or whose output has a shape that depends on values."""

MAKERS = (torch.tensor, torch.as_tensor, torch.asarray)
"""Functions that copy numbers of the host to the device that they are given, and wait for that."""


class _Methods(TorchFunctionMode):
    def __init__(self, counts: collections.Counter) -> None:
        super().__init__()
        self.counts = counts

    def __torch_function__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        name = getattr(func, "__name__", "")
        if name == "to" and _waits_for_copy(args[1:], kwargs or {}):
            self.counts["to the host"] += 1
        if name in READING_METHODS and args and isinstance(args[0], Tensor):
            self.counts[name] += 1
        is_given_device = (kwargs or {}).get("device") is not None
        if func in MAKERS and is_given_device and not isinstance(args[0], Tensor):
            self.counts[f"{name} of host numbers"] += 1
        return func(*args, **(kwargs or {}))


class _Operators(TorchDispatchMode):
    def __init__(self, counts: collections.Counter) -> None:
        super().__init__()
        self.counts = counts

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        name = func.overloadpacket.__name__
        if name in READING_OPERATORS or _has_mask_index(name, args):
            self.counts[name] += 1
        return func(*args, **(kwargs or {}))


def _waits_for_copy(args: tuple, kwargs: dict) -> bool:
    """Whether a call of `to` names the CPU, so that it would wait on a GPU. A `torch.device` may
    be the model's own, which is the CPU in tests."""
    targets = [*args, kwargs.get("device")]
    to_host = any(isinstance(target, str) and target == "cpu" for target in targets)
    return to_host and not kwargs.get("non_blocking")


def _has_mask_index(name: str, args: tuple) -> bool:
    """Indexing by a mask asks how many elements it has."""
    if name not in ("index", "index_put", "index_put_", "_index_put_impl_"):
        return False
    indices = [index for index in args[1] if index is not None]
    return any(index.dtype in (torch.bool, torch.uint8) for index in indices)


@contextmanager
def counted_host_waits():
    """Yields a Counter of what ran inside, by name. It includes backward passes."""
    counts: collections.Counter = collections.Counter()
    with ExitStack() as modes:
        modes.enter_context(_Operators(counts))
        modes.enter_context(_Methods(counts))
        yield counts
