"""A trainer process on a GPU that it shares: its part of the memory, and what to do if it is too
small."""

import functools
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import torch

from one_step_off.cluster.device_turns import device_turn
from one_step_off.cluster.errors import RoleError
from one_step_off.config.errors import ConfigError
from one_step_off.config.placement import memory_share
from one_step_off.config.roles import role_settings
from one_step_off.config.schema import Config
from one_step_off.config.sections.roles import TrainedConfig
from one_step_off.models.divided_sequences import more_ranks_shorten

T = TypeVar("T")

CONTEXT_BYTES = 1 << 30
"""What a process takes on a GPU beside the memory that torch counts: the CUDA context with its
kernels, and the libraries' handles."""

GIB = 1 << 30
OUT_OF_MEMORY = "OutOfMemoryError"
"""In the message of a RoleError: the name of torch's exception."""


def limit_memory(cfg: Config, role: str, device: torch.device) -> None:
    """Hold this process to its role's part of the GPU's memory: torch raises OutOfMemoryError
    beyond it. Does nothing on CPUs, and where the role has whole GPUs.

    Raises:
        ConfigError: the part is too small for any model.
    """
    share = memory_share(cfg, role)
    if device.type != "cuda" or share == 1:
        return
    total_bytes = torch.cuda.get_device_properties(device).total_memory
    usable_bytes = share * total_bytes - CONTEXT_BYTES
    if usable_bytes <= 0:
        pool = cfg.placement.roles[role]
        raise ConfigError(
            f"placement.pools.{pool}={cfg.placement.pools[pool]}: the {role}'s part of the GPU is "
            f"{share * total_bytes / GIB:.2g} GiB, and a process needs {CONTEXT_BYTES / GIB:g} GiB "
            "before any model; give the pool a larger share"
        )
    torch.cuda.set_per_process_memory_fraction(usable_bytes / total_bytes, device)


def in_device_turn(setup: Callable[..., None]) -> Callable[..., None]:
    """Let the `setup` of a rank wait while an engine measures the GPU that both share."""

    @functools.wraps(setup)
    def wait_and_set_up(self: Any, *args: Any) -> None:
        if self._device_type != "cuda" or memory_share(self.cfg, self.role) == 1:
            setup(self, *args)
            return
        with device_turn(alone=False, limit_s=self.cfg.trainer.start_timeout_s):
            setup(self, *args)

    return wait_and_set_up


async def with_memory_advice(cfg: Config, role: str, work: Awaitable[T]) -> T:
    """Await the calls of a role. A RoleError that reports a lack of GPU memory is raised again with
    the keys that change it."""
    try:
        return await work
    except RoleError as error:
        if OUT_OF_MEMORY not in str(error):
            raise
        advice = _memory_advice(cfg, role)
        pool = cfg.placement.roles[role]
        if memory_share(cfg, role) < 1:
            shown = f"placement.pools.{pool}={cfg.placement.pools[pool]}"
            advice += f", or give it a larger share of the GPU than {shown}"
        raise RoleError(f"{error}; {advice}") from error


def _memory_advice(cfg: Config, role: str) -> str:
    """What lowers the memory of a role, the greatest effect first."""
    settings = role_settings(cfg, role)
    parts = []
    if isinstance(settings, TrainedConfig) and not settings.activation_checkpointing:
        parts.append(f"set {role}.activation_checkpointing=true")
    if more_ranks_shorten(cfg, role):
        parts.append(f"raise {role}.sequence_parallel_size={settings.sequence_parallel_size}")
    parts.append(f"lower {role}.micro_batch_tokens={settings.micro_batch_tokens}")
    parts.append(f"lower actor.log_prob_chunk={cfg.actor.log_prob_chunk}")
    can_offload = isinstance(settings, TrainedConfig) and settings.backend == "fsdp"
    if can_offload and not settings.optimizer_offload:
        parts.append(f"set {role}.optimizer_offload=true")
    return ", ".join(parts)
