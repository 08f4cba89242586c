"""The contract between a training back end and the rest of the program, and with it that of the weight stream.

A back end knows nothing of vLLM, the receiver knows nothing of FSDP or Megatron. Between them stand
`WeightPiece`s: blocks of tensors, named as the Hugging Face checkpoint names them.

A back end has a class per role, as `fsdp_workers.py` does, where the methods are described:

    every role     free_address, setup
    actor, critic  update, save_state, load_state, and the number `version`
    actor          score, weight_plan, weight_tensors, save_hf
    actor, ref     log_prob, log_prob_and_squares
    critic         values
    reward_model   score_sequences
"""

from dataclasses import dataclass, replace
from typing import Any


@dataclass(frozen=True)
class WeightPiece:
    """The block [start, stop) along dimension `dim` of one HF-named tensor, owned by one trainer rank.

    `shape` is the shape of the whole tensor, `dtype` the torch dtype's name ("bfloat16") on the wire.
    A 0-dimensional tensor counts as one row. Pieces of all ranks together cover every tensor once, cut along one
    dimension: 0 everywhere but where tensor parallelism splits what goes in.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int
    dim: int = 0

    @property
    def block_shape(self) -> tuple[int, ...]:
        """The shape of the piece itself."""
        if not self.shape:
            return ()
        return (*self.shape[: self.dim], self.stop - self.start, *self.shape[self.dim + 1 :])

    def part(self, i: int, count: int) -> "WeightPiece":
        """The `i`-th of `count` parts, as equal as they can be, along the dimension in which it is cut."""
        first, size = self.start, self.stop - self.start
        return replace(self, start=first + size * i // count, stop=first + size * (i + 1) // count)

    def slice_of(self, tensor: Any, first: int = 0) -> Any:
        """Where the piece lies in the whole tensor, or in another piece of it that starts at `first`: a view."""
        return (
            tensor.narrow(self.dim, self.start - first, self.stop - self.start)
            if self.shape
            else tensor
        )
