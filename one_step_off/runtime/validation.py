"""The whole check of a config before any engine or GPU is taken."""

import itertools

from one_step_off.algorithms.validation import algorithm_checks
from one_step_off.config.schema import Config, ConfigError
from one_step_off.config.validation import (
    checks_after_algorithm,
    checks_before_algorithm,
    first_fault,
    missing_hardware,
    resolved_device,
    visible_gpu_count,
)


def validate(cfg: Config, num_gpus: int | None = None, machine: bool = True) -> None:
    """Check what belongs together, what the config names on disk, and what the machine must have. `num_gpus`: of this
    machine; None: counted here, where it matters. Without `machine` it may have too few. Raises ConfigError: the first
    fault found."""
    if num_gpus is None:
        num_gpus = visible_gpu_count(cfg)
    device = resolved_device(cfg, num_gpus)
    groups = [
        *checks_before_algorithm(cfg, device),
        algorithm_checks(cfg),
        *checks_after_algorithm(cfg, device),
    ]
    fault = first_fault(cfg, itertools.chain(*groups))
    if not fault and machine:
        fault = missing_hardware(cfg, num_gpus)
    if fault:
        raise ConfigError(fault)
