"""Runs in which chosen processes are killed at chosen points, one after another."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, ClassVar

import pytest

from tests.chaos import __main__ as chaos_runs
from tests.chaos.command import Command
from tests.chaos.kills import TITLES, Chaos, Kill
from tests.chaos.watch import marked

Points = list[tuple[str, str]]
"""Kind of process and point of each kill."""


def engine_processes(command: Command) -> set[int]:
    """The process ids of the replicas and their engines."""
    titles = (TITLES["replica"], TITLES["engine"])
    processes = marked(command.mark)
    return {pid for pid, line in processes.items() if line.startswith(titles)}


class ChosenKills(Chaos):
    """Kills at `points`, one after another, and notes whether the engines' processes stay."""

    points: ClassVar[Points] = []
    engines_stayed: ClassVar[list[bool]] = []

    def choose(self, kinds: list[str], points: list[str], stop: bool) -> Kill:
        kind, point = self.points[len(self.kills) % len(self.points)]
        return Kill(len(self.kills), kind, point)

    def once(self, kill: Kill) -> None:
        engines = engine_processes(self.command)
        super().once(kill)
        self.engines_stayed.append(engines == engine_processes(self.command))


def run_with_kills(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, points: Points, *options: str
) -> dict[str, Any]:
    """Kill processes of a run at these points. Rows and prompts must be those of an undisturbed
    run, and no process may be left. Returns what `tests.chaos` does."""
    monkeypatch.setattr(chaos_runs, "Chaos", ChosenKills)
    monkeypatch.setattr(ChosenKills, "points", points)
    monkeypatch.setattr(ChosenKills, "engines_stayed", [])
    out = tmp_path / "c"
    arguments = [f"--kills={len(points)}", f"--out={out}", "--reach=40", *options]
    result = chaos_runs.run_with_kills(chaos_runs.parse_arguments(arguments))
    assert result["wrong"] == [], json.dumps(result, indent=1)
    assert result["hit"] == len(points), json.dumps(result, indent=1)
    return result
