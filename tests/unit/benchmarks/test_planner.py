"""The benchmark of the planner: tables of published runs and of a validation."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from benchmarks.planner import validation
from benchmarks.planner.published import published
from one_step_off.tools.planner.work import Work

ROOT = Path(__file__).parents[3]


def test_published_tables() -> None:
    text = published()
    assert "| FSDP2, one step off on 4 + 12 | 520 | 458 (-12%) | 45 | 13 |" in text
    slower = "does not fit: slower than synchronous"
    assert f"| 30B-A3B, 16 GB200 | 221 | 301 | 0.73 | {slower} |" in text
    page = (ROOT / "docs/measured/planner.md").read_text()
    for line in text.splitlines():
        assert line in page, f"docs/measured/planner.md lacks {line}"


def test_the_table_of_a_validation() -> None:
    measured = dict.fromkeys(validation.FIGURES, 0.5)
    predicted = measured | {validation.STEP: 0.52}
    rounds = [
        {"measured": {"one step off": measured}, "predicted": {"one step off": predicted}},
    ]
    row = "| one step off | 0.500 | 0.520 | +4.0% | 50%, 50% | 50%, 50% |"
    assert row in validation.table(rounds)


def test_an_arm_is_predicted_by_its_own_keys() -> None:
    config = str(ROOT / "config/gsm8k_tiny_cpu.yaml")
    work = Work(
        prompts=16,
        lengths=np.full((1, 16), 20),
        prompt_tokens=0.0,
        decode_s=0.0,
        sequence_s=1e-3,
        train_fixed_s=0.0,
        train_token_s=1e-4,
        sync_s=1.0,
    )
    steps = {
        arm: validation.predict(work, config, keys)[validation.STEP]
        for arm, keys in validation.arms_of(16).items()
    }
    generate = 20 * 256e-3
    train = 256 * 20 * 1e-4
    sync = 1.0
    assert steps["synchronous"] == pytest.approx(generate + train + sync)
    assert steps["one step off"] == pytest.approx(generate + sync)
    assert steps["one step off, half of the batch"] == pytest.approx(generate / 2 + sync)
    assert steps["one step off, responses of 10 tokens at most"] == pytest.approx(
        generate / 2 + sync
    )
    assert steps["colocated, two of each"] == pytest.approx((generate + train) / 2 + sync)
