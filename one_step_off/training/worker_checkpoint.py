"""A rank's part of a checkpoint: weights and optimizer by the back end, counters and random numbers
as arrays."""

import contextlib
import functools
import os
from abc import abstractmethod
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import numpy as np
import ray
import torch
from torch.distributed.checkpoint.api import CheckpointException

from one_step_off.algorithms import schedule
from one_step_off.config.errors import ConfigError, first_line
from one_step_off.models import safe_unpickling
from one_step_off.training.model_worker import ModelWorker
from one_step_off.training.written_files import FileFacts, facts_of_rank

WEIGHTS_ONLY_VARIABLE = "TORCH_FORCE_WEIGHTS_ONLY_LOAD"
"""With this in the environment torch.load reads tensors and plain values only."""


class CheckpointedWorker(ModelWorker):
    """One rank of a role that learns: its counters, and how they are saved and loaded.

    Attributes:
        version: finished updates; a resumed run sets it.
        optimizer_steps: the position in the learning-rate schedule; a skipped step counts too.
        skipped_in_a_row: optimizer steps skipped since the last one that was made.
    """

    threads = {"control": 1, "saving": 1}
    """Ray's concurrency groups. "saving" waits for a checkpoint while the worker's own thread
    trains."""

    version = 0
    optimizer_steps = 0
    skipped_in_a_row = 0

    @abstractmethod
    def _write_state(self, folder: str) -> Future:
        """Copy weights and optimizer to host memory, and begin to write them into `folder`, with
        collectives of `_checkpoint_group` alone. Returns a future of the writing (collective)."""

    @abstractmethod
    def _read_state(self, folder: str) -> None:
        """Load weights and optimizer from `folder`, written by any number of ranks (collective)."""

    @functools.cached_property
    def decay(self) -> schedule.Decay:
        """The decay of the learning rate; `load_state` changes it where the checkpoint's run had
        another plan."""
        return schedule.new_decay(self._decay_plan(), self.role_config.warmup_steps)

    def _decay_plan(self) -> schedule.DecayPlan:
        return schedule.decay_plan(self.cfg, self.role, self.total_steps or 0)

    def save_state(self, folder: str) -> None:
        """Copy weights, optimizer, counters and this rank's RNG state, to be written into `folder`
        (collective).

        Training may continue while they are written. `saved` waits for that, and must be called
        before the next `save_state`.
        """
        self._checkpoint_folder = Path(folder)
        self._writing = self._write_state(os.path.join(folder, self.role))
        arrays: dict[str, Any] = {
            "version": self.version,
            "optimizer_steps": self.optimizer_steps,
            "rng": torch.get_rng_state(),
        }
        arrays |= schedule.to_arrays(self.decay, self._decay_plan())
        if self._device_type == "cuda":
            arrays["cuda_rng"] = torch.cuda.get_rng_state()
        np.savez(self._rank_file(folder, self.rank), **arrays)

    def _rank_file(self, folder: str, rank: int) -> str:
        return os.path.join(folder, f"{self.role}_rank_{rank}.npz")

    @ray.method(concurrency_group="saving")
    def saved(self) -> FileFacts:
        """Wait until what `save_state` began is written. Returns size and checksum of this rank's
        files. Raises RuntimeError: it cannot be written."""
        try:
            self._writing.result()
            return facts_of_rank(self._checkpoint_folder, self.role, self.rank)
        # CheckpointException, torch's own, is no Exception.
        except (Exception, CheckpointException) as e:
            raise RuntimeError(f"it cannot be written: {_reason(e)}") from e

    def load_state(self, folder: str) -> None:
        """Load the state that `save_state` wrote, on this or another number of ranks (collective).

        A rank that the saving run did not have takes rank 0's counters and keeps the random numbers
        of a new run.

        Raises:
            ConfigError: the checkpoint is of another model or cannot be read.
        """
        own_file = self._rank_file(folder, self.rank)
        was_saved_by_this_rank = os.path.exists(own_file)
        counter_file = own_file if was_saved_by_this_rank else self._rank_file(folder, 0)
        state_folder = os.path.join(folder, self.role)
        try:
            with _weights_only():
                safe_unpickling.check(os.path.join(state_folder, ".metadata"))
                self._read_state(state_folder)
                with np.load(counter_file, allow_pickle=False) as file:
                    arrays = dict(file)
        except (Exception, CheckpointException) as e:
            problem = f"the part of the {self.role} does not fit its model ({_reason(e)})"
            raise ConfigError(f"checkpoint {folder}: {problem}") from e
        self.adapters.gather()
        self._end_turn()
        self.version = int(arrays["version"])
        self.optimizer_steps = int(arrays["optimizer_steps"])
        saved_schedule = schedule.from_arrays(arrays)
        warmup_steps = self.role_config.warmup_steps
        self.decay = schedule.resumed_decay(self._decay_plan(), warmup_steps, saved_schedule)
        if was_saved_by_this_rank:
            self._set_rng_state(arrays)

    def _set_rng_state(self, arrays: dict[str, np.ndarray]) -> None:
        torch.set_rng_state(torch.from_numpy(arrays["rng"]))
        if self._device_type == "cuda" and "cuda_rng" in arrays:
            torch.cuda.set_rng_state(torch.from_numpy(arrays["cuda_rng"]))


@contextlib.contextmanager
def _weights_only() -> Iterator[None]:
    """Meanwhile torch.load runs nothing that a file holds."""
    os.environ[WEIGHTS_ONLY_VARIABLE] = "1"
    try:
        yield
    finally:
        del os.environ[WEIGHTS_ONLY_VARIABLE]


def _reason(error: BaseException) -> str:
    """An error in one line; of those that torch's checkpoints gather from the ranks the first."""
    if isinstance(error, CheckpointException):
        first_failure = next(iter(error.failures.values()))
        return first_line(first_failure[0])
    return first_line(error)
