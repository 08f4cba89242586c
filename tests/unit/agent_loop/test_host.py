"""The program that runs external agents: its processes and its tasks. Real agents are in
test_external_failures.py.
"""

import asyncio
import io
import json
import os
import socket
import subprocess
from pathlib import Path
from typing import Any

from agent_loop.host.output import Log
from agent_loop.host.process_agents import Agent, ProcessAgents, is_running, kill_all
from agent_loop.host.serving import TaskAgents

ENDED_PID = 2**22 + 1  # above the largest pid of Linux


def test_an_agents_end_and_its_output_may_be_events_of_one_poll(tmp_path: Path) -> None:
    """The end closes the output, and its number may at once be another agent's: what the poll still
    says of it must not be read."""
    control, replica = socket.socketpair()
    agents = ProcessAgents(control, (64, 64), ["true"])
    output, writer = os.pipe()
    os.set_blocking(output, False)
    os.write(writer, b"done")
    os.close(writer)
    agent = Agent("1", "key", ENDED_PID, output, Log(str(tmp_path / "log")), io.BytesIO())
    agents.selector.register(output, 1, lambda: agents._read_output(agent))
    [(event, _)] = agents.selector.select(0)

    agents._report_end(agent, 0)
    reused, other_writer = os.pipe()
    assert reused == output
    os.write(other_writer, b"of another agent")
    assert event.data() is False

    assert (tmp_path / "log").read_text() == "done"
    assert os.read(reused, 100) == b"of another agent"
    assert json.loads(replica.recv(1000)) == {"ended": "1", "exit": 0, "log": "done"}


def test_a_process_that_is_missed_once_is_killed():
    """It gets another parent in the moment in which it is looked for."""
    process = subprocess.Popen(["sleep", "60"])
    answers = iter([[], [process.pid], [process.pid]])
    try:
        kill_all(lambda: next(answers, []))
        assert process.wait(5) == -9
        assert not is_running(process.pid)
    finally:
        process.kill()
        process.wait()


async def returns_one(row: dict, base_url: str, api_key: str) -> float:
    return 1.0


def start_message(name: str, folder: Any) -> dict[str, Any]:
    log = str(folder / name)
    return {"start": name, "row": {}, "base_url": "", "api_key": "", "log": log}


def test_an_agent_whose_end_arrives_with_its_start_is_reported_as_ended(tmp_path):
    async def main() -> list[dict[str, Any]]:
        control, replica = socket.socketpair()
        agents = TaskAgents(control, returns_one)
        messages = [start_message("0", tmp_path), {"end": "0"}, start_message("1", tmp_path)]
        replica.sendall("".join(json.dumps(message) + "\n" for message in messages).encode())
        serving = asyncio.create_task(agents.serve())
        reader, writer = await asyncio.open_connection(sock=replica)
        async with asyncio.timeout(10):
            received = [json.loads(await reader.readline()) for _ in range(3)]
        assert agents.tasks == {}
        writer.close()
        await serving
        return received[1:]

    canceled, finished = asyncio.run(main())
    assert (canceled["ended"], finished["ended"]) == ("0", "1")
    assert canceled["error"].startswith("CancelledError")
    assert finished["value"] == 1.0
