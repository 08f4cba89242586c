"""A client that repeats a request gets the answer that was made for it; one that asks again gets a
new one. Long waits keep streams alive."""

from __future__ import annotations

import asyncio
import json

import aiohttp
import pytest

from one_step_off.endpoint import replica_server
from one_step_off.endpoint.episodes import MAX_CACHED, Attempt, CachedAnswer, IdempotencyCache
from one_step_off.endpoint.http_messages import Answer, json_answer
from tests.unit.endpoint.stand_ins import CHAT, Endpoint, endpoint

RETRY = {"x_stainless_retry_count": "1"}


async def give_up(running: Endpoint, key: str, content: dict) -> None:
    """Send a request, and go away before its answer comes."""
    running.engine.gate.clear()
    turns = running.engine.turns
    asking = asyncio.create_task(running.post(key, content))
    async with asyncio.timeout(5):
        while running.engine.turns == turns:
            await asyncio.sleep(0.002)
    asking.cancel()
    await asyncio.gather(asking, return_exceptions=True)
    asked = [server.episodes._open.get(key) for server in running.replicas]
    (own,) = [record for record in asked if record]
    async with asyncio.timeout(5):  # until the server has seen that the client has gone
        while any(answer.clients for answer in own.answers._answers):
            await asyncio.sleep(0.002)


def test_the_same_request_again_is_a_new_turn():
    async def check() -> None:
        async with endpoint() as running:
            episode = running.open()
            answers = [await running.post(episode.key) for _ in range(3)]
            assert [answer["turn"] for _, answer in answers] == [1, 2, 3]
            assert episode.turns == 3

    asyncio.run(check())


def test_a_retry_gets_the_answer_of_the_first_request():
    async def check() -> None:
        async with endpoint() as running:
            episode = running.open()
            assert (await running.post(episode.key))[1]["turn"] == 1
            assert (await running.post(episode.key, **RETRY))[1]["turn"] == 1
            other = {"messages": ["other"]}
            assert (await running.post(episode.key, other, **RETRY))[1]["turn"] == 2
            named = {"Idempotency_Key": "a"}
            assert (await running.post(episode.key, **named))[1]["turn"] == 3
            assert (await running.post(episode.key, **named))[1]["turn"] == 3
            assert (await running.post(episode.key, Idempotency_Key="b"))[1]["turn"] == 4
            assert running.engine.turns == episode.turns == 4

    asyncio.run(check())


@pytest.mark.parametrize("ends_while_away", [False, True])
def test_a_turn_goes_on_when_its_client_has_gone_and_is_given_to_it_later(ends_while_away: bool):
    async def check() -> None:
        async with endpoint() as running:
            episode = running.open()
            await give_up(running, episode.key, {"messages": []})
            if ends_while_away:
                running.engine.gate.set()
                async with asyncio.timeout(5):
                    while not episode.turns_done:
                        await asyncio.sleep(0.002)
                assert episode.turns == 0, "no client has seen it"
                again = await running.post(episode.key)
            else:
                asking = asyncio.create_task(running.post(episode.key))
                await asyncio.sleep(0.05)
                running.engine.gate.set()
                again = await asking
            assert again == (200, {"turn": 1, "padding": ""})
            assert (running.engine.turns, episode.turns) == (1, 1)
            assert (await running.post(episode.key))[1]["turn"] == 2

    asyncio.run(check())


def test_an_answer_that_nobody_took_is_not_trained_on():
    async def check() -> None:
        async with endpoint() as running:
            episode = running.open()
            await give_up(running, episode.key, {"messages": []})
            running.engine.gate.set()
            assert (await running.post(episode.key, {"messages": ["x"]}))[1]["turn"] == 2
            assert [turn.delivered for turn in episode.turns_done] == [False, True]

    asyncio.run(check())


def test_two_clients_that_ask_the_same_at_once_get_two_turns():
    async def check() -> None:
        async with endpoint() as running:
            episode = running.open()
            running.engine.delay = 0.05
            answers = await asyncio.gather(*(running.post(episode.key) for _ in range(4)))
            assert sorted(answer["turn"] for _, answer in answers) == [1, 2, 3, 4]

    asyncio.run(check())


def test_few_answers_are_kept():
    async def check() -> None:
        async with endpoint() as running:
            episode = running.open()
            for number in range(30):
                await running.post(episode.key, {"messages": [], "number": number})
            assert len(running.replicas[0].episodes.of(episode).answers._answers) == MAX_CACHED
            old = {"messages": [], "number": 0}
            assert (await running.post(episode.key, old, **RETRY))[1]["turn"] == 31

    asyncio.run(check())


def test_large_answers_are_kept_until_there_are_too_many_of_them():
    async def check() -> None:
        async with endpoint() as running:
            episode = running.open()
            for number in range(5):
                content = {"messages": [], "answer_chars": 200_000, "number": number}
                await running.post(episode.key, content)
            kept = running.replicas[0].episodes.of(episode).answers._answers
            assert [answer.size > 200_000 for answer in kept] == [True, True]
            assert (await running.post(episode.key, content, **RETRY))[1]["turn"] == 5

    asyncio.run(check())


def test_an_error_is_not_kept():
    async def check() -> None:
        async with endpoint() as running:
            episode = running.open()
            bad = b'{"messages": 5}'
            assert (await running.post(episode.key, bad))[0] == 500
            assert (await running.post(episode.key, bad, **RETRY))[0] == 500
            assert running.servings[0].requests == 2

    asyncio.run(check())


def test_too_many_requests_of_one_episode_are_refused():
    async def check() -> None:
        async with endpoint() as running:
            episode = running.open()
            running.engine.gate.clear()
            most = replica_server.MAX_AT_ONCE
            asking = [asyncio.create_task(running.post(episode.key)) for _ in range(most)]
            async with asyncio.timeout(5):
                while running.engine.turns < most:
                    await asyncio.sleep(0.002)
            status, answer = await running.post(episode.key)
            assert (status, answer["error"]["type"]) == (429, "too_many_requests")
            assert (await running.post(running.open().key, b"{"))[0] == 400, "another episode's"
            running.engine.gate.set()
            assert {status for status, _ in await asyncio.gather(*asking)} == {200}

    asyncio.run(check())


async def answer_as_sdk(running: Endpoint, key: str, content: dict) -> int:
    """The turn that a client receives for a request that it repeats after 429, as SDKs do."""
    for retries in range(100):
        headers = {"x_stainless_retry_count": str(retries)}
        status, answer = await running.post(key, content, **headers)
        if status == 200:
            return answer["turn"]
        assert status == 429
        await asyncio.sleep(0.02)
    raise AssertionError("refused every time")


@pytest.mark.parametrize("delay", [0.03, 0.2])  # the retries come after the answers, or before
def test_the_best_of_forty_equal_requests_at_once_is_of_forty_answers(delay: float):
    """Some are refused at first. A refused one has no answer, so its retry gets one of its own."""

    async def check() -> None:
        async with endpoint() as running:
            episode = running.open()
            running.engine.delay = delay
            content = {"messages": []}
            asking = [answer_as_sdk(running, episode.key, content) for _ in range(40)]
            assert sorted(await asyncio.gather(*asking)) == list(range(1, 41))
            assert episode.turns == 40
            again = {"x_stainless_retry_count": "9"}  # the last one, whose answer was lost
            assert (await running.post(episode.key, content, **again))[1]["turn"] == 40
            assert episode.turns == 40

    asyncio.run(check())


def test_a_lost_answer_is_found_beside_retries_of_refused_requests():
    async def made(turn: int) -> Answer:
        return json_answer(200, turn)

    async def check() -> None:
        answers = IdempotencyCache()

        def add(attempt: Attempt) -> CachedAnswer:
            kept = CachedAnswer(attempt.digest, asyncio.create_task(made(0)), 0, True)
            kept.retries = attempt.retries
            answers.add(kept)
            return kept

        first, retry, second_retry = (Attempt(b"a", retries) for retries in range(3))
        lost = add(first)
        answers.refuse(first)
        await asyncio.sleep(0)
        assert answers.take(retry) is None, "the refused one's"
        add(retry)
        await asyncio.sleep(0)
        assert answers.take(retry) is lost
        assert answers.take(second_retry) in answers._answers, "lost again"
        answers.refuse(Attempt(b"b"))
        assert answers.take(Attempt(b"b", 1)) is None
        other = add(Attempt(b"b"))
        await asyncio.sleep(0)
        assert answers.take(Attempt(b"b", 1)) is other, "each refusal counts for one retry"

    asyncio.run(check())


def test_two_lost_answers_of_equal_requests_go_to_two_retries():
    async def check() -> None:
        async with endpoint() as running:
            episode = running.open()
            for _ in range(2):
                await running.post(episode.key)
            retries = [await running.post(episode.key, **RETRY) for _ in range(2)]
            assert sorted(answer["turn"] for _, answer in retries) == [1, 2]
            assert episode.turns == 2

    asyncio.run(check())


def test_closing_an_episode_refuses_the_requests_in_progress():
    async def check() -> None:
        async with endpoint() as running:
            episode = running.open()
            running.engine.gate.clear()
            asking = asyncio.create_task(running.post(episode.key))
            while not running.engine.turns:
                await asyncio.sleep(0.002)
            running.replicas[0].close(episode, "time")
            status, answer = await asking
            assert (status, answer["error"]["code"]) == (410, "time")
            assert episode.turns_done == []

    asyncio.run(check())


async def streamed(running: Endpoint, key: str, path: str = CHAT) -> tuple[int, str]:
    content = json.dumps({"messages": [], "stream": True}).encode()
    headers = {"Authorization": f"Bearer {key}"}
    async with running.client.post(running.url + path, data=content, headers=headers) as answer:
        assert answer.content_type == "text/event-stream"
        return answer.status, await answer.text()


def test_a_stream_is_kept_alive_while_its_turn_is_made(monkeypatch):
    monkeypatch.setattr(replica_server, "KEEP_ALIVE_S", 0.05)

    async def check() -> None:
        async with endpoint() as running:
            episode = running.open()
            running.engine.delay = 0.3
            status, text = await streamed(running, episode.key)
            assert status == 200
            assert 2 <= text.count(": keep-alive\n\n") <= 6
            events = [line for line in text.split("\n\n") if not line.startswith(":")]
            assert json.loads(events[0].removeprefix("data: "))["turn"] == 1
            assert events[1:] == ["data: [DONE]", ""]
            assert episode.turns == 1

    asyncio.run(check())


@pytest.mark.parametrize(
    ("path", "begin"),
    [
        (CHAT, 'data: {"error": {"message'),
        ("/v1/responses", 'event: error\ndata: {"error"'),
        ("/v1/messages", 'event: error\ndata: {"type": "error", "error"'),
    ],
)
def test_an_error_after_the_first_byte_of_a_stream_is_an_event(monkeypatch, path: str, begin: str):
    monkeypatch.setattr(replica_server, "KEEP_ALIVE_S", 0.05)

    async def check() -> None:
        async with endpoint() as running:
            episode = running.open()
            running.engine.delay = 0.1
            running.engine.error = RuntimeError("dead")
            status, text = await streamed(running, episode.key, path)
            last = text.split("\n\n")[-2]
            assert (status, last.startswith(begin)) == (200, True), text
            assert "engine_failed" in last

    asyncio.run(check())


def test_an_answer_is_repeated_to_a_client_that_took_half_of_it():
    async def check() -> None:
        async with endpoint() as running:
            episode = running.open()
            content = {"messages": [], "answer_chars": 20_000_000}
            reader, writer = await asyncio.open_connection(
                "127.0.0.1", running.port.port, limit=1000
            )
            body = json.dumps(content).encode()
            head = f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nx-api-key: {episode.key}\r\n"
            writer.write(head.encode() + f"Content-Length: {len(body)}\r\n\r\n".encode() + body)
            assert b"200" in await reader.readline()
            assert episode.turns == 0
            writer.transport.abort()
            answer = aiohttp.ClientTimeout(total=10)
            headers = {"x-api-key": episode.key}
            async with running.client.post(
                running.url + CHAT, data=body, headers=headers, timeout=answer
            ) as again:
                assert (await again.json())["turn"] == 1
            assert (running.engine.turns, episode.turns) == (1, 1)

    asyncio.run(check())
