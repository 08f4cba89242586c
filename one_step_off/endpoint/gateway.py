"""The gateway: one URL in front of the endpoints of all replicas, in a process of its own.

It reads from an episode's key which replica has the episode, and passes requests and answers on. It
knows nothing else: replicas report their addresses again and again, so that it may be killed at
any time. It never passes on a head of a client, but writes a new one, so that no client can smuggle
a request behind another one's.
"""

import asyncio
import contextlib
import errno
import json
import os
import time
from collections import defaultdict
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

import aiohttp
import psutil
from aiohttp import web
from yarl import URL

from one_step_off.cluster.remote_calls import observed
from one_step_off.endpoint.episodes import EpisodeKeys
from one_step_off.endpoint.http_messages import (
    ANSWER,
    GATEWAY,
    INTERNAL,
    NEXT,
    RETRY_SOON,
    STATUS_OVER,
    Answer,
    Refused,
    Route,
    replica_gone,
    route_of,
    unknown_key,
)
from one_step_off.endpoint.http_server import (
    MIB,
    GuardedServer,
    HttpLimits,
    borrow_port,
    seconds_to_wait,
)

HOLD_S = 15.0
"""Seconds that a request waits for its replica to report its address."""

HELD_BODY = 64 << 10
"""Bytes of a request that are held here, so that it can be sent again; longer ones are passed on
as they come."""

HELD_ANSWER = 1 * MIB
CONNECT_S = 10.0
UPSTREAM_IDLE_S = 30.0  # less than the replicas' keep_alive_s
PASSED_HEADERS = (
    "Authorization",
    "x-api-key",
    "Content-Type",
    "x-stainless-retry-count",
    "Idempotency-Key",
)
GONE_ERRORS = (errno.ECONNREFUSED, errno.EHOSTUNREACH, errno.ENETUNREACH)
"""Why a connection to a replica fails whose process or node is gone. Anything else, as too many
open files, is a problem of this process."""

BROKEN = (aiohttp.ClientConnectionError, aiohttp.ClientPayloadError)
MAX_ENDED = 1 << 14
"""Keys of ended episodes that are remembered."""

RETURNED_HEADERS = ("Retry-After", "x-should-retry", "Allow", "Cache-Control")
ASK_S = 10.0


@dataclass(eq=False)
class KnownReplica:
    """Where a replica's server listens, and the requests that wait for its answers."""

    address: str
    requests: set[asyncio.Task] = field(default_factory=set)


class WorkRequests:
    """Gives each agent that asks for work the oldest episode of a replica that has one.

    Replicas report how many episodes wait for an agent. That is a hint: a replica is asked for an
    episode, and may have none by then. They are asked round-robin.

    Attributes:
        session: of HTTP; set before the first request.
    """

    session: aiohttp.ClientSession

    def __init__(self, replicas: dict[int, KnownReplica], keys: EpisodeKeys) -> None:
        """
        Args:
            replicas: those that the gateway knows; it changes them.
        """
        self.replicas = replicas
        self.keys = keys
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

    async def answer(self, request: web.BaseRequest, server: GuardedServer) -> web.StreamResponse:
        """An episode for the agent that asks; 204: there is none within the time that it waits."""
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
        replica = self.replicas.get(index)
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
        return self.session.request(
            method,
            f"http://{replica.address}{path}",
            headers={"x-api-key": self.keys.service_key},
            timeout=aiohttp.ClientTimeout(total=ASK_S),
            allow_redirects=False,
        )

    def _give_back_found(self, asking: asyncio.Task[Answer | None]) -> None:
        if not asking.cancelled() and asking.exception() is None and asking.result() is not None:
            self._start(self._give_back(asking.result()))

    async def _give_back(self, found: Answer) -> None:
        """The agent has gone that should get this episode: the replica offers it again."""
        key = json.loads(found.chunks[0])["key"]
        replica = self.replicas.get(self.keys.replica_index(key))
        if replica is None:
            return
        await self._post(replica, f"/v1/episodes/{key}/return")

    def tell_lost(self, replica: KnownReplica, key: str, number: str) -> None:
        """A client has not taken the answer of this number: no agent has seen the turns in it."""
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


class Gateway:
    """Becomes a Ray actor. See the module."""

    calls_at_once = 1 << 10
    restarts = -1  # Ray restarts the process any number of times
    beside_driver = True  # it listens at an address of the driver's machine

    def __init__(
        self, port_path: str, service_key: str, answer_s: float, limits: HttpLimits | None = None
    ) -> None:
        """
        Args:
            port_path: see `borrow_port`.
            service_key: see `EpisodeKeys`.
            answer_s: a request without an answer for longer than this is given up.
        """
        self.port_path = port_path
        self.keys = EpisodeKeys(service_key)
        self.answer_s = answer_s
        self.limits = limits or HttpLimits()
        self.replicas: dict[int, KnownReplica] = {}
        self.lost: set[int] = set()
        self.ended: dict[str, None] = {}  # keys of episodes that are over, oldest first
        self.registered: dict[int, asyncio.Event] = defaultdict(asyncio.Event)
        self.work = WorkRequests(self.replicas, self.keys)
        self._starting = asyncio.Lock()
        self.server: GuardedServer | None = None
        self.session: aiohttp.ClientSession

    async def alive(self) -> tuple[int, float]:
        """Listen, if this process does not yet. Returns the process: its id and when it began."""
        async with self._starting:
            if self.server is None:
                await self._start()
        return os.getpid(), psutil.Process().create_time()

    async def _start(self) -> None:
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_S, sock_read=self.answer_s)
        connector = aiohttp.TCPConnector(
            limit=0, keepalive_timeout=UPSTREAM_IDLE_S, use_dns_cache=False
        )
        self.session = aiohttp.ClientSession(
            connector=connector,
            timeout=timeout,
            auto_decompress=False,
            cookie_jar=aiohttp.DummyCookieJar(),
            skip_auto_headers=("User-Agent", "Accept", "Accept-Encoding"),
        )
        self.work.session = self.session
        server = GuardedServer(self._handle, self.limits)
        await server.listen(borrow_port(self.port_path))
        self.server = server

    async def register(self, index: int, address: str, offers: int = 0) -> None:
        """A replica reports where its server listens, and how many episodes wait for an agent."""
        await self.alive()
        known = self.replicas.get(index)
        if known is None or known.address != address:
            if known is not None:
                _end_requests(known)
            self.replicas[index] = KnownReplica(address)
        self.lost.discard(index)
        self.registered[index].set()
        self.work.offered(index, offers)

    async def stop(self) -> None:
        """Close the port and all connections of this process."""
        if self.server is not None:
            await self.server.stop()
            await self.session.close()

    # --- requests ---------------------------------------------------------------------------------

    async def _handle(self, request: web.BaseRequest) -> web.StreamResponse:
        route = route_of(request)
        if route.name in INTERNAL:
            raise Refused(404, "not_found", "there is no such path", route.path)
        if self.keys.is_service_key(route.key) and route.name in ("next", "models"):
            self.server.authenticate(request)
            if route.name == "next":
                return await self.work.answer(request, self.server)
            return await self._exchange(request, route, await self.any_replica(route.path), b"")
        index = self.keys.replica_index(route.key)
        if index is None or route.name == "next":
            raise unknown_key(route.path, bool(route.key))
        if route.key in self.ended:  # its replica says why; an unauthenticated client sends no body
            return await self._pass_on(request, route, index, b"")
        self.server.authenticate(request, route.key)
        self.server.check_body_head(request)
        if request.can_read_body and (request.content_length or HELD_BODY + 1) > HELD_BODY:
            pieces = self.server.body_pieces(request)
            return await self._pass_on(request, route, index, pieces)
        async with self.server.body(request, key=route.key) as body:
            return await self._pass_on(request, route, index, body)

    async def _pass_on(
        self,
        request: web.BaseRequest,
        route: Route,
        index: int,
        body: bytes | AsyncIterator[bytes],
    ) -> web.StreamResponse:
        """Pass a request on to its replica.

        Raises:
            Refused: the replica is not known, or has died.
        """
        replica = await self.known_replica(index, route.path)
        try:
            return await self._exchange(request, route, replica, body)
        except aiohttp.ClientConnectorError as error:
            raise self._no_connection(index, replica, route.path, error) from None
        except BROKEN as error:
            if isinstance(error.__cause__, Refused):  # of the client's body
                raise error.__cause__ from None
            # An idle connection that has just been closed, or a death. The replica gives the answer
            # of the first request to the second one.
            if not isinstance(body, bytes):
                raise _interrupted(route.path) from None
        try:
            return await self._exchange(request, route, replica, body)
        except aiohttp.ClientConnectorError as error:
            raise self._no_connection(index, replica, route.path, error) from None
        except BROKEN:
            raise _interrupted(route.path) from None

    def _no_connection(
        self, index: int, replica: KnownReplica, path: str, error: aiohttp.ClientConnectorError
    ) -> Refused:
        """The answer where a replica cannot be reached."""
        if error.os_error.errno not in GONE_ERRORS:
            return _interrupted(path)
        self.forget(index, replica)
        return replica_gone(path)

    async def known_replica(self, index: int, path: str) -> KnownReplica:
        """The replica, when it has reported its address. Raises Refused: it has not in time."""
        try:
            async with asyncio.timeout(HOLD_S):
                while index not in self.replicas:
                    await self.registered[index].wait()
        except TimeoutError:
            if index in self.lost:
                raise replica_gone(path) from None
            message = f"rollout {index} has not reported its address yet"
            raise Refused(503, "replica_unknown", message, path, RETRY_SOON) from None
        return self.replicas[index]

    async def any_replica(self, path: str) -> KnownReplica:
        """Any replica that is known. Raises Refused: none is."""
        for replica in self.replicas.values():
            return replica
        raise Refused(503, "replica_unknown", "no replica is there yet", path, RETRY_SOON)

    def forget(self, index: int, replica: KnownReplica) -> None:
        """A replica is gone. It is known again when it, or its successor, registers."""
        if self.replicas.get(index) is replica:
            del self.replicas[index]
            self.registered[index].clear()
            self.lost.add(index)

    async def _exchange(
        self,
        request: web.BaseRequest,
        route: Route,
        replica: KnownReplica,
        body: bytes | AsyncIterator[bytes],
    ) -> web.StreamResponse:
        """Send a request to a replica, and its answer to the client.

        Raises:
            aiohttp.ClientError: the connection to the replica broke before the client got a byte.
            Refused: another process has taken the replica's place, or it does not answer.
        """
        task = asyncio.current_task()
        replica.requests.add(task)
        headers = {n: request.headers[n] for n in PASSED_HEADERS if n in request.headers}
        headers[GATEWAY] = self.keys.service_key
        url = URL(f"http://{replica.address}{route.path}", encoded=True)
        try:
            async with self.session.request(
                request.method, url, data=body or None, headers=headers, allow_redirects=False
            ) as upstream:
                if upstream.status == STATUS_OVER:
                    self._end_key(route.key)
                taken = False
                try:
                    response, taken = await self._return_answer(request, upstream)
                finally:
                    if not taken and ANSWER in upstream.headers:
                        self.work.tell_lost(replica, route.key, upstream.headers[ANSWER])
                return response
        except asyncio.CancelledError:
            if task in replica.requests:  # the client has gone
                raise
            task.uncancel()
            raise replica_gone(route.path) from None
        except aiohttp.ServerTimeoutError:
            message = f"no answer within {self.answer_s:g} s"
            raise Refused(504, "no_answer", message, route.path, RETRY_SOON) from None
        finally:
            replica.requests.discard(task)

    def _end_key(self, key: str) -> None:
        """An episode is over: cut off what its agent holds."""
        self.ended[key] = None
        if len(self.ended) > MAX_ENDED:
            del self.ended[next(iter(self.ended))]
        self.server.end_key(key)

    async def _return_answer(
        self, request: web.BaseRequest, upstream: aiohttp.ClientResponse
    ) -> tuple[web.StreamResponse, bool]:
        """Send a replica's answer to the client. Returns the response, and whether the client has
        taken all of it."""
        headers = {n: upstream.headers[n] for n in RETURNED_HEADERS if n in upstream.headers}
        content_type = upstream.headers.get("Content-Type", "application/json")
        length = upstream.content_length
        if length is not None and length <= HELD_ANSWER:
            answer = Answer(upstream.status, content_type, [await upstream.read()])
            over = upstream.status == STATUS_OVER
            return await self.server.send(request, answer, headers, close=over)
        response = web.StreamResponse(
            status=upstream.status, headers=headers | {"Content-Type": content_type}
        )
        if length is not None:
            response.content_length = length
        else:
            response.enable_chunked_encoding()
        taken = await self.server.write(request, response.prepare(request))
        left_s = self.server.limits.write_s  # for the client to take all pieces
        try:
            async for piece in upstream.content.iter_any():
                begin = time.monotonic()
                writing = response.write(piece)
                taken = taken and await self.server.write(request, writing, left_s)
                left_s -= time.monotonic() - begin
                if not taken:
                    return response, False
        except aiohttp.ClientError:  # the client must not take half an answer for a whole one
            if request.transport is not None:
                request.transport.abort()
            return response, False
        return response, await self.server.write(request, response.write_eof())


def _end_requests(replica: KnownReplica) -> None:
    """Another process has taken the replica's place: nothing will answer these requests."""
    waiting = list(replica.requests)
    replica.requests.clear()
    for task in waiting:
        task.cancel()


def _interrupted(path: str) -> Refused:
    message = "the connection to the replica broke; send the request again"
    return Refused(503, "interrupted", message, path, RETRY_SOON, close=True)
