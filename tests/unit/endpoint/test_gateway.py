"""The gateway between agents and replicas: restarts, deaths, and agents that ask for work."""

from __future__ import annotations

import asyncio
import errno
from typing import Any

import aiohttp
import pytest

from agent_loop.trajectory import Limits
from one_step_off.endpoint import gateway as gateway_module
from one_step_off.endpoint.http_messages import Answer
from tests.unit.endpoint.stand_ins import CHAT, Endpoint, Serving, endpoint

NEXT = "/v1/episodes/next"


async def begun(running: Endpoint, turns: int = 1) -> None:
    """Wait until the engine works on so many turns."""
    async with asyncio.timeout(5):
        while running.engine.turns < turns:
            await asyncio.sleep(0.002)


def test_a_restarted_gateway_holds_requests_until_replicas_have_registered():
    async def check() -> None:
        async with endpoint(replicas=2, registers=False) as running:
            await running.register()
            episode = running.open(1)
            await running.post(episode.key)
            await running.restart_gateway()
            asking = asyncio.create_task(running.post(episode.key))
            await asyncio.sleep(0.1)
            assert not asking.done()
            await running.register()
            assert (await asking)[1]["turn"] == 2

    asyncio.run(check())


def test_replicas_register_again_by_themselves(monkeypatch):
    monkeypatch.setattr("one_step_off.endpoint.replica_server.REGISTER_S", 0.05)

    async def check() -> None:
        async with endpoint(replicas=2) as running:
            episode = running.open(1)
            await running.restart_gateway()
            assert (await running.post(episode.key))[0] == 200

    asyncio.run(check())


def test_a_request_that_the_gateway_took_with_it_is_answered_when_it_is_repeated():
    async def check() -> None:
        async with endpoint() as running:
            episode = running.open()
            running.engine.gate.clear()
            asking = asyncio.create_task(running.post(episode.key))
            await begun(running)
            for connection in running.gateway.server.connections:
                connection.transport.abort()  # as the kernel does for a killed process
            result = (await asyncio.gather(asking, return_exceptions=True))[0]
            assert isinstance(result, Exception)
            await running.restart_gateway()
            await running.register()
            running.engine.gate.set()
            again = await running.post(episode.key, x_stainless_retry_count="1")
            assert again == (200, {"turn": 1, "padding": ""})
            assert episode.turns == 1

    asyncio.run(check())


def test_clients_that_connect_while_no_gateway_is_there_wait_for_the_next_one():
    async def check() -> None:
        async with endpoint() as running:
            episode = running.open()
            await running.gateway.stop()
            asking = asyncio.create_task(running.post(episode.key))
            await asyncio.sleep(0.1)
            assert not asking.done(), "the driver keeps the port open"
            await running.restart_gateway()
            await running.register()
            assert (await asking)[0] == 200

    asyncio.run(check())


def test_a_replica_that_is_not_there_in_time_is_an_error_that_clients_retry(monkeypatch):
    monkeypatch.setattr(gateway_module, "HOLD_S", 0.05)

    async def check() -> None:
        async with endpoint(registers=False) as running:
            status, answer = await running.post(running.open().key)
            assert (status, answer["error"]["type"]) == (503, "replica_unknown")

    asyncio.run(check())


@pytest.mark.parametrize("path", [CHAT, "/v1/messages"])
def test_the_death_of_a_replica_ends_its_episodes_by_name(monkeypatch, path: str):
    monkeypatch.setattr(gateway_module, "HOLD_S", 0.05)

    async def check() -> None:
        async with endpoint(replicas=2, registers=False) as running:
            await running.register()
            dying = running.open(0)
            other = running.open(1)
            running.engine.gate.clear()
            asking = asyncio.create_task(running.post(dying.key, path=path))
            await begun(running)
            server = running.replicas[0]._server
            server._listener.close()
            for connection in server.connections:
                connection.transport.abort()
            late = asyncio.create_task(running.post(dying.key, path=path))
            running.engine.gate.set()
            for status, answer in (await asking, await late):
                assert (status, answer["error"]["code"]) == (410, "replica")
                assert "its replica was restarted" in answer["error"]["message"]
            assert (await running.post(dying.key))[0] == 410
            assert (await running.post(other.key))[0] == 200

    asyncio.run(check())


def test_requests_to_a_replica_that_hangs_end_when_its_successor_is_there():
    async def check() -> None:
        async with endpoint(replicas=2, registers=False) as running:
            await running.register()
            episode = running.open(0)
            running.engine.gate.clear()
            asking = asyncio.create_task(running.post(episode.key))
            await begun(running)
            await running.gateway.register(0, running.replicas[1].address)
            status, answer = await asking
            assert (status, answer["error"]["code"]) == (410, "replica")
            running.engine.gate.set()

    asyncio.run(check())


def test_a_connection_that_breaks_in_mid_answer_is_tried_again():
    """The replica sends half of an answer, and resets the connection."""

    async def check() -> None:
        async with endpoint(registers=False) as running:
            heads = 0

            async def half(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
                nonlocal heads
                await reader.readuntil(b"\r\n\r\n")
                heads += 1
                writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\n{")
                await writer.drain()
                writer.close()

            async with await asyncio.start_server(half, "127.0.0.1", 0) as server:
                port = server.sockets[0].getsockname()[1]
                await running.gateway.register(0, f"127.0.0.1:{port}")
                status, answer = await running.post(running.open().key)
                assert heads == 2
                assert (status, answer["error"]["type"]) == (503, "interrupted")
                await running.register()
                assert (await running.post(running.open().key))[0] == 200

    asyncio.run(check())


def test_a_problem_of_the_gateway_does_not_end_episodes(monkeypatch):
    async def check() -> None:
        async with endpoint() as running:
            episode = running.open()
            problem = OSError(errno.EMFILE, "Too many open files")

            def refuse(*args: object, **kwargs: object) -> None:
                key = running.gateway.session._connector
                raise aiohttp.ClientConnectorError(key, problem)

            with monkeypatch.context() as patched:
                patched.setattr(running.gateway.session, "_request", refuse)
                status, answer = await running.post(episode.key)
            assert (status, answer["error"]["type"]) == (503, "interrupted")
            assert (await running.post(episode.key))[0] == 200

    asyncio.run(check())


def test_an_idle_connection_that_the_replica_has_closed_is_replaced():
    async def check() -> None:
        async with endpoint() as running:
            episode = running.open()
            await running.post(episode.key)
            for _ in range(3):
                for connection in running.replicas[0]._server.connections:
                    connection.transport.abort()
                assert (await running.post(episode.key))[0] == 200

    asyncio.run(check())


# --- agents that ask for work ---------------------------------------------------------------------


async def ask_for_work(running: Endpoint, wait: float = 5.0) -> tuple[int, dict]:
    return await running.get(f"{NEXT}?wait={wait}", running.gateway.keys.service_key)


async def offered(running: Endpoint, replica: int, limits: Limits | None = None):
    """An episode, and the task that offers it, and closes it then, as a loop does."""
    episode = running.open(replica, limits or Limits(1000, 100, None, 60.0))

    async def offer() -> None:
        try:
            await running.replicas[replica].offer(episode)
        finally:
            running.replicas[replica].close(episode)

    offering = asyncio.create_task(offer())
    await asyncio.sleep(0)
    return episode, offering


def test_an_agent_that_asks_for_work_gets_an_episode_and_ends_it():
    async def check() -> None:
        async with endpoint() as running:
            episode, offering = await offered(running, 0)
            status, given = await ask_for_work(running)
            assert (status, given["key"], given["base_url"]) == (200, episode.key, running.url)
            assert given["row"]["ground_truth"] == "2"
            assert (await running.post(given["key"]))[0] == 200
            assert not offering.done()
            await running.post("", {"reward": 1}, f"/v1/episodes/{given['key']}/end")
            await offering
            assert (episode.turns, float(episode.reward)) == (1, 1.0)

    asyncio.run(check())


def test_work_comes_from_all_replicas_and_each_episode_once():
    async def check() -> None:
        async with endpoint(replicas=3) as running:
            offers = [await offered(running, replica) for replica in (0, 1, 2) for _ in range(4)]
            given = await asyncio.gather(*(ask_for_work(running) for _ in range(12)))
            assert {status for status, _ in given} == {200}
            assert {work["key"] for _, work in given} == {episode.key for episode, _ in offers}
            assert (await ask_for_work(running, 0.05))[0] == 204
            for _, offering in offers:
                offering.cancel()

    asyncio.run(check())


def test_an_agent_waits_for_work():
    async def check() -> None:
        async with endpoint(replicas=2) as running:
            asking = [asyncio.create_task(ask_for_work(running, 5.0)) for _ in range(3)]
            await asyncio.sleep(0.05)
            offers = [await offered(running, 1) for _ in range(3)]
            given = await asyncio.gather(*asking)
            assert {work["key"] for _, work in given} == {episode.key for episode, _ in offers}
            for _, offering in offers:
                offering.cancel()

    asyncio.run(check())


def test_work_that_its_agent_did_not_take_goes_to_another_one():
    async def check() -> None:
        async with endpoint() as running:
            gone = [asyncio.create_task(ask_for_work(running, 5.0)) for _ in range(3)]
            await asyncio.sleep(0.05)
            offers = [await offered(running, 0) for _ in range(3)]
            for number, task in enumerate(gone):  # at different moments
                await asyncio.sleep(0.001 * number)
                task.cancel()
            results = await asyncio.gather(*gone, return_exceptions=True)
            taken = {result[1]["key"] for result in results if isinstance(result, tuple)}
            for _ in range(3 - len(taken)):
                status, work = await ask_for_work(running)
                assert status == 200
                taken.add(work["key"])
            assert taken == {episode.key for episode, _ in offers}
            for _, offering in offers:
                offering.cancel()

    asyncio.run(check())


def test_work_that_could_not_be_sent_goes_to_another_agent(monkeypatch):
    async def check() -> None:
        async with endpoint() as running:
            episode, offering = await offered(running, 0)
            server = running.gateway.server
            send = server.send

            async def lose(*args: object) -> tuple:
                response, _ = await send(*args)
                return response, False

            with monkeypatch.context() as patched:
                patched.setattr(server, "send", lose)
                await ask_for_work(running)
            assert (await ask_for_work(running))[1]["key"] == episode.key
            await running.post(episode.key)
            # It is at work: it is not given away again.
            path = f"http://{running.replicas[0].address}/v1/episodes/{episode.key}/return"
            headers = {"x-api-key": running.gateway.keys.service_key}
            async with running.client.post(path, headers=headers) as answer:
                assert await answer.json() == {"offered": False}
            offering.cancel()

    asyncio.run(check())


def test_no_agent_gets_work_without_the_service_key():
    async def check() -> None:
        async with endpoint() as running:
            episode, offering = await offered(running, 0)
            replica = f"http://{running.replicas[0].address}"
            ways = [("GET", NEXT), ("POST", f"/v1/episodes/{episode.key}/return")]
            for method, path in ways:
                for key in ("", episode.key, "ose-fleet-" + "a" * 32):
                    headers = {"x-api-key": key}
                    url = replica + path
                    async with running.client.request(method, url, headers=headers) as answer:
                        assert answer.status == 401
            assert (await ask_for_work(running))[0] == 200
            offering.cancel()

    asyncio.run(check())


def test_work_ends_at_its_time_limit_also_if_its_agent_goes_on_asking(monkeypatch):
    """Its requests overlap: at each moment one is being read, before it is refused."""

    async def check() -> None:
        async with endpoint() as running:
            _, offering = await offered(running, 0, Limits(1000, 100, None, 2.0))
            _, given = await ask_for_work(running)
            answer = running.servings[0].answer

            async def slow_answer(*request: Any) -> Answer:
                await asyncio.sleep(0.2)
                return await answer(*request)

            monkeypatch.setattr(running.servings[0], "answer", slow_answer)
            async with asyncio.TaskGroup() as asking:
                for number in range(120):
                    content = {"messages": [], "number": number}
                    asking.create_task(running.post(given["key"], content))
                    await asyncio.sleep(0.05)
                    if offering.done():
                        break
            assert number < 90
            await offering

    asyncio.run(check())


def test_work_ends_at_its_time_limit_which_begins_when_it_is_taken():
    async def check() -> None:
        async with endpoint() as running:
            limits = Limits(1000, 100, None, 2.0)
            episode, offering = await offered(running, 0, limits)
            await asyncio.sleep(1.5)
            _, given = await ask_for_work(running)
            await asyncio.sleep(1.0)
            assert (await running.post(given["key"]))[0] == 200, "2.5 s after it was offered"
            async with asyncio.timeout(10):
                await offering
            assert episode.turns == 1

    asyncio.run(check())


def test_a_turn_begun_in_time_is_finished():
    async def check() -> None:
        async with endpoint() as running:
            episode, offering = await offered(running, 0, Limits(1000, 100, None, 1.0))
            _, given = await ask_for_work(running)
            running.engine.delay = 2.0
            assert (await running.post(given["key"]))[0] == 200
            await offering
            assert episode.turns == 1

    asyncio.run(check())


def test_work_that_nobody_asks_for_is_an_error_by_name():
    async def check() -> None:
        async with endpoint() as running:
            _, offering = await offered(running, 0, Limits(1000, 100, None, 0.1))
            with pytest.raises(TimeoutError, match="no agent asked the endpoint for work within"):
                await offering
            assert (await ask_for_work(running, 0.05))[0] == 204

    asyncio.run(check())


@pytest.mark.parametrize("wait", ["soon", "-1", "nan", ""])
def test_a_bad_wait_is_refused(wait: str):
    async def check() -> None:
        async with endpoint() as running:
            path = f"{NEXT}?wait={wait}"
            assert (await running.get(path, running.gateway.keys.service_key))[0] == 400

    asyncio.run(check())


def test_five_hundred_episodes_are_served_at_once():
    async def check() -> None:
        async with endpoint(replicas=2) as running:
            running.engine.gate.clear()
            episodes = [running.open(number % 2) for number in range(500)]
            asking = [asyncio.create_task(running.post(episode.key)) for episode in episodes]
            await begun(running, 500)
            running.engine.gate.set()
            assert {status for status, _ in await asyncio.gather(*asking)} == {200}
            assert {episode.turns for episode in episodes} == {1}

    asyncio.run(check())


def test_a_replica_without_an_engine_yet_asks_clients_to_try_again():
    async def check() -> None:
        async with endpoint() as running:
            running.replicas[0].serving = None
            episode = running.open()
            assert (await running.post(episode.key))[0] == 503
            running.replicas[0].serving = Serving()
            assert (await running.post(episode.key))[0] == 200

    asyncio.run(check())


def test_nothing_of_a_stopped_endpoint_listens():
    async def check() -> None:
        async with endpoint() as running:
            port = running.port.port
            address = running.replicas[0].address
        for host_port in (("127.0.0.1", port), tuple(address.split(":"))):
            with pytest.raises(ConnectionRefusedError):
                await asyncio.open_connection(*host_port)

    asyncio.run(check())
