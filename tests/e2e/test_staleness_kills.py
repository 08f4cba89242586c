"""Processes die while samples of several versions are in flight: no prompt is lost or repeated, and
no token is older than allowed."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.chaos.command import (
    Command,
    complaints,
    expected_prompts,
    left_behind,
    processes_titled,
    rows,
    settings,
    wait_for_step,
)

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(600)]

STEPS = 24
BATCH = 8
OLDEST = 3
END_S = 240.0


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[[str], Command]]:
    """start(in_flight): a run of this way of syncing that has ended some steps."""
    commands: list[Command] = []

    def start_run(in_flight: str) -> Command:
        more = [
            f"pipeline.staleness={OLDEST}",
            f"weight_sync.in_flight={in_flight}",
            "data.max_response_length=64",
        ]
        keys = settings(tmp_path / "run", STEPS, more=more)
        command = Command(tmp_path, keys, inject=False)
        commands.append(command)
        command.start()
        wait_for_step(command, 4)
        return command

    yield start_run
    for command in commands:
        command.clear()


def assert_every_prompt_once(command: Command) -> None:
    """And none that is too old. Prompts may be trained on in another order than they were drawn."""
    expected = expected_prompts(command.arguments, STEPS)
    drawn = {tuple(prompt) for prompts in expected for prompt in prompts}
    trained = [
        tuple(prompt) for row in rows(command.folder, "ledger.jsonl") for prompt in row["prompts"]
    ]
    assert len(trained) == len(set(trained)) == STEPS * BATCH
    assert set(trained) == drawn
    metrics = rows(command.folder, "metrics.jsonl")
    assert [row["step"] for row in metrics] == list(range(STEPS))
    assert max(row["staleness/max"] for row in metrics) <= OLDEST


@pytest.mark.parametrize("in_flight", ["wait", "recompute", "keep"])
def test_replicas_and_trainer_are_killed(start, in_flight):
    command = start(in_flight)
    processes_titled(command, "ray::RolloutReplica")[0].kill()
    wait_for_step(command, 9)
    processes_titled(command, "ray::ActorWorker")[0].kill()
    wait_for_step(command, 14)
    processes_titled(command, "ray::RolloutReplica")[0].kill()
    assert command.process.wait(END_S) == 0, command.log.read_text()[-3000:]
    assert_every_prompt_once(command)
    if in_flight == "wait":  # whole batches, in the order of the data
        expected = expected_prompts(command.arguments, STEPS)
        assert complaints(command, STEPS, expected, OLDEST) == []
    metrics = rows(command.folder, "metrics.jsonl")
    assert metrics[-1]["restarts/replicas"] >= 1
    assert metrics[-1]["restarts/trainer"] >= 1
    assert left_behind(command) == []


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_the_driver_ends_and_the_same_command_resumes(start, number):
    """By SIGTERM it saves what is in flight; after a kill it begins with its last checkpoint."""
    command = start("recompute")
    code = command.end(number, 120)
    assert code is not None
    _, left = command.wait_until_gone()
    assert left == {}
    command.start()
    assert command.process.wait(END_S) == 0, command.log.read_text()[-3000:]
    assert_every_prompt_once(command)
    assert left_behind(command) == []
