"""The rewards of environments by name, also where an episode meets a limit of the run."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest

from agent_loop import external
from tests.unit.agent_loop.external_setting import LIMITS, MODULE, EndlessEngine, sample_of
from tests.unit.agent_loop.openenv_server import Game, serving


class SlowThirdTurn(EndlessEngine):
    """Answers two requests."""

    async def __call__(self, ids: Any, max_tokens: int, stop: tuple[str, ...] = ()) -> Any:
        if len(self.requests) == 2:
            await asyncio.sleep(3600)
        return await super().__call__(ids, max_tokens)


def test_the_rewards_before_a_kill_at_the_time_limit_are_kept(setting):
    with serving(Game().routes()) as url:
        run = setting(environment=f"openenv:{url}")
        limits = replace(LIMITS, seconds=2.0)
        engine = SlowThirdTurn(run.tokenizer)
        episode = run.run(limits, started=True, engine=engine, task=7)
    assert episode.over == "time"
    assert episode.reward == -0.5
    assert episode.facts["lost_rewards"] == 0


def environment(setting: Any, monkeypatch: pytest.MonkeyPatch, function: str) -> Any:
    """A run in an environment that this function of the tests plays."""
    monkeypatch.setitem(external.ADAPTERS, "verifiers", f"{MODULE}:{function}")
    return setting(environment="verifiers:game")


@pytest.mark.parametrize(
    ("function", "limits"),
    [
        ("asks_for_ever", replace(LIMITS, turns=2)),  # it raises at the refused turn
        ("fails", replace(LIMITS, turn_tokens=3)),
        ("hangs", replace(LIMITS, seconds=2.0)),
    ],
)
def test_a_reward_that_a_limit_prevented_is_zero_and_counted(
    setting, monkeypatch, function, limits
):
    """The run's reward function would compare the policy's text with the number of the task."""
    episode = environment(setting, monkeypatch, function).run(limits)
    assert episode.reward == 0.0
    assert sample_of_first(episode).extra["agent"]["lost_rewards"] == 1


def sample_of_first(episode: Any) -> Any:
    return episode.samples(episode.prompt, 0)[0]


def test_a_reward_of_the_environment_is_not_counted_as_lost(setting, monkeypatch):
    episode = environment(setting, monkeypatch, "plain").run()
    assert episode.reward == {"right": 1.0, "length": 0.25}
    assert sample_of(episode).extra["agent"]["lost_rewards"] == 0


def test_a_failure_of_the_environment_is_an_error(setting, monkeypatch):
    with pytest.raises(RuntimeError, match="no such city"):
        environment(setting, monkeypatch, "fails").run()


def test_another_agent_without_a_reward_is_scored_by_the_run(setting):
    episode = setting(command=f"{MODULE}:asks_for_ever").run(replace(LIMITS, turns=2))
    assert episode.reward is None
    assert "lost_rewards" not in episode.facts
