"""The data of a run: training and held-out sets together."""

from __future__ import annotations

from pathlib import Path

import pytest

from one_step_off.config.errors import ConfigError
from one_step_off.data.run_data import load_run_data
from tests.unit.data.data_helpers import (
    GOOD,
    PLAIN,
    chat_row,
    run_config,
    write_jsonl,
)

DIGEST = "fb21cfb3c2e26f0c"  # of 30 word problems, seed 0, in the order of epoch 1


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


def test_build_with_sources(tmp_path: Path) -> None:
    """Rows are numbered over all sources, bad ones included; a row's own loop wins; a held-out set
    with the name of a source is as that source."""
    questions = [{**GOOD, "question": f"q{i}"} for i in range(3)]
    sums = write_jsonl(tmp_path / "sums.jsonl", [*questions, "broken"])
    rows = [{**chat_row(), "agent_loop": "tool"}, chat_row()]
    chat = write_jsonl(tmp_path / "chat.jsonl", rows)
    cfg = run_config(
        [
            {"files": sums, "weight": 3.0},
            {"files": chat, "name": "talk", "agent_loop": "retry_with_feedback"},
        ],
        chat,
        val_sets={"talk": chat, "other": sums},
        train_batch_size=4,
        chat_template="never",
    )
    data = load_run_data(cfg, PLAIN)
    assert [(p.id, p.source, p.agent_loop) for p in data.stream.prompts] == [
        ((0, 0), "sums", ""),
        ((0, 1), "sums", ""),
        ((0, 2), "sums", ""),
        ((0, 4), "talk", "tool"),
        ((0, 5), "talk", "retry_with_feedback"),
    ]
    assert data.stream.total_steps == 2, "each prompt of talk, with three of sums for each"
    assert [len(data.stream.next_batch()) for _ in range(2)] == [4, 4]
    assert data.find((3, 5)).source == "talk"
    held_out = [(p.id[0], p.source, p.agent_loop) for p in data.val]
    assert held_out == [
        (-1, "", "tool"),
        (-1, "", ""),
        (-2, "talk", "tool"),
        (-2, "talk", "retry_with_feedback"),
        *[(-3, "", "")] * 3,
    ]
    lines = "\n".join(data.lines())
    assert "training data sums: 4 rows, 3 used, 1 malformed skipped" in lines
    assert "training data talk: 2 rows, 2 used" in lines


def test_a_single_source_has_its_order_and_digest_of_before() -> None:
    """With other rules of the draw too. A changed digest would refuse earlier checkpoints."""
    cfg = run_config("generator:word_problems", generator_size=30, train_batch_size=4)
    plain = load_run_data(cfg, PLAIN).stream
    cfg.data.difficulty_filter = {"visits": 2}
    filtered = load_run_data(cfg, PLAIN).stream
    filtered.load_state_dict(plain.state_dict())
    for _ in range(9):
        expected = [prompt.id for prompt in plain.next_batch()]
        assert [prompt.id for prompt in filtered.next_batch()] == expected
    state = plain.state_dict()
    assert (state["epoch"], state["offset"]) == (1, 6)
    assert state["digest"][:16] == DIGEST


def test_a_loop_of_a_source_that_cannot_be_loaded() -> None:
    def tools_of_loop(loop: str) -> None:
        raise ConfigError(f"agent.loop={loop}: has no tools; set agent.tools")

    source = {"files": "generator:addition", "agent_loop": "tool"}
    with pytest.raises(ConfigError, match=r"^data.train_files, addition: agent_loop=tool: agent.l"):
        load_run_data(run_config([source]), PLAIN, tools_of_loop)


def test_build_without_data() -> None:
    with pytest.raises(ConfigError, match="'' names no data"):
        load_run_data(run_config(""), PLAIN)
