"""The config section placement."""

from dataclasses import dataclass

from one_step_off.config.keys import config_key


@dataclass
class PlacementConfig:
    """Which role runs on which processes."""

    pools: dict[str, list[int | float]] = config_key(
        {"rollout": [1], "actor": [1]},
        "pool name: GPUs (processes) on each node, e.g. [4, 4], or a share of one GPU, e.g. [0.5]",
    )
    roles: dict[str, str] = config_key(
        {"rollout": "rollout", "actor": "actor"}, "role name: pool name"
    )
    device: str = config_key(
        "auto",
        "cuda, cpu, or auto: cuda if this machine has GPUs, else cpu",
        choices="auto cuda cpu",
    )
    pin_cores: bool = config_key(
        True,
        "CPU runs on one machine: pin each process to its own cores, "
        "separate for rollout and trainer",
    )
