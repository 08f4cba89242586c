"""Checks of the sources of training prompts, the difficulty filter and the curriculum."""

import re
from collections.abc import Callable

from one_step_off.config.errors import ConfigError, key_error
from one_step_off.config.schema import Config
from one_step_off.config.sections.data import SourceConfig
from one_step_off.config.sources import (
    difficulty_filter,
    source_rewards,
    split_files,
    train_sources,
)
from one_step_off.config.text import did_you_mean, format_value

DROPS = ("always", "never")
NAME = r"[A-Za-z0-9_.-]+"

CheckName = Callable[[str, str], None]
"""Receives a key and its value. Raises ConfigError."""


def check_sources(
    cfg: Config, check_file: CheckName, check_loop: CheckName, check_reward: CheckName
) -> None:
    """Check each source of `data.train_files`, and the settings of the draw.

    Args:
        check_file: checks one file, generator or hub id.
        check_loop: checks the name of an agent loop.
        check_reward: checks the name of a reward function.

    Raises:
        ConfigError: the first fault.
    """
    seen: dict[str, str] = {}
    for i, source in enumerate(train_sources(cfg.data.train_files)):
        key = f"data.train_files[{i}]"
        _check_name(key, source, seen)
        seen[source.name] = key
        for file in split_files(source.files):
            check_file(f"{key}.files", file)
        if source.agent_loop:
            check_loop(f"{key}.agent_loop", source.agent_loop)
        if source.reward:
            check_reward(f"{key}.reward", source.reward)
        _check_length(cfg, key, source)
    _check_rewards(cfg)
    _check_filter(cfg)


def _check_name(key: str, source: SourceConfig, seen: dict[str, str]) -> None:
    if not source.files.strip(" ,"):
        raise ConfigError(f"{key}.files: not set; give files, a hub id or generator:NAME")
    if not re.fullmatch(NAME, source.name):
        raise ConfigError(
            f"{key}.name={format_value(source.name)}: must be letters, digits, _.- only; "
            "it is part of the names of metrics"
        )
    if source.name in seen:
        raise ConfigError(
            f"{key}.name={source.name}: {seen[source.name]} has this name too; "
            "give each source a name of its own"
        )


def _check_length(cfg: Config, key: str, source: SourceConfig) -> None:
    length = source.max_response_length
    longest = cfg.data.max_response_length
    if length is None:
        return
    if length > longest:
        raise ConfigError(
            f"{key}.max_response_length={length}: more than data.max_response_length={longest}; "
            "lower it, or raise that"
        )
    if cfg.reward.overlong_buffer and length < longest:
        raise ConfigError(
            f"{key}.max_response_length={length}: reward.overlong_buffer counts from "
            f"data.max_response_length={longest}, which these responses do not reach; set "
            "reward.overlong_buffer=0, or the same length for all"
        )


def _check_rewards(cfg: Config) -> None:
    rewards = source_rewards(cfg)
    if rewards and cfg.reward.functions:
        raise key_error(
            cfg,
            "reward.functions",
            f"the source {next(iter(rewards))} in data.train_files names a function too; "
            "name all of them in one place",
        )


def _check_filter(cfg: Config) -> None:
    rules = difficulty_filter(cfg)
    if rules is None:
        return
    key = "data.difficulty_filter.drop"
    if not rules.drop:
        raise ConfigError(f"{key}=[]: drops nothing; name always, never or both")
    for name in rules.drop:
        if name not in DROPS:
            fix = did_you_mean(name, DROPS, "use always, never or both")
            raise ConfigError(f"{key}={format_value(rules.drop)}: no such rule {name}; {fix}")
