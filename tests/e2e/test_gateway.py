"""Agents outside of the replicas, through the gateway of a real run, while its processes are
killed."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import stat
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import aiohttp
import psutil
import pytest

from tests.chaos.command import Command, finished, rows, settings, wait_for_step
from tests.e2e.http_agent import HttpAgent, OfferedAgent, converse

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(600)]

AGENTS = "tests.e2e.http_agent"
GATEWAY = "ray::Gateway"
REPLICA = "ray::RolloutReplica"
START_S = 180.0
STEPS_S = 120.0


def run_with_agents(folder: Path, loop: type, steps: int) -> Command:
    """A run whose samples are made by agents over HTTP."""
    more = [f"agent.loop={AGENTS}:{loop.__name__}", "agent.timeout_s=120"]
    return Command(folder, settings(folder / "run", steps, more=more), inject=False)


def wait_for_message(command: Command, message: str) -> None:
    deadline = time.monotonic() + STEPS_S
    while message not in command.log.read_text():
        assert command.process.poll() is None, command.log.read_text()[-3000:]
        assert time.monotonic() < deadline, f"no '{message}': {command.log.read_text()[-3000:]}"
        time.sleep(0.05)


def process_of(command: Command, title: str) -> psutil.Process:
    """The first of the run's processes with that title."""
    children = psutil.Process(command.process.pid).children(recursive=True)
    (found, *_) = [child for child in children if title in " ".join(child.cmdline())]
    return found


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[[type, int], Command]]:
    """start(loop, steps): a run whose first step has ended."""
    commands: list[Command] = []

    def start_run(loop: type, steps: int) -> Command:
        command = run_with_agents(tmp_path, loop, steps)
        commands.append(command)
        command.start()
        wait_for_step(command, 0, START_S)
        command.look()
        return command

    yield start_run
    for command in commands:
        command.clear()


def assert_nothing_lost(command: Command, steps: int) -> None:
    """Every prompt was trained on once, every sample has its turns, and nothing is left."""
    for row in finished(command, steps, STEPS_S):
        assert row["agent/errors"] == 0, command.log.read_text()[-3000:]
        assert row["agent/turns/mean"] == 2.0


def test_agents_go_on_while_gateway_and_replicas_are_killed(start):
    steps = 16
    command = start(HttpAgent, steps)
    log = command.log.read_text()
    file = command.folder / "endpoint.json"
    url = json.loads(file.read_text())["base_url"]
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert f"endpoint: {url} (key per episode; service key in {file})" in log.replace("\n", "")

    killed = process_of(command, GATEWAY)
    killed.kill()
    wait_for_step(command, command.steps() + 3)
    stopped = process_of(command, GATEWAY)
    assert stopped.pid != killed.pid
    os.kill(stopped.pid, signal.SIGSTOP)
    wait_for_step(command, command.steps() + 3)
    assert not stopped.is_running()
    process_of(command, REPLICA).kill()
    command.look()
    assert_nothing_lost(command, steps)
    last = rows(command.folder, "metrics.jsonl")[-1]
    assert last["restarts/endpoint"] == 2
    assert last["restarts/replicas"] == 1
    assert last["restarts/trainer"] == 0
    assert json.loads(file.read_text())["base_url"] == url


async def work(folder: Path, agents: int, ask: asyncio.Event) -> None:
    """Agents elsewhere, which know `endpoint.json` and nothing else. They ask for the next
    episode only while `ask` is set."""
    endpoint = json.loads((folder / "endpoint.json").read_text())
    headers = {"Authorization": f"Bearer {endpoint['service_key']}"}
    url = f"{endpoint['base_url']}/v1/episodes/next?wait=2"

    async def agent() -> None:
        timeout = aiohttp.ClientTimeout(total=60)
        async with aiohttp.ClientSession(timeout=timeout) as client:
            while True:
                await ask.wait()
                try:
                    async with client.get(url, headers=headers) as reply:
                        given = await reply.json() if reply.status == 200 else None
                    if given is not None:
                        await converse(given["base_url"], given["key"], given["row"]["prompt"])
                        end = f"{given['base_url']}/v1/episodes/{given['key']}/end"
                        await (await client.post(end, json={"reward": 0.25})).read()
                except aiohttp.ClientError:
                    await asyncio.sleep(0.2)

    async with asyncio.TaskGroup() as tasks:
        for _ in range(agents):
            tasks.create_task(agent())


def test_agents_elsewhere_ask_for_work_while_the_gateway_is_killed(tmp_path: Path):
    steps = 4
    command = run_with_agents(tmp_path, OfferedAgent, steps)

    async def train() -> None:
        deadline = time.monotonic() + START_S
        while not (command.folder / "endpoint.json").exists() and time.monotonic() < deadline:
            await asyncio.sleep(0.1)
        ask = asyncio.Event()
        ask.set()
        working = asyncio.create_task(work(command.folder, 40, ask))
        try:
            await asyncio.to_thread(wait_for_step, command, 0, START_S)
            process_of(command, GATEWAY).kill()
            ask.clear()  # or the run could end before its watcher has looked
            await asyncio.to_thread(wait_for_message, command, "the endpoint is back")
            ask.set()
            await asyncio.to_thread(command.process.wait, STEPS_S)
        finally:
            working.cancel()
            await asyncio.gather(working, return_exceptions=True)

    try:
        command.start()
        asyncio.run(train())
        assert_nothing_lost(command, steps)
    finally:
        command.clear()
    metrics = rows(command.folder, "metrics.jsonl")
    assert [row["reward/mean"] for row in metrics] == [0.25] * steps
    assert metrics[-1]["restarts/endpoint"] == 1
