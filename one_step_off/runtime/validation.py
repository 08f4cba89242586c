"""The whole check of a config, before any engine or GPU is taken."""

from one_step_off.algorithms.validation import check_algorithm
from one_step_off.config.old_keys import replace_old_keys
from one_step_off.config.placement import resolved_device, visible_gpu_count
from one_step_off.config.pool_checks import check_hardware
from one_step_off.config.schema import Config
from one_step_off.config.supervised import supervised_config
from one_step_off.config.supervised_checks import (
    check_supervised,
    check_supervised_files,
    check_supervised_keys,
)
from one_step_off.config.type_checks import check_types
from one_step_off.config.validation import check_after_algorithm, check_before_algorithm
from one_step_off.engines.engine import check_name


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
    check_types(cfg)
    replace_old_keys(cfg)
    check_name(cfg.rollout.engine)
    if num_gpus is None:
        num_gpus = visible_gpu_count(cfg)
    device = resolved_device(cfg, num_gpus)
    check_before_algorithm(cfg, device)
    check_algorithm(cfg)
    check_after_algorithm(cfg, device)
    if machine:
        check_hardware(cfg, device, num_gpus)


def validate_supervised(cfg: Config, num_gpus: int | None = None, machine: bool = True) -> Config:
    """Check a config for `main_sft`, and return that of its supervised run.

    Args:
        num_gpus, machine: see `validate`.

    Raises:
        ConfigError: the first fault found.
    """
    check_types(cfg)
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
