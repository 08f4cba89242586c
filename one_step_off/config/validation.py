"""What a valid config must hold beyond types and bounds: keys that fit together, files, the
machine.

Each check function looks at one part of the config and raises `ConfigError` at the first fault. The
order matters: a later check may rely on what an earlier one has refused. What only the contents of
the files show is checked when the run is prepared.
"""

from one_step_off.config.agent_checks import check_external_agents
from one_step_off.config.allocator import check_allocator
from one_step_off.config.data_checks import check_agent, check_data, check_output
from one_step_off.config.engine_checks import check_engine, check_sampling, check_weight_sync
from one_step_off.config.errors import ConfigError
from one_step_off.config.lora_checks import check_adapter_sync
from one_step_off.config.model_checks import check_model
from one_step_off.config.optimizer_checks import check_optimizers
from one_step_off.config.placement import resolved_device, visible_gpu_count
from one_step_off.config.pool_checks import check_batch, check_hardware, check_layouts, check_pools
from one_step_off.config.role_checks import check_roles, check_run
from one_step_off.config.schema import Config
from one_step_off.config.staleness_checks import check_staleness
from one_step_off.config.supervised_checks import check_warm_up
from one_step_off.config.teacher_checks import check_teacher


def check_before_algorithm(cfg: Config, device: str) -> None:
    """The checks that those of the algorithm rely on. Raises ConfigError."""
    check_run(cfg)
    check_pools(cfg)
    check_layouts(cfg, device)
    check_optimizers(cfg)
    check_batch(cfg)
    check_roles(cfg, device)
    check_teacher(cfg)


def check_after_algorithm(cfg: Config, device: str) -> None:
    """The remaining checks, except that of the machine (`check_hardware`). Raises ConfigError."""
    check_sampling(cfg)
    check_engine(cfg, device)
    check_model(cfg, device)
    check_data(cfg)
    check_agent(cfg)
    check_external_agents(cfg)
    check_output(cfg)
    check_staleness(cfg)
    check_weight_sync(cfg, device)
    check_adapter_sync(cfg, device)
    check_allocator(cfg, device)
    check_warm_up(cfg, device)


def missing_hardware(cfg: Config, num_gpus: int | None = None) -> str | None:
    """What this machine lacks to run an otherwise valid config, and how to fix it; None if
    nothing.
    """
    if num_gpus is None:
        num_gpus = visible_gpu_count(cfg)
    try:
        check_hardware(cfg, resolved_device(cfg, num_gpus), num_gpus)
    except ConfigError as error:
        return str(error)
    return None
