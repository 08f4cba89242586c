"""Agents that ask the gateway for work: each gets the oldest episode of a replica that has one.

Replicas report how many episodes wait for an agent. That is a hint: a replica is asked for an
episode, and may have none by then.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from typing import TYPE_CHECKING

import aiohttp
from aiohttp import web

from one_step_off.cluster.remote_calls import observed
from one_step_off.endpoint.answers import Answer
from one_step_off.endpoint.routes import NEXT
from one_step_off.endpoint.waiting import seconds_to_wait

if TYPE_CHECKING:
    from one_step_off.endpoint.gateway import Gateway, KnownReplica

ASK_S = 10.0


class WorkRequests:
    """Goes round the replicas that have episodes to offer."""

    def __init__(self, gateway: Gateway) -> None:
        self.gateway = gateway
        self._offers: dict[int, int] = {}  # replica index -> episodes, as last reported
        self._changed = asyncio.Condition()
        self._last_replica = -1
        self._tasks: set[asyncio.Task] = set()

    def offered(self, index: int, offers: int) -> None:
        """A replica reports how many episodes wait for an agent."""
        self._offers[index] = offers
        if offers:
            self._start(self._wake(offers))

    async def _wake(self, count: int) -> None:
        async with self._changed:
            self._changed.notify(count)

    async def answer(self, request: web.BaseRequest) -> web.StreamResponse:
        """An episode for the agent that asks; 204: there is none within the time that it waits."""
        server = self.gateway.server
        found: Answer | None = None
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds_to_wait(request)):
                found = await self._find()
        if found is None:
            response, _ = await server.send(request, Answer(204, "application/json", []))
            return response
        taken = False
        try:
            response, taken = await server.send(request, found)
        finally:
            if not taken:
                self._start(self._give_back(found))
        return response

    async def _find(self) -> Answer:
        """An episode. Waits until there is one."""
        while True:
            index = self._next_replica()
            if index is None:
                async with self._changed:
                    if self._next_replica() is None:
                        await self._changed.wait()
                continue
            self._last_replica = index
            asking = self._start(self._ask(index))
            try:
                found = await asyncio.shield(asking)
            except asyncio.CancelledError:  # the agent has gone, or its time is over
                asking.add_done_callback(self._give_back_found)
                raise
            if found is not None:
                return found

    def _next_replica(self) -> int | None:
        """The next replica that has an episode to offer, after the last one that was asked."""
        having = sorted(index for index, offers in self._offers.items() if offers > 0)
        if not having:
            return None
        later = [index for index in having if index > self._last_replica]
        return (later or having)[0]

    async def _ask(self, index: int) -> Answer | None:
        """An episode of this replica; None: it has none, or cannot be asked."""
        replica = self.gateway.replicas.get(index)
        self._offers[index] -= 1
        if replica is None:
            self._offers[index] = 0
            return None
        try:
            async with self._call(replica, "GET", f"{NEXT}?wait=0") as answer:
                body = await answer.read()
                if answer.status != 200:
                    self._offers[index] = 0
                    return None
                return Answer(200, "application/json", [body])
        except (aiohttp.ClientError, TimeoutError):
            self._offers[index] = 0
            return None

    def _call(
        self, replica: KnownReplica, method: str, path: str
    ) -> contextlib.AbstractAsyncContextManager[aiohttp.ClientResponse]:
        gateway = self.gateway
        return gateway.session.request(
            method,
            f"http://{replica.address}{path}",
            headers={"x-api-key": gateway.keys.service_key},
            timeout=aiohttp.ClientTimeout(total=ASK_S),
            allow_redirects=False,
        )

    def _give_back_found(self, asking: asyncio.Task[Answer | None]) -> None:
        if not asking.cancelled() and asking.exception() is None and asking.result() is not None:
            self._start(self._give_back(asking.result()))

    async def _give_back(self, found: Answer) -> None:
        """The agent has gone that should get this episode: the replica offers it again."""
        key = json.loads(found.chunks[0])["key"]
        index = self.gateway.keys.replica_index(key)
        replica = self.gateway.replicas.get(index)
        if replica is None:
            return
        await self._post(replica, f"/v1/episodes/{key}/return")

    def tell_lost(self, replica: KnownReplica, key: str, number: str) -> None:
        """A client has not taken the answer of this number: nobody has seen the turns in it."""
        self._start(self._post(replica, f"/v1/episodes/{key}/lost?answer={number}"))

    async def _post(self, replica: KnownReplica, path: str) -> None:
        with contextlib.suppress(aiohttp.ClientError, TimeoutError):
            async with self._call(replica, "POST", path) as answer:
                await answer.read()

    def _start(self, work) -> asyncio.Task:
        """Run this beside the requests."""
        task = observed(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task
