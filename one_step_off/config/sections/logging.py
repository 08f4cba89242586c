"""The config section logging."""

from dataclasses import dataclass
from typing import Optional

from one_step_off.config import packages
from one_step_off.config.errors import refuse_here, value_error
from one_step_off.config.keys import config_key


@dataclass
class LoggingConfig:
    """What a run logs in addition to metrics.jsonl, ledger.jsonl and summary.json."""

    tensorboard: bool = config_key(True, "write tensorboard/ in the run folder")
    wandb: bool = config_key(False, "log to Weights & Biases; needs the package wandb")
    wandb_project: str = config_key("one_step_off", "project in W&B")
    wandb_mode: str = config_key(
        "online",
        "offline: log into the run folder until you run `wandb sync`",
        choices="online offline",
    )
    prometheus_port: Optional[int] = config_key(
        None,
        "serve the metrics of each step on this port of 127.0.0.1; null: no server",
        low=1,
        high=65535,
    )
    sample_dump: bool = config_key(
        True, "write all samples to samples/ (read them with python -m one_step_off.view)"
    )
    logger: str = config_key("", "a logger of your own, as module:Class; empty: none")


def check_loggers(logging: LoggingConfig) -> None:
    """Check the packages and settings of the loggers. Raises ConfigError."""
    for name in ("tensorboard", "wandb"):
        if getattr(logging, name) and not packages.is_installed(name):
            problem = f"the package {name} is missing; pip install {name}, or set it to false"
            refuse_here(value_error(f"logging.{name}", True, problem))
    if logging.wandb and not logging.wandb_project.strip():
        raise value_error("logging.wandb_project", logging.wandb_project, "empty; name a project")
