"""Agents outside of the replicas in real runs: as functions, as programs, and elsewhere, while
processes are killed."""

from __future__ import annotations

import contextlib
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.chaos.command import (
    Command,
    complaints,
    expected_prompts,
    finished,
    left_behind,
    rows,
    settings,
    wait_for_step,
)
from tests.chaos.kills import Chaos, Kill
from tests.e2e import external_agent

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(600)]

FUNCTION = f"{external_agent.__name__}:in_task"
PROGRAM = f"{sys.executable} {external_agent.__file__}"
HOST = "agent_loop/host/__main__.py"
REPLICA = "ray::RolloutReplica"
START_S = 180.0
STEPS_S = 180.0
HOSTS_S = 60.0
RECOVERY_S = 240.0
ENDLESS_STEPS = 100_000
INTERRUPTED = 130


def run_of_agents(folder: Path, steps: int, *more: str) -> Command:
    """A run on two replicas whose samples are made by external agents. Not started yet."""
    keys = ["agent.loop=external", "data.max_response_length=64", *more]
    return Command(folder, settings(folder / "run", steps, more=keys))


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Command]]:
    """start(steps, *keys): a run whose first step has ended."""
    commands: list[Command] = []

    def start_run(steps: int, *more: str) -> Command:
        command = run_of_agents(tmp_path, steps, *more)
        commands.append(command)
        command.start()
        wait_for_step(command, 0, START_S)
        command.look()
        return command

    yield start_run
    for command in commands:
        command.clear()


def processes_with(command: Command, words: str) -> list[psutil.Process]:
    """The run's processes whose command line has these words; a program's begins with it."""
    found = []
    for pid, line in command.processes().items():
        with contextlib.suppress(psutil.NoSuchProcess):  # it has just ended
            if line.startswith(words) or (words != PROGRAM and words in line):
                found.append(psutil.Process(pid))
    return found


def assert_agents_made_it_all(metrics: list[dict[str, Any]], command: Command) -> None:
    for row in metrics:
        assert row["agent/errors"] == 0, command.log.read_text()[-3000:]
        assert row["agent/turns/mean"] == 2.0
        assert 0 < row["reward/mean"] < 1
        assert row["actor/grad_norm"] > 0
    assert metrics[0]["ratio/mean"] == pytest.approx(1.0, abs=1e-4)


def test_agents_that_hang_end_at_their_time_limit_and_the_run_goes_on(start):
    """The sync waits for them until then. They have no reward, where the other agents give one."""
    steps = 2
    keys = [f"agent.command={external_agent.__name__}:some_hang", "agent.timeout_s=6"]
    command = start(steps, *keys, "reward.on_error=zero", "data.shuffle=false")
    metrics = finished(command, steps)
    for row in metrics:
        # Of the eight rows of a step two hang; one of them had no turn.
        assert row["agent/errors"] == 8
        assert row["agent/failed_share"] == 0.25
        assert row["agent/own_reward/mean"] == 0.75
        assert row["time/generate_s"] > 5.5
    log = (command.folder / "logs" / "rollout_0.log").read_text()
    log += (command.folder / "logs" / "rollout_1.log").read_text()
    assert "killed at agent.timeout_s=6, before the first turn of the policy" in log
    assert "gave no reward (agent.timeout_s=6 is over; its agent was killed)" in log


def kill_a_host(command: Command) -> None:
    """One of the two; the run goes on."""
    deadline = time.monotonic() + HOSTS_S
    while len(hosts := processes_with(command, HOST)) != 2:
        assert time.monotonic() < deadline, hosts
        time.sleep(0.1)
    hosts[0].kill()
    wait_for_step(command, command.steps() + 2)


def kill_an_engine_between_two_buckets(command: Command) -> None:
    """Its replica comes back, and takes part in a sync."""
    chaos = Chaos(command, seed=1, limit_s=RECOVERY_S, reach_s=HOSTS_S)
    kill = Kill(0, "engine", "between buckets")
    chaos.once(kill)
    assert kill.time, "no engine was between two buckets"
    assert not kill.wrong
    assert command.starts == 1, "the run itself never ended"


def end_in_order(command: Command) -> list[dict[str, Any]]:
    """By SIGTERM. Every prompt was trained on once, and nothing is left. Returns the metrics."""
    assert command.end(signal.SIGTERM, START_S) == INTERRUPTED, command.log.read_text()[-3000:]
    steps = command.steps() + 1
    assert complaints(command, steps, expected_prompts(command.arguments, steps)) == []
    assert left_behind(command) == []
    return rows(command.folder, "metrics.jsonl")


@pytest.mark.ci
@pytest.mark.timeout(900)
def test_hosts_an_engine_and_a_replica_are_killed(start):
    """One after another. Nothing is lost: the episodes of hosts and replicas begin again, and the
    other replica gets the weights that an engine did not."""
    # At a higher rate all answers were alike after twelve steps, and there was no gradient.
    keys = [f"agent.command={FUNCTION}", "agent.timeout_s=60", "actor.lr=1.0e-5"]
    command = start(ENDLESS_STEPS, *keys)
    for _ in range(2):
        kill_a_host(command)
    kill_an_engine_between_two_buckets(command)
    processes_with(command, REPLICA)[0].kill()
    wait_for_step(command, command.steps() + 3)
    metrics = end_in_order(command)
    assert_agents_made_it_all(metrics, command)
    assert sum(row["agent/restarts/mean"] for row in metrics) > 0
    assert metrics[-1]["restarts/replicas"] == 2
    logs = list((command.folder / "agents").iterdir())
    assert "it said '" in logs[0].read_text()


def test_programs_are_killed(start):
    steps = 3
    command = start(steps, f"agent.command={PROGRAM}", "agent.timeout_s=60")
    killed = 0
    while command.process.poll() is None and killed < 10:
        for program in processes_with(command, PROGRAM)[:1]:
            with contextlib.suppress(psutil.NoSuchProcess):
                program.kill()
                killed += 1
        time.sleep(0.5)
    metrics = finished(command, steps)
    assert_agents_made_it_all(metrics, command)
    assert sum(row["agent/restarts/mean"] for row in metrics) > 0


def test_a_fleet_elsewhere_works_for_the_run_while_its_agents_are_killed(tmp_path):
    steps = 3
    command = run_of_agents(tmp_path, steps, "agent.timeout_s=20", "reward.on_error=zero")
    words = [sys.executable, external_agent.__file__, "fleet", str(command.folder)]
    agents = [subprocess.Popen(words) for _ in range(8)]
    try:
        command.start()
        wait_for_step(command, 0, START_S)
        agents[0].kill()
        metrics = finished(command, steps)
        assert sum(row["agent/errors"] for row in metrics) <= 1
        assert all(row["agent/turns/mean"] > 1.9 for row in metrics)
    finally:
        for agent in agents:
            agent.kill()
            agent.wait()
        command.clear()
