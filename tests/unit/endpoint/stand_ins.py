"""A gateway and replicas' servers in one process, with a stand-in for `Serving`."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import numpy as np

from agent_loop.episode import Episode
from agent_loop.trajectory import Generated, Limits
from one_step_off.data.samples import Prompt
from one_step_off.endpoint.episodes import make_service_key
from one_step_off.endpoint.gateway import Gateway
from one_step_off.endpoint.http_messages import Answer, json_answer
from one_step_off.endpoint.http_server import HttpLimits, InheritedSocket
from one_step_off.endpoint.replica_server import EndpointAccess, ReplicaServer

CHAT = "/v1/chat/completions"
LIMITS = Limits(tokens=1000, turns=100, seconds=60.0)
PROMPT = Prompt((0, 3), np.arange(2, dtype=np.int32), "1 + 1?", "2", extra={"level": 1})


class Serving:
    """Answers with the number of the turn that it sampled. The context grows by a token each
    time."""

    def __init__(self) -> None:
        self.requests = 0

    async def answer(self, episode: Episode, path: str, body: bytes) -> Answer:
        self.requests += 1
        content = json.loads(body)
        ids = np.arange(1, 3 + len(content.get("messages", [])), dtype=np.int32)
        turn = await episode.turn(ids, 4)
        said = {"turn": int(turn.generated.ids[0]), "padding": "x" * content.get("answer_chars", 0)}
        if content.get("stream"):
            chunks = [b"data: " + json.dumps(said).encode() + b"\n\n", b"data: [DONE]\n\n"]
            return Answer(200, "text/event-stream", chunks, [turn])
        answer = json_answer(200, said)
        answer.turns.append(turn)
        return answer


class Engine:
    """Gives the numbers 1, 2, 3, ... as turns of one token.

    Attributes:
        delay: seconds for each.
        gate: turns wait for it.
        error: that it raises, if any.
    """

    def __init__(self, delay: float = 0.0) -> None:
        self.delay = delay
        self.gate = asyncio.Event()
        self.gate.set()
        self.error: Exception | None = None
        self.turns = 0

    async def generate(self, ids: np.ndarray, max_tokens: int, stop: tuple = ()) -> Generated:
        self.turns += 1
        number = self.turns
        if self.delay:
            await asyncio.sleep(self.delay)
        await self.gate.wait()
        if self.error is not None:
            raise self.error
        return Generated(
            np.array([number], np.int32), np.zeros(1, np.float32), np.zeros(1, np.int32), 0, "stop"
        )


@dataclass
class Endpoint:
    """A gateway and some replicas' servers."""

    gateway: Gateway
    port: InheritedSocket
    replicas: list[ReplicaServer]
    client: aiohttp.ClientSession
    engine: Engine = field(default_factory=Engine)
    servings: list[Serving] = field(default_factory=list)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port.port}"

    def open(self, replica: int = 0, limits: Limits = LIMITS) -> Episode:
        return self.replicas[replica].open(PROMPT, self.engine.generate, limits)

    async def post(
        self, key: str, content: Any = None, path: str = CHAT, **headers: str
    ) -> tuple[int, Any]:
        """Status and content of an answer."""
        return await self.request("POST", path, key, content, **headers)

    async def get(self, path: str, key: str = "") -> tuple[int, Any]:
        return await self.request("GET", path, key)

    async def request(
        self, method: str, path: str, key: str = "", content: Any = None, **headers: str
    ) -> tuple[int, Any]:
        sent = {name.replace("_", "-"): value for name, value in headers.items()}
        if key:
            sent["Authorization"] = f"Bearer {key}"
        body = content if isinstance(content, bytes) else None
        if body is None and method == "POST":
            body = json.dumps({"messages": []} if content is None else content).encode()
        async with self.client.request(method, self.url + path, data=body, headers=sent) as answer:
            text = await answer.text()
            is_json = answer.content_type == "application/json" and text
            return answer.status, json.loads(text) if is_json else text

    async def restart_gateway(self) -> None:
        """As after a kill: a new gateway on the same port, that knows no replica."""
        await self.gateway.stop()
        self.gateway = Gateway(
            self.port.path, self.gateway.keys.service_key, 60.0, self.gateway.limits
        )
        await self.gateway.alive()

    async def register(self) -> None:
        for replica in self.replicas:
            await self.gateway.register(replica.index, replica.address, replica.offers.qsize())


@contextlib.asynccontextmanager
async def endpoint(
    replicas: int = 1,
    limits: HttpLimits | None = None,
    replica_limits: HttpLimits | None = None,
    registers: bool = True,
) -> AsyncIterator[Endpoint]:
    port = InheritedSocket("127.0.0.1", 0)
    service_key = make_service_key()
    gateway = Gateway(port.path, service_key, 60.0, limits)
    await gateway.alive()
    access = EndpointAccess(f"http://127.0.0.1:{port.port}", service_key)
    timeout = aiohttp.ClientTimeout(20)
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(timeout=timeout, connector=connector) as client:
        running = Endpoint(gateway, port, [], client)

        async def register(*report: Any) -> None:
            await running.gateway.register(*report)

        for index in range(replicas):
            server = ReplicaServer(index, access, 2000, replica_limits)
            serving = Serving()
            server.serving = serving
            running.servings.append(serving)
            await server.start("127.0.0.1", register if registers else None)
            running.replicas.append(server)
        try:
            if registers:
                async with asyncio.timeout(5):
                    while len(gateway.replicas) < replicas:
                        await asyncio.sleep(0.005)
            yield running
        finally:
            for server in running.replicas:
                await server.stop()
            await running.gateway.stop()
            port.close()
