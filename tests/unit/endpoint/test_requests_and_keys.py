"""What an agent with a key may do, and what no client may do without one."""

from __future__ import annotations

import asyncio
import json
import math

import pytest

from agent_loop.trajectory import Limits
from one_step_off.endpoint.episodes import EpisodeKeys, make_service_key
from one_step_off.rewards.reward import Reward
from tests.unit.endpoint.stand_ins import CHAT, LIMITS, PROMPT, endpoint


def code_of(answer: dict) -> str:
    return answer["error"]["type"]


def test_an_agent_reaches_its_episode_through_the_gateway():
    async def check() -> None:
        async with endpoint(replicas=3) as running:
            episodes = [running.open(replica) for replica in (0, 1, 2)]
            for episode in episodes:
                status, answer = await running.post(episode.key)
                assert (status, episode.turns) == (200, 1)
                assert answer["turn"] == episode.last_turn.ids[0]
            status, _ = await running.request("POST", CHAT, x_api_key=episodes[1].key)
            assert (status, episodes[1].turns) == (200, 2)
            status, models = await running.get("/v1/models", episodes[2].key)
            assert (status, models["data"][0]["id"]) == (200, "policy")

    asyncio.run(check())


@pytest.mark.parametrize(
    "make_key",
    [
        lambda keys: "",
        lambda keys: "sk-anything",
        lambda keys: EpisodeKeys(make_service_key()).make(0),  # another run's
        lambda keys: keys.make(0)[:-1] + "!",
        lambda keys: keys.service_key,
        lambda keys: keys.make(7),
        lambda keys: "ose-0-" + "../" * 8 + "a" * 8,
        lambda keys: "ose-" + "9" * 60,
        lambda keys: "é" * 32,
    ],
    ids=["none", "foreign", "other run", "forged", "fleet", "no replica", "path", "long", "odd"],
)
def test_nobody_is_let_in_without_the_key_of_an_open_episode(make_key, monkeypatch):
    monkeypatch.setattr("one_step_off.endpoint.gateway.HOLD_S", 0.05)

    async def check() -> None:
        async with endpoint() as running:
            running.open()
            key = make_key(running.gateway.keys)
            for path in (CHAT, "/v1/messages"):
                status, answer = await running.post("", path=path, x_api_key=key)
                assert (status, code_of(answer)) in ((401, "unknown_key"), (503, "replica_unknown"))
            assert running.servings[0].requests == 0
            # Not at the replica's own port either.
            url = f"http://{running.replicas[0].address}{CHAT}"
            async with running.client.post(url, data=b"{}", headers={"x-api-key": key}) as answer:
                assert answer.status == 401

    asyncio.run(check())


def test_an_agent_cannot_reach_another_ones_episode():
    async def check() -> None:
        async with endpoint() as running:
            mine = running.open()
            other = running.open()
            await running.post(mine.key)
            assert (mine.turns, other.turns) == (1, 0)
            status, _ = await running.get("/v1/episodes/next?wait=0", mine.key)
            assert status == 401
            status, _ = await running.post(mine.key, path=f"/v1/episodes/{other.key}/return")
            assert status == 404

    asyncio.run(check())


def test_a_late_request_learns_why_its_episode_is_over():
    async def check() -> None:
        async with endpoint() as running:
            server = running.replicas[0]
            episode = running.open()
            server.close(episode, "time")
            for path in (CHAT, "/v1/messages"):
                status, answer = await running.post(episode.key, path=path)
                assert status == 410
                assert (code_of(answer), answer["error"]["code"]) == ("episode_over", "time")
                assert "agent.timeout_s" in answer["error"]["message"]
            # An earlier process on this replica gave this key out.
            status, answer = await running.post(server.keys.make(0))
            assert (status, answer["error"]["code"]) == (410, "replica")

    asyncio.run(check())


def test_when_the_run_returns_to_its_checkpoint_all_episodes_end():
    async def check() -> None:
        async with endpoint() as running:
            server = running.replicas[0]
            episodes = [running.open() for _ in range(2)]
            server.close_all("attempt")
            assert len(server.episodes) == 0
            for episode in episodes:
                status, answer = await running.post(episode.key)
                assert (status, answer["error"]["code"]) == (410, "attempt")
                assert "returned to its last checkpoint" in answer["error"]["message"]

    asyncio.run(check())


def test_the_reasons_of_closed_episodes_take_bounded_memory(monkeypatch):
    monkeypatch.setattr("one_step_off.endpoint.episodes.MAX_CLOSED", 3)

    async def check() -> None:
        async with endpoint() as running:
            episodes = [running.open() for _ in range(6)]
            for episode in episodes:
                running.replicas[0].close(episode, "turns")
            known = running.replicas[0].episodes
            assert (len(known), len(known._reasons)) == (0, 3)
            codes = []
            for episode in episodes:
                status, answer = await running.post(episode.key)
                assert status == 410
                codes.append(answer["error"]["code"])
            assert codes == ["ended"] * 3 + ["turns"] * 3

    asyncio.run(check())


def test_a_limit_is_an_error_that_no_client_retries():
    async def check() -> None:
        async with endpoint() as running:
            episode = running.open(limits=Limits(tokens=1000, turns=1, seconds=60.0))
            assert (await running.post(episode.key))[0] == 200
            headers = {"Authorization": f"Bearer {episode.key}"}
            url = running.url + CHAT
            async with running.client.post(url, data=b"{}", headers=headers) as answer:
                assert answer.status == 410
                assert answer.headers["x-should-retry"] == "false"
                error = (await answer.json())["error"]
                assert error["code"] == "turns"
                assert "agent.max_turns=1" in error["message"]

    asyncio.run(check())


@pytest.mark.parametrize("body", [b"{", b"", b"\xff\xfe", b"[" * 100_000, b'{"messages": 5'])
def test_malformed_json_is_answered_in_one_line(body: bytes):
    async def check() -> None:
        async with endpoint() as running:
            episode = running.open()
            for path in (CHAT, f"/v1/episodes/{episode.key}/reward"):
                headers = {"Authorization": f"Bearer {episode.key}"}
                url = running.url + path
                async with running.client.post(url, data=body, headers=headers) as answer:
                    error = (await answer.json())["error"]
                    assert answer.status == 400, error
                    assert "\n" not in error["message"]
            assert (await running.post(episode.key))[0] == 200

    asyncio.run(check())


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", CHAT, 405),
        ("DELETE", "/v1/models", 405),
        ("POST", "/v1/episodes/next", 405),
        ("GET", "/", 404),
        ("GET", "/v1/episodes/../../etc/passwd", 404),
        ("GET", "/v1/episodes/%2e%2e/reward", 404),
        ("POST", "/v1/chat/completions/", 404),
        ("POST", "//v1/chat/completions", 404),
        ("GET", "/v1/episodes/" + "a" * 500, 404),
    ],
)
def test_other_paths_and_methods_are_refused_with_and_without_a_key(
    method: str, path: str, status: int
):
    async def check() -> None:
        async with endpoint() as running:
            for key in (running.open().key, ""):
                assert (await running.request(method, path, key, b""))[0] == status

    asyncio.run(check())


@pytest.mark.parametrize(
    ("sent", "total", "parts"),
    [
        (0.5, 0.5, {}),
        (True, 1.0, {}),
        ({"right": 1, "form": -0.5}, 0.5, {"right": 1.0, "form": -0.5}),
        ({"reward": {"right": 1, "form": -0.5}}, 0.5, {"right": 1.0, "form": -0.5}),
        ({"reward": 2}, 2.0, {}),
    ],
)
def test_an_agent_sets_the_reward(sent, total: float, parts: dict):
    async def check() -> None:
        async with endpoint() as running:
            episode = running.open()
            path = f"/v1/episodes/{episode.key}/reward"
            assert await running.post("", sent, path) == (200, {"reward": total, "parts": parts})
            reward = Reward.of(episode.reward)
            assert (reward.total, reward.parts) == (total, parts)
            state = (await running.get(f"/v1/episodes/{episode.key}"))[1]
            assert (state["reward"], state["turns"], state["over"]) == (total, 0, "")
            assert 0 < state["seconds_left"] <= LIMITS.seconds

    asyncio.run(check())


@pytest.mark.parametrize("sent", [math.nan, math.inf, "good", None, [], {}, {"a": "b"}, 1e31])
def test_a_bad_reward_is_refused_and_changes_nothing(sent):
    async def check() -> None:
        async with endpoint() as running:
            episode = running.open()
            base = f"/v1/episodes/{episode.key}"
            body = json.dumps(sent).encode()
            status, answer = await running.post("", body, f"{base}/reward")
            assert (status, code_of(answer)) == (400, "bad_reward")
            assert "send a finite number" in answer["error"]["message"]
            if sent is not None:
                body = json.dumps({"reward": sent}).encode()
                assert (await running.post("", body, f"{base}/end"))[0] == 400
            assert (episode.reward, episode.over) == (None, "")

    asyncio.run(check())


def test_an_agent_ends_its_episode_with_a_reward():
    async def check() -> None:
        async with endpoint() as running:
            episode = running.open()
            await running.post(episode.key)
            path = f"/v1/episodes/{episode.key}/end"
            status, answer = await running.post("", {"reward": 0.25}, path)
            assert (status, answer) == (200, {"ended": True, "turns": 1})
            assert float(episode.reward) == 0.25
            assert (await running.post(episode.key))[0] == 410
            (sample,) = episode.samples(PROMPT, 0)
            assert sample.response_ids.tolist() == [1]

    asyncio.run(check())


def test_an_error_of_the_agent_is_an_error_of_its_sample():
    async def check() -> None:
        async with endpoint() as running:
            episode = running.open()
            await running.post(episode.key)
            path = f"/v1/episodes/{episode.key}/end"
            assert (await running.post("", {"error": "no such file"}, path))[0] == 200
            with pytest.raises(RuntimeError, match="its agent reported: no such file"):
                episode.samples(PROMPT, 0)

    asyncio.run(check())


def test_a_failure_of_the_engine_ends_the_episode_by_name():
    async def check() -> None:
        async with endpoint() as running:
            episode = running.open()
            running.engine.error = RuntimeError("EngineDeadError")
            status, answer = await running.post(episode.key)
            assert (status, code_of(answer)) == (503, "engine_failed")
            assert episode.over == "engine"
            assert (await running.post(episode.key))[0] == 503
            assert running.engine.turns == 1

    asyncio.run(check())
