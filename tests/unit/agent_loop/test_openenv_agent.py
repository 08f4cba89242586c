"""The adapter of OpenEnv servers, against a server and an endpoint that speak their protocols."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import sys
from types import ModuleType
from typing import Any

import pytest
from aiohttp import web

import agent_loop
from one_step_off.config.errors import ConfigError
from one_step_off.config.schema import Config
from one_step_off.data.environment_rows import HELD_OUT_TASKS, read_tasks
from one_step_off.data.rows import DataReport, load_rows
from tests.unit.agent_loop.openenv_server import Game, serving

ADAPTER = f"{agent_loop.__path__[0]}/adapters/openenv_agent.py"


def adapter(monkeypatch: pytest.MonkeyPatch, name: str) -> ModuleType:
    """The adapter as `agent.python` imports it."""
    monkeypatch.setenv("AGENT_ENVIRONMENT", name)
    spec = importlib.util.spec_from_file_location("adapter", ADAPTER)
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "adapter", module)
    spec.loader.exec_module(module)
    return module


class Policy:
    """An endpoint whose policy says these texts, and what it was asked."""

    def __init__(self, *texts: str, over: web.Response | None = None) -> None:
        self.texts = list(texts)
        self.requests: list[dict[str, Any]] = []
        self.keys: list[str] = []
        self.rewards: list[float] = []
        self.over = over

    async def answer(self, request: web.Request) -> web.Response:
        self.requests.append(await request.json())
        self.keys.append(request.headers["Authorization"])
        if not self.texts:
            return self.over or web.json_response({}, status=500)
        message = {"role": "assistant", "content": self.texts.pop(0)}
        return web.json_response({"choices": [{"message": message, "finish_reason": "stop"}]})

    async def take_reward(self, request: web.Request) -> web.Response:
        assert request.headers["Authorization"] == f"Bearer {request.match_info['key']}"
        self.rewards.append(await request.json())
        return web.json_response({})

    def routes(self) -> list[Any]:
        return [
            web.post("/v1/chat/completions", self.answer),
            web.post("/v1/episodes/{key}/reward", self.take_reward),
        ]


def play(monkeypatch: Any, game: Game, policy: Policy, task: int = 7, settings: str = "") -> float:
    with serving(game.routes()) as url, serving(policy.routes()) as endpoint:
        module = adapter(monkeypatch, url + settings)
        row = {"extra": {"task": task}}
        return asyncio.run(module.run(row, f"{endpoint}/v1", "ose-0-key"))


def test_the_policys_texts_are_actions_and_the_rewards_are_summed(monkeypatch):
    game = Game()
    policy = Policy("5", "7")
    assert play(monkeypatch, game, policy) == 0.75
    assert policy.rewards == [-0.25, 0.75], "the sum so far, after each step"
    assert game.resets == [{"seed": 7}]
    assert policy.keys == ["Bearer ose-0-key"] * 2
    assert policy.requests[1]["messages"] == [
        {"role": "user", "content": "guess"},
        {"role": "assistant", "content": "5"},
        {"role": "user", "content": "not 5"},
    ]
    assert game.open == 0


@pytest.mark.parametrize(
    ("status", "content"),
    [
        (403, {"error": {}}),
        (410, {"error": {}}),
        (200, {"choices": [{"message": {"content": None}, "finish_reason": "length"}]}),
    ],
)
def test_a_limit_of_the_run_ends_the_episode_with_the_reward_so_far(monkeypatch, status, content):
    over = web.json_response(content, status=status)
    assert play(monkeypatch, Game(), Policy("5", over=over)) == -0.25


def test_an_error_of_the_endpoint_is_an_error_of_the_episode(monkeypatch):
    with pytest.raises(Exception, match="500"):
        play(monkeypatch, Game(), Policy("5"))


def test_the_policy_may_write_the_whole_action_as_json(monkeypatch):
    game = Game(action=("guess", "comment"), observation=("text", "hint"))
    policy = Policy(json.dumps({"guess": "7", "comment": ""}))
    assert play(monkeypatch, game, policy, settings="#action=json") == 1.0
    seen = policy.requests[0]["messages"][0]["content"]
    assert json.loads(seen) == {"text": "guess", "hint": "guess"}


def test_what_is_no_json_ends_the_episode(monkeypatch):
    assert play(monkeypatch, Game(), Policy("seven"), settings="#action=json") == 0.0


def test_named_fields_are_used(monkeypatch):
    game = Game(action=("guess", "comment"), observation=("text", "hint"))
    policy = Policy("7")
    assert play(monkeypatch, game, policy, settings="#action=guess&observation=hint") == 1.0
    assert policy.requests[0]["messages"][0]["content"] == "guess"


def test_episodes_wait_for_a_free_session(monkeypatch):
    game = Game(sessions=2)
    policy = Policy(*["7"] * 6)
    with serving(game.routes()) as url, serving(policy.routes()) as endpoint:
        module = adapter(monkeypatch, url)

        async def play_all() -> list[float]:
            row = {"extra": {"task": 7}}
            return await asyncio.gather(*(module.run(row, f"{endpoint}/v1", "k") for _ in range(6)))

        assert asyncio.run(play_all()) == [1.0] * 6
    assert game.most_open == 2


def test_no_free_session_in_time_is_an_error_that_says_so(monkeypatch):
    with serving(Game(sessions=0).routes()) as url:
        module = adapter(monkeypatch, url)
        monkeypatch.setattr(module, "FREE_SESSION_S", 0.3)
        with pytest.raises(module.Refused, match="CAPACITY_REACHED"):
            asyncio.run(module.run({"extra": {"task": 1}}, "http://127.0.0.1:1/v1", "k"))


# ---- rows ----------------------------------------------------------------------------------------


def config(environment: str) -> Config:
    cfg = Config()
    cfg.agent.environment = environment
    cfg.data.generator_size = 6
    return cfg


def test_held_out_episodes_and_those_for_training_are_others():
    with serving(Game().routes()) as url:
        cfg = config(f"openenv:{url}")
        train = read_tasks(cfg, "train")
        held_out = read_tasks(cfg, "test")
    assert [row["extra_info"]["task"] for row in train] == list(
        range(HELD_OUT_TASKS, HELD_OUT_TASKS + 6)
    )
    assert [row["extra_info"]["task"] for row in held_out] == list(range(HELD_OUT_TASKS))


def test_the_tasks_of_a_split_are_rows(monkeypatch):
    game = Game()
    with serving(game.routes()) as url:
        cfg = config(f"openenv:{url}#split=train")
        cfg.data.val_size = 17
        report = DataReport("training data")
        rows = load_rows(
            "environment", "train", cfg.data, 0, report, read_tasks=lambda s: read_tasks(cfg, s)
        )
    assert [row.extra["task"] for row in rows] == [17, 18, 19]
    assert rows[0].data_source == f"openenv:{url}"
    assert rows[0].agent_loop == "external"
    assert game.resets == [{"split": "train", "index": 17}]


@pytest.mark.parametrize(
    ("game", "settings", "reason"),
    [
        (Game(action=("a", "b")), "", "its action has the fields a, b, not one required text"),
        (Game(), "#actoin=message", "no setting 'actoin'"),
        (Game(), "#split=test", "num_tasks gives no answer .*404"),
        (Game(sessions=0), "#action=json", "CAPACITY_REACHED"),
    ],
)
def test_a_server_that_cannot_be_played_is_one_line(game, settings, reason, monkeypatch):
    with serving(game.routes()) as url:
        monkeypatch.setenv("OPENENV_FREE_SESSION_S", "0.2")
        with pytest.raises(ConfigError, match=f"^agent.environment=.*{reason}") as raised:
            read_tasks(config(f"openenv:{url}{settings}"), "train")
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("environment", "reason"),
    [
        ("openenv:http://127.0.0.1:1", "schema gives no answer .*refused"),
        ("openenv:localhost", "gives no answer"),
        ("verifiers:anything", "this Python has no package verifiers"),
        ("", "agent.environment, which is empty"),
    ],
)
def test_what_is_not_there_is_one_line_that_names_the_fix(environment, reason):
    with pytest.raises(ConfigError, match=reason) as raised:
        read_tasks(config(environment), "train")
    assert "\n" not in str(raised.value)
    assert "agent.environment" in str(raised.value)


def test_an_interpreter_that_is_not_there_is_named():
    cfg = config("verifiers:anything")
    cfg.agent.python = "/no/python"
    with pytest.raises(ConfigError, match="/no/python: FileNotFoundError"):
        read_tasks(cfg, "train")
