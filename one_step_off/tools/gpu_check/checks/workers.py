"""The trainer's own worker, one rank, in the check's process."""

import importlib.util
import sys
import types
from typing import Any

from one_step_off.config.schema import Config
from one_step_off.tools.gpu_check.peers import HOST


def policy_worker(cfg: Config, device: str) -> Any:
    """A policy worker that is built and not yet set up. Also where Ray is not installed."""
    if importlib.util.find_spec("ray") is None:
        sys.modules["ray"] = _marks_without_ray()
    from one_step_off.training.fsdp.fsdp_workers import PolicyWorker

    return PolicyWorker(cfg, "actor", 0, 1, device, total_steps=4)


def set_up(worker: Any) -> None:
    """Load its model, as the only rank."""
    worker.setup(*worker.free_address(HOST))


def _marks_without_ray() -> types.ModuleType:
    """A stand-in for Ray: the workers mark methods with `ray.method`, and use nothing else of it
    outside of actors."""
    stand_in: Any = types.ModuleType("ray")
    stand_in.method = lambda **options: lambda method: method
    return stand_in
