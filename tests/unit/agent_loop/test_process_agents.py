"""The program that runs agents as processes, event by event."""

from __future__ import annotations

import io
import json
import os
import socket
from pathlib import Path

from agent_loop.host.output import Log
from agent_loop.host.process_agents import Agent, ProcessAgents

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
