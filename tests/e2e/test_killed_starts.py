"""Processes that are killed while the command starts for the first time: the run starts again by
itself. Exceptions in a start end it at once."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.chaos.command import Command, finished, processes_titled, settings

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(900)]

STEPS = 2
START_S = 120.0
POLL_S = 0.02
ENGINE = "VLLM::EngineCore"
REPLICA = "ray::RolloutReplica"
RANK = "ray::ActorWorker"


@pytest.fixture
def command(tmp_path: Path) -> Iterator[Command]:
    """A run of two steps, which is started, and ended after the test."""
    command = Command(tmp_path, settings(tmp_path / "run", STEPS), inject=False)
    try:
        command.start()
        yield command
    finally:
        command.clear()


def next_process(command: Command, title: str, other_than: tuple[int, ...] = ()) -> psutil.Process:
    """The first process of this title that appears, but none of `other_than`."""
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline:
        assert command.process.poll() is None, command.log.read_text()[-3000:]
        for process in processes_titled(command, title):
            if process.pid not in other_than:
                return process
        time.sleep(POLL_S)
    pytest.fail(f"no {title} in {START_S:g} s: {command.log.read_text()[-3000:]}")


def restart_lines(command: Command) -> list[str]:
    """What the user reads about restarts."""
    return [line for line in command.log.read_text().splitlines() if "as attempt" in line]


def test_a_rank_that_is_killed_in_the_first_start_costs_a_start(command: Command) -> None:
    rank = next_process(command, RANK)
    rank.kill()
    metrics = finished(command, STEPS)
    (line,) = restart_lines(command)
    assert "actor 0" in line
    assert f"its process died (pid {rank.pid}); starting again as attempt 1" in line
    assert metrics[-1]["restarts/trainer"] == 1
    assert metrics[0]["restarts/recovery_s"] > 0


def test_an_engine_a_replica_and_a_rank_are_killed_in_three_starts(command: Command) -> None:
    engine = next_process(command, ENGINE)
    engine.kill()
    replica = next_process(command, REPLICA, _pids(command, REPLICA))
    replica.kill()
    rank = next_process(command, RANK, _pids(command, RANK))
    rank.kill()
    metrics = finished(command, STEPS)
    lines = restart_lines(command)
    assert len(lines) == 3
    assert f"its engine's process {engine.pid} died (SIGKILL)" in lines[0]
    assert f"(pid {replica.pid})" in lines[1]
    assert f"(pid {rank.pid})" in lines[2]
    assert metrics[-1]["restarts/trainer"] == 3


def test_sigterm_after_a_killed_start_ends_the_run_at_once(command: Command) -> None:
    next_process(command, RANK).kill()
    while not restart_lines(command):
        assert command.process.poll() is None, command.log.read_text()[-3000:]
        time.sleep(POLL_S)
    next_process(command, RANK)
    assert command.end(signal.SIGTERM) is not None
    _, left = command.wait_until_gone()
    assert not left
    assert len(restart_lines(command)) == 1


def _pids(command: Command, title: str) -> tuple[int, ...]:
    return tuple(process.pid for process in processes_titled(command, title))
