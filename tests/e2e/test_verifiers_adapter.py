"""The adapter of verifiers with the real package, against an endpoint that says what it is told."""

from __future__ import annotations

import json
import os
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from one_step_off.config.errors import ConfigError
from one_step_off.config.schema import Config
from one_step_off.data.environment_rows import read_tasks
from tests.agent_frameworks import venvs
from tests.unit.agent_loop.openenv_server import serving

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

ROOT = Path(__file__).parents[2]
ENVIRONMENTS = ROOT / "examples" / "environments"
ADAPTER = ROOT / "agent_loop" / "adapters" / "verifiers_agent.py"
PLAYER = ROOT / "tests" / "agent_frameworks" / "verifiers_player.py"
NAME = "products_verifiers"


@pytest.fixture(scope="module")
def python() -> str:
    try:
        return venvs.ensure("verifiers")
    except venvs.NoIndex as error:
        pytest.skip(str(error))


@pytest.fixture
def cfg(python: str, monkeypatch: pytest.MonkeyPatch) -> Config:
    """A run in the folder of the environment."""
    monkeypatch.chdir(ENVIRONMENTS)
    cfg = Config()
    cfg.agent.python = python
    cfg.agent.environment = f"verifiers:{NAME}"
    cfg.data.generator_size = 3
    return cfg


@pytest.mark.ci
def test_its_tasks_are_rows(cfg):
    cfg.data.val_size = 2
    rows = read_tasks(cfg, "train")
    assert [row["extra_info"]["task"] for row in rows] == [2, 3, 4]
    assert re.fullmatch(r"What is \d\d \* \d\d\?", rows[0]["prompt"][0]["content"])
    held_out = read_tasks(cfg, "test")
    assert [row["extra_info"]["task"] for row in held_out] == [0, 1]


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("not_installed", "taskset 'not_installed' not found"),
        (f"{NAME}?agent.harness.id=bash", "its harness 'bash' runs programs of the model"),
        (f"{NAME}?agent.nonsense=1", "agent.nonsense Extra inputs are not permitted"),
        (f"{NAME}?id=user-sim", "the policy would play assistant, user"),
    ],
)
def test_a_name_that_cannot_be_played_is_one_line(cfg, name, reason):
    cfg.agent.environment = f"verifiers:{name}"
    with pytest.raises(ConfigError, match=reason) as raised:
        read_tasks(cfg, "train")
    assert "\n" not in str(raised.value)


class Policy:
    """Calls the calculator, and answers with what it says. It is wrong for the key "key-1", and
    fails for "key-2"."""

    def __init__(self) -> None:
        self.keys: list[str] = []

    async def answer(self, request: web.Request) -> web.Response:
        key = request.headers["Authorization"].removeprefix("Bearer ")
        self.keys.append(key)
        if key == "key-2":
            return web.json_response({"error": {"message": "engine failed"}}, status=500)
        messages = (await request.json())["messages"]
        if messages[-1]["role"] == "tool":
            text = f"#### {messages[-1]['content']}"
            return answer({"content": "#### 1" if key == "key-1" else text})
        expression = re.search(r"\d+ \* \d+", messages[0]["content"])[0]
        arguments = json.dumps({"expression": expression})
        call = {"name": "calculator", "arguments": arguments}
        return answer({"tool_calls": [{"id": "c", "type": "function", "function": call}]})


def answer(message: dict[str, Any]) -> web.Response:
    choice = {"index": 0, "finish_reason": "stop", "message": {"role": "assistant"} | message}
    usage = {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}
    content = {"id": "1", "object": "chat.completion", "created": 0, "model": "policy"}
    return web.json_response(content | {"choices": [choice], "usage": usage})


@pytest.mark.ci
def test_episodes_at_once_have_their_own_keys_and_rewards(python):
    policy = Policy()
    with serving([web.post("/v1/chat/completions", policy.answer)]) as url:
        finished = subprocess.run(
            [python, str(PLAYER), str(ADAPTER), f"{url}/v1", *"0 1 2 3".split()],
            capture_output=True,
            text=True,
            cwd=ENVIRONMENTS,
            env={**os.environ, "AGENT_ENVIRONMENT": NAME, "PYTHONPATH": str(ENVIRONMENTS)},
            timeout=300,
        )
    right, wrong, failed, also_right = json.loads(finished.stdout.splitlines()[0])
    assert right == also_right == {"right_answer": 1.0}
    assert wrong == {"right_answer": 0.0}
    assert "engine failed" in failed
    assert sorted(key for key in policy.keys if key != "key-2") == sorted(
        ["key-0", "key-1", "key-3"] * 2
    )
