"""Imports the agent's function and serves; agents that are coroutine functions are tasks."""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import inspect
import json
import os
import resource
import socket
import sys
import traceback
from collections.abc import Callable
from operator import attrgetter
from typing import Any

from agent_loop.host.messages import MAX_ERROR_CHARS, MAX_MESSAGE_BYTES, encode, failure, outcome
from agent_loop.host.output import CURRENT_LOG, EpisodeStream, Log
from agent_loop.host.process_agents import ProcessAgents, die_with_parent


class TaskAgents:
    """Runs a coroutine function, a task for each episode."""

    def __init__(self, control: socket.socket, function: Callable[..., Any]) -> None:
        self.control = control
        self.function = function
        self.tasks: dict[str, asyncio.Task] = {}

    async def serve(self) -> None:
        """Until the control socket ends."""
        reader, self.writer = await asyncio.open_connection(
            sock=self.control, limit=MAX_MESSAGE_BYTES
        )
        self.writer.write(encode({"ready": "tasks"}))
        async for line in reader:
            message = json.loads(line)
            if "start" in message:
                self._start(message)
            elif message["end"] in self.tasks:
                self.tasks[message["end"]].cancel()

    def _start(self, message: dict[str, Any]) -> None:
        name = message["start"]
        self.tasks[name] = asyncio.create_task(self._run(message))
        # Not in the task: one that is canceled before it begins runs none of its code.
        self.tasks[name].add_done_callback(lambda task: self._send_end(name, task))

    async def _run(self, message: dict[str, Any]) -> dict[str, Any]:
        """Run the function. Returns what the last message says of it."""
        log = Log(message["log"])
        CURRENT_LOG.set(log)
        try:
            arguments = (message["row"], message["base_url"], message["api_key"])
            result = outcome(await self.function(*arguments))
        except BaseException as e:  # SystemExit too: it is the agent's
            result = failure(e)
        return {"log": log.close()} | result

    def _send_end(self, name: str, task: asyncio.Task) -> None:
        del self.tasks[name]
        if task.cancelled():
            result = {"log": ""} | failure(asyncio.CancelledError("before it began"))
        else:
            result = task.result()
        self.writer.write(encode({"ended": name, "exit": 0} | result))


def load_function(spec: str, folders: list[str]) -> Callable[..., Any]:
    """The function of `module:function`, or of `/path/of/a/file.py:function`.

    Args:
        folders: searched for the module after Python's own path.

    Raises:
        TypeError: it is no function with three arguments.
        Exception: whatever the import raised.
    """
    sys.path += [folder for folder in folders if folder not in sys.path]
    module_name, _, attribute = spec.rpartition(":")
    if module_name.endswith(".py"):
        module_spec = importlib.util.spec_from_file_location("one_step_off_agent", module_name)
        module = importlib.util.module_from_spec(module_spec)
        sys.modules[module_spec.name] = module
        module_spec.loader.exec_module(module)
    else:
        module = importlib.import_module(module_name)
    function = attrgetter(attribute)(module)
    if not callable(function):
        raise TypeError(f"{attribute} is a {type(function).__name__}, not a function")
    try:
        inspect.signature(function).bind({}, "base_url", "api_key")
    except TypeError as e:
        raise TypeError(f"{attribute} must take (row, base_url, api_key): {e}") from e
    except ValueError:  # a function of C that has no signature
        pass
    return function


def _describe(error: BaseException) -> str:
    """One line: type, first line of the message, and the place, without the machinery's frames."""
    lines = str(error).strip().splitlines() or [""]
    places = [
        f" ({os.path.basename(frame.filename)}:{frame.lineno})"
        for frame in traceback.extract_tb(error.__traceback__)
        if not frame.filename.startswith("<frozen") and frame.filename != __file__
    ]
    if isinstance(error, SyntaxError) and error.filename:
        places.append(f" ({os.path.basename(error.filename)}:{error.lineno})")
    return f"{type(error).__name__}: {lines[0][:MAX_ERROR_CHARS]}" + "".join(places[-1:])


def is_coroutine_function(function: Any) -> bool:
    """Whether a call of it gives a coroutine; also of an object with such a `__call__`."""
    called = getattr(type(function), "__call__", None)  # noqa: B004  its definition, not whether
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(called)


def main() -> None:
    """Import the function, report it, and serve."""
    task = json.loads(sys.argv[1])
    parent = os.getppid()
    control = socket.socket(fileno=os.dup(0))
    os.dup2(os.open(os.devnull, os.O_RDWR), 0)
    die_with_parent(parent)  # also in an import that hangs
    with contextlib.suppress(OSError):  # the machine may have fewer by now
        os.sched_setaffinity(0, task["cores"])
    file_limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (file_limits[1], file_limits[1]))
    function = None
    if "function" in task:
        function = _agent_function(control, task)
    if is_coroutine_function(function):
        asyncio.run(TaskAgents(control, function).serve())
    else:
        die_with_parent(parent, 0)  # it kills its processes itself, in order
        ProcessAgents(control, file_limits, task.get("program", []), function).serve()
    os._exit(0)  # threads of the agents do not hold it up


def _agent_function(control: socket.socket, task: dict[str, Any]) -> Callable[..., Any]:
    """The function, or one that imports and calls it in its process. Ends this program if it cannot
    be imported."""
    spec, folders = task["function"], task["folders"]
    if "late" in task:
        return lambda *arguments: load_function(spec, folders)(*arguments)
    # Before the import, because loggers keep the streams that they find.
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        stream.reconfigure(line_buffering=True)
        setattr(sys, name, EpisodeStream(stream))
    try:
        function = load_function(spec, folders)
    except BaseException as e:  # the module may raise anything
        control.sendall(encode({"failed": _describe(e)}))
        os._exit(1)
    threads = len(os.listdir("/proc/self/task"))
    if threads > 1 and not is_coroutine_function(function):
        # A process with threads cannot be forked safely: a lock that another thread holds stays
        # locked. So this program begins again, and each process of an episode imports the module.
        os.dup2(control.fileno(), 0)
        late_task = json.dumps(task | {"late": True})
        os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:-1], late_task])
    return function
