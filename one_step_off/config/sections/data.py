"""The config section data, and the entries of its keys `train_files`, `difficulty_filter` and
`curriculum`.

These entries stay plain mappings in a `Config`, so that a config is written and read as YAML.
`train_sources`, `difficulty_filter` and `curriculum` give them as the types of this module.
"""

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import PurePath
from typing import Any, Optional

from one_step_off.config.errors import ConfigError, refuse_here, value_error
from one_step_off.config.keys import config_key, files_key
from one_step_off.config.sections.agent import check_loop
from one_step_off.config.sections.reward import RewardConfig, check_reward
from one_step_off.config.text import did_you_mean, format_value

FILE_ENDINGS = (".jsonl", ".json", ".parquet")
# The names that data/word_problems.py registers, repeated because importing it takes long; a test
# keeps them equal.
GENERATORS = ("word_problems", "addition", "products", "puzzles", "shapes")

ENVIRONMENT_SOURCE = "environment"

TEMPLATE_ARGUMENTS = (
    *("conversation", "messages", "tools", "chat_template", "tokenize"),
    *("add_generation_prompt", "continue_final_message", "return_dict", "return_tensors"),
    *("return_assistant_tokens_mask", "padding", "truncation", "max_length", "tokenizer_kwargs"),
)
"""What the program itself tells a chat template, or the tokenizer: no settings of a template."""

DROPS = ("always", "never")

NAME = r"[A-Za-z0-9_.-]+"

_FREE_COMMA = re.compile(r"(?<!\\),")


@dataclass(frozen=True)
class SourceConfig:
    """One source of training prompts. What it leaves out is as in the rest of the config."""

    files: str = files_key("", "files (comma-separated), hub id or generator:NAME of this source")
    name: str = config_key("", "its name in metrics; empty: made of its files")
    weight: float = config_key(1.0, "its share of the prompts, relative to the others", above=0.0)
    agent_loop: str = config_key("", "its agent loop; empty: agent.loop")
    reward: str = config_key("", "its reward function; empty: reward.function")
    max_turns: Optional[int] = config_key(
        None, "model turns per trajectory; null: agent.max_turns", low=1
    )
    max_turn_tokens: Optional[int] = config_key(
        None, "longest model turn, in tokens; null: agent.max_turn_tokens", low=1
    )
    timeout_s: Optional[float] = config_key(
        None, "a trajectory starts no new turn after this time; null: agent.timeout_s", above=0.0
    )
    max_response_length: Optional[int] = config_key(
        None,
        "longest response, in tokens; null: data.max_response_length, which it must not exceed",
        low=1,
    )


@dataclass(frozen=True)
class DifficultyFilter:
    """Which prompts are dropped for some epochs because they teach nothing."""

    visits: int = config_key(2, "number of the last visits that must agree", low=1, high=10000)
    drop: list[str] = field(
        default_factory=lambda: ["always", "never"],
        metadata={"help": "always: solved by every sample; never: solved by none", "choices": ()},
    )
    max_dropped: float = config_key(
        0.5, "largest share of a source that is dropped at the same time", above=0.0, high=0.99
    )
    return_after: int = config_key(
        5, "epochs of its source until a dropped prompt comes back", low=1, high=1000000
    )


@dataclass(frozen=True)
class Curriculum:
    """How often a prompt is drawn, by its measured pass rate."""

    target: float = config_key(0.5, "pass rate of the prompts drawn most", low=0.0, high=1.0)
    max_interval: int = config_key(
        4, "a prompt far from the target is drawn once in this many epochs", low=2, high=10000
    )


Entry = dict[str, Any]
"""A mapping with the keys of one of these classes."""


@dataclass
class DataConfig:
    """Prompts."""

    train_files: str | list[dict[str, Any]] = files_key(
        "",
        "jsonl or parquet files (comma-separated, or a list), hub id, generator:NAME, or "
        "environment: the tasks of agent.environment; or a list of sources with weights "
        "(docs/tutorials/reward_and_data.md)",
        entries=SourceConfig,
    )
    val_files: str = files_key(
        "", "held-out set, in the same forms as train_files; empty: no evaluation"
    )
    val_sets: dict[str, str] = files_key(
        {}, "further held-out sets, in addition to val_files, as a mapping {name: files}"
    )
    chat_template: str = config_key(
        "auto", "auto: the tokenizer's chat template, if it has one", choices="auto always never"
    )
    chat_template_kwargs: dict[str, Any] = config_key(
        {}, "settings of the chat template for all rows, e.g. {enable_thinking: false}"
    )
    instruction: str = config_key("", "text appended to each question of the gsm8k format")
    train_batch_size: int = config_key(
        64, "prompts per step (each gives rollout.n trajectories)", low=1
    )
    max_prompt_length: int = config_key(512, "longest prompt, in tokens", low=1)
    max_response_length: int = config_key(1024, "longest response, in tokens", low=1)
    overlong_prompts: str = config_key(
        "skip", "what to do with prompts longer than max_prompt_length", choices="skip fail"
    )
    bad_rows: str = config_key(
        "skip",
        "what to do with malformed rows (they are counted and listed)",
        choices="skip fail",
    )
    shuffle: bool = config_key(True, "shuffle each epoch, seeded by trainer.seed")
    val_size: int = config_key(
        -1, "use only the first rows of each held-out set; -1: all", low=1, also=-1
    )
    generator_size: int = config_key(
        4096, "number of training rows that generator:NAME generates", low=1
    )
    solved_at: float = config_key(
        1.0,
        "a sample solves its prompt with at least this reward (pass rates, metrics of sources)",
        low=-1e6,
        high=1e6,
    )
    difficulty_filter: dict[str, Any] = config_key(
        {},
        "drop prompts for some epochs that were solved always or never, e.g. {visits: 2}; "
        "empty: off",
        entries=DifficultyFilter,
    )
    curriculum: dict[str, Any] = config_key(
        {},
        "draw prompts more often whose pass rate is near a target, e.g. {target: 0.5}; empty: off",
        entries=Curriculum,
    )


NO_SOURCE = SourceConfig()
"""The settings of a prompt that belongs to no source of a list: all as in the rest of the
config."""


def split_files(text: str) -> list[str]:
    """The files, hub ids and generators of a comma-separated text. `\\,` is a comma in a name."""
    names = [part.strip().replace("\\,", ",") for part in _FREE_COMMA.split(text)]
    return [name for name in names if name]


def join_files(names: Sequence[str]) -> str:
    """The text that `split_files` takes apart again."""
    return ",".join(name.replace(",", "\\,") for name in names)


def train_sources(train_files: str | Sequence[Entry]) -> list[SourceConfig]:
    """The sources of `data.train_files`, each with a name; [] where it is text."""
    if isinstance(train_files, str):
        return []
    sources = []
    for entry in train_files:
        name = entry.get("name") or _default_name(str(entry.get("files", "")))
        sources.append(SourceConfig(**entry | {"name": name}))
    return sources


def _default_name(files: str) -> str:
    """The last part of the first file, hub id or generator, without its ending."""
    first = next(iter(split_files(files)), "")
    if first.startswith("generator:"):
        name = first.removeprefix("generator:")
    elif first.endswith((".jsonl", ".json", ".parquet")):
        name = PurePath(first).stem
    else:
        name = PurePath(first.partition(":")[0]).name
    return re.sub(r"[^A-Za-z0-9_.-]", "_", name)


def source_of(data: DataConfig, name: str) -> SourceConfig:
    """The settings of the source of that name; `NO_SOURCE` where there is none."""
    for source in train_sources(data.train_files):
        if source.name == name:
            return source
    return NO_SOURCE


def train_files_text(data: DataConfig) -> str:
    """The training data in a few words."""
    sources = train_sources(data.train_files)
    if not sources:
        return str(data.train_files)
    total = sum(source.weight for source in sources)
    return " + ".join(f"{source.name} ({source.weight / total:.0%})" for source in sources)


def source_rewards(data: DataConfig) -> dict[str, str]:
    """Source name -> its reward function, of the sources that name one."""
    sources = train_sources(data.train_files)
    return {source.name: source.reward for source in sources if source.reward}


def reward_names(data: DataConfig, reward: RewardConfig) -> list[str]:
    """All reward functions that a config names."""
    default = list(reward.functions.values()) or [reward.function]
    return default + list(source_rewards(data).values())


def difficulty_filter(data: DataConfig) -> DifficultyFilter | None:
    """`data.difficulty_filter`; None: it is off."""
    settings = data.difficulty_filter
    return DifficultyFilter(**settings) if settings else None


def curriculum(data: DataConfig) -> Curriculum | None:
    """`data.curriculum`; None: it is off."""
    settings = data.curriculum
    return Curriculum(**settings) if settings else None


def check_data(data: DataConfig, reward: RewardConfig) -> None:
    """Check the rows that a config names, and their sources. Raises ConfigError."""
    for name, files in data.val_sets.items():
        # The metrics of a set "reward" would have the names of parts of the main set's reward.
        is_name = name not in ("val", "reward") and re.fullmatch(r"[A-Za-z0-9_.-]+", name)
        if not is_name or not files.strip(" ,"):
            raise ConfigError(
                f"data.val_sets.{format_value(name)}={format_value(files)}: "
                "must have a name of letters, digits, _.- (not val or reward), and files"
            )
    files_by_key = {"val_files": data.val_files}
    if isinstance(data.train_files, str):
        files_by_key = {"train_files": data.train_files} | files_by_key
    for name, files in data.val_sets.items():
        files_by_key[f"val_sets.{name}"] = files
    for key, files in files_by_key.items():
        for source in split_files(files):
            check_source(f"data.{key}", source)
    _check_template_settings(data)
    _check_sources(data, reward)


def _check_template_settings(data: DataConfig) -> None:
    """Raises ConfigError: a setting of the chat template is none, or there is no template."""
    key = "data.chat_template_kwargs"
    settings = data.chat_template_kwargs
    for name in TEMPLATE_ARGUMENTS:
        if name in settings:
            raise value_error(key, settings, f"{name} is set by the program; remove it")
    if settings and data.chat_template == "never":
        raise value_error(
            key, settings, "data.chat_template=never uses no template; remove one of them"
        )


def check_source(key: str, source: str) -> None:
    """Check one file, generator or hub id; empty: nothing. Raises ConfigError."""
    if not source or source == ENVIRONMENT_SOURCE:
        return
    location = f"{key}={format_value(source)}"
    if source.startswith("generator:"):
        if source.removeprefix("generator:") not in GENERATORS:
            otherwise = f"use generator:{' or generator:'.join(GENERATORS)}"
            fix = did_you_mean(source.removeprefix("generator:"), GENERATORS, otherwise)
            fix = fix.replace("did you mean ", "did you mean generator:")
            raise ConfigError(f"{location}: no such generator; {fix}")
    elif source.endswith(FILE_ENDINGS):
        if not os.path.isfile(source):
            problem = f"no such file (working directory {os.getcwd()}); check the path"
            refuse_here(ConfigError(f"{location}: {problem}"))
    else:
        exists = os.path.exists(source)
        may_be_hub_id = re.fullmatch(r"[\w.-]+(/[\w.-]+)?(:[\w.-]+)?", source)
        if exists or not may_be_hub_id:
            missing = "" if exists else "no such file or folder; "
            raise ConfigError(
                f"{location}: {missing}must be a {', '.join(FILE_ENDINGS)} file, "
                "generator:NAME or a hub id"
            )


def _check_sources(data: DataConfig, reward: RewardConfig) -> None:
    """Check each source of `train_files`, and the settings of the draw. Raises ConfigError."""
    seen: dict[str, str] = {}
    for i, source in enumerate(train_sources(data.train_files)):
        key = f"data.train_files[{i}]"
        _check_name(key, source, seen)
        seen[source.name] = key
        for file in split_files(source.files):
            check_source(f"{key}.files", file)
        if source.agent_loop:
            check_loop(f"{key}.agent_loop", source.agent_loop)
        if source.reward:
            check_reward(f"{key}.reward", source.reward)
        _check_length(data, reward, key, source)
    _check_source_rewards(data, reward)
    _check_filter(data)


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


def _check_length(data: DataConfig, reward: RewardConfig, key: str, source: SourceConfig) -> None:
    length = source.max_response_length
    longest = data.max_response_length
    if length is None:
        return
    if length > longest:
        raise ConfigError(
            f"{key}.max_response_length={length}: more than data.max_response_length={longest}; "
            "lower it, or raise that"
        )
    if reward.overlong_buffer and length < longest:
        raise ConfigError(
            f"{key}.max_response_length={length}: reward.overlong_buffer counts from "
            f"data.max_response_length={longest}, which these responses do not reach; set "
            "reward.overlong_buffer=0, or the same length for all"
        )


def _check_source_rewards(data: DataConfig, reward: RewardConfig) -> None:
    rewards = source_rewards(data)
    if rewards and reward.functions:
        raise value_error(
            "reward.functions",
            reward.functions,
            f"the source {next(iter(rewards))} in data.train_files names a function too; "
            "name all of them in one place",
        )


def _check_filter(data: DataConfig) -> None:
    rules = difficulty_filter(data)
    if rules is None:
        return
    key = "data.difficulty_filter.drop"
    if not rules.drop:
        raise ConfigError(f"{key}=[]: drops nothing; name always, never or both")
    for name in rules.drop:
        if name not in DROPS:
            fix = did_you_mean(name, DROPS, "use always, never or both")
            raise ConfigError(f"{key}={format_value(rules.drop)}: no such rule {name}; {fix}")
