"""The entries of `data.train_files`, `data.difficulty_filter` and `data.curriculum`.

They stay plain mappings in a `Config`, so that a config is written and read as YAML. `sources.py`
gives them as the types of this module.
"""

from dataclasses import dataclass, field
from typing import Any, Optional

from one_step_off.config.keys import config_key, files_key


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
