"""Trainers that die in each phase of a step: the engines stay, and the run has the same bits as one
that nothing happened to."""

from __future__ import annotations

import time
from pathlib import Path

import psutil
import pytest

from tests.chaos.command import (
    Command,
    finished,
    processes_titled,
    rows,
    settings,
    wait_for_step,
)
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


def trainers_of(command: Command, count: int) -> list[psutil.Process]:
    """The actor's ranks, spares too, oldest first; waits until there are so many."""
    wait_for_step(command, command.steps() + 1)
    deadline = time.monotonic() + 60
    while len(found := processes_titled(command, "ray::ActorWorker")) != count:
        assert time.monotonic() < deadline, found
        time.sleep(0.1)
    return found


def test_a_warm_spare_takes_a_dead_trainers_place(tmp_path: Path):
    """And where the spare itself has died, a new process does. Prompts stay as they are."""
    steps = 150
    more = ["trainer.warm_spares=true", "data.shuffle=false"]
    command = Command(tmp_path, settings(tmp_path / "run", steps, more=more), inject=False)
    try:
        command.start()
        rank, spare = trainers_of(command, 2)
        rank.kill()
        trainer, second_spare = trainers_of(command, 2)
        assert trainer == spare
        second_spare.kill()
        trainer.kill()
        third, _ = trainers_of(command, 2)
        assert third not in (rank, spare, second_spare)
        metrics = finished(command, steps)
    finally:
        command.clear()
    assert metrics[-1]["restarts/trainer"] == 2
