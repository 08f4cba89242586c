"""Megatron's checkpoints, copied to host memory and written while training continues.

Megatron-core's own asynchronous save is deprecated, copies from GPUs only and runs its collectives
in the group that training uses. Here its state goes to torch's `async_save`, as FSDP2's does. The
files are those of Megatron's own save, which loads them.
"""

from concurrent.futures import Future
from pathlib import Path
from typing import Any

import torch.distributed.checkpoint as dcp
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import is_main_replica
from megatron.core.dist_checkpointing.strategies.torch import (
    MCoreSavePlanner,
    TorchDistSaveShardedStrategy,
    _replace_state_dict_keys_with_sharded_keys,
    mcore_to_pyt_state_dict,
)
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.checkpoint.staging import AsyncStager


def copy_to_host(model_state: dict[str, Any]) -> None:
    """Replace the tensors of a model's sharded state that this rank writes by copies in host
    memory.

    The optimizer's part needs none: Megatron gathers its fully reshardable form in new tensors in
    host memory. It finds its parameters by the model's tensors, so it must have been made before.
    """
    for entry in nested_values(model_state):
        data = getattr(entry, "data", None)
        if isinstance(data, Tensor) and is_main_replica(entry.replica_id):
            entry.data = data.detach().to("cpu", copy=True)


class _HostCopies(AsyncStager):
    """For a state that is already a copy in host memory."""

    def stage(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """The state as it is."""
        return state_dict

    def synchronize_staging(self) -> None:
        """Nothing is copied, so there is nothing to wait for."""


class BackgroundWriter(TorchDistSaveShardedStrategy):
    """What `dist_checkpointing.save` hands a state to: begins to write it and returns.

    Attributes:
        writing: the future of the writing; None before `save`.
    """

    def __init__(self, group: ProcessGroup) -> None:
        """`group`: gloo, of all ranks, and used by nothing else meanwhile."""
        super().__init__()
        self.group = group
        self.writing: Future | None = None

    def save(self, sharded_state_dict: dict[str, Any], checkpoint_dir: str | Path) -> None:
        """Begin to write a state whose tensors no one changes (collective)."""
        entries, _, _ = _replace_state_dict_keys_with_sharded_keys(
            sharded_state_dict, self.keep_only_main_replica
        )
        self.writing = dcp.async_save(
            mcore_to_pyt_state_dict(entries),
            checkpoint_id=checkpoint_dir,
            planner=MCoreSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False),
            process_group=self.group,
            async_stager=_HostCopies(),
        )
