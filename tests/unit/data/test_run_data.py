"""The data of a run: training and held-out sets together."""

from __future__ import annotations

from pathlib import Path

import pytest

from one_step_off.config.errors import ConfigError
from one_step_off.data.run_data import load_run_data
from tests.unit.data.data_helpers import (
    GOOD,
    PLAIN,
    run_config,
    write_jsonl,
)


def test_build(tmp_path: Path) -> None:
    train = write_jsonl(
        tmp_path / "train.jsonl", [{**GOOD, "question": f"q{i}"} for i in range(10)] + ["broken"]
    )
    val = write_jsonl(tmp_path / "val.jsonl", [{**GOOD, "question": f"q{i}"} for i in (3, 77, 78)])
    data = load_run_data(run_config(train, val, train_batch_size=4, val_size=2), PLAIN)
    assert data.stream.total_steps == 3
    assert len(data.stream) == 10
    assert [p.id for p in data.val] == [(-1, 0), (-1, 1)]
    lines = "\n".join(data.lines())
    assert "training data: 11 rows, 10 used, 1 malformed skipped" in lines
    assert "1 of the 2 held-out prompts are also in the training data" in lines


@pytest.mark.parametrize(("val", "val_size"), [("", -1), ("generator:word_problems", 0)])
def test_build_without_evaluation(val: str, val_size: int) -> None:
    cfg = run_config(
        "generator:word_problems", val, val_size=val_size, generator_size=8, train_batch_size=4
    )
    data = load_run_data(cfg, PLAIN)
    assert data.val is None
    assert data.stream.total_steps == 2


def test_build_with_the_generator() -> None:
    cfg = run_config("generator:word_problems", "generator:word_problems", generator_size=600)
    data = load_run_data(cfg, PLAIN)
    cfg.trainer.seed = 9
    again = load_run_data(cfg, PLAIN)
    assert [p.text for p in data.val] == [p.text for p in again.val]
    assert [p.text for p in data.stream.next_batch()] != [p.text for p in again.stream.next_batch()]
    assert not any("warning" in line for line in data.lines())


def test_build_without_data() -> None:
    with pytest.raises(ConfigError, match="'' names no data"):
        load_run_data(run_config(""), PLAIN)
