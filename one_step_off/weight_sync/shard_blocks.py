"""`Block`: a box of one tensor, and `ShardBlocks`: the boxes that one vLLM worker keeps.

Under tensor or expert parallelism a worker keeps rows, columns or whole experts of the checkpoint's
tensors. Both ends of the weight sync speak of these parts as boxes: plain numbers that cross
process borders, with nothing of vLLM or of a training back end in them.
"""

import math
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Block:
    """The numbers of a tensor from `start` to `stop`, in every dimension; () and () for a
    0-dimensional tensor."""

    start: tuple[int, ...]
    stop: tuple[int, ...]

    @staticmethod
    def whole(shape: tuple[int, ...]) -> "Block":
        """All of a tensor of this shape."""
        return Block((0,) * len(shape), tuple(shape))

    @property
    def shape(self) -> tuple[int, ...]:
        """Numbers in each dimension."""
        return tuple(stop - start for start, stop in zip(self.start, self.stop, strict=True))

    @property
    def numel(self) -> int:
        """Numbers in all."""
        return math.prod(self.shape)

    def intersect(self, other: "Block") -> "Block | None":
        """The box that both have in common; None if there is none."""
        start = tuple(map(max, self.start, other.start))
        stop = tuple(map(min, self.stop, other.stop))
        if any(first >= end for first, end in zip(start, stop, strict=True)):
            return None
        return Block(start, stop)

    def contains(self, other: "Block") -> bool:
        """Whether all of `other` lies in this box."""
        return self.intersect(other) == other

    def slice_of(self, tensor: Any, origin: tuple[int, ...] | None = None) -> Any:
        """A view of this box.

        Args:
            tensor: the whole tensor, or a larger box of it.
            origin: where that larger box starts; None: `tensor` is whole.
        """
        view = tensor
        for dim, size in enumerate(self.shape):
            offset = origin[dim] if origin else 0
            view = view.narrow(dim, self.start[dim] - offset, size)
        return view


ShardBlocks = dict[str, tuple[Block, ...]]
"""Name of a checkpoint tensor -> the boxes of it that a worker keeps. They are disjoint. () if it
keeps nothing of the tensor."""


def plain_shards(kept: ShardBlocks) -> dict[str, list]:
    """As lists of numbers, which cross process borders: name -> [[start, stop] of each box]."""
    return {
        name: [[list(block.start), list(block.stop)] for block in blocks]
        for name, blocks in kept.items()
    }


def shards_from_plain(plain: dict[str, list]) -> ShardBlocks:
    """The inverse of `plain_shards`."""
    return {
        name: tuple(Block(tuple(start), tuple(stop)) for start, stop in boxes)
        for name, boxes in plain.items()
    }
