"""What unauthenticated and hostile agents may try: nothing is let in, nothing hangs, and agents are
served meanwhile."""

from __future__ import annotations

import asyncio
import contextlib
import json
import resource
import time
from collections.abc import AsyncIterator

import psutil
import pytest

from one_step_off.endpoint.http_server import MIB, HttpLimits
from tests.unit.endpoint.stand_ins import CHAT, Endpoint, endpoint

SHORT = HttpLimits(
    connections=40,
    authenticate_s=0.5,
    keep_alive_s=5.0,
    body_bytes=4 * MIB,
    all_bodies_bytes=16 * MIB,
    body_s=0.5,
    write_s=0.5,
)


@contextlib.asynccontextmanager
async def hostile_endpoint(limits: HttpLimits = SHORT) -> AsyncIterator[Endpoint]:
    async with endpoint(limits=limits, replica_limits=limits) as running:
        yield running


def head(key: str, length: int | str, *lines: str, path: str = CHAT) -> bytes:
    """The head of a request."""
    own = [f"POST {path} HTTP/1.1", "Host: x", f"Authorization: Bearer {key}", *lines]
    if length != "":
        own.append(f"Content-Length: {length}")
    return "\r\n".join([*own, "", ""]).encode()


async def raw(running: Endpoint, data: bytes, limit_s: float = 5.0) -> bytes:
    """All that comes back, until the server closes the connection."""
    reader, writer = await asyncio.open_connection("127.0.0.1", running.port.port)
    try:
        async with asyncio.timeout(limit_s):
            with contextlib.suppress(ConnectionError):
                writer.write(data)
                await writer.drain()
                return await reader.read()
        return b""
    finally:
        writer.transport.abort()


async def assert_served(running: Endpoint) -> None:
    """An agent is served."""
    assert (await running.post(running.open().key))[0] == 200


@pytest.mark.parametrize(
    "data",
    [
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + b"\x00" * 100,  # TLS
        b"GET\r\n\r\n",
        b"POST /v1/chat/completions HTTP/9.9\r\n\r\n",
        b"\r\n" * 10 + b"nonsense\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: x\r\nA: " + b"a" * 100_000 + b"\r\n\r\n",
        b"GET /" + b"a" * 100_000 + b" HTTP/1.1\r\nHost: x\r\n\r\n",
        b"GET / HTTP/1.1\r\n" + b"".join(b"H%d: x\r\n" % i for i in range(5000)) + b"\r\n",
        b"GET / HTTP/1.1\r\nHost: x\r\n bad folding: 1\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: x\r\nA\x00B: 1\r\n\r\n",
    ],
    ids=["tls", "short", "version", "noise", "header", "line", "headers", "folding", "nul"],
)
def test_malformed_http_is_refused_and_its_connection_closed(data: bytes):
    async def check() -> None:
        async with hostile_endpoint() as running:
            answer = await raw(running, data)
            assert b" 200 " not in answer.partition(b"\r\n")[0]
            assert not answer or answer.startswith((b"HTTP/1.1 4", b"HTTP/1.0 4")), answer[:100]
            await assert_served(running)

    asyncio.run(check())


@pytest.mark.parametrize(
    "lines",
    [
        ("Content-Length: 2", "Transfer-Encoding: chunked"),
        ("Content-Length: 2", "Content-Length: 60"),
        ("Content-Length: +2",),
        ("Transfer-Encoding: chunked, identity",),
        ("Transfer-Encoding: xchunked",),
        ("Transfer-Encoding : chunked",),
    ],
)
def test_no_request_is_smuggled_behind_another_one(lines: tuple[str, ...]):
    """Two lengths, or an encoding that one end reads and the other does not: the second request is
    in the body of the first."""

    async def check() -> None:
        async with hostile_endpoint() as running:
            mine = running.open()
            other = running.open()
            smuggled = head(other.key, 2) + b"{}"
            body = b"0\r\n\r\n" + smuggled
            answer = await raw(running, head(mine.key, "", *lines) + body)
            assert answer.startswith((b"HTTP/1.1 400", b"HTTP/1.0 400")), answer[:200]
            assert (mine.turns, other.turns) == (0, 0)
            await assert_served(running)

    asyncio.run(check())


def test_requests_in_a_row_on_one_connection_are_answered_in_order():
    async def check() -> None:
        async with hostile_endpoint() as running:
            episode = running.open()
            body = b'{"messages": []}'
            data = (head(episode.key, len(body)) + body) * 3
            data += head(episode.key, 2, "Connection: close") + b"{}"
            answer = await raw(running, data)
            assert [answer.count(b'{"turn": %d' % turn) for turn in (1, 2, 3, 4)] == [1, 1, 1, 1]

    asyncio.run(check())


@pytest.mark.parametrize("chunked", [False, True])
@pytest.mark.parametrize("path", [CHAT, "/v1/episodes/KEY/reward"])
def test_a_body_without_end_is_refused(path: str, chunked: bool):
    async def check() -> None:
        async with hostile_endpoint() as running:
            episode = running.open()
            path_of_key = path.replace("KEY", episode.key)
            if chunked:
                data = head(episode.key, "", "Transfer-Encoding: chunked", path=path_of_key)
                data += (b"10000\r\n" + b"x" * 0x10000 + b"\r\n") * 100  # of no end
            else:
                data = head(episode.key, 10**12, path=path_of_key) + b"x" * MIB
            answer = await raw(running, data)
            status = answer.split(b" ")[1]
            assert status == b"413" or (chunked and answer == b""), answer[:200]
            assert running.gateway.server.bodies_bytes == 0
            assert running.replicas[0]._server.bodies_bytes == 0
            assert episode.turns_begun == 0
            await assert_served(running)

    asyncio.run(check())


def test_a_body_may_have_several_megabytes():
    async def check() -> None:
        async with hostile_endpoint() as running:
            episode = running.open()
            for size in (60_000, 70_000, 3_000_000):
                content = json.dumps({"messages": [], "long": "x" * size}).encode()
                assert (await running.post(episode.key, content))[0] == 200
                assert (await running.post(episode.key, content, Expect="100-continue"))[0] == 200

            async def pieces() -> AsyncIterator[bytes]:
                for start in range(0, len(content), 100_000):
                    yield content[start : start + 100_000]

            headers = {"x-api-key": episode.key}
            url = running.url + CHAT
            async with running.client.post(url, data=pieces(), headers=headers) as answer:
                assert answer.status == 200

    asyncio.run(check())


def test_bodies_of_all_requests_together_are_bounded():
    async def check() -> None:
        limits = HttpLimits(all_bodies_bytes=200_000, body_bytes=MIB, body_s=5.0)
        async with hostile_endpoint(limits) as running:
            running.engine.gate.clear()
            content = json.dumps({"messages": [], "long": "x" * 60_000}).encode()
            asking = [asyncio.create_task(running.post(running.open().key, content))]
            for _ in range(6):
                asking.append(asyncio.create_task(running.post(running.open().key, content)))
            async with asyncio.timeout(30):
                while sum(task.done() for task in asking) < 4:
                    await asyncio.sleep(0.01)
            await asyncio.sleep(0.1)  # a fifth answer would be one too many
            running.engine.gate.set()
            statuses = [status for status, _ in await asyncio.gather(*asking)]
            assert sorted(set(statuses)) == [200, 503]
            assert statuses.count(200) == 3
            assert running.gateway.server.bodies_bytes == 0
            await assert_served(running)

    asyncio.run(check())


def test_a_compressed_body_is_refused():
    async def check() -> None:
        async with hostile_endpoint() as running:
            status, _ = await running.post(running.open().key, b"x" * 100, Content_Encoding="gzip")
            assert status == 415

    asyncio.run(check())


@pytest.mark.parametrize("sent", ["nothing", "half a head", "half a body", "no key"])
def test_slow_clients_are_closed(sent: str):
    async def check() -> None:
        async with hostile_endpoint() as running:
            episode = running.open()
            data = {
                "nothing": b"",
                "half a head": head(episode.key, 10)[:-4],
                "half a body": head(episode.key, 10) + b"12345",
                "no key": head("", 10) + b"12345",
            }[sent]
            begin = time.monotonic()
            answer = await raw(running, data, limit_s=5.0)
            assert time.monotonic() - begin < 4.0
            expected = {"half a body": b"HTTP/1.1 408", "no key": b"HTTP/1.1 401"}.get(sent, b"")
            assert answer.startswith(expected) and bool(answer) == bool(expected), answer[:100]
            assert episode.turns_begun == 0
            await assert_served(running)

    asyncio.run(check())


def test_a_head_that_comes_byte_by_byte_is_closed():
    async def check() -> None:
        async with hostile_endpoint() as running:
            reader, writer = await asyncio.open_connection("127.0.0.1", running.port.port)
            with contextlib.suppress(ConnectionError):
                async with asyncio.timeout(5.0):
                    for byte in head(running.open().key, 2):
                        writer.write(bytes([byte]))
                        await writer.drain()
                        await asyncio.sleep(0.05)
                        if reader.at_eof():
                            break
                    assert await reader.read() == b""
            writer.transport.abort()

    asyncio.run(check())


def test_a_client_that_does_not_read_holds_neither_the_episode_nor_memory():
    async def check() -> None:
        async with hostile_endpoint() as running:
            episode = running.open()
            body = json.dumps({"messages": [], "answer_chars": 30_000_000}).encode()
            reader, writer = await asyncio.open_connection(
                "127.0.0.1", running.port.port, limit=1000
            )
            writer.write(head(episode.key, len(body)) + body)
            async with asyncio.timeout(5.0):
                while not episode.turns_done:
                    await asyncio.sleep(0.01)
                while running.gateway.server.open:
                    await asyncio.sleep(0.01)
            own = running.replicas[0].episodes.of(episode)
            async with asyncio.timeout(5.0):
                while own.answers.busy:
                    await asyncio.sleep(0.01)
            assert episode.turns == 0, "no client has received it"
            writer.transport.abort()
            await assert_served(running)

    asyncio.run(check())


def test_unauthenticated_clients_cannot_keep_agents_out():
    """More connections than the server takes, all of which say nothing."""

    async def check() -> None:
        async with hostile_endpoint() as running:
            episode = running.open()
            assert (await running.post(episode.key))[0] == 200
            unauthenticated = []
            for _ in range(5):
                opened = [
                    asyncio.open_connection("127.0.0.1", running.port.port)
                    for _ in range(SHORT.connections)
                ]
                unauthenticated += await asyncio.gather(*opened, return_exceptions=True)
                assert (await running.post(episode.key))[0] == 200
                assert len(running.gateway.server.open) <= SHORT.connections
            async with asyncio.timeout(5.0):
                while len(running.gateway.server.open) > 1:
                    await asyncio.sleep(0.05)  # all unauthenticated are closed in time
            for _, writer in unauthenticated:
                writer.transport.abort()

    asyncio.run(check())


def test_agents_over_the_limit_of_connections_learn_that_at_once():
    async def check() -> None:
        limits = HttpLimits(connections=3)
        async with hostile_endpoint(limits) as running:
            running.engine.gate.clear()
            asking = [asyncio.create_task(running.post(running.open().key)) for _ in range(3)]
            while running.engine.turns < 3:
                await asyncio.sleep(0.01)
            answer = await raw(running, head(running.open().key, 2) + b"{}")
            assert answer.startswith(b"HTTP/1.1 503"), answer
            assert b"Retry-After: 1" in answer
            running.engine.gate.set()
            assert {status for status, _ in await asyncio.gather(*asking)} == {200}

    asyncio.run(check())


@pytest.mark.parametrize(
    ("flood", "most"),
    [
        (2000, 200),
        pytest.param(10_000, 1000, marks=[pytest.mark.slow, pytest.mark.ci]),
    ],
)
def test_thousands_of_connections(flood: int, most: int):
    """Agents are served all the time, and the server has no more of them than its limit."""
    _, most_files = resource.getrlimit(resource.RLIMIT_NOFILE)
    if most_files < flood + 3 * most:
        pytest.skip(f"this process may open {most_files} files")

    async def check() -> None:
        limits = HttpLimits(connections=most, authenticate_s=60.0)
        async with hostile_endpoint(limits) as running:
            episode = running.open()
            writers = []
            for _ in range(flood // 500):
                opening = [
                    asyncio.open_connection("127.0.0.1", running.port.port) for _ in range(500)
                ]
                opened = await asyncio.gather(*opening, return_exceptions=True)
                writers += [pair[1] for pair in opened if isinstance(pair, tuple)]
                assert (await running.post(episode.key))[0] == 200
                assert len(running.gateway.server.open) <= most
            assert len(writers) > 0.9 * flood
            for writer in writers:
                writer.transport.abort()

    asyncio.run(check())


def test_floods_of_bad_requests_leave_no_memory_behind():
    async def check() -> None:
        async with hostile_endpoint(HttpLimits()) as running:
            process = psutil.Process()

            async def flood(count: int) -> None:
                for _ in range(count // 50):
                    bad = [running.post(f"sk-{i}", b"x" * 1000) for i in range(50)]
                    assert {status for status, _ in await asyncio.gather(*bad)} == {401}

            await flood(300)
            before = process.memory_info().rss
            await flood(700)
            assert process.memory_info().rss - before < 10 * MIB
            await assert_served(running)

    asyncio.run(check())
