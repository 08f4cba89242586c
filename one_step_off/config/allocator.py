"""Settings of torch's GPU allocator, in its environment variables."""

import os

from one_step_off.config.errors import ConfigError
from one_step_off.config.placement import rollout_and_actor_share
from one_step_off.config.schema import Config

VARIABLES = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")
"""The names under which torch reads the settings: "name:value,name:value"."""

EXPANDABLE = "expandable_segments"


def expandable_segments() -> str:
    """The variable that turns expandable segments on, with its value; empty: none does.

    Where several variables are set, one that turns them on counts.
    """
    for variable in VARIABLES:
        for setting in os.environ.get(variable, "").split(","):
            name, _, value = setting.partition(":")
            if name.strip() == EXPANDABLE and value.strip() == "True":
                return f"{variable}={os.environ[variable]}"
    return ""


def check_allocator(cfg: Config, device: str) -> None:
    """Refuse expandable segments where rollout and actor share a GPU.

    Weights go there by CUDA IPC. torch shares expandable segments in another way: with file
    descriptors that one process takes out of another (`pidfd_getfd`). Containers and kernels often
    forbid that, and torch 2.13 reserves address space for a whole GPU with each mapping.

    Raises:
        ConfigError: they are turned on.
    """
    setting = expandable_segments()
    if device != "cuda" or not setting or not rollout_and_actor_share(cfg):
        return
    raise ConfigError(
        f"{setting}: in placement.pools rollout and actor share GPUs, where weights go by CUDA "
        f"IPC, which expandable segments prevent; remove {EXPANDABLE}:True, or give them "
        "separate GPUs"
    )
