"""Trainers that die in each phase of a step: the engines stay, and the run has the same bits as one
that nothing happened to."""

from __future__ import annotations

import json
from pathlib import Path
from typing import ClassVar

import pytest

from tests.chaos import __main__ as chaos_runs
from tests.chaos.command import Command, rows
from tests.chaos.kills import TITLES, Chaos, Kill
from tests.chaos.watch import marked

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(900)]


def engine_processes(command: Command) -> set[int]:
    """The process ids of the replicas and their engines."""
    titles = (TITLES["replica"], TITLES["engine"])
    processes = marked(command.mark)
    return {pid for pid, line in processes.items() if line.startswith(titles)}


class ChosenKills(Chaos):
    """Kills at `points`, one after another, and notes whether the engines' processes stay."""

    points: ClassVar[list[tuple[str, str]]] = []
    engines_stayed: ClassVar[list[bool]] = []

    def choose(self, kinds: list[str], points: list[str], stop: bool) -> Kill:
        kind, point = self.points[len(self.kills) % len(self.points)]
        return Kill(len(self.kills), kind, point)

    def once(self, kill: Kill) -> None:
        engines = engine_processes(self.command)
        super().once(kill)
        self.engines_stayed.append(engines == engine_processes(self.command))


def run_with(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, points: list[tuple[str, str]], *options: str
) -> None:
    """Kill trainers of a run at these points (kind, point). Prompts, rows and bits must be those of
    an undisturbed run, and no process may be left."""
    monkeypatch.setattr(chaos_runs, "Chaos", ChosenKills)
    monkeypatch.setattr(ChosenKills, "points", points)
    monkeypatch.setattr(ChosenKills, "engines_stayed", [])
    out = tmp_path / "c"
    arguments = [f"--kills={len(points)}", "--compare", f"--out={out}", "--reach=40", *options]
    result = chaos_runs.run_with_kills(chaos_runs.parse_arguments(arguments))
    assert result["wrong"] == [], json.dumps(result, indent=1)
    assert result["hit"] == len(points), json.dumps(result, indent=1)
    assert ChosenKills.engines_stayed == [True] * len(ChosenKills.engines_stayed)
    recoveries = [row for row in rows(out / "run", "metrics.jsonl") if "restarts/recovery_s" in row]
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
