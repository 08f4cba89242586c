"""The config section data, and the entries of its keys `train_files`, `difficulty_filter` and
`curriculum`.

These entries stay plain mappings in a `Config`, so that a config is written and read as YAML.
`sources.py` gives them as the types of this module.
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
