"""The whole check of a config, before any engine or GPU is taken.

Types and bounds come first (`loading.checked_copy`), then what a section alone shows
(`config/sections/`), what must fit together, what the config names on disk, and the machine. Each
check function looks at one part and raises `ConfigError` at the first fault. The order matters: a
later check may rely on what an earlier one has refused. What only the contents of the files show is
checked when the run is prepared.
"""

from one_step_off.algorithms.config_checks import check_algorithm
from one_step_off.config.allocator import check_allocator
from one_step_off.config.errors import ConfigError
from one_step_off.config.lengths import longest_sequence
from one_step_off.config.loading import checked_copy
from one_step_off.config.lora_checks import check_adapter_sync
from one_step_off.config.placement import (
    resolved_device,
    rollout_and_actor_share,
    visible_gpu_count,
)
from one_step_off.config.pool_checks import (
    check_batch,
    check_hardware,
    check_layouts,
    check_lending,
    check_pools,
)
from one_step_off.config.quantization import check_quantization
from one_step_off.config.registry import ENGINES, check_name
from one_step_off.config.role_checks import check_roles, check_run
from one_step_off.config.roles import check_optimizers
from one_step_off.config.schema import Config
from one_step_off.config.sections.agent import check_agent
from one_step_off.config.sections.data import check_data
from one_step_off.config.sections.logging import check_loggers
from one_step_off.config.sections.model import check_model
from one_step_off.config.sections.reward import check_rewards
from one_step_off.config.sections.rollout import check_engine, check_sampling
from one_step_off.config.sections.trainer import check_folders
from one_step_off.config.sections.weight_sync import check_weight_sync
from one_step_off.config.supervised import (
    check_supervised,
    check_supervised_files,
    check_supervised_keys,
    check_warm_up,
    supervised_config,
)
from one_step_off.config.sync_schedule import check_staleness
from one_step_off.config.teachers import check_teacher


def validate(cfg: Config, num_gpus: int | None = None, machine: bool = True) -> None:
    """Check types and ranges, what must fit together, what the config names on disk, and what the
    machine must have.

    Args:
        num_gpus: GPUs of this machine; None: they are counted, if it matters.
        machine: check too that this machine has the GPUs and nodes of the config.

    In a block of `noting_what_is_missing` files, folders and packages that this machine lacks are
    noted and not refused.

    Raises:
        ConfigError: the first fault found.
    """
    checked_copy(cfg)
    check_name("rollout.engine", cfg.rollout.engine, ENGINES)
    if num_gpus is None:
        num_gpus = visible_gpu_count(cfg)
    device = resolved_device(cfg, num_gpus)
    check_run(cfg)
    check_pools(cfg)
    check_lending(cfg)
    check_layouts(cfg, device)
    check_optimizers(cfg)
    check_batch(cfg)
    check_roles(cfg, device)
    check_teacher(cfg)
    check_algorithm(cfg)
    check_sampling(cfg.rollout)
    check_engine(cfg.rollout, cfg.weight_sync.in_flight, longest_sequence(cfg), device)
    check_model(cfg.model, cfg.actor.backend, device)
    check_rewards(cfg.reward)
    check_data(cfg.data, cfg.reward)
    check_agent(cfg.agent)
    check_folders(cfg.trainer)
    check_loggers(cfg.logging)
    check_staleness(cfg)
    check_weight_sync(cfg.weight_sync, device, rollout_and_actor_share(cfg))
    check_adapter_sync(cfg, device)
    check_quantization(cfg, device)
    check_allocator(cfg, device)
    check_warm_up(cfg, device)
    if machine:
        check_hardware(cfg, device, num_gpus)


def missing_hardware(cfg: Config) -> str | None:
    """What this machine lacks to run an otherwise valid config, and how to fix it; None if
    nothing.
    """
    num_gpus = visible_gpu_count(cfg)
    try:
        check_hardware(cfg, resolved_device(cfg, num_gpus), num_gpus)
    except ConfigError as error:
        return str(error)
    return None


def validate_supervised(cfg: Config, num_gpus: int | None = None, machine: bool = True) -> Config:
    """Check a config for `main_sft`, and return that of its supervised run.

    Args:
        num_gpus, machine: see `validate`.

    Raises:
        ConfigError: the first fault found.
    """
    checked_copy(cfg)
    if num_gpus is None:
        num_gpus = visible_gpu_count(cfg)
    device = resolved_device(cfg, num_gpus)
    check_supervised_keys(cfg)
    check_supervised_files(cfg)
    supervised = supervised_config(cfg)
    check_supervised(supervised, device)
    if machine:
        check_hardware(supervised, device, num_gpus)
    return supervised
