"""The replica's side of the program that runs external agents, `agent_loop.host`."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import signal
import socket
import subprocess
import weakref
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agent_loop.host.messages import MAX_MESSAGE_BYTES, encode
from one_step_off.cluster.core_binding import usable_cores
from one_step_off.cluster.remote_calls import observed

PROGRAM = Path(__file__).with_name("host") / "__main__.py"
MAX_START_S = 600.0  # for the imports of large libraries
KILL_S = 2.0  # that a cancellation waits for its agent's end
END_S = 10.0  # for an agent to end after it was asked to


# openai-agents would send what the agents do to OpenAI, and name a model of OpenAI's.
AGENT_VARIABLES = {
    "OMP_NUM_THREADS": "1",
    "OPENAI_AGENTS_DISABLE_TRACING": "1",
    "OPENAI_DEFAULT_MODEL": "policy",
}


class HostFailed(Exception):
    """The program does not start, or cannot use the agent. The message says why."""


class AgentDied(Exception):
    """An agent, or the program that ran it, was killed from outside."""


@dataclass(frozen=True)
class HostPlan:
    """How the program is started.

    Attributes:
        python: its interpreter.
        task: {"program": words}, or {"function": spec, "folders": [...]}.
        variables: of the environment, beside those of this process.
    """

    python: str
    task: dict[str, Any]
    variables: dict[str, str]


@dataclass
class Running:
    """An agent that runs.

    Attributes:
        ended: receives the program's last message about it.
        pid: its process, which leads a group; 0: it has none of its own.
        abandoned: no trajectory waits for it any more.
    """

    ended: asyncio.Future
    pid: int = 0
    abandoned: bool = False


class HostProcess:
    """The program, started once.

    Attributes:
        retired: it receives no more agents, and ends with those that it has.
    """

    def __init__(self, plan: HostPlan) -> None:
        """Raises HostFailed: the interpreter cannot be started."""
        self.running: dict[str, Running] = {}
        self.retired = False
        self.connection, host_end = socket.socketpair()
        # Its replica is bound to some cores, because its engine needs these.
        task = plan.task | {"cores": usable_cores()}
        command = [plan.python, str(PROGRAM), json.dumps(task)]
        environment = {**os.environ, **AGENT_VARIABLES, **plan.variables}
        with host_end:
            try:
                self.process = subprocess.Popen(
                    command, stdin=host_end, env=environment, start_new_session=True
                )
            except OSError as e:
                self.connection.close()
                raise HostFailed(f"{plan.python}: {e.strerror}") from e
        # A copy, because the streams close their own.
        self.close = weakref.finalize(self, _end_process, self.process, self.connection.dup())

    async def begin(self) -> None:
        """Wait until the agent is imported. Raises HostFailed: it cannot be."""
        self.reader, self.writer = await asyncio.open_unix_connection(
            sock=self.connection, limit=MAX_MESSAGE_BYTES
        )
        message: dict[str, Any] = {}
        reason = "the interpreter ended at once; is it Python 3.10 or newer?"
        try:
            line = await asyncio.wait_for(self.reader.readline(), MAX_START_S)
            message = json.loads(line or "{}")
        except TimeoutError:
            reason = f"its import took longer than {MAX_START_S:g} s"
        finally:
            if "ready" not in message:
                self.process.kill()
                self.writer.close()
                self.close()
        if "ready" not in message:
            raise HostFailed(message.get("failed", reason))
        self.reading = asyncio.create_task(self._read())

    @property
    def is_usable(self) -> bool:
        """Whether it takes agents."""
        return not self.retired and not self.reading.done()

    async def _read(self) -> None:
        """Pass messages on until the program ends."""
        try:
            with contextlib.suppress(ConnectionError):
                async for line in self.reader:
                    self._receive(json.loads(line))
        finally:
            self._clean_up()

    def _receive(self, message: dict[str, Any]) -> None:
        if "started" in message:
            self.running[message["started"]].pid = message["pid"]
            return
        agent = self.running.pop(message["ended"])
        if not agent.ended.done():
            agent.ended.set_result(message)
        self._close_if_idle()

    def _clean_up(self) -> None:
        """After the program's end: the processes that it cannot kill any more."""
        self.writer.close()
        self._close()
        for agent in self.running.values():
            if agent.pid:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(agent.pid, signal.SIGKILL)
            if not agent.ended.done():
                agent.ended.set_exception(AgentDied("the program that ran it was killed"))
                agent.ended.exception()  # else Python reports it where no trajectory waits any more
        self.running.clear()

    def start(self, name: str, message: dict[str, Any]) -> asyncio.Future:
        """Start an agent. Returns what will hold the program's last message about it, or AgentDied.

        Args:
            name: of this agent alone.
            message: row, base_url, api_key and log; see `agent_loop.host`.

        Raises:
            AgentDied: the program has ended.
        """
        if self.reading.done():
            raise AgentDied("the program that runs agents was killed")
        agent = Running(asyncio.get_running_loop().create_future())
        self.running[name] = agent
        self._send({"start": name} | message)
        return agent.ended

    def end(self, name: str) -> None:
        """Kill or cancel an agent. If it does not end, this program is replaced."""
        agent = self.running.get(name)
        if agent is None:
            return
        agent.abandoned = True
        self._send({"end": name})
        asyncio.get_running_loop().call_later(END_S, self._retire_for, name)

    def _send(self, message: dict[str, Any]) -> None:
        if not self.writer.is_closing():
            self.writer.write(encode(message))

    def _retire_for(self, name: str) -> None:
        """Take no more agents, if this one has not ended."""
        if name in self.running:
            self.retired = True
            self._close_if_idle()

    def _close_if_idle(self) -> None:
        """A retired program ends when no trajectory waits for any of its agents."""
        if self.retired and all(agent.abandoned for agent in self.running.values()):
            self._close()

    def _close(self) -> None:
        """Without waiting for the program's end, which the event loop must not."""
        asyncio.get_running_loop().run_in_executor(None, self.close)


def _end_process(process: subprocess.Popen, connection: socket.socket) -> None:
    """Let the program end its agents and itself; kill it if it does not."""
    with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)  # also where a fork of this process holds a copy
    connection.close()
    try:
        process.wait(END_S)
    except subprocess.TimeoutExpired:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


class AgentHosts:
    """Runs agents by a program that is started with the first of them, and replaced where it dies
    or cannot end an agent."""

    def __init__(self, plan: HostPlan) -> None:
        self.plan = plan
        self.starting: asyncio.Task[HostProcess] | None = None
        self.names = map(str, itertools.count())

    async def check(self) -> None:
        """Start the program and end it. Raises HostFailed."""
        host = HostProcess(self.plan)
        await host.begin()
        host.close()
        await host.reading

    async def run(self, message: dict[str, Any]) -> dict[str, Any]:
        """Run an agent to its end. A cancellation kills it.

        Args:
            message: as for `HostProcess.start`.

        Returns:
            The program's last message about it.

        Raises:
            HostFailed: the program does not start.
            AgentDied: the program was killed.
        """
        host = await self._host()
        name = next(self.names)
        ended = host.start(name, message)
        try:
            await asyncio.wait([ended])
        except asyncio.CancelledError:
            host.end(name)
            await asyncio.wait([ended], timeout=KILL_S)
            raise
        return ended.result()

    async def _host(self) -> HostProcess:
        """The program, started if there is none. All that wait for a start share it."""
        if self.starting is None or (self.starting.done() and not self._is_usable()):
            self.starting = observed(self._start())
        return await asyncio.shield(self.starting)

    def _is_usable(self) -> bool:
        failed = self.starting.cancelled() or self.starting.exception() is not None
        return not failed and self.starting.result().is_usable

    async def _start(self) -> HostProcess:
        host = HostProcess(self.plan)
        await host.begin()
        return host

    def close(self) -> None:
        """End the program and all its agents."""
        if self.starting is not None and self.starting.done() and self._is_usable():
            self.starting.result().close()
