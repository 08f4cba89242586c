"""The figures of the distillation benchmark, from rows of runs."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import distillation

ROWS = [{"samples": 10.0}, {"samples": 10.0}, {"samples": 6.0}]
EVALUATED = [{"val/version": v, "val/reward": r} for v, r in ((0, 0.1), (2, 0.6), (3, 0.5))]
CURVE = [(0.0, 0.1), (20.0, 0.6), (26.0, 0.5)]


def test_a_version_has_trained_on_the_samples_of_the_steps_before() -> None:
    assert distillation.curve_of(ROWS, EVALUATED) == CURVE


def test_the_first_evaluation_that_reaches_a_score_counts() -> None:
    assert distillation.samples_until(CURVE, 0.5) == 20.0
    assert distillation.samples_until(CURVE, 0.1) == 0.0
    assert distillation.samples_until(CURVE, 0.7) is None


def test_the_table_and_the_picture(tmp_path: Path) -> None:
    slow = [(0.0, 0.0), (20.0, 0.2), (26.0, 0.4)]
    curves = {"grpo": {0: slow, 1: slow}, "distill": {0: CURVE, 1: CURVE}}
    text = distillation.table(curves, 0.8)
    assert "held-out reward: 0.800" in text
    grpo, distill = text.splitlines()[-2:]
    assert grpo.startswith("| grpo | 0.000 | 0.400 (0.400, 0.400) | 26; 26 | not reached;")
    assert distill.startswith("| distill | 0.100 | 0.500 (0.500, 0.500) | 20; 20 | not reached;")
    distillation.plot(curves, 0.8, tmp_path / "distillation.png")
    assert (tmp_path / "distillation.png").stat().st_size > 1000


@pytest.mark.parametrize(
    "argv",
    [["--seeds", "1", "1"], ["--arms", "grpo", "grpo"], ["--test-freq", "0"], ["--arms", "sft"]],
)
def test_bad_arguments_end_with_one_line(argv: list[str], capsys) -> None:
    with pytest.raises(SystemExit) as ended:
        distillation.arguments(["--out", "x", *argv])
    assert ended.value.code == 2
    assert len(capsys.readouterr().err.strip().splitlines()) == 1
