"""What Megatron-core needs to run on CPUs over gloo. It has no switch for that; on GPUs nothing here is used.

Megatron asks `torch.cuda` where it is, makes small tensors on "cuda", keeps RNG states of the device, and asserts on
the names of CUDA tensor types. Inside `cuda_is_cpu()` all of that is answered for the CPU, and nowhere else: a patch
for the whole process would mislead other libraries.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.tensor_parallel import random as megatron_random
from megatron.core.transformer.moe import token_dispatcher
from torch.overrides import TorchFunctionMode


class _CudaIsCpu(TorchFunctionMode):
    """Tensors asked for on "cuda" are made on the CPU; `Tensor.type()` gives the CUDA name that asserts want."""

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
        if func is torch.Tensor.type and len(args) == 1:  # perhaps inside another of these
            return "torch.cuda." + answer.rsplit(".", 1)[1]
        return answer


class _Stream(torch.cpu.Stream):
    """torch's own, where everything has already happened; and so has an event on it."""

    record_event = torch.cpu.Event


def _to_arrays(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
    # Megatron does so with tensors from a GPU alone.
    return tensor.numpy() if as_numpy and isinstance(tensor, torch.Tensor) else tensor


_set_states = DistributedOptimizer._set_main_param_and_optimizer_states


def _set_without_step(self: DistributedOptimizer, parameter: Any, tensors: dict[str, Any]) -> None:
    # torch's AdamW counts steps in a tensor, which a checkpoint has elsewhere; the fused optimisers of GPUs do not.
    _set_states(self, parameter, {"step": None} | tensors)


PATCHES = [
    (DistributedOptimizer, "_set_main_param_and_optimizer_states", _set_without_step),
    (torch.cuda, "current_device", lambda: torch.device("cpu")),
    (torch.cuda, "current_stream", torch.cpu.current_stream),
    (torch.cuda, "Stream", _Stream),
    (torch.cuda, "stream", torch.cpu.stream),
    (torch.cuda, "synchronize", torch.cpu.synchronize),
    (torch.cuda, "get_rng_state", lambda *_: torch.get_rng_state()),
    (torch.cuda, "manual_seed", lambda seed: None),
    (megatron_random, "_get_cuda_rng_state", lambda *_, **__: torch.get_rng_state()),
    (megatron_random, "_set_cuda_rng_state", lambda state, *_, **__: torch.set_rng_state(state)),
    (token_dispatcher, "maybe_move_tensor_to_cpu", _to_arrays),
]


@contextmanager
def cuda_is_cpu(device: torch.device) -> Iterator[None]:
    """Around every call into Megatron; does nothing where `device` is a GPU. May be nested."""
    if device.type == "cuda":
        yield
        return
    with ExitStack() as patched, _CudaIsCpu():
        for patch in PATCHES:
            patched.enter_context(mock.patch.object(*patch))
        yield
