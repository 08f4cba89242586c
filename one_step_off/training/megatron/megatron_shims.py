"""Patches of Megatron-core and torch: what Megatron-core needs to run on CPUs over gloo, and one
fix on all devices.

Megatron-core has no switch for CPUs. It asks `torch.cuda` where it is, makes small tensors on
"cuda", keeps RNG states of the device, and asserts on the names of CUDA tensor types. Inside
`cuda_is_cpu()` all of that is answered for the CPU, and nowhere else: a patch for the whole process
would mislead other libraries. On GPUs `cuda_is_cpu()` does nothing.

Written against the versions in `MEGATRON_VERSION` and `TORCH_VERSION`;
tests/unit/training/test_megatron_shims.py fails when a patched function changes.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.tensor_parallel import random as megatron_random
from megatron.core.transformer.moe import token_dispatcher
from torch.overrides import TorchFunctionMode

MEGATRON_VERSION = "0.19.2"
TORCH_VERSION = "2.13.0"


class _CudaIsCpu(TorchFunctionMode):
    """Tensors asked for on "cuda" are made on the CPU; `Tensor.type()` gives the CUDA name that
    Megatron asserts."""

    def __torch_function__(
        self, func: Callable, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if func is torch.Tensor.cuda:
            return args[0]
        if str(kwargs.get("device", "")).startswith("cuda"):
            kwargs["device"] = "cpu"
        kwargs.pop("pin_memory", None)
        answer = func(*args, **kwargs)
        if func is torch.Tensor.type and len(args) == 1:
            # The last part alone: inside a nested mode the name starts with "torch.cuda" already.
            return "torch.cuda." + answer.rsplit(".", 1)[1]
        return answer


class _Stream(torch.cpu.Stream):
    """torch's stream of the CPU, on which everything has already happened; so has an event on
    it."""

    record_event = torch.cpu.Event


def _current_device() -> torch.device:
    return torch.device("cpu")


def _get_rng_state(*_: Any, **__: Any) -> torch.Tensor:
    return torch.get_rng_state()


def _set_rng_state(state: torch.Tensor, *_: Any, **__: Any) -> None:
    torch.set_rng_state(state)


def _ignore_seed(seed: int) -> None:
    """The CPU's generator is seeded by torch.manual_seed, which Megatron calls too."""


def _to_cpu(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
    if as_numpy and isinstance(tensor, torch.Tensor):
        return tensor.numpy()
    return tensor


_set_states = DistributedOptimizer._set_main_param_and_optimizer_states


def _set_states_without_step(
    self: DistributedOptimizer, parameter: Any, tensors: dict[str, Any]
) -> None:
    _set_states(self, parameter, {"step": None} | tensors)


@dataclass(frozen=True)
class Patch:
    """A function of another library that is replaced inside `cuda_is_cpu`, and why."""

    owner: Any
    name: str
    replacement: Any
    reason: str


PATCHES = (
    Patch(
        DistributedOptimizer,
        "_set_main_param_and_optimizer_states",
        _set_states_without_step,
        "torch's AdamW counts steps in a tensor, for which Megatron looks among the loaded ones; a "
        "checkpoint has it elsewhere. The fused optimizers of GPUs have no such tensor.",
    ),
    Patch(torch.cuda, "current_device", _current_device, "Megatron makes tensors there."),
    Patch(torch.cuda, "current_stream", torch.cpu.current_stream, "Gradient reduction asks."),
    Patch(torch.cuda, "Stream", _Stream, "The optimizer and the dispatcher of tokens make some."),
    Patch(torch.cuda, "stream", torch.cpu.stream, "They enter them."),
    Patch(torch.cuda, "synchronize", torch.cpu.synchronize, "Checkpoints and pipelines wait."),
    Patch(torch.cuda, "get_rng_state", _get_rng_state, "Checkpoints and recomputing save it."),
    Patch(torch.cuda, "manual_seed", _ignore_seed, "The RNG tracker seeds the device."),
    Patch(megatron_random, "_get_cuda_rng_state", _get_rng_state, "The RNG tracker saves it."),
    Patch(megatron_random, "_set_cuda_rng_state", _set_rng_state, "The RNG tracker restores it."),
    Patch(
        token_dispatcher,
        "maybe_move_tensor_to_cpu",
        _to_cpu,
        "Megatron turns only tensors that come from a GPU into arrays.",
    ),
)


@contextmanager
def cuda_is_cpu(device: torch.device) -> Iterator[None]:
    """Put around every call into Megatron; does nothing where `device` is a GPU. May be nested."""
    if device.type == "cuda":
        yield
        return
    with ExitStack() as patched, _CudaIsCpu():
        for patch in PATCHES:
            patched.enter_context(mock.patch.object(patch.owner, patch.name, patch.replacement))
        yield


def count_padding_in_checkpoints(optimizer: Any) -> None:
    """Let the distributed optimizer save its buffers with the padding between buckets.

    Megatron's checkpoints leave that padding out, but compute offsets that include it. A tied
    head on the last pipeline stage has a bucket of its own, so whatever follows it would be saved
    from the wrong places. Concerns `DistributedOptimizer` of all devices.
    """
    for inner_optimizer in optimizer.chained_optimizers:
        for buffer in inner_optimizer.buffers:
            buffer.numel_unpadded = buffer.numel
            for bucket in buffer.buckets:
                bucket.numel_unpadded = bucket.grad_data.numel()
