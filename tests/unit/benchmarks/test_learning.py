"""The benchmark of learning: curves of seeds, and synchronous runs against runs one step off."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from benchmarks.learning import __main__ as learning
from benchmarks.learning import comparison, curves


def run_with(*reward: float, end: float = 0.9) -> dict[str, Any]:
    """A run with these rewards, and `end` as its last held-out reward."""
    evaluations = [
        {"val/version": 0.0, "val/reward": 0.0},
        {"val/version": float(len(reward)), "val/reward": end},
    ]
    return curves.summarize([{"reward/mean": value} for value in reward], evaluations)


def test_curves_of_seeds(tmp_path: Path) -> None:
    run = run_with(0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7)
    assert curves.table({3: run}).splitlines()[-1] == "| 3 | 0.300 | 0.500 | 0.000 | 0.900 |"
    curves.plot({3: run}, tmp_path / "x.png")
    assert (tmp_path / "x.png").stat().st_size > 1000


def test_tool_calls_have_columns_of_their_own() -> None:
    rows = [{"reward/mean": 0.5, curves.TOOL_CALLS: 0.25}] * 6
    run = curves.summarize(rows, [])
    heading, _, cells = curves.table({0: run}).splitlines()
    assert "tool calls, first five steps | tool calls, last five steps" in heading
    assert cells == "| 0 | 0.500 | 0.500 | 0.250 | 0.250 | - | - |"


def test_synchronous_runs_against_one_step_off(tmp_path: Path) -> None:
    runs = {
        "sync": {0: run_with(0.1, 0.5), 1: run_with(0.2, 0.6), 2: run_with(0.3, 0.7)},
        "async": {0: run_with(0.1, 0.5), 1: run_with(0.1, 0.6), 2: run_with(0.4, 0.7)},
    }
    compared = comparison.compare(runs)
    found = compared["reward, all samples"]
    assert found["differences"] == pytest.approx([0.0, -0.05, 0.05])
    assert found["mean"] == pytest.approx(0.0)
    # Student's t with two degrees of freedom times the standard error.
    half_width = 4.303 * 0.05 / math.sqrt(3)
    assert found["interval"] == pytest.approx([-half_width, half_width])
    # The second step of async samples with v0, as the first step of sync does.
    same_versions = compared["reward, equal versions"]["differences"]
    assert same_versions == pytest.approx([0.5 - 0.1, 0.6 - 0.2, 0.7 - 0.3])
    verdict = comparison.verdict("reward", found)
    assert f"no difference is shown; a loss of more than {half_width:.3f} is excluded" in verdict
    text = comparison.table(runs, 512)
    assert "| reward, all samples | async | 0.400 | 0.300 to 0.550 |" in text
    assert "on 512 samples" in text
    comparison.plot(runs, 256, tmp_path / "x.png")
    assert (tmp_path / "x.png").stat().st_size > 5000


@pytest.mark.parametrize(
    ("shift", "expected"), [(-0.2, "async is worse"), (0.2, "async is better")]
)
def test_the_verdict_follows_the_data(shift: float, expected: str) -> None:
    name = "reward, all samples"
    sync = {seed: run_with(0.4 + seed / 100) for seed in range(3)}
    shifted = {seed: run_with(0.4 + shift + seed / 90) for seed in range(3)}
    found = comparison.compare({"sync": sync, "async": shifted})[name]
    assert expected in comparison.verdict(name, found)
    equal = comparison.compare({"sync": sync, "async": sync})[name]
    assert comparison.verdict("reward", equal) == "reward: the same with each of 3 seeds."
    one_seed = comparison.compare({"sync": {0: sync[0]}, "async": {0: shifted[0]}})[name]
    assert one_seed["interval"] is None
    assert "tells nothing of chance" in comparison.verdict("reward", one_seed)


def test_students_t() -> None:
    """Against tables, beyond the module's own."""
    assert comparison.student_t_95(10) == pytest.approx(2.228, abs=3e-3)
    assert comparison.student_t_95(30) == pytest.approx(2.042, abs=1e-3)


@pytest.mark.parametrize("flags", [["--seeds", "1", "1"], ["rollout.nn=1"]])
def test_bad_flags_are_one_line(
    flags: list[str], capsys: pytest.CaptureFixture, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    with pytest.raises(SystemExit) as ended:
        learning.main(["--out", str(out), *flags])
    assert ended.value.code == 2
    assert capsys.readouterr().err.count("\n") == 1
    assert not out.exists()
