"""Sequence parallelism under FSDP2 (Ulysses, arXiv:2309.14509): several ranks compute one packed
row, so that a long sequence needs a part of the memory on each.

    a row of eight tokens, four heads, sequence_parallel_size = 2

                        rank 0                     rank 1
      all but attention tokens 0-3, all heads      tokens 4-7, all heads
      attention         tokens 0-7, heads 0-1      tokens 0-7, heads 2-3

Before attention the ranks exchange queries, keys and values, after it their outputs. What the model
computes at the wanted tokens is then put together, so that all ranks of a group have the same
columns and compute the same loss; the gradient of each rank's weights is that through its own
tokens, and the sum over the ranks is the whole one.
"""

import math
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from transformers import AttentionInterface

from one_step_off.algorithms import batching
from one_step_off.training.fsdp.collectives import exchange, total
from one_step_off.training.packed_attention import AttentionChoice, packed_attention
from one_step_off.training.token_outputs import TokenOutputs
from one_step_off.training.worker_interface import BatchShare

IMPLEMENTATION = "one_step_off_sequence_parallel"
"""The name of our attention function in transformers' registry."""


class SequenceGroup:
    """The ranks that divide each row of tokens among them: neighbours, which have the fastest
    links.

    Attributes:
        size: how many; 1: this rank has whole rows.
        rank: of this process among them.
        group: None where it is alone.
    """

    def __init__(self, device: torch.device, size: int) -> None:
        """Form the group (collective)."""
        self.size = size
        self.rank = dist.get_rank() % size
        self.group: dist.ProcessGroup | None = None
        if size > 1:
            shape = (dist.get_world_size() // size, size)
            mesh = init_device_mesh(device.type, shape, mesh_dim_names=("data", "sequence"))
            self.group = mesh["sequence"].get_group()
            AttentionInterface.register(IMPLEMENTATION, attention)

    def implementation(self, choice: AttentionChoice) -> str:
        """transformers' name of a role's attention."""
        return choice.implementation if self.group is None else IMPLEMENTATION

    def attach(self, layers: nn.Module) -> None:
        """Let the attention of these decoder layers exchange within this group."""
        for module in layers.modules():
            module.sequence_group = self

    def share_of_batch(self) -> BatchShare:
        """The ranks of a group compute the same part of a batch."""
        return BatchShare(
            index=dist.get_rank() // self.size,
            count=dist.get_world_size() // self.size,
            reports=self.rank == 0,
            width_multiple=self.size,
        )

    def part_of(self, layout: batching.MicroBatch) -> tuple[batching.MicroBatch, np.ndarray]:
        """This rank's tokens of a packed row, and the indices of its wanted tokens among all."""
        return batching.sequence_parallel_slice(layout, self.rank, self.size)

    def own_columns(self, row: np.ndarray) -> np.ndarray:
        """This rank's part of an array [width]."""
        return row[batching.sequence_parallel_columns(len(row), self.rank, self.size)]

    def joined(self, outputs: TokenOutputs, indices: Tensor, count: int) -> TokenOutputs:
        """The outputs at all `count` wanted tokens, of which this rank has those at `indices` [n]
        (collective)."""
        values, figures = outputs
        if figures is None:
            return self._joined(values, indices, count), None
        return self._joined(values, indices, count), self._joined(figures, indices, count)

    def _joined(self, values: Tensor, indices: Tensor, count: int) -> Tensor:
        whole = values.new_zeros(count, *values.shape[1:])
        return total(whole.index_copy(0, indices, values), self.group)

    def to_heads(self, query: Tensor, key: Tensor, value: Tensor) -> list[Tensor]:
        """Give each rank some of the heads of the whole row (collective).

        Args:
            query: [1, heads, t, width] of this rank's t tokens; key, value: [1, key-value heads, t,
                width]. Where these are no multiple of the ranks, each is sent more than once.

        Returns:
            Queries, keys and values, [1, own heads, T, width] of all T tokens.
        """
        copies = math.lcm(key.shape[1], self.size) // key.shape[1]
        if copies > 1:
            key = key.repeat_interleave(copies, 1)
            value = value.repeat_interleave(copies, 1)
        tensors = (query, key, value)
        flat = [tensor.reshape(self.size, -1) for tensor in tensors]  # by the rank of the heads
        received = self._exchanged(torch.cat(flat, 1))
        results = []
        for part, tensor in zip(
            received.split([f.shape[1] for f in flat], 1), tensors, strict=True
        ):
            _, heads, tokens, width = tensor.shape
            by_sender = part.reshape(self.size, heads // self.size, tokens, width)
            whole = by_sender.transpose(0, 1).reshape(1, heads // self.size, -1, width)
            results.append(whole)
        return results

    def to_tokens(self, output: Tensor) -> Tensor:
        """From [1, T, own heads, width] to [1, t, heads, width]: the way back (collective)."""
        _, tokens, heads, width = output.shape
        by_receiver = output.reshape(self.size, tokens // self.size, heads, width)
        by_heads = self._exchanged(by_receiver)
        return by_heads.transpose(0, 1).reshape(1, tokens // self.size, -1, width)

    def _exchanged(self, rows: Tensor) -> Tensor:
        """Row r goes to rank r; row s of the result is from rank s."""
        assert self.group is not None
        one_each = [1] * self.size
        return exchange(rows, one_each, one_each, self.group)


@torch.compiler.disable
def attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """As `packed_attention`, whose arguments it has, of this rank's tokens of the row (collective).
    The boundaries are those of the whole row."""
    group: SequenceGroup = module.sequence_group
    query, key, value = group.to_heads(query, key, value)
    output, _ = packed_attention(module, query, key, value, attention_mask, **kwargs)
    return group.to_tokens(output), None
