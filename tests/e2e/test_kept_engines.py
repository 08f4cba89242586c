"""Trainers that die in each phase of a step: the engines stay, and the run has the same bits as one
that nothing happened to."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.chaos.command import rows
from tests.e2e.chosen_kills import ChosenKills, Points, run_with_kills

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(900)]


def run_with(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, points: Points, *options: str
) -> None:
    """Kill trainers of a run at these points. Its bits must be those of an undisturbed run."""
    run_with_kills(tmp_path, monkeypatch, points, "--compare", *options)
    assert ChosenKills.engines_stayed == [True] * len(points)
    metrics = rows(tmp_path / "c/run", "metrics.jsonl")
    recoveries = [row for row in metrics if "restarts/recovery_s" in row]
    assert recoveries
    assert recoveries[-1]["restarts/engines_kept"] == len(points)


def test_ranks_of_actor_and_critic_die_in_each_phase_and_the_engines_stay(tmp_path, monkeypatch):
    points = [
        ("trainer", "idle"),  # while the replicas generate
        ("trainer", "between buckets"),
        ("critic", "optimizer"),
        ("trainer", "checkpoint: being written"),
    ]
    run_with(tmp_path, monkeypatch, points, "--ranks=2", "--critic")


def test_the_only_rank_of_an_actor_dies_in_each_phase_and_the_engines_stay(tmp_path, monkeypatch):
    names = ["forward", "optimizer", "before the first bucket", "in the canary", "checkpoint"]
    run_with(tmp_path, monkeypatch, [("trainer", name) for name in names])
