"""An OpenEnv server of a guessing game, by aiohttp: what the adapter needs of the protocol."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

SHARED = {"done": {"type": "boolean"}, "reward": {"type": "number"}, "metadata": {"type": "object"}}
TEXT = {"type": "string"}


def schema(*fields: str) -> dict[str, Any]:
    return {"properties": SHARED | {name: TEXT for name in fields}, "required": list(fields)}


@dataclass
class Game:
    """A server, and what it was asked.

    Attributes:
        sessions: that may be open at once.
        resets: the data of each.
        tasks: of the split "train".
    """

    action: tuple[str, ...] = ("message",)
    observation: tuple[str, ...] = ("text",)
    sessions: int = 8
    tasks: int = 20
    open: int = 0
    most_open: int = 0
    resets: list[dict[str, Any]] = field(default_factory=list)
    url: str = ""

    async def answer_schema(self, request: web.Request) -> web.Response:
        fields = {"action": schema(*self.action), "observation": schema(*self.observation)}
        return web.json_response(fields)

    async def answer_names(self, request: web.Request) -> web.Response:
        return web.json_response(["game"])

    async def answer_num_tasks(self, request: web.Request) -> web.Response:
        if (await request.json())["split"] != "train":
            return web.json_response({}, status=404)
        return web.json_response({"num_tasks": self.tasks})

    async def answer_ws(self, request: web.Request) -> web.WebSocketResponse:
        ws = web.WebSocketResponse()
        await ws.prepare(request)
        if self.open == self.sessions:
            details = {"code": "CAPACITY_REACHED", "message": "all sessions are taken"}
            await ws.send_json({"type": "error", "data": details})
            await ws.close()
            return ws
        self.open += 1
        self.most_open = max(self.most_open, self.open)
        try:
            await self._play(ws)
        finally:
            self.open -= 1
        return ws

    async def _play(self, ws: web.WebSocketResponse) -> None:
        secret = 0
        async for message in ws:
            content = json.loads(message.data)
            if content["type"] == "state":
                await ws.send_json({"type": "state", "data": {}})
                continue
            if content["type"] == "reset":
                self.resets.append(content["data"])
                secret = content["data"].get("seed", content["data"].get("index"))
                data = {"observation": self._shown("guess"), "reward": None, "done": False}
            else:
                guess = content["data"][self.action[0]]
                right = guess == str(secret)
                seen = self._shown(f"not {guess}")
                data = {"observation": seen, "reward": 1.0 if right else -0.25, "done": right}
            await ws.send_json({"type": "observation", "data": data})

    def _shown(self, text: str) -> dict[str, Any]:
        return {name: text for name in self.observation}

    def routes(self) -> list[Any]:
        return [
            web.get("/schema", self.answer_schema),
            web.get("/list_environments", self.answer_names),
            web.post("/game/num_tasks", self.answer_num_tasks),
            web.get("/ws", self.answer_ws),
        ]


@contextmanager
def serving(routes: list[Any]) -> Iterator[str]:
    """A server of these routes in a thread of its own; its URL."""
    loop = asyncio.new_event_loop()
    runner = None

    async def start() -> str:
        nonlocal runner
        app = web.Application()
        app.add_routes(routes)
        runner = web.AppRunner(app, shutdown_timeout=0.1)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        return f"http://127.0.0.1:{runner.addresses[0][1]}"

    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    try:
        yield asyncio.run_coroutine_threadsafe(start(), loop).result(10)
    finally:
        asyncio.run_coroutine_threadsafe(runner.cleanup(), loop).result(10)
        loop.call_soon_threadsafe(loop.stop)
        thread.join(10)
        loop.close()
