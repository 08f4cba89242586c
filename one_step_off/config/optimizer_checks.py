"""Checks of the optimizers that roles name, and of their own settings."""

from collections.abc import Callable
from typing import Any

from one_step_off.config import packages
from one_step_off.config.data_checks import did_you_mean_function
from one_step_off.config.errors import ConfigError, refuse_here
from one_step_off.config.roles import role_settings
from one_step_off.config.schema import Config
from one_step_off.config.text import did_you_mean, format_value
from one_step_off.config.user_code import is_user_spec

ADAMW = "adamw"
ADAMW_8BIT = "adamw_8bit"
MUON = "muon"
OPTIMIZERS = (ADAMW, ADAMW_8BIT, MUON)

BLOCK_SIZE = 256
"""Of adamw_8bit where the config names none, as torchao has it."""

ROLES = ("actor", "critic")
"""The roles that have an optimizer."""

LEARNING_RATE_ADJUSTMENTS = ("match_rms_adamw", "original")
"""How Muon scales an orthogonal update by the shape of its matrix, by torch's names."""

RESERVED_SETTINGS = {
    "lr": "ROLE.lr sets it",
    "params": "they are the model's",
}
"""What a class of the user's own receives from elsewhere."""


def _is_fraction(value: Any) -> bool:
    return type(value) in (int, float) and 0 <= value < 1


def _is_step_count(value: Any) -> bool:
    return type(value) is int and 1 <= value <= 20


def _is_block_size(value: Any) -> bool:
    return type(value) is int and 32 <= value <= 4096


def _is_adjustment(value: Any) -> bool:
    return value in LEARNING_RATE_ADJUSTMENTS


def _is_bool(value: Any) -> bool:
    return type(value) is bool


# Optimizer -> its own settings -> what a value must be, and the check of it.
SETTINGS: dict[str, dict[str, tuple[str, Callable[[Any], bool]]]] = {
    ADAMW: {},
    ADAMW_8BIT: {"block_size": ("a whole number from 32 to 4096", _is_block_size)},
    MUON: {
        "momentum": ("a number, at least 0 and below 1", _is_fraction),
        "nesterov": ("true or false", _is_bool),
        "ns_steps": ("a whole number from 1 to 20", _is_step_count),
        "adjust_lr_fn": (" or ".join(LEARNING_RATE_ADJUSTMENTS), _is_adjustment),
    },
}


def own_optimizers(cfg: Config) -> dict[str, Any]:
    """Role -> its settings, of the roles whose optimizer is a class of the user's own."""
    found = {}
    for role in ROLES:
        if role in cfg.placement.roles:
            settings = role_settings(cfg, role)
            if settings.optimizer not in OPTIMIZERS:
                found[role] = settings
    return found


def check_optimizers(cfg: Config) -> None:
    """Check the optimizer of each role that learns. A class of the user's own is imported and tried
    when the run is prepared.

    Raises:
        ConfigError: there is no such optimizer, its back end or its package is missing, or it has
            no such setting.
    """
    for role in ROLES:
        if role in cfg.placement.roles:
            settings = role_settings(cfg, role)
            _check_name(role, settings)
            _check_settings(role, settings.optimizer, settings.optimizer_kwargs)


def _check_name(role: str, settings: Any) -> None:
    name = settings.optimizer
    location = f"{role}.optimizer={format_value(name)}"
    if name not in OPTIMIZERS and not is_user_spec(name):
        otherwise = (
            f"use {', '.join(OPTIMIZERS)}, or your own as module:Class, where the module exists"
        )
        fix = did_you_mean_function(name, OPTIMIZERS, otherwise)
        raise ConfigError(f"{location}: no such optimizer; {fix}")
    if settings.backend == "megatron" and name != ADAMW:
        raise ConfigError(
            f"{location}: the megatron back end has adamw alone; "
            f"use that, or set {role}.backend=fsdp"
        )
    if name == ADAMW_8BIT and not packages.is_installed("torchao"):
        fix = "pip install 'torchao>=0.18,<0.19', or use adamw"
        refuse_here(ConfigError(f"{location}: the package torchao is missing; {fix}"))


def _check_settings(role: str, name: str, kwargs: dict[str, Any]) -> None:
    if name not in OPTIMIZERS:
        for key, reason in RESERVED_SETTINGS.items():
            if key in kwargs:
                raise ConfigError(
                    f"{role}.optimizer_kwargs.{key}={format_value(kwargs[key])}: "
                    f"{reason.replace('ROLE', role)}; remove it"
                )
        return
    known = SETTINGS[name]
    for key, value in kwargs.items():
        location = f"{role}.optimizer_kwargs.{format_value(key)}={format_value(value)}"
        if key not in known:
            otherwise = f"use {', '.join(known)}" if known else "remove it"
            fix = did_you_mean(str(key), known, otherwise)
            raise ConfigError(f"{location}: no such setting of {name}; {fix}")
        wanted, is_valid = known[key]
        if not is_valid(value):
            raise ConfigError(f"{location}: must be {wanted}")
