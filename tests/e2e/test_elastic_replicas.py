"""Replicas join and leave a real run, by the command: with real Ray, trainers, gloo and the
reference engine. `python -m tests.chaos --scale` goes further."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.chaos import command as real
from tests.chaos.kills import TITLES

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(900)]

STEPS = 100_000
"""More than it makes: it is stopped."""


def scale(run: real.Command, change: str) -> subprocess.Popen:
    """The command that changes the number of replicas."""
    return subprocess.Popen(
        [sys.executable, "-m", "one_step_off.scale", str(run.folder), change, "--timeout=300"],
        cwd=real.ROOT,
        stdout=subprocess.PIPE,
        text=True,
    )


def test_a_replica_joins_though_the_trainer_dies_meanwhile_and_one_leaves(tmp_path: Path):
    arguments = real.settings(tmp_path / "run", STEPS, more=["rollout.engine=transformers"])
    run = real.Command(tmp_path, arguments, inject=False)
    try:
        run.start()
        real.wait_for_step(run, 2)
        join = scale(run, "rollout=+1")
        assert join.stdout.readline() == "rollout=+1: rollout replicas: 2 -> 3\n"
        step = run.steps()
        (trainer,) = real.processes_titled(run, TITLES["trainer"])
        trainer.kill()
        assert join.wait(320) == 0, join.stdout.read()
        assert len(real.processes_titled(run, TITLES["replica"])) == 3
        real.wait_for_step(run, step + 4)
        real.wait_for_step(run, run.steps() + 3)
        leave = scale(run, "rollout=2")
        assert leave.wait(320) == 0, leave.stdout.read()
        assert len(real.processes_titled(run, TITLES["replica"])) == 2
        real.wait_for_step(run, run.steps() + 3)
        assert run.end(signal.SIGTERM) == 130
        steps = run.steps() + 1
        expected = real.expected_prompts(run.arguments, steps)
        assert real.complaints(run, steps, expected) == []
        assert real.left_behind(run) == []
        metrics = real.rows(run.folder, "metrics.jsonl")
        numbers = [row["rollout/replicas"] for row in metrics]
        assert max(numbers) == 3
        assert numbers[-1] == 2
        assert metrics[-1]["restarts/trainer"] == 1
        assert metrics[-1]["restarts/engines_kept"] == 1
        synced = [row["sync/ranks"] for row in metrics if row["rollout/replicas"] == 3]
        assert any("rollout 2" in name for name in synced[-1])
    finally:
        run.clear()
