"""Agents that are programs or plain functions: a process for each episode, and how it is ended with
all that descends from it.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import inspect
import json
import os
import resource
import selectors
import signal
import socket
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from typing import Any

from agent_loop.host.messages import agent_environment, encode, failure, outcome
from agent_loop.host.output import Log

NO_PROGRAM = 127  # the exit code of shells for it
CLOSED = -1  # no descriptor, while a number that was closed may be another agent's by now
LIBC = ctypes.CDLL(None)
SET_DEATH_SIGNAL = 1  # of prctl
SET_SUBREAPER = 36
KILL_S = 5.0  # for killed processes to end


def adopt_orphans() -> None:
    """Make orphans among the processes below this one its children."""
    LIBC.prctl(SET_SUBREAPER, 1, 0, 0, 0)


def die_with_parent(parent: int, send: int = signal.SIGKILL) -> None:
    """Have this process killed when the thread that started it ends."""
    LIBC.prctl(SET_DEATH_SIGNAL, send, 0, 0, 0)
    if os.getppid() != parent:  # it died before
        os._exit(1)


def children(pid: int) -> list[int]:
    """The children of a process, of all its threads."""
    found: list[int] = []
    try:
        for task in os.listdir(f"/proc/{pid}/task"):
            with open(f"/proc/{pid}/task/{task}/children") as file:
                found += map(int, file.read().split())
    except OSError:  # it has ended
        pass
    return found


def descendants(pid: int) -> list[int]:
    """All processes below a process that run."""
    found: list[int] = []
    for child in children(pid):
        found += [child, *descendants(child)]
    return [process for process in found if is_running(process)]


def is_running(pid: int) -> bool:
    """Whether a process exists and has not ended."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] not in ("Z", "X")
    except OSError:
        return False


def kill_all(find: Callable[[], list[int]]) -> None:
    """Kill the processes that `find` returns, until it returns none twice in a row. A process may
    start another before it ends. One that changes its parent during a search is found by the
    next."""
    deadline = time.monotonic() + KILL_S
    times_none = 0
    while times_none < 2 and time.monotonic() < deadline:
        processes = find()
        times_none = 0 if processes else times_none + 1
        for pid in processes:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.001)


class Agent:
    """The process of one episode."""

    def __init__(self, name: str, key: str, pid: int, output: int, log: Log, result: Any) -> None:
        """
        Args:
            output: descriptor from which its stdout and stderr are read, or CLOSED.
            result: the file into which a function's process writes its outcome.
        """
        self.name = name
        self.key = key
        self.pid = pid
        self.output = output
        self.log = log
        self.result = result


class ProcessAgents:
    """Runs a program, or a plain function, in a process for each episode. It has one thread, so
    that it can fork."""

    def __init__(
        self,
        control: socket.socket,
        file_limits: tuple[int, int],
        program: list[str],
        function: Callable[..., Any] | None = None,
    ) -> None:
        """
        Args:
            file_limits: on open files, of the agents.
            program: the words of its command line; empty: `function` is called.
        """
        self.control = control
        self.file_limits = file_limits
        self.program = program
        self.function = function
        self.agents: dict[int, Agent] = {}  # by the id of the process that began
        self.received = b""
        self.pid = os.getpid()
        self.selector = selectors.DefaultSelector()

    def serve(self) -> None:
        """Until the control socket ends. Kills all processes then."""
        adopt_orphans()
        self.wakeup, wakeup_writer = socket.socketpair()
        self.wakeup.setblocking(False)
        wakeup_writer.setblocking(False)
        signal.set_wakeup_fd(wakeup_writer.fileno(), warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        self.selector.register(self.control, selectors.EVENT_READ, self._read_control)
        self.selector.register(self.wakeup, selectors.EVENT_READ, self._read_wakeup)
        self.control.sendall(encode({"ready": "processes"}))
        try:
            while True:
                self.handle_events()
        except (EOFError, ConnectionError):
            kill_all(lambda: descendants(self.pid))

    def handle_events(self) -> None:
        """Wait for messages, output, or ends of processes, and handle them."""
        for key, _ in self.selector.select():
            key.data()
        self._reap()  # last, because it closes descriptors that the selector may have reported

    def _read_control(self) -> None:
        data = self.control.recv(1 << 20)
        if not data:
            raise EOFError
        *lines, self.received = (self.received + data).split(b"\n")
        for line in lines:
            message = json.loads(line)
            if "start" in message:
                try:
                    self._start(message)
                except OSError as e:  # no process, or no file: of this episode alone
                    ended = {"ended": message["start"], "exit": None, "log": ""}
                    self.control.sendall(encode(ended | failure(e)))
                continue
            for agent in list(self.agents.values()):
                if agent.name == message["end"]:
                    self._kill_agent(agent)

    def _start(self, message: dict[str, Any]) -> None:
        name = message["start"]
        row = json.dumps(message["row"])
        variables = agent_environment(message["base_url"], message["api_key"], row)
        output, output_writer = os.pipe()
        os.set_blocking(output, False)
        result = tempfile.TemporaryFile()
        with tempfile.TemporaryFile() as row_file:
            row_file.write(row.encode())
            row_file.seek(0)
            pid = os.fork()
            if pid == 0:
                self._become_agent(message, variables, row_file, output_writer, result)
        os.close(output_writer)
        agent = Agent(name, message["api_key"], pid, output, Log(message["log"]), result)
        self.agents[pid] = agent
        self.selector.register(output, selectors.EVENT_READ, lambda: self._read_output(agent))
        self.control.sendall(encode({"started": name, "pid": pid}))

    def _become_agent(
        self, message: dict[str, Any], variables: dict[str, str], row: Any, output: int, result: Any
    ) -> None:
        """In the forked process. Does not return."""
        code = 1
        try:
            os.setsid()
            die_with_parent(self.pid)
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            os.dup2(row.fileno(), 0)
            os.dup2(output, 1)
            os.dup2(output, 2)
            resource.setrlimit(resource.RLIMIT_NOFILE, self.file_limits)
            os.environ.update(variables)
            if self.function is None:
                code = _execute(self.program)
            self.selector.close()
            self.control.close()
            arguments = (message["row"], message["base_url"], message["api_key"])
            code = _call(self.function, arguments, result)
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)

    def _read_output(self, agent: Agent) -> bool:
        """Into the log. Returns whether there may be more at once."""
        if agent.output == CLOSED:  # its end was an earlier event of the same poll
            return False
        try:
            data = os.read(agent.output, 1 << 16)
        except BlockingIOError:
            return False
        if not data:
            self.selector.unregister(agent.output)
            return False
        agent.log.write(data)
        return True

    def _read_wakeup(self) -> None:
        """A process has ended."""
        with contextlib.suppress(BlockingIOError):
            self.wakeup.recv(1 << 12)

    def _reap(self) -> None:
        """Take leave of all processes that have ended. Orphans of agents are among them."""
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            agent = self.agents.pop(pid, None)
            if agent is not None:
                self._report_end(agent, os.waitstatus_to_exitcode(status))

    def _report_end(self, agent: Agent, exit_code: int) -> None:
        self._kill_agent(agent)  # what it left behind
        while agent.output in self.selector.get_map() and self._read_output(agent):
            pass
        if agent.output in self.selector.get_map():
            self.selector.unregister(agent.output)
        os.close(agent.output)
        agent.output = CLOSED
        agent.result.seek(0)
        returned = self._outcome(agent.result.read(), exit_code)
        agent.result.close()
        facts = {"ended": agent.name, "exit": exit_code, "log": agent.log.close()}
        self.control.sendall(encode(facts | returned))

    def _outcome(self, result: bytes, exit_code: int) -> dict[str, Any]:
        """What a function's process has written. It may have ended before, or in between."""
        if result.endswith(b"\n"):  # as `encode` ends it
            return json.loads(result)
        if self.function is None or exit_code:
            return {}
        return {"error": "its process ended with exit code 0 before the function had returned"}

    def _kill_agent(self, agent: Agent) -> None:
        kill_all(lambda: self._processes_of(agent))

    def _processes_of(self, agent: Agent) -> list[int]:
        """An agent's processes that run, by what they descend from; orphans by their session and
        by the key in their environment."""
        processes = []
        for pid in children(self.pid):
            is_orphan = pid not in self.agents
            if pid == agent.pid or (is_orphan and _belongs_to(pid, agent)):
                processes += [pid, *descendants(pid)]
        return [pid for pid in processes if is_running(pid)]


def _belongs_to(pid: int, agent: Agent) -> bool:
    try:
        if os.getsid(pid) == agent.pid:
            return True
        with open(f"/proc/{pid}/environ", "rb") as file:
            return agent.key.encode() in file.read()
    except OSError:
        return False


def _execute(program: list[str]) -> int:
    """Become a program. Returns an exit code where that fails."""
    try:
        os.execvp(program[0], program)
    except OSError as e:
        os.write(2, f"{program[0]}: {e.strerror}\n".encode())
    return NO_PROGRAM


def _call(function: Callable[..., Any], arguments: tuple[Any, ...], result: Any) -> int:
    """Call an agent's function and write its outcome into a file. Returns the exit code."""
    try:
        value = function(*arguments)
        if inspect.isawaitable(value):
            value = asyncio.run(_await(value))
        answer = outcome(value)
    except BaseException as e:  # SystemExit too: it is the agent's
        answer = failure(e)
    result.write(encode(answer))
    result.flush()
    return 0


async def _await(value: Any) -> Any:
    return await value
