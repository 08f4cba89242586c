"""one_step_off: a one-step-off-policy PPO trainer for language models.

    from one_step_off import load_config, train

    result = train(load_config("gsm8k_tiny_cpu", trainer={"total_steps": 3}))

Importing this package imports nothing else: shell/setup.sh reads one_step_off.config.hardware
before anything is installed. The names below are imported when they are first used."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from one_step_off.config.errors import ConfigError
    from one_step_off.config.schema import Config
    from one_step_off.monitoring.callbacks import StopTraining
    from one_step_off.runtime.api import RunResult, load_config, train

__version__ = "0.2.0"
__all__ = ["Config", "ConfigError", "RunResult", "StopTraining", "load_config", "train"]

_MODULES = {
    "Config": "one_step_off.config.schema",
    "ConfigError": "one_step_off.config.errors",
    "RunResult": "one_step_off.runtime.api",
    "StopTraining": "one_step_off.monitoring.callbacks",
    "load_config": "one_step_off.runtime.api",
    "train": "one_step_off.runtime.api",
}


def __getattr__(name: str) -> Any:
    """Import a public name when it is first used."""
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(_MODULES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_MODULES})
