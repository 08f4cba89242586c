"""Where a box of a checkpoint tensor lies in the parameter into which it is copied."""

import torch

from one_step_off.engines.vllm.load_recording import Copy, Destination, Loadable
from one_step_off.weight_sync.shard_blocks import Block


def kernel_tensor(owner: Destination | Loadable) -> torch.Tensor:
    """The parameter as the model computes with it."""
    return owner.layer._parameters[owner.name].data


def parameter_view(copy: Copy, part: Block) -> torch.Tensor:
    """The numbers of `part` of the tensor, inside the parameter; without dimensions of size one."""
    return part_of(copy, part).slice_of(kernel_tensor(copy.destination)).squeeze()


def part_of(copy: Copy, part: Block) -> Block:
    """The box of the parameter that holds `part` of the box `copy.source`.

    Dimensions of more than one number follow one another in the same order on both sides; the
    parameter may have others of size one.
    """
    block = copy.destination.block
    start = list(block.start)
    stop = list(block.stop)
    wide_dims = iter([dim for dim, size in enumerate(block.shape) if size > 1])
    for dim, size in enumerate(copy.source.shape):
        if size > 1:
            offset = part.start[dim] - copy.source.start[dim]
            target_dim = next(wide_dims)
            start[target_dim] = block.start[target_dim] + offset
            stop[target_dim] = start[target_dim] + part.shape[dim]
    return Block(tuple(start), tuple(stop))
