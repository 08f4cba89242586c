"""A newcomer's agent in real runs: where no room is left for its second answer, and where it
fails."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.e2e.commands import PROGRAM, TINY_CONFIG
from tests.e2e.run_folder import read_rows

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]
AGENT = f"{sys.executable} {Path(__file__).with_name('newcomer_agent.py')}"
STEPS = 2
PROMPTS = 8


def train(folder: Path, *changes: str) -> subprocess.CompletedProcess[str]:
    settings = [
        "agent.loop=external",
        "agent.max_concurrency=8",
        f"data.train_batch_size={PROMPTS}",
        f"actor.ppo_mini_batch_size={PROMPTS}",
        "data.val_files=",
        "data.shuffle=false",
        "rollout.n=4",
        f"trainer.total_steps={STEPS}",
        f"trainer.output_dir={folder}",
    ]
    command = [*PROGRAM, TINY_CONFIG, *settings, *changes]
    return subprocess.run(command, capture_output=True, text=True, timeout=500)


@pytest.mark.slow
def test_an_episode_without_room_for_a_second_answer_ends_by_length(tmp_path):
    """The agent's second request was refused before, it exited with 1, and its episode was scored
    by the function."""
    folder = tmp_path / "run"
    run = train(folder, f"agent.command={AGENT}", "data.max_response_length=32")
    assert run.returncode == 0, run.stdout + run.stderr
    for row in read_rows(folder, "metrics.jsonl"):
        assert row["agent/failed_share"] == row["agent/errors"] == 0
        assert row["agent/own_reward/mean"] == 1
        assert row["response_length/cut_share"] > 0.5
    assert "failed" not in run.stdout
    logs = [path.read_text() for path in (folder / "agents").glob("*.log")]
    assert sum("finished by length" in log for log in logs) > len(logs) / 2


@pytest.mark.slow
@pytest.mark.ci
def test_an_agent_that_fails_ends_the_run_with_its_reason(tmp_path):
    run = train(tmp_path / "run", f"agent.command={AGENT} fails")
    assert run.returncode == 1, run.stdout + run.stderr
    words = "exit code 1 (agents/"
    assert words in run.stderr, run.stdout + run.stderr
    assert "its last line: the second answer is no answer" in run.stderr


@pytest.mark.slow
@pytest.mark.ci
def test_the_groups_of_failed_agents_are_dropped_and_seen(tmp_path):
    folder = tmp_path / "run"
    run = train(folder, f"agent.command={AGENT} fails", "reward.on_error=drop")
    assert run.returncode == 0, run.stdout + run.stderr
    for row in read_rows(folder, "metrics.jsonl"):
        assert row["agent/failed_share"] == 0.75
        assert row["agent/errors"] == 24
        assert row["samples/dropped_groups"] == 6
        assert row["samples"] == 8
    consumed = []
    for row in read_rows(folder, "ledger.jsonl"):
        consumed += row["prompts"]
        assert all(number % 4 for _, number in row["dropped"])
    assert sorted(consumed) == [[0, number] for number in range(STEPS * PROMPTS)]
    assert run.stdout.count("agents failed 75%") == STEPS
    warning = "24 of 32 agents failed (24 errors, see reward.on_error; 0 at a limit of the run)"
    assert warning in run.stdout
    assert "the second answer is no answer" in run.stdout
    assert "75.0% of the episodes failed" in run.stdout
