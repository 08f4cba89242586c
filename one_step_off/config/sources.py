"""What a config says of its sources of training prompts, as typed values."""

import re
from collections.abc import Sequence
from pathlib import PurePath

from one_step_off.config.schema import Config
from one_step_off.config.sections.data import Curriculum, DifficultyFilter, Entry, SourceConfig

_FREE_COMMA = re.compile(r"(?<!\\),")

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


def source_of(cfg: Config, name: str) -> SourceConfig:
    """The settings of the source of that name; `NO_SOURCE` where there is none."""
    for source in train_sources(cfg.data.train_files):
        if source.name == name:
            return source
    return NO_SOURCE


def train_files_text(cfg: Config) -> str:
    """The training data in a few words."""
    sources = train_sources(cfg.data.train_files)
    if not sources:
        return str(cfg.data.train_files)
    total = sum(source.weight for source in sources)
    return " + ".join(f"{source.name} ({source.weight / total:.0%})" for source in sources)


def source_rewards(cfg: Config) -> dict[str, str]:
    """Source name -> its reward function, of the sources that name one."""
    sources = train_sources(cfg.data.train_files)
    return {source.name: source.reward for source in sources if source.reward}


def reward_names(cfg: Config) -> list[str]:
    """All reward functions that a config names."""
    default = list(cfg.reward.functions.values()) or [cfg.reward.function]
    return default + list(source_rewards(cfg).values())


def difficulty_filter(cfg: Config) -> DifficultyFilter | None:
    """`data.difficulty_filter`; None: it is off."""
    settings = cfg.data.difficulty_filter
    return DifficultyFilter(**settings) if settings else None


def curriculum(cfg: Config) -> Curriculum | None:
    """`data.curriculum`; None: it is off."""
    settings = cfg.data.curriculum
    return Curriculum(**settings) if settings else None
