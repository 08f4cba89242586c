"""Lists of sources in `data.train_files`, the difficulty filter and the curriculum: what is
accepted, and what is refused in one line."""

from __future__ import annotations

from pathlib import Path

import pytest

from one_step_off.config.loading import load_config
from one_step_off.config.sections.data import (
    NO_SOURCE,
    Curriculum,
    DifficultyFilter,
    curriculum,
    difficulty_filter,
    source_of,
    train_sources,
)
from one_step_off.config.yaml_io import resolved_yaml
from tests.unit.config.config_helpers import GOOD, fault, good, load_text

BASE = tuple(argument for argument in GOOD if "train_files" not in argument)


def list_of(*entries: str) -> str:
    return f"data.train_files=[{', '.join(entries)}]"


def test_a_list_on_the_command_line_and_in_a_file() -> None:
    entries = (
        '{files: "generator:products, a.jsonl", weight: 0.7, agent_loop: tool, max_turns: 3}',
        "{files: ~/x/my.chat.jsonl, weight: 3, reward: 'own:score', timeout_s: 60}",
        "{files: 'openai/gsm8k:main', name: math}",
    )
    cfg = load_config([*BASE, list_of(*entries)])
    first, second, third = train_sources(cfg.data.train_files)
    assert (first.name, first.weight, first.agent_loop, first.max_turns) == (
        "products", 0.7, "tool", 3,
    )  # fmt: skip
    assert first.files == "generator:products,a.jsonl"
    assert second.files == str(Path("~/x/my.chat.jsonl").expanduser())
    assert (second.name, second.weight, second.timeout_s) == ("my.chat", 3.0, 60.0)
    assert (third.name, third.weight, third.max_turns) == ("math", 1.0, None)
    assert source_of(cfg.data, "math") == third
    assert source_of(cfg.data, "other") == source_of(cfg.data, "") == NO_SOURCE
    lines = "".join(f"    - {entry}\n" for entry in entries)
    from_file = load_text(f"data:\n  train_files:\n{lines}")
    assert from_file.data.train_files == cfg.data.train_files
    assert load_text(resolved_yaml(cfg)) == cfg, "a run's config.yaml reads back"


def test_text_stays_text() -> None:
    assert good().data.train_files == "generator:word_problems"
    assert train_sources(good().data.train_files) == []
    files = "data.train_files=~/a.jsonl, b.jsonl"
    assert load_config([*BASE, files]).data.train_files == (
        f"{Path('~').expanduser()}/a.jsonl,b.jsonl"
    )


def test_the_draw_is_off_by_default_and_single_entries_can_be_set() -> None:
    assert difficulty_filter(good().data) is None
    assert curriculum(good().data) is None
    cfg = good("data.difficulty_filter.visits=3", "data.curriculum={target: 0.25}")
    assert difficulty_filter(cfg.data) == DifficultyFilter(visits=3)
    assert curriculum(cfg.data) == Curriculum(target=0.25)
    assert load_text(resolved_yaml(cfg)) == cfg


WORDS = "{files: 'generator:word_problems'}"
SOURCES = [
    ("{files: 'generator:sums'}", "data.train_files[0].files=generator:sums: no such generator"),
    ("{files: nowhere.jsonl}", "data.train_files[0].files=nowhere.jsonl: no such file"),
    ("{weight: 1}", "data.train_files[0].files: not set"),
    ("{files: a.jsonl, wieght: 1}", "data.train_files[0].wieght: unknown key; did you mean weight"),
    ("{files: a.jsonl, agent_lop: x}", "data.train_files[0].agent_lop: unknown key; did you mean"),
    ("{files: a.jsonl, weight: 0}", "data.train_files[0].weight=0.0: must be above 0"),
    ("{files: a.jsonl, weight: x}", "data.train_files[0].weight=x: must be a number"),
    ("{files: a.jsonl, max_turns: 0}", "data.train_files[0].max_turns=0: must be at least 1"),
    ("{files: a.jsonl, timeout_s: -1}", "data.train_files[0].timeout_s=-1.0: must be above 0"),
    ("{files: 'generator:addition', name: a/b}", "data.train_files[0].name=a/b: must be letters"),
    (f"{WORDS}, {WORDS}", "data.train_files[1].name=word_problems: data.train_files[0] has this"),
    (
        "{files: 'generator:addition', agent_loop: tol}",
        "data.train_files[0].agent_loop=tol: no such name; did you mean tool",
    ),
    (
        "{files: 'generator:addition', reward: gsm}",
        "data.train_files[0].reward=gsm: no such function; did you mean gsm8k?",
    ),
    (
        "{files: 'generator:addition', max_response_length: 2000}",
        "data.train_files[0].max_response_length=2000: more than data.max_response_length=1024",
    ),
    ("generator:addition, 3", "data.train_files=[generator:addition, 3]: must be text, or a list"),
    ("", "data.train_files=[]: must be text, or a list"),
    ("{files: ]", "data.train_files=[{files: ]]: not valid YAML"),
]


@pytest.mark.parametrize(("entries", "line"), SOURCES)
def test_what_is_wrong_with_a_source_is_said_in_one_line(entries: str, line: str) -> None:
    assert fault(list_of(entries), base=BASE).startswith(line)


SETTINGS = [
    ("data.difficulty_filter={visit: 2}", "data.difficulty_filter.visit: unknown key; did you mea"),
    ("data.difficulty_filter={visits: 0}", "data.difficulty_filter.visits=0: must be at least 1"),
    ("data.difficulty_filter.max_dropped=1", "data.difficulty_filter.max_dropped=1.0: must be at"),
    ("data.difficulty_filter={drop: []}", "data.difficulty_filter.drop=[]: drops nothing"),
    ("data.difficulty_filter={drop: [alwys]}", "data.difficulty_filter.drop=[alwys]: no such rule"),
    ("data.difficulty_filter={drop: always}", "data.difficulty_filter.drop=always: must be a list"),
    ("data.difficulty_filter=true", "data.difficulty_filter=true: must be a mapping"),
    ("data.curriculum={target: 2}", "data.curriculum.target=2.0: must be at most 1"),
    ("data.curriculum={max_interval: 1}", "data.curriculum.max_interval=1: must be at least 2"),
]


@pytest.mark.parametrize(("argument", "line"), SETTINGS)
def test_wrong_settings_of_the_draw(argument: str, line: str) -> None:
    assert fault(argument).startswith(line)


def test_one_place_names_the_reward_functions() -> None:
    source = list_of("{files: 'generator:addition', reward: math}")
    line = fault(source, "reward.functions={addition: gsm8k}", base=BASE)
    assert line.startswith("reward.functions={addition: gsm8k}: the source addition")


def test_an_overlong_penalty_that_could_not_reach_a_source() -> None:
    source = list_of("{files: 'generator:addition', max_response_length: 64}")
    line = fault(source, "reward.overlong_buffer=16", base=BASE)
    assert "reward.overlong_buffer counts from data.max_response_length=1024" in line
