"""An HTTP server that hostile clients can neither stop nor fill: the gateway's and the replicas'.

Connections, heads, bodies and answers all have limits in number, bytes and seconds. A connection is
unauthenticated until it has sent a valid key, and again when that key has ended. Where there are
too many, the oldest unauthenticated one is closed, so that these cannot keep agents out; then one
without a request in progress, of the key that has most. No key has more than its share.

aiohttp limits the size of heads and the time of idle connections. The other limits are here:
neither aiohttp nor uvicorn has limits per key, or in seconds for a head, a body or an answer.
"""

import asyncio
import contextlib
import contextvars
import json
import logging
import os
import resource
import shutil
import socket
import tempfile
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from aiohttp import web

from one_step_off.cluster.process_cleanup import RUN_FOLDER_VARIABLE
from one_step_off.config.errors import ConfigError
from one_step_off.config.user_code import describe_error, format_traceback, log_traceback
from one_step_off.endpoint.http_messages import NO_RETRY, RETRY_SOON, Answer, Refused

MIB = 1 << 20
BACKLOG = 4096
RESERVED_FILES = 256  # file descriptors for what is no connection of a client
FILES_PER_CONNECTION = 2  # the gateway has one to the replica, too
SEND_BUFFER = 1 << 16
"""Bytes of an answer, about, that the kernel takes from the server before the client does."""

SWEEP_S = 1.0
CONNECTIONS_PER_EPISODE = 4
SHARE_OF_KEY = 4
"""A key has at most one in so many of the connections."""

CLOSE_S = 2.0
"""Seconds for the requests in progress at the end of the server."""
OVERLOADED = (
    b"HTTP/1.1 503 Service Unavailable\r\nConnection: close\r\nRetry-After: 1\r\n"
    b"Content-Length: 0\r\n\r\n"
)

QUIET = logging.getLogger("one_step_off.endpoint.http")
"""aiohttp logs each malformed request with a traceback: a client could fill the disk with them."""
QUIET.setLevel(logging.CRITICAL + 1)

Handler = Callable[[web.BaseRequest], Awaitable[web.StreamResponse]]

MAX_PATH_CHARS = 100
"""The kernel's limit for the path of a local socket is 107."""

LEND_TIMEOUT_S = 10.0
FORMER_ENDS_S = 3.0
RETRY_S = 0.1
MAX_WAIT_S = 60.0
DEFAULT_WAIT_S = 30.0
MAX_TIMER_S = 1e6

THREADS = ThreadPoolExecutor(2, "endpoint")
"""For work on requests that would block the event loop: a replica that does not answer is killed.
They are few, because what they do in Python makes the event loop wait."""

Result = TypeVar("Result")


@dataclass(frozen=True)
class HttpLimits:
    """Limits of one server.

    Attributes:
        connections: at once; fewer where the process may open fewer files.
        connections_per_key: at once.
        authenticate_s: for a new connection to send the head of a request with a valid key.
        keep_alive_s: until a connection without a request is closed.
        head_bytes: of the request line, and of each header.
        body_bytes: of one request.
        all_bodies_bytes: of all requests in progress.
        bodies_bytes_per_key: of those with one key.
        body_s: for a client to send a request's body.
        write_s: for a client to take an answer.
    """

    connections: int = 4096
    connections_per_key: int = 64
    authenticate_s: float = 10.0
    keep_alive_s: float = 60.0
    head_bytes: int = 8190
    body_bytes: int = 32 * MIB
    all_bodies_bytes: int = 1024 * MIB
    bodies_bytes_per_key: int = 128 * MIB
    body_s: float = 60.0
    write_s: float = 60.0


def limits_for(episodes: int) -> HttpLimits:
    """The limits of a server with at most so many episodes at once, whose agents may have several
    connections each."""
    default = HttpLimits()
    connections = max(default.connections, CONNECTIONS_PER_EPISODE * episodes)
    return replace(default, connections=connections)


def raise_file_limit() -> int:
    """Let this process open as many files as it may ever. Returns how many."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0]


class GuardedServer(web.Server):
    """Serves `handler`; what it raises becomes an answer.

    Attributes:
        most_connections: at once.
        open: the connections.
        busy: those of them with a request in progress.
        unauthenticated: those that have sent no valid key -> when they were opened, oldest first.
        by_key: those that have, oldest first.
        bodies_bytes: of all requests in progress.
        bodies_of_key: key -> the same of the requests with it.
    """

    def __init__(self, handler: Handler, limits: HttpLimits) -> None:
        super().__init__(
            self._respond,
            handler_cancellation=True,  # a request ends when its client has gone
            keepalive_timeout=limits.keep_alive_s,
            lingering_time=0.5,
            max_line_size=limits.head_bytes,
            max_field_size=limits.head_bytes,
            auto_decompress=False,  # a small body may hold a large one
            access_log=None,
            logger=QUIET,
        )
        self.handler = handler
        self.limits = limits
        files = raise_file_limit() - RESERVED_FILES
        self.most_connections = max(1, min(limits.connections, files // FILES_PER_CONNECTION))
        self.open: set[web.RequestHandler] = set()
        share = max(1, self.most_connections // SHARE_OF_KEY)
        self.most_per_key = min(limits.connections_per_key, share)
        self.busy: set[web.RequestHandler] = set()
        self.unauthenticated: dict[web.RequestHandler, float] = {}
        self.by_key: dict[str, dict[web.RequestHandler, None]] = {}
        self._keys: dict[web.RequestHandler, str] = {}
        self.bodies_bytes = 0
        self.bodies_of_key: Counter[str] = Counter()
        self._listener: asyncio.Server | None = None
        self._sweeper: asyncio.Task | None = None

    async def listen(self, listening: socket.socket) -> None:
        """Accept connections."""
        self._listener = await self._loop.create_server(self, sock=listening, backlog=BACKLOG)
        self._sweeper = asyncio.create_task(self._close_unauthenticated())

    async def stop(self) -> None:
        """Close the port and all connections."""
        if self._listener is not None:
            self._listener.close()
        if self._sweeper is not None:
            self._sweeper.cancel()
        self.pre_shutdown()  # ends idle connections
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(2 * CLOSE_S):
                await self.shutdown(CLOSE_S)

    # --- connections ------------------------------------------------------------------------------

    def connection_made(self, handler: web.RequestHandler, transport: asyncio.Transport) -> None:
        """Called by aiohttp."""
        super().connection_made(handler, transport)
        transport.set_write_buffer_limits(0)  # a write has ended when the kernel has taken all
        if len(self.open) >= self.most_connections:
            spare = next(iter(self.unauthenticated), None) or self._idlest()
            if spare is None:
                transport.write(OVERLOADED)
                transport.close()
                return
            self._abort(spare)
        self.open.add(handler)
        self.unauthenticated[handler] = self._loop.time()

    def connection_lost(
        self, handler: web.RequestHandler, exc: BaseException | None = None
    ) -> None:
        """Called by aiohttp."""
        self._forget(handler)
        super().connection_lost(handler, exc)

    def _forget(self, handler: web.RequestHandler) -> None:
        self.open.discard(handler)
        self.unauthenticated.pop(handler, None)
        self._disown(handler)

    def _disown(self, handler: web.RequestHandler) -> None:
        key = self._keys.pop(handler, None)
        if key is not None:
            self.by_key[key].pop(handler)
            if not self.by_key[key]:
                del self.by_key[key]

    def _abort(self, handler: web.RequestHandler) -> None:
        """Close a connection at once."""
        self._forget(handler)
        if handler.transport is not None:
            handler.transport.abort()

    def _idlest(self) -> web.RequestHandler | None:
        """A connection without a request, of the key that has most connections; None: all have
        requests."""
        idle = self.open - self.busy
        own = self.by_key
        return max(idle, key=lambda one: len(own.get(self._keys.get(one, ""), ())), default=None)

    def authenticate(self, request: web.BaseRequest, key: str = "") -> None:
        """The request has a valid key: its connection is authenticated.

        Args:
            key: whose share of the connections it counts to; "": of no key.

        Raises:
            Refused: the key has too many connections, all with requests.
        """
        handler = request.protocol
        if key and self._keys.get(handler) != key:
            own = self.by_key.get(key, {})
            if len(own) >= self.most_per_key:
                idle = next((one for one in own if one not in self.busy), None)
                if idle is None:
                    message = f"{len(own)} connections have this key; close some"
                    raise Refused(
                        429, "too_many_connections", message, request.path, RETRY_SOON, close=True
                    )
                self._abort(idle)
            self._disown(handler)
            self.by_key.setdefault(key, {})[handler] = None
            self._keys[handler] = key
        self.unauthenticated.pop(handler, None)

    def end_key(self, key: str) -> None:
        """A key is valid no longer: its connections are unauthenticated until they send one."""
        for handler in list(self.by_key.get(key, ())):
            self._disown(handler)
            self.unauthenticated[handler] = self._loop.time()

    async def _close_unauthenticated(self) -> None:
        while True:
            await asyncio.sleep(SWEEP_S)
            latest = self._loop.time() - self.limits.authenticate_s
            slow = [handler for handler, opened in self.unauthenticated.items() if opened < latest]
            for handler in slow:
                self._abort(handler)

    # --- requests ---------------------------------------------------------------------------------

    async def _respond(self, request: web.BaseRequest) -> web.StreamResponse:
        """What aiohttp calls for each request."""
        self.busy.add(request.protocol)
        try:
            return await self._answer(request)
        finally:
            self.busy.discard(request.protocol)

    async def _answer(self, request: web.BaseRequest) -> web.StreamResponse:
        try:
            return await self.handler(request)
        except Refused as refused:
            response, _ = await self.send(
                request, refused.answer, refused.headers, close=refused.close
            )
            return response
        except ConnectionError:  # the client has gone
            raise
        except Exception as error:
            message = f"{type(error).__name__} in the endpoint, at {describe_error(error)}"
            log_traceback(message, format_traceback(error))
            failed = Refused(500, "endpoint_error", message, request.path, NO_RETRY)
            response, _ = await self.send(request, failed.answer, failed.headers)
            return response

    @contextlib.asynccontextmanager
    async def body(
        self, request: web.BaseRequest, most: int | None = None, key: str = ""
    ) -> AsyncIterator[bytes]:
        """The body of a request; it counts as memory in use during the block.

        Args:
            key: whose share of the memory it counts to; "": of no key.

        Raises:
            Refused: it is compressed, too large, too slow, or malformed; or those of all requests,
                or of all with this key, are too large.
        """
        pieces: list[bytes] = []
        counted = 0
        try:
            async for piece in self.body_pieces(request, most):
                pieces.append(piece)
                counted += len(piece)
                self.bodies_bytes += len(piece)
                self.bodies_of_key[key] += len(piece)
                self._check_bodies(request, key)
            yield b"".join(pieces)
        finally:
            self.bodies_bytes -= counted
            self.bodies_of_key[key] -= counted
            if not self.bodies_of_key[key]:
                del self.bodies_of_key[key]

    def _check_bodies(self, request: web.BaseRequest, key: str) -> None:
        """Raises Refused: the requests in progress are too large together."""
        message = "the requests in progress are too large together; try again"
        if key and self.bodies_of_key[key] > self.limits.bodies_bytes_per_key:
            message = f"of this episode, {message}"
            raise Refused(429, "too_many_requests", message, request.path, RETRY_SOON, close=True)
        if self.bodies_bytes > self.limits.all_bodies_bytes:
            raise Refused(503, "overloaded", message, request.path, RETRY_SOON, close=True)

    async def body_pieces(
        self, request: web.BaseRequest, most: int | None = None
    ) -> AsyncIterator[bytes]:
        """The body of a request as it comes. Raises as `body`, but for the memory."""
        most = self.limits.body_bytes if most is None else most
        self.check_body_head(request, most)
        if not request.can_read_body:
            return
        if request.headers.get("Expect", "").lower() == "100-continue":
            await self.write(request, request.writer.write(b"HTTP/1.1 100 Continue\r\n\r\n"))
            request.writer.output_size = 0
        received = 0
        deadline = self._loop.time() + self.limits.body_s
        while True:
            try:
                async with asyncio.timeout_at(deadline):
                    piece = await request.content.readany()
            except TimeoutError:
                message = f"the body did not come within {self.limits.body_s:g} s"
                raise Refused(408, "slow_body", message, request.path, NO_RETRY, True) from None
            except (web.RequestPayloadError, ValueError) as error:
                message = f"malformed body: {error}".splitlines()[0][:200]
                raise Refused(400, "malformed", message, request.path, close=True) from None
            if not piece:
                return
            received += len(piece)
            if received > most:
                raise _too_large(request, most)
            yield piece

    def check_body_head(self, request: web.BaseRequest, most: int | None = None) -> None:
        """Raises Refused: the head says that the body is compressed or too large."""
        most = self.limits.body_bytes if most is None else most
        encoding = request.headers.get("Content-Encoding", "identity").lower()
        if encoding != "identity":
            message = f"Content-Encoding: {encoding[:20]}: send the body as it is"
            raise Refused(415, "encoding", message, request.path, close=True)
        if (request.content_length or 0) > most:
            raise _too_large(request, most)

    async def send(
        self,
        request: web.BaseRequest,
        answer: Answer,
        headers: dict[str, str] | None = None,
        close: bool = False,
    ) -> tuple[web.StreamResponse, bool]:
        """Write an answer. Returns the response, and whether the client has taken all of it."""
        response = web.Response(
            status=answer.status,
            body=b"".join(answer.chunks),
            headers={"Content-Type": answer.content_type} | (headers or {}),
        )
        if close:
            response.force_close()

        async def write() -> None:
            await response.prepare(request)
            await response.write_eof()

        return response, await self.write(request, write())

    async def write(
        self, request: web.BaseRequest, writing: Awaitable[Any], seconds: float | None = None
    ) -> bool:
        """Await a write to the client.

        Args:
            seconds: that the client has to take it; None: `write_s`.

        Returns:
            Whether it was taken. A client that did not take it is disconnected.
        """
        transport = request.transport
        try:
            async with asyncio.timeout(self.limits.write_s if seconds is None else seconds):
                await writing
                await request.writer.drain()
        except (TimeoutError, ConnectionError):
            if transport is not None:
                transport.abort()
            return False
        return request.transport is not None and not request.transport.is_closing()


def json_body(body: bytes, path: str) -> Any:
    """What a body says. Raises Refused: it is no JSON."""
    try:
        return json.loads(body)
    except (ValueError, RecursionError) as error:
        message = f"the body is no JSON: {error}".splitlines()[0][:200]
        raise Refused(400, "malformed", message, path) from None


def open_listener(host: str, port: int) -> socket.socket:
    """A socket that listens. Raises OSError: this address cannot be used."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listening = socket.socket(family, socket.SOCK_STREAM)
    try:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER)
        listening.bind((host, port))
        listening.listen(BACKLOG)
        listening.setblocking(False)
    except BaseException:
        listening.close()
        raise
    return listening


def url_host(host: str) -> str:
    """A host as URLs have it: IPv6 in brackets."""
    return f"[{host}]" if ":" in host else host


def _too_large(request: web.BaseRequest, most: int) -> Refused:
    message = f"the body is larger than {most // MIB} MiB"
    return Refused(413, "too_large", message, request.path, close=True)


class InheritedSocket:
    """The gateway's port, kept open by the driver, which lends it to the gateway's process.

    So the port stays the same, and open, when that process is killed: clients that connect
    meanwhile wait for its successor, and no other program can take the port. A thread lends it to
    processes of this user.

    Attributes:
        host, port: where it listens.
        path: the local socket at which `borrow_port` gets it.
    """

    def __init__(self, host: str, port: int, preferred_port: int = 0) -> None:
        """
        Args:
            port: 0: a free one.
            preferred_port: of the previous attempt, to use instead of any free one. It is
                waited for if it is in use.

        Raises:
            ConfigError: this machine cannot listen there.
        """
        self.host = host
        self._listening = _listen(host, port, preferred_port)
        self.port = self._listening.getsockname()[1]
        # Removed after the run, even after a kill. The variable outlives an earlier run's folder.
        run_folder = os.environ.get(RUN_FOLDER_VARIABLE, "")
        parent = run_folder if os.path.isdir(run_folder) else None
        folder = tempfile.mkdtemp(prefix="ose_", dir=parent)  # only this user may enter
        if len(folder) > MAX_PATH_CHARS - len("/port"):
            os.rmdir(folder)
            folder = tempfile.mkdtemp(prefix="ose_", dir="/tmp")
        self._folder = folder
        self.path = os.path.join(folder, "port")
        self._lender = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._lender.bind(self.path)
        self._lender.listen()
        threading.Thread(target=self._lend, name="endpoint port", daemon=True).start()

    def _lend(self) -> None:
        while True:
            try:
                borrower, _ = self._lender.accept()
            except OSError:  # closed
                return
            with borrower, contextlib.suppress(OSError):
                socket.send_fds(borrower, [b"."], [self._listening.fileno()])

    def close(self) -> None:
        """Close the port."""
        with contextlib.suppress(OSError):
            self._lender.shutdown(socket.SHUT_RDWR)  # ends the thread's wait
        self._lender.close()
        self._listening.close()
        shutil.rmtree(self._folder, ignore_errors=True)


def borrow_port(path: str) -> socket.socket:
    """The listening socket of the `InheritedSocket` at this path. Raises OSError: it is closed."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as lender:
        lender.settimeout(LEND_TIMEOUT_S)
        lender.connect(path)
        _, descriptors, _, _ = socket.recv_fds(lender, 1, 1)
    if not descriptors:
        raise OSError(f"{path}: the port is closed")
    listening = socket.socket(fileno=descriptors[0])
    listening.setblocking(False)
    return listening


def _listen(host: str, port: int, preferred_port: int) -> socket.socket:
    """A socket that listens. Raises ConfigError."""
    wanted = port or preferred_port
    if wanted and wanted == preferred_port:
        # The processes of the previous attempt may not have ended yet.
        deadline = time.monotonic() + FORMER_ENDS_S
        while time.monotonic() < deadline:
            with contextlib.suppress(OSError):
                return open_listener(host, wanted)
            time.sleep(RETRY_S)
    try:
        return open_listener(host, port)
    except OSError as error:
        raise ConfigError(
            f"agent.endpoint_host={host} agent.endpoint_port={port}: {error.strerror or error}; "
            "name an address of this machine and a free port, or 0"
        ) from error


async def in_thread(function: Callable[..., Result], *arguments: object) -> Result:
    """What a function returns. It runs in one of `THREADS`, with the caller's context variables."""
    run = contextvars.copy_context().run
    return await asyncio.get_running_loop().run_in_executor(THREADS, run, function, *arguments)


def seconds_to_wait(request: web.BaseRequest) -> float:
    """`wait` of a request's query. Raises Refused: it is no number of seconds."""
    text = request.query.get("wait", str(DEFAULT_WAIT_S))
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not seconds >= 0:
        raise Refused(400, "bad_request", f"wait={text[:40]!r}: send seconds, 0 to {MAX_WAIT_S:g}")
    return min(seconds, MAX_WAIT_S)


async def happens(event: asyncio.Event, seconds: float) -> bool:
    """Whether an event is set within that time."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(min(seconds, MAX_TIMER_S)):
            await event.wait()
    return event.is_set()
