"""Agents that are coroutine functions."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import Callable
from typing import Any

from agent_loop.host.messages import MAX_MESSAGE_BYTES, encode, failure, outcome
from agent_loop.host.output import CURRENT_LOG, Log


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
