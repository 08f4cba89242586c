"""The types and ranges of a config that was built in Python, checked as the loader checks a file's.

Dataclasses accept any value: `ActorConfig(lr="abc")` and `cfg.actor.lrr = 1` raise nothing by
themselves.
"""

import copy
import dataclasses
from typing import Any

from one_step_off.config import loading
from one_step_off.config.errors import ConfigError
from one_step_off.config.schema import Config
from one_step_off.config.text import format_value


def checked_copy(cfg: Config) -> Config:
    """A copy of a config whose values have the types of the schema, as "0.5" becomes 0.5 for a
    number.

    Raises:
        ConfigError: a value of a wrong type or out of bounds, or an attribute that is no key. Names
            the key, the value and what it must be.
    """
    if not isinstance(cfg, Config):
        raise ConfigError(
            f"config of type {type(cfg).__name__}: must be a Config, for example from load_config"
        )
    checked = copy.deepcopy(cfg)
    _refuse_unknown_attributes(checked)
    for key in loading.KEYS.values():
        section = getattr(checked, key.section)
        value = loading.checked_value(key, getattr(section, key.name))
        setattr(section, key.name, value)
    return checked


def check_types(cfg: Config) -> None:
    """Raises ConfigError, as `checked_copy`."""
    checked_copy(cfg)


def _refuse_unknown_attributes(cfg: Config) -> None:
    """Raises ConfigError: a section is no section of the schema, or has an attribute that the
    schema lacks.
    """
    sections = {field.name: field.type for field in dataclasses.fields(Config)}
    for name in vars(cfg):
        if name not in sections:
            raise ConfigError(f"{name}: unknown section; the sections are {', '.join(sections)}")
    for name, section_type in sections.items():
        section = getattr(cfg, name)
        _require_section_type(name, section, section_type)
        for attribute, value in vars(section).items():
            loading.find_key(f"{name}.{attribute}", value)


def _require_section_type(name: str, section: Any, section_type: Any) -> None:
    if not isinstance(section, section_type):
        shown = format_value(section)
        raise ConfigError(f"{name}={shown}: must be an instance of {section_type.__name__}")
