"""The interface of the roles that a training back end fills, and the contract of the weight stream.

A back end knows nothing of vLLM, the receiver knows nothing of FSDP or Megatron. Between them stand
`WeightPiece`s: rows of tensors, named as the Hugging Face checkpoint names them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    import numpy as np
    import torch

    from one_step_off.samples import Batch


@dataclass(frozen=True)
class WeightPiece:
    """The rows [start, stop) along dimension 0 of one HF-named tensor, owned by one trainer rank.

    `shape` is the shape of the whole tensor, `dtype` the torch dtype's name ("bfloat16") on the wire.
    A 0-dimensional tensor counts as one row. Pieces of all ranks together cover every tensor once.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int


class TrainWorker(Protocol):
    """One rank of a role that holds a model. All ranks of a role are called together, with the same arguments."""

    def free_address(self, host: str = "") -> tuple[str, int]:
        """Where the ranks are to meet, a free port included (asked of rank 0). `host` empty: this machine's address."""
        ...

    def rendezvous(self, master_addr: str, master_port: int) -> None:
        """Told to every rank before `setup`."""
        ...

    def setup(self) -> dict[str, Any]:
        """Join the role's process group, build and load the model. Returns facts: num_params, device, world_size."""
        ...

    def log_prob(self, batch: Batch) -> dict[int, np.ndarray]:
        """Log-probs (nats, after temperature) of the response tokens of this rank's share: position in batch -> float32 [R]."""
        ...

    def score(self, sequences: list[np.ndarray]) -> list[np.ndarray]:
        """Log-probs at temperature 1 of every token but the first; the whole answer on every rank."""
        ...

    def update(self, batch: Batch, learn: bool = True) -> dict[str, float]:
        """One training step over the batch: v(N) -> v(N+1). Returns metrics, equal on every rank.

        Without `learn` the version counts on and nothing else changes.

        Raises:
            StalenessError: a token was made by other weights than `batch.expected`. Nothing was changed then.
        """
        ...

    def weight_plan(self) -> list[WeightPiece]:
        """The pieces this rank sends, in a fixed order, without touching any data. Empty on ranks that hold copies."""
        ...

    def weight_tensors(self) -> Iterator[torch.Tensor]:
        """The data of `weight_plan()`, in its order, in the wire dtype; no collective is called on the way."""
        ...

    def save_hf(self, path: str) -> None:
        """Write a Hugging Face checkpoint with its tokenizer (collective; rank 0 writes)."""
        ...

    def save_state(self, folder: str) -> None:
        """Write weights, optimiser, counters and RNG state into a checkpoint's folder (collective)."""
        ...

    def load_state(self, folder: str) -> None:
        """Go to the state that `save_state` wrote (collective; another number of ranks is allowed).

        Raises:
            ConfigError: the checkpoint is of another model or cannot be read.
        """
        ...


class CriticWorker(Protocol):
    """One rank of the critic. Beside `values` it has the start, update and checkpoint of `TrainWorker`."""

    def values(self, batch: Batch) -> dict[int, np.ndarray]:
        """V(state before each response token) of this rank's share: position in batch -> float32 [R]."""
        ...


class RewardModelWorker(Protocol):
    """One rank of a reward model. Beside `score_sequences` it has the start of `TrainWorker`."""

    def score_sequences(self, sequences: list[np.ndarray]) -> dict[int, float]:
        """Scores of this rank's share of whole sequences (token ids): position -> score."""
        ...
