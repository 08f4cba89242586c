"""The generated problems: correct, deterministic, and never shared between the splits."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from one_step_off.data.word_problems import (
    NAMES,
    OBJECTS,
    TEMPLATES,
    QuestionRow,
    default_test_size,
    make,
    make_addition,
    problems_of_split,
)

CAPACITY = len(problems_of_split("test")) * len(TEMPLATES["+"]) * len(NAMES) * len(OBJECTS)


def _triple(row: QuestionRow) -> tuple[str, int, int]:
    a, op, b, result, final = re.fullmatch(
        r"(\d+) ([+-]) (\d+) = (\d+)\n#### (\d+)", row["answer"]
    ).groups()
    assert int(result) == int(final) == (int(a) + int(b) if op == "+" else int(a) - int(b))
    return op, int(a), int(b)


@pytest.mark.parametrize("split", ["train", "test"])
def test_answers_are_right_and_belong_to_the_split(split: str) -> None:
    space = set(problems_of_split(split))
    for row in make(split, 2000, seed=1):
        triple = _triple(row)
        assert triple in space
        assert re.findall(r"\d+", row["question"]) == [str(n) for n in triple[1:]]


def test_splits_are_disjoint_and_whole() -> None:
    train = set(problems_of_split("train"))
    test = set(problems_of_split("test"))
    assert not train & test
    assert len(train | test) == 2 * 9 * 45  # 9 tens, 45 pairs of last digits, two operations
    assert 0.1 < len(test) / len(train | test) < 0.2
    assert all(a // 10 == (a + b if op == "+" else a - b) // 10 for op, a, b in train | test)


def test_deterministic_by_seed_and_a_prefix_when_shorter() -> None:
    rows = make("train", 3000, seed=5)
    assert rows == make("train", 3000, seed=5)
    assert rows[:700] == make("train", 700, seed=5)
    assert rows != make("train", 3000, seed=6)


def test_the_same_in_another_process() -> None:
    code = "from one_step_off.data.word_problems import make; print(make('test', 20, 3))"
    root = Path(__file__).parents[3]
    run = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=root
    )
    assert run.stdout.strip() == repr(make("test", 20, 3))


def test_every_triple_once_before_any_twice() -> None:
    count = len(problems_of_split("train"))
    rows = [_triple(r) for r in make("train", 2 * count, seed=0)]
    assert set(rows[:count]) == set(rows[count:]) == set(problems_of_split("train"))


def test_test_split_has_no_duplicates_and_refuses_more() -> None:
    rows = make("test", CAPACITY, seed=0)
    assert len({r["question"] for r in rows}) == CAPACITY
    with pytest.raises(ValueError, match=f"holds {CAPACITY} problems; ask for fewer"):
        make("test", CAPACITY + 1, seed=0)


def test_train_repeats_only_beyond_capacity() -> None:
    assert len({r["question"] for r in make("train", 20_000, seed=2)}) == 20_000


def test_templates_are_balanced() -> None:
    assert len(TEMPLATES["+"]) == len(TEMPLATES["-"])
    assert " 1 apples" not in " ".join(r["question"] for r in make("train", 20_000, seed=0))


def test_zero_rows() -> None:
    assert make("test", 0, 0) == []


def test_sums_of_two_splits_share_nothing_even_turned_round() -> None:
    train = make_addition("train", 4096, 0)
    test = make_addition("test", 400, 1)
    assert train == make_addition("train", 4096, 0) != make_addition("train", 4096, 1)

    def numbers(row: dict[str, Any]) -> tuple[int, int]:
        a, b = map(int, re.findall(r"\d+", row["prompt"][-1]["content"]))
        return a, b

    def pairs(rows: list[dict[str, Any]]) -> set[frozenset[int]]:
        return {frozenset(numbers(row)) for row in rows}

    assert not pairs(train) & pairs(test)
    for row in test:
        a, b = numbers(row)
        assert 10 <= a < 100
        assert 10 <= b < 100
        assert row["reward_model"]["ground_truth"] == str(a + b)


def test_default_test_size_is_one_per_triple() -> None:
    assert default_test_size("word_problems") == len(problems_of_split("test"))
