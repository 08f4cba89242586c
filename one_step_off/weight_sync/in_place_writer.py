"""A vLLM model that is its own receive buffer: what a worker keeps is written where it stays.

Full messages are written into the parameters. A delta is applied to what the parameters hold, so no
copy of the model in the checkpoint's layout is needed.
"""

from typing import Protocol

import torch

from one_step_off.weight_sync import delta
from one_step_off.weight_sync.routes import Message
from one_step_off.weight_sync.shard_blocks import Block, ShardBlocks


class BoundShards(Protocol):
    """Blocks of checkpoint tensors in a buffer, and their places in the model."""

    def write(self) -> None:
        """Copy the buffer into the model."""
        ...

    def read(self) -> None:
        """Copy from the model into the buffer."""
        ...


class Layout(Protocol):
    """Where the blocks that a worker keeps lie in its model."""

    kept: ShardBlocks

    def addresses(self) -> tuple[int, ...]:
        """Of the parameters. They change when an engine allocates its weights again."""
        ...

    def bind(self, shards: list[tuple[str, Block, torch.Tensor]]) -> BoundShards:
        """Find the places of these shards.

        Args:
            shards: of each the tensor's name, the block, and the view of it in a buffer.
        """
        ...


class InPlaceWriter:
    """The parameters of one worker's model, bucket by bucket."""

    def __init__(self, messages: list[list[Message]], layout: Layout, device: torch.device) -> None:
        """Nothing is allocated until the first delta.

        Args:
            messages: per bucket those that this worker gets.
            layout: of its model, proved.
            device: of the model.
        """
        self.messages = messages
        self.layout = layout
        self.device = device
        self.base_buffer = torch.zeros(0, dtype=torch.uint8, device=device)
        # By bucket and the addresses of the messages, which alternate between few buffers.
        self.bound: dict[tuple[int, ...], BoundShards] = {}
        self.addresses: tuple[int, ...] = ()  # of the parameters that they refer to

    def start(self) -> None:
        """Before each sync: forget what was bound to memory that is not the parameters' any more.
        To write there would spoil whatever has it now."""
        addresses = self.layout.addresses()
        if addresses != self.addresses:
            self.addresses = addresses
            self.bound.clear()

    def sizes(self, index: int) -> list[int]:
        """Bytes of the full messages of bucket `index`."""
        return [message.nbytes for message in self.messages[index]]

    def update(self, index: int, received: list[torch.Tensor]) -> list[torch.Tensor]:
        """Apply what came for bucket `index`.

        Args:
            index: of the bucket.
            received: whole messages, or delta payloads, which are always shorter; uint8.

        Returns:
            Whole messages; one that was received whole is returned itself.
        """
        full = self.sizes(index)
        if all(len(message) == size for message, size in zip(received, full, strict=True)):
            return received
        bases = self._read(index)
        whole = []
        for message, base in zip(received, bases, strict=True):
            if len(message) == len(base):
                whole.append(message)
            else:
                delta.apply(message, base)
                whole.append(base)
        return whole

    def write(self, index: int, whole: list[torch.Tensor]) -> None:
        """Write the messages of bucket `index` into the parameters."""
        self._bind(index, whole).write()

    def _read(self, index: int) -> list[torch.Tensor]:
        """The messages of bucket `index`, as the parameters hold them."""
        sizes = self.sizes(index)
        if len(self.base_buffer) < sum(sizes):
            largest = max(sum(self.sizes(number)) for number in range(len(self.messages)))
            self.base_buffer = torch.zeros(largest, dtype=torch.uint8, device=self.device)
        bases = list(self.base_buffer[: sum(sizes)].split(sizes))
        for message, base in zip(self.messages[index], bases, strict=True):
            paddings = [padding for padding in message.paddings(base) if padding.numel()]
            if paddings:
                torch._foreach_zero_(paddings)
        self._bind(index, bases).read()
        return bases

    def _bind(self, index: int, buffers: list[torch.Tensor]) -> BoundShards:
        key = (index, *(buffer.data_ptr() for buffer in buffers))
        if key not in self.bound:
            shards = []
            for message, buffer in zip(self.messages[index], buffers, strict=True):
                views = message.views(buffer)
                for shard, view in zip(message.shards, views, strict=True):
                    shards.append((shard.slot.piece.name, shard.block, view))
            self.bound[key] = self.layout.bind(shards)
        return self.bound[key]
