"""Agents that ask the real endpoint for work, and end their episodes badly: what the loop
`external` makes of them."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from agent_loop.base import Limits
from agent_loop.episode import Episode, RewardMissing
from agent_loop.external import AgentFailed, ExternalLoop
from one_step_off.config.schema import Config
from tests.unit.endpoint.stand_ins import CHAT, PROMPT, Endpoint, endpoint
from tests.unit.endpoint.test_gateway import ask_for_work

LIMITS = Limits(tokens=1000, turns=2, seconds=1.0)
Agent = Callable[[Endpoint, str], Awaitable[Any]]


def play(tmp_path: Any, *agents: Agent) -> Episode:
    """The last one of these agents' episodes, one after the other."""
    cfg = Config()
    cfg.agent.loop = "external"
    cfg.trainer.output_dir = str(tmp_path)
    loop = ExternalLoop(cfg, None)
    score: Any = None

    async def work(running: Endpoint, agent: Agent) -> None:
        _, given = await ask_for_work(running)
        await agent(running, given["key"])

    async def main() -> Any:
        async with endpoint() as running:
            loop.endpoint = running.replicas[0]
            for agent in agents:
                working = asyncio.create_task(work(running, agent))
                try:
                    episode = await loop.run(PROMPT, running.engine.generate, score, LIMITS)
                finally:
                    await working
            return episode

    return asyncio.run(main())


async def ends(running: Endpoint, key: str, content: Any = None) -> tuple[int, Any]:
    return await running.post("", content or {}, f"/v1/episodes/{key}/end")


async def asks_and_goes(running: Endpoint, key: str) -> None:
    assert (await running.post(key))[0] == 200


async def rewards(running: Endpoint, key: str) -> None:
    await asks_and_goes(running, key)
    assert (await ends(running, key, {"reward": 1.0}))[0] == 200


async def gives_no_reward(running: Endpoint, key: str) -> None:
    await asks_and_goes(running, key)
    assert (await ends(running, key))[0] == 200


async def reports_an_error(running: Endpoint, key: str) -> None:
    assert (await ends(running, key, {"error": "no such city"}))[0] == 200


async def rewards_after_the_end(running: Endpoint, key: str) -> None:
    await rewards(running, key)
    path = f"/v1/episodes/{key}"
    for place in (f"{path}/reward", f"{path}/end"):
        assert (await running.post("", {"reward": 9.0}, place))[0] == 410
    assert (await running.post(key, path=CHAT))[0] == 410


async def is_refused_and_goes(running: Endpoint, key: str) -> None:
    statuses = [(await running.post(key))[0] for _ in range(3)]
    assert statuses[:2] == [200, 200]
    assert statuses[2] >= 400


@pytest.mark.parametrize(
    ("agent", "reason"), [(asks_and_goes, "time"), (is_refused_and_goes, "turns")]
)
def test_an_agent_that_ends_without_a_word_is_reported(tmp_path, agent, reason):
    episode = play(tmp_path, agent)
    sample = episode.samples(PROMPT, 0)[-1]
    message = "agent.timeout_s=1 is over; its agent did not end it"
    assert sample.extra["agent_failure"] == message
    assert sample.finish_reason == reason


def test_an_agent_that_takes_work_and_asks_nothing_is_an_error_that_names_the_limit(tmp_path):
    async def takes_and_goes(running: Endpoint, key: str) -> None:
        pass

    message = "without a turn of the policy; agent.timeout_s=1 is over; its agent did not end it"
    with pytest.raises(AgentFailed, match=message):
        play(tmp_path, takes_and_goes)


def test_an_error_that_an_agent_reports_is_that_of_its_sample(tmp_path):
    with pytest.raises(AgentFailed, match="an agent that asked for work: reported no such city"):
        play(tmp_path, reports_an_error)


def test_a_reward_after_the_end_is_refused(tmp_path):
    assert float(play(tmp_path, rewards_after_the_end).reward) == 1.0


def test_rewards_of_agents_and_of_the_function_are_not_mixed(tmp_path):
    assert play(tmp_path, gives_no_reward).reward is None
    with pytest.raises(RewardMissing, match="it ended well"):
        play(tmp_path, rewards, gives_no_reward)
    with pytest.raises(RewardMissing, match="its agent did not end it"):
        play(tmp_path, rewards, asks_and_goes)
