"""`WeightPiece`: the unit of the weight sync, a block of one tensor as the Hugging Face checkpoint
names it.

A training back end knows nothing of vLLM, and the receiver knows nothing of FSDP or Megatron.
Between them stand `WeightPiece`s. What else a back end offers is listed in
`training/worker_interface.py`.
"""

from dataclasses import dataclass, replace
from typing import Any

from one_step_off.weight_sync.shard_blocks import Block


@dataclass(frozen=True)
class WeightPiece:
    """The block [start, stop) along dimension `dim` of one tensor, owned by one trainer rank.

    The pieces of all ranks together cover every tensor once, cut along one dimension: 0 everywhere,
    except where tensor parallelism splits the input. A 0-dimensional tensor counts as one row.
    """

    name: str
    """The tensor's name in the Hugging Face checkpoint."""
    dtype: str
    """Name of the torch dtype on the wire, as "bfloat16"."""
    shape: tuple[int, ...]
    """Shape of the whole tensor."""
    start: int
    stop: int
    dim: int = 0

    @property
    def block_shape(self) -> tuple[int, ...]:
        """Shape of the piece itself."""
        if not self.shape:
            return ()
        return (*self.shape[: self.dim], self.stop - self.start, *self.shape[self.dim + 1 :])

    @property
    def block(self) -> Block:
        """The piece as a block of the whole tensor."""
        if not self.shape:
            return Block((), ())
        start = [0] * len(self.shape)
        stop = list(self.shape)
        start[self.dim] = self.start
        stop[self.dim] = self.stop
        return Block(tuple(start), tuple(stop))

    def strip(self, i: int, count: int) -> "WeightPiece":
        """The `i`-th of `count` strips of almost equal size, along the dimension in which the piece
        is cut."""
        size = self.stop - self.start
        strip_start = self.start + size * i // count
        strip_stop = self.start + size * (i + 1) // count
        return replace(self, start=strip_start, stop=strip_stop)

    def slice_of(self, tensor: Any, tensor_start: int = 0) -> Any:
        """A view of this piece inside the whole tensor, or inside a larger piece that starts at
        `tensor_start`."""
        if not self.shape:
            return tensor
        return tensor.narrow(self.dim, self.start - tensor_start, self.stop - self.start)


@dataclass(frozen=True)
class FrozenBlock:
    """A block of a frozen model, and the digest of its elements in the piece's dtype."""

    piece: WeightPiece
    digest: str
