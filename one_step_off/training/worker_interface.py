"""What a training back end offers: the methods of each role's worker.

A worker is one rank of one role. A back end has one worker class per role, in a table that
`back_ends.py` finds: FSDP2 in `fsdp_workers.py`, Megatron-core in `megatron_workers.py`. It knows
nothing of vLLM, and the weight receiver knows nothing of FSDP or Megatron: between them stand
`WeightPiece`s, blocks of tensors named as the Hugging Face checkpoint names them.

Collective methods are called on all ranks of a role together, with the same arguments; every rank
runs the same collectives in the same order.

Shapes: B samples in a batch; R response tokens of a sample; a "share" is the part of the batch that
a rank computes, as a dict of position in the batch -> result. All shares together hold each
position once.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from one_step_off.algorithms.shared_prefixes import SharingRule
from one_step_off.data.images import Images
from one_step_off.data.samples import Batch
from one_step_off.training.written_files import FileFacts
from one_step_off.weight_sync.weight_piece import FrozenBlock, WeightPiece

TRAINED_ROLES = ("actor", "critic")
"""The trainable roles. They have an optimizer and take part in checkpoints."""

Share = dict[int, np.ndarray]
"""Position in the batch -> array of that sample."""


@dataclass
class BatchShare:
    """The part of a batch that a rank computes, and how it is cut into micro-batches.

    Attributes:
        index: which share, 0 .. count - 1. Ranks that hold one model together have the same share.
        count: into how many shares a batch is divided: the data-parallel size.
        reports: whether this rank returns the results of its share; one of the ranks with the same
            share does.
        width_multiple: the width of a padded micro-batch is a multiple of it, in tokens.
        micro_batch_multiple: the number of micro-batches of a share is a multiple of it.
        sharing: by which rule prefixes are shared; None: none are.
    """

    index: int
    count: int
    reports: bool = True
    width_multiple: int = 1
    micro_batch_multiple: int = 1
    sharing: SharingRule | None = None


class ModelInterface(Protocol):
    """Every role that holds a model."""

    def free_address(self, host: str = "") -> tuple[str, int]:
        """Host and free port at which the ranks can meet; asked of rank 0 before `setup`."""

    def setup(self, master_addr: str, master_port: int) -> None:
        """Join the role's process group, then build, load and shard the model (collective). Raises
        ConfigError."""

    def share_of_batch(self) -> BatchShare:
        """Which part of a batch this rank computes; after `setup`. It may be sent without the
        tokens of the other parts, see `data/packing.py`."""

    def alive(self) -> None:
        """Answers at once, also during another call."""

    def peak_memory_bytes(self) -> int:
        """Most memory used so far, in bytes: of the GPU, or resident in this process."""

    def peak_memory_parts(self) -> dict[str, int]:
        """Most memory so far by kind, in bytes: "resident" in host memory; on a GPU also
        "reserved"."""


class TrainedInterface(ModelInterface, Protocol):
    """The roles of `TRAINED_ROLES`."""

    version: int
    """Finished updates, and so the version of the weights that this rank holds."""

    def update(self, batch: Batch, learn: bool = True, profile: str = "") -> dict[str, float]:
        """One training step on the whole batch (collective): v(N) -> v(N+1). Returns the same
        metrics on every rank."""

    def save_state(self, folder: str) -> None:
        """Copy weights, optimizer, counters and RNG state, and begin to write them into `folder`
        (collective)."""

    def saved(self) -> FileFacts:
        """Wait until what `save_state` began is written. Returns size and checksum of this rank's
        files. Raises RuntimeError: it cannot be written."""

    def load_state(self, folder: str) -> None:
        """Load what `save_state` wrote (collective). Raises ConfigError: it does not fit this
        model."""


class ReferenceInterface(ModelInterface, Protocol):
    """The roles "actor" and "ref": log-probs of the responses, in nats, after
    `rollout.temperature`."""

    def log_prob(self, batch: Batch) -> Share:
        """Log-probs of all response tokens of this rank's share: float32 [R] per sample
        (collective)."""

    def log_prob_and_squares(self, batch: Batch) -> Share:
        """As `log_prob`, float32 [R, 2]: beside each log-prob sum_v p(v)^2 over the vocabulary
        (collective)."""


class ActorInterface(ReferenceInterface, TrainedInterface, Protocol):
    """The role "actor". Its workers also have the methods of the weight sender in
    `weight_sync/trainer_sender.py`."""

    def score(self, sequences: list[np.ndarray], images: Sequence[Images] = ()) -> list[np.ndarray]:
        """Log-probs at temperature 1 of every token but the first of each int sequence [L]: float32
        [L-1] each (collective). Every rank scores all sequences; ranks that do not report return
        []. `images`: of each sequence, where it has some."""

    def weight_plan(self) -> list[WeightPiece]:
        """The pieces that this rank sends, in a fixed order. No collective."""

    def weight_tensors(self) -> Iterable[Any]:
        """The data of `weight_plan()`, in its order: a tensor of shape `piece.block_shape` each. No
        collective. A list of live tensors must be the same object until a storage moves."""

    def base_digests(self) -> list[FrozenBlock]:
        """For weight_sync.lora=adapter: the digests of what this rank holds of the frozen model.
        No collective."""

    def save_hf(self, path: str) -> None:
        """Write a Hugging Face checkpoint with tokenizer and generation config to `path`
        (collective)."""


class CriticInterface(TrainedInterface, Protocol):
    """The role "critic"."""

    def values(self, batch: Batch) -> Share:
        """V(state before each response token) of this rank's share: float32 [R] per sample
        (collective)."""


class RewardModelInterface(ModelInterface, Protocol):
    """The role "reward_model"."""

    def score_sequences(self, sequences: list[np.ndarray]) -> dict[int, float]:
        """One score per int sequence [L] of this rank's share, by position (collective)."""


class TeacherInterface(ModelInterface, Protocol):
    """The role "teacher"."""

    def score_responses(self, batch: Batch) -> Share:
        """Log-probs of all response tokens of this rank's share: float32 [R] per sample, or [R, 1 +
        2 k] with the k likeliest tokens, see `roles.TeacherWorker` (collective)."""


INTERFACES: dict[str, type] = {
    "actor": ActorInterface,
    "ref": ReferenceInterface,
    "critic": CriticInterface,
    "reward_model": RewardModelInterface,
    "teacher": TeacherInterface,
}
"""What the worker of each role offers, in every back end."""
