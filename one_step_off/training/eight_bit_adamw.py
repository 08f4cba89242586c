"""AdamW with moments of 8 bits (arXiv:2110.02861), by torchao, for weights that FSDP2 shards.

torchao quantizes blocks of a rank's own rows and lets their number of elements decide whether it
quantizes at all, so that the same run differs from one number of ranks to another, and blocks that
span rows cannot be divided anew. Here a block is a part of one row. What is quantized, and how,
follows from the whole tensor's shape alone; so one rank and two take the same step, and a
checkpoint fits any number of ranks.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torchao.optim import AdamW8bit
from torchao.optim.adam import single_param_adam
from torchao.optim.subclass_8bit import OptimState8bit

from one_step_off.training.muon import local

SMALLEST_TENSOR = 4096
"""Smaller ones keep 32 bits, as torchao and bitsandbytes have it."""

SMALLEST_BLOCK = 32
"""Below it the scales, of 4 bytes a block, would cost more than quantizing saves."""

MOMENTS = ("exp_avg", "exp_avg_sq")

PART_NUMBERS = {"cpu": 1 << 16, "cuda": 1 << 24}
"""Numbers of a tensor that a step works on at once: on CPUs they fit into a cache, on GPUs they
keep it busy."""


def block_in_row(shape: torch.Size, largest: int) -> int | None:
    """The number of elements of a block: the largest divisor of a row's length that is at most
    `largest`. None: a tensor of this shape is not quantized."""
    if len(shape) < 2 or shape.numel() < SMALLEST_TENSOR:
        return None
    row = shape.numel() // shape[0]
    for block in range(min(largest, row), SMALLEST_BLOCK - 1, -1):
        if row % block == 0:
            return block
    return None


def _row_parts(tensor: Tensor) -> list[Tensor]:
    """Views of some rows each. A step needs some sixty bytes of memory for each number, which for
    all of an embedding would be more than the quantized moments save."""
    if not tensor.numel():
        return []
    row = tensor.numel() // tensor.shape[0]
    count = max(1, PART_NUMBERS[tensor.device.type] // row)
    starts = range(0, tensor.shape[0], count)
    return [tensor[start : min(start + count, tensor.shape[0])] for start in starts]


def sharded_like(parameter: Tensor, rows: Tensor, shape: torch.Size) -> Tensor:
    """This rank's rows of a tensor of that shape, placed as the parameter is."""
    if not isinstance(parameter, DTensor):
        return rows
    mesh = parameter.device_mesh
    wrapped = DTensor.from_local(
        rows,
        mesh,
        parameter.placements,
        run_check=False,
        shape=shape,
        stride=torch.empty(shape, device="meta").stride(),
    )
    # Offloaded rows are in host memory, and from_local has copied them to the mesh's device.
    wrapped._local_tensor = rows
    return wrapped


class EightBitAdamW(AdamW8bit):
    """torchao's, with blocks that do not span rows and a step on each rank's own rows.

    The step runs without torch.compile: that needs a compiler on CPUs and takes seconds for each
    shape, and what it saves is small beside a step of reinforcement learning.
    """

    def new_state(self, group: dict[str, Any], parameter: Tensor) -> dict[str, Tensor]:
        """The state with which the first step of a parameter begins."""
        return {
            "step": torch.tensor(0.0),
            "exp_avg": self._new_buffer(parameter, True),
            "exp_avg_sq": self._new_buffer(parameter, False),
        }

    def _new_buffer(self, p: Tensor, signed: bool) -> Tensor:
        block = block_in_row(p.shape, self.block_size)
        rows = local(p.detach())
        # A rank without rows: torchao cannot make an empty one.
        if block is None or not rows.numel():
            return sharded_like(p, torch.zeros_like(rows), p.shape)
        return sharded_like(p, self._subclass_zeros(rows, signed, block), p.shape)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> Any:
        """One step of all parameters that have gradients."""
        if closure is not None:
            raise ValueError("adamw_8bit: a step takes no closure")
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._step_parameter(group, parameter)

    def _step_parameter(self, group: dict[str, Any], parameter: Tensor) -> None:
        state = self.state[parameter]
        if not state:
            state.update(self.new_state(group, parameter))
        state["step"] += 1
        tensors = [local(t) for t in (parameter, parameter.grad, *map(state.get, MOMENTS))]
        for weights, gradient, first, second in zip(*map(_row_parts, tensors), strict=True):
            single_param_adam(
                weights,
                gradient,
                state["step"],
                first,
                second,
                None,  # no maximum of the second moment (amsgrad)
                group["lr"],
                group["betas"][0],
                group["betas"][1],
                group["weight_decay"],
                group["eps"],
                self.is_adamw,
                False,  # no stochastic rounding: the weights have 32 bits
            )

    # Checkpoints.

    def as_plain(self, state: dict[str, Any]) -> dict[str, Any]:
        """The state of a parameter in tensors that torch's checkpoints know, in the same memory: in
        place of a quantized moment its codes and its scales, cut by rows as the moment is."""
        plain = dict(state)
        for name in MOMENTS:
            moment = state[name]
            block = block_in_row(moment.shape, self.block_size)
            if block is not None:
                plain[name] = _plain_moment(moment, block)
        return plain


def _plain_moment(moment: Tensor, block: int) -> dict[str, Tensor]:
    """Codes, uint8 of the moment's shape, and scales, float32 [rows, blocks of a row]."""
    rows = local(moment)
    blocks_of_row = moment.shape.numel() // moment.shape[0] // block
    if isinstance(rows, OptimState8bit):
        codes = rows.codes
        scales = rows.scale.view(rows.shape[0], blocks_of_row)
    else:
        codes = rows.to(torch.uint8)  # no rows
        scales = rows.new_zeros(0, blocks_of_row)
    scales_shape = torch.Size([moment.shape[0], blocks_of_row])
    return {
        "codes": sharded_like(moment, codes, moment.shape),
        "scales": sharded_like(moment, scales, scales_shape),
    }
