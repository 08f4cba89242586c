"""Collectives through which gradients flow."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, sent: list[int], received: list[int], group: dist.ProcessGroup
    ) -> Tensor:
        ctx.sizes = (sent, received, group)
        return _exchanged(rows, sent, received, group)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        sent, received, group = ctx.sizes
        return _exchanged(gradients[0], received, sent, group), None, None, None


def _exchanged(
    rows: Tensor, sent: list[int], received: list[int], group: dist.ProcessGroup
) -> Tensor:
    result = rows.new_empty(sum(received), *rows.shape[1:])
    dist.all_to_all_single(result, rows.contiguous(), received, sent, group=group)
    return result


def exchange(
    rows: Tensor, sent: list[int], received: list[int], group: dist.ProcessGroup
) -> Tensor:
    """Send rows to the ranks of a group, and their gradients back (collective).

    Args:
        rows: [sum of `sent`, ...]; first those for rank 0 of the group.
        sent, received: how many rows go to each rank, and come from it.

    Returns:
        [sum of `received`, ...]; first those from rank 0.
    """
    result: Any = _Exchange.apply(rows, sent, received, group)
    return result


class _Total(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, part: Tensor, group: dist.ProcessGroup) -> Tensor:
        whole = part.clone()
        dist.all_reduce(whole, group=group)
        return whole

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return gradients[0], None


def total(part: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """The sum of the parts of all ranks of a group, which compute the same loss with it, so that
    each part's gradient is that of the sum (collective). `group` None: this rank has all."""
    if group is None:
        return part
    result: Any = _Total.apply(part, group)
    return result
