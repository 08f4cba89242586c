"""A stand-in for the run's endpoint: one path of the OpenAI API, without templates and parsers."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections.abc import AsyncIterator
from typing import Any

import numpy as np
from aiohttp import web

from agent_loop.base import Generate, Limits
from agent_loop.episode import Episode, EpisodeOver, episode_row
from one_step_off.data.samples import Prompt

NO_AGENT_S = 0.2


class StandInEndpoint:
    """Serves episodes of one replica.

    Attributes:
        opened: all episodes, in order.
        record_s: how long it takes to see that an agent has received its answer.
    """

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self.base_url = ""
        self.opened: list[Episode] = []
        self.record_s = 0.0
        self.by_key: dict[str, Episode] = {}
        self.offered: asyncio.Queue[Episode] = asyncio.Queue()
        self.finished: dict[str, asyncio.Event] = {}

    @property
    def local_url(self) -> str:
        return self.base_url

    def open(self, prompt: Prompt, generate: Generate, limits: Limits) -> Episode:
        key = f"ose-0-{secrets.token_hex(8)}"
        episode = Episode(key, prompt, generate, limits, max_sequence=4000)
        self.opened.append(episode)
        self.by_key[key] = episode
        return episode

    def close(self, episode: Episode, reason: str = "ended") -> None:
        episode.end(reason)
        self.by_key.pop(episode.key, None)

    async def offer(self, episode: Episode) -> None:
        finished = self.finished.setdefault(episode.key, asyncio.Event())
        self.offered.put_nowait(episode)
        async with asyncio.timeout(episode.seconds_left):
            await finished.wait()

    def _episode(self, request: web.Request) -> Episode:
        key = request.headers.get("Authorization", "").removeprefix("Bearer ")
        if key not in self.by_key:
            raise web.HTTPUnauthorized
        return self.by_key[key]

    async def _chat(self, request: web.Request) -> web.Response:
        episode = self._episode(request)
        body = await request.json()
        text = "".join(message["content"] for message in body["messages"])
        ids = np.array(self.tokenizer.encode(text), np.int32)
        try:
            turn = await episode.turn(ids, body.get("max_tokens", 100))
        except EpisodeOver as e:
            return web.json_response({"error": {"message": str(e)}}, status=409)
        asyncio.get_running_loop().call_later(self.record_s, setattr, turn, "delivered", True)
        content = self.tokenizer.decode(turn.generated.ids, skip_special_tokens=True)
        message = {"role": "assistant", "content": content}
        choice = {"message": message, "finish_reason": turn.generated.finish_reason}
        return web.json_response({"choices": [choice]})

    async def _reward(self, request: web.Request) -> web.Response:
        content = await request.json()
        reward = content["reward"] if isinstance(content, dict) else content
        self._episode(request).reward = reward
        return web.json_response({})

    async def _next(self, request: web.Request) -> web.Response:
        try:
            episode = await asyncio.wait_for(self.offered.get(), NO_AGENT_S)
        except TimeoutError:
            return web.Response(status=204)
        return web.json_response({"api_key": episode.key, "row": episode_row(episode.prompt)})

    async def _end(self, request: web.Request) -> web.Response:
        self.finished[self._episode(request).key].set()
        return web.json_response({})

    @contextlib.asynccontextmanager
    async def serving(self) -> AsyncIterator[None]:
        """On a free port, during the block."""
        app = web.Application()
        app.router.add_post("/v1/chat/completions", self._chat)
        app.router.add_post("/v1/episodes/{key}/reward", self._reward)
        app.router.add_post("/v1/episodes/KEY/end", self._end)
        app.router.add_get("/v1/episodes/next", self._next)
        runner = web.AppRunner(app, shutdown_timeout=0.1)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        port = runner.addresses[0][1]
        self.base_url = f"http://127.0.0.1:{port}"
        try:
            yield
        finally:
            await runner.cleanup()
