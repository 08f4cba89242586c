"""Requests that are large, many or slow: other agents are served meanwhile, and the event loop of
the replica, which answers whether it is alive, never waits for one of them."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

from agent_loop.episode import Episode
from one_step_off.config.schema import Config
from one_step_off.endpoint.http_server import MIB, HttpLimits
from one_step_off.engines.vllm.chat import conversation, requests
from one_step_off.engines.vllm.chat.conversation import ConversationRecord
from one_step_off.models import tiny_qwen
from tests.unit.endpoint.scripted_policy import ScriptedPolicy, make_serving
from tests.unit.endpoint.stand_ins import Endpoint, endpoint
from tests.unit.endpoint.test_hostile_clients import head

LIMITS = HttpLimits(connections=40, authenticate_s=0.5, keep_alive_s=2.0, body_s=0.5, write_s=1.0)
QUESTION = [{"role": "user", "content": "What is 3 * 4?"}]
LONG = "So 12 * 13. " * (16 * MIB // 12)
MAX_WAIT_S = 2.0
"""Seconds for which one request may keep the event loop from other work, on a busy machine. A
replica that does not answer for `LIVENESS_TIMEOUT_S` is killed."""


@contextlib.asynccontextmanager
async def served(limits: HttpLimits = LIMITS) -> AsyncIterator[Endpoint]:
    async with endpoint(limits=limits, replica_limits=limits) as running:
        yield running


async def until(condition: Callable[[], Any], limit_s: float = 10.0) -> None:
    async with asyncio.timeout(limit_s):
        while not condition():
            await asyncio.sleep(0.005)


async def connect(running: Endpoint) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    return await asyncio.open_connection("127.0.0.1", running.port.port)


# --- connections ----------------------------------------------------------------------------------


@pytest.mark.parametrize("ended", [False, True])
def test_an_agent_that_holds_all_connections_keeps_no_other_one_out(ended: bool) -> None:
    async def check() -> None:
        async with served() as running:
            bad, good = running.open(), running.open()
            state = f"GET /v1/episodes/{bad.key} HTTP/1.1\r\nHost: x\r\n\r\n".encode()
            held = []

            async def hold() -> None:
                with contextlib.suppress(ConnectionError):
                    reader, writer = await connect(running)
                    held.append(writer)
                    writer.write(state)
                    await reader.readline()

            for _ in range(3):
                await asyncio.gather(*(hold() for _ in range(LIMITS.connections)))
                assert (await running.post(good.key))[0] == 200
                assert len(running.gateway.server.by_key[bad.key]) <= LIMITS.connections // 4
            if ended:
                running.replicas[0].close(bad)
            for _ in range(3):
                for writer in held:
                    writer.write(state)
                assert (await running.post(good.key))[0] == 200
            for writer in held:
                writer.transport.abort()

    asyncio.run(check())


def test_connections_of_one_key_with_requests_are_bounded() -> None:
    async def check() -> None:
        async with served(HttpLimits(connections_per_key=3)) as running:
            running.engine.gate.clear()
            episode = running.open()
            asking = [asyncio.create_task(running.post(episode.key)) for _ in range(3)]
            await until(lambda: running.engine.turns == 3)
            status, answer = await running.post(episode.key)
            assert (status, answer["error"]["type"]) == (429, "too_many_connections")
            running.engine.gate.set()
            assert {status for status, _ in await asyncio.gather(*asking)} == {200}
            assert (await running.post(episode.key))[0] == 200

    asyncio.run(check())


def test_what_an_agent_holds_is_cut_off_when_its_episode_ends() -> None:
    async def check() -> None:
        async with served(HttpLimits(authenticate_s=1.0)) as running:
            running.engine.gate.clear()
            server, episode, other = running.replicas[0], running.open(), running.open()
            waiting = asyncio.create_task(running.post(episode.key))
            state = f"GET /v1/episodes/{episode.key} HTTP/1.1\r\nHost: x\r\n\r\n".encode()
            idle = [await connect(running) for _ in range(5)]
            for reader, writer in idle:
                writer.write(state)
                assert b"200" in await reader.readline()
            await until(lambda: running.engine.turns == 1)
            server.close(episode)
            assert (await waiting)[0] == 410
            for reader, _ in idle:  # the gateway learns of it by the first answer
                async with asyncio.timeout(5):
                    await reader.read()
            assert episode.key not in running.gateway.server.by_key
            body = b"x" * 1000
            reader, writer = await connect(running)
            writer.write(head(episode.key, 10**6) + body)  # an ended key sends no body
            async with asyncio.timeout(5):
                assert (await reader.read()).startswith(b"HTTP/1.1 410")
            running.engine.gate.set()
            assert (await running.post(other.key))[0] == 200

    asyncio.run(check())


def test_a_reader_that_takes_a_little_at_a_time_has_one_time_limit() -> None:
    async def check() -> None:
        async with served() as running:
            episode = running.open()
            body = json.dumps({"messages": [], "answer_chars": 60_000_000}).encode()
            reader, writer = await connect(running)
            writer.write(head(episode.key, len(body)) + body)
            begin = time.monotonic()
            with contextlib.suppress(ConnectionError):
                async with asyncio.timeout(20):
                    while await reader.read(100_000):
                        await asyncio.sleep(0.1)
            assert time.monotonic() - begin < 10
            assert episode.turns == 0
            writer.transport.abort()

    asyncio.run(check())


def test_a_later_head_that_comes_byte_by_byte_is_closed() -> None:
    async def check() -> None:
        async with served() as running:
            episode = running.open()
            reader, writer = await connect(running)
            body = b'{"messages": []}'
            writer.write(head(episode.key, len(body)) + body)
            assert b"200" in await reader.readline()
            begin = time.monotonic()
            with contextlib.suppress(ConnectionError, TimeoutError):
                while time.monotonic() - begin < 10 and running.gateway.server.by_key:
                    writer.write(b"P")
                    await writer.drain()
                    await asyncio.sleep(0.1)
            assert time.monotonic() - begin < 9
            writer.transport.abort()

    asyncio.run(check())


@pytest.mark.parametrize("chars", [300_000, 900_000, 20_000_000])
def test_a_client_that_leaves_in_mid_answer_has_not_received_it(chars: int) -> None:
    async def check() -> None:
        async with served(HttpLimits(write_s=1.0)) as running:
            episode = running.open()
            answers = running.replicas[0].episodes.of(episode).answers
            content = {"messages": [], "answer_chars": chars}
            body = json.dumps(content).encode()
            connection = socket.socket()
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            connection.connect(("127.0.0.1", running.port.port))
            reader, writer = await asyncio.open_connection(sock=connection)
            writer.write(head(episode.key, len(body)) + body)
            assert await reader.readline()
            await asyncio.sleep(0.2)
            writer.transport.abort()
            await until(lambda: episode.turns_done and not answers.busy)
            await until(lambda: episode.turns == 0)
            again = await running.post(episode.key, content)
            assert again[1]["turn"] == 1, "nothing is sampled twice"
            assert episode.turns == 1

    asyncio.run(check())


def test_one_agent_does_not_fill_the_memory_for_requests() -> None:
    async def check() -> None:
        limits = HttpLimits(all_bodies_bytes=400_000, bodies_bytes_per_key=200_000)
        async with served(limits) as running:
            running.engine.gate.clear()
            bad, good = running.open(), running.open()
            content = json.dumps({"messages": [], "long": "x" * 60_000}).encode()
            asking = [asyncio.create_task(running.post(bad.key, content)) for _ in range(6)]
            await until(lambda: sum(task.done() for task in asking) == 3)
            last = asyncio.create_task(running.post(good.key, content))
            await until(lambda: running.engine.turns == 4)
            running.engine.gate.set()
            statuses = [status for status, _ in await asyncio.gather(*asking)]
            assert sorted(statuses) == [200, 200, 200, 429, 429, 429]
            assert (await last)[0] == 200
            assert not running.gateway.server.bodies_of_key

    asyncio.run(check())


@pytest.mark.parametrize("count", ["9" * 5000, "-1", "x", ""])
def test_an_odd_count_of_retries_is_no_error(count: str) -> None:
    async def check() -> None:
        async with served() as running:
            episode = running.open()
            answer = await running.post(episode.key, x_stainless_retry_count=count)
            assert answer[0] == 200

    asyncio.run(check())


# --- what a request holds -------------------------------------------------------------------------


@pytest.fixture(scope="module")
def serving(tmp_path_factory: pytest.TempPathFactory) -> Any:
    cfg = Config()
    cfg.model.dtype = "float32"
    cfg.model.path = tiny_qwen.build("qwen2", str(tmp_path_factory.mktemp("model")))
    return make_serving(cfg)


async def ask(serving: Any, episode: Episode, path: str, content: Any) -> tuple[int, Any]:
    body = content if isinstance(content, bytes) else json.dumps(content).encode()
    answer = await serving.answer(episode, path, body)
    for turn in answer.turns:
        turn.delivered = True
    return answer.status, json.loads(answer.chunks[0])


async def longest_wait(work: Any) -> tuple[float, Any]:
    """The longest time for which other work of the event loop waited, and what came out."""
    waits = []

    async def beat() -> None:
        while True:
            begin = time.monotonic()
            await asyncio.sleep(0.01)
            waits.append(time.monotonic() - begin)

    beating = asyncio.create_task(beat())
    await asyncio.sleep(0.05)
    result = await work
    await asyncio.sleep(0.05)
    beating.cancel()
    return max(waits), result


def long_requests() -> dict[str, tuple[str, Any]]:
    def chat(*messages: Any, **more: Any) -> tuple[str, Any]:
        return requests.CHAT, {"model": "x", "messages": [*QUESTION, *messages]} | more

    user = {"role": "user", "content": LONG}
    said = {"role": "assistant", "content": " a"}
    function = {"name": "f", "description": LONG, "parameters": {"type": "object"}}
    message = {"model": "x", "max_tokens": 9}
    return {
        "rendered": chat(user),
        "spliced": chat(said, user),
        "said": chat({"role": "assistant", "content": LONG}, QUESTION[0]),
        "parts": chat(*[{"role": "user", "content": [{"type": "text", "text": "a"}] * 10**5}] * 5),
        "messages": chat(*[{"role": "user", "content": ""}] * 400_000),
        "anthropic": (requests.MESSAGES, message | {"messages": [user], "system": LONG[: 8 * MIB]}),
        "count": (requests.COUNT_TOKENS, {"model": "x", "messages": [user]}),
        "response": (requests.RESPONSES, {"model": "x", "input": LONG}),
        "text": (requests.COMPLETIONS, {"model": "x", "prompt": LONG}),
        "spliced text": (requests.COMPLETIONS, {"model": "x", "prompt": "q a" + LONG}),
        "ids": (requests.COMPLETIONS, {"model": "x", "prompt": [5] * 3_000_000}),
        "tokens": (requests.GENERATE, {"token_ids": [5] * 3_000_000, "sampling_params": {}}),
        "bias": chat(logit_bias={str(n): 1 for n in range(300_000)}),
        "stop": chat(stop=[LONG]),
        "lists": (requests.CHAT, b'{"messages": [' + b"[]," * 3_000_000 + b"[]]}"),
        "nested": (requests.CHAT, b'{"messages": ' + b"[" * 3_000_000),
        "template": chat(chat_template_kwargs={"a": LONG}),
        "tool": chat(tools=[{"type": "function", "function": function}]),
    }


SERVED = ("tool", "template", "count")
"""Long requests whose length the tiny model's template leaves out, or that need no room."""

NO_ROOM = ("rendered", "spliced", "said", "anthropic", "response", "text", "spliced text")
"""Contexts that leave no room for an answer: it is empty and was cut off at its length."""


@pytest.mark.parametrize("name", long_requests())
def test_no_request_blocks_the_event_loop(serving: Any, name: str) -> None:
    path, content = long_requests()[name]
    body = content if isinstance(content, bytes) else json.dumps(content).encode()

    async def check() -> None:
        tokenizer = serving.chat.renderer.tokenizer
        episode = ScriptedPolicy(tokenizer, texts=[" a<|im_end|>"] * 3).episode()
        if name == "spliced":
            first = {"model": "x", "messages": QUESTION}
            assert (await ask(serving, episode, path, first))[0] == 200
        if name == "spliced text":
            assert (await ask(serving, episode, path, {"model": "x", "prompt": "q"}))[0] == 200
        begin = time.monotonic()
        wait, (status, answer) = await longest_wait(ask(serving, episode, path, body))
        assert wait < MAX_WAIT_S
        assert time.monotonic() - begin < 20
        assert status == (200 if name in SERVED + NO_ROOM else 400), answer
        assert episode.limit_reached == ("length" if name in NO_ROOM else "")
        shorter = {"model": "x", "messages": QUESTION}
        assert (await ask(serving, episode, requests.CHAT, shorter))[0] == 200

    asyncio.run(check())


def test_the_long_requests_of_one_episode_do_not_delay_those_of_another(serving: Any) -> None:
    async def check() -> None:
        tokenizer = serving.chat.renderer.tokenizer
        bad = ScriptedPolicy(tokenizer, texts=[" a<|im_end|>"] * 50).episode()
        good = ScriptedPolicy(tokenizer, texts=[" a<|im_end|>"] * 50).episode()
        path, content = long_requests()["messages"]
        body = json.dumps(content).encode()
        asking = [asyncio.create_task(ask(serving, bad, path, body)) for _ in range(20)]
        await asyncio.sleep(0.05)
        shorter = {"model": "x", "messages": QUESTION}
        assert (await ask(serving, good, requests.CHAT, shorter))[0] == 200
        assert sum(task.done() for task in asking) < len(asking)
        assert {status for status, _ in await asyncio.gather(*asking)} == {400}

    asyncio.run(check())


def test_a_long_prompt_is_hashed_once_however_many_turns_are_known(monkeypatch: Any) -> None:
    hashed = []
    encoded = conversation._encoded
    monkeypatch.setattr(
        conversation, "_encoded", lambda text: hashed.append(len(text)) or encoded(text)
    )
    record = ConversationRecord()
    turns: list[Any] = [object() for _ in range(300)]
    for number, turn in enumerate(turns):
        record.add_text("x" * 1000 * number, "y", turn)
    prompt = "x" * 1000 * 250 + "y and more"
    hashed.clear()
    assert record.find_text(prompt) == (turns[250], "y", " and more")
    assert sum(hashed) <= len(prompt)


def test_old_responses_go_where_they_are_too_large_together(monkeypatch: Any) -> None:
    monkeypatch.setattr(conversation, "MAX_RESPONSE_BYTES", 1000)
    record = ConversationRecord()
    for number in range(20):
        record.add_response(str(number), [number], 300)
    assert list(record.responses) == ["17", "18", "19"]
    record.add_response("large", ["large"], 5000)
    assert list(record.responses) == ["large"]


def test_settings_of_the_chat_template_take_bounded_memory(serving: Any) -> None:
    async def check() -> None:
        tokenizer = serving.chat.renderer.tokenizer
        for number in range(70):
            episode = ScriptedPolicy(tokenizer, texts=[" a<|im_end|>"] * 2).episode()
            own = {"model": "x", "chat_template_kwargs": {"number": number}}
            said = {"role": "assistant", "content": " a"}
            for messages in (QUESTION, [*QUESTION, said, *QUESTION]):
                content = own | {"messages": messages}
                assert (await ask(serving, episode, requests.CHAT, content))[0] == 200
        encoder = serving.chat.online_renderer.renderer._encoder
        assert 0 < encoder.frame.cache_info().currsize <= 64

    asyncio.run(check())
