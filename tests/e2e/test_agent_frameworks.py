"""Agents of real frameworks train the tiny model with the tool, each from a venv of its own."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import mean
from typing import Any

import pytest

from tests.agent_frameworks import venvs
from tests.e2e.commands import PROGRAM
from tests.e2e.run_folder import read_rows

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(900)]

ROOT = Path(__file__).parents[2]
CONFIG = f"config={ROOT / 'config' / 'external_agent.yaml'}"
STEPS = 12
SMALL = {
    "data.train_batch_size": 8,
    "actor.ppo_mini_batch_size": 8,
    "actor.lr": 4e-4,
    "actor.warmup_steps": 2,
    "data.val_files": "",
    "data.generator_size": 512,
    "trainer.total_steps": STEPS,
    "trainer.test_freq": -1,
}
RISE = 0.15
"""Of the mean reward from the first three steps to the last three. Each mean is of 384 samples with
a standard error of at most 0.026, so chance gives this rise once in 20,000 runs."""

START_S = 60.0


def python_of(framework: str) -> str:
    """The framework's interpreter. Skips the test where no package index can be reached."""
    try:
        return venvs.ensure(framework)
    except venvs.NoIndex as error:
        pytest.skip(str(error))


def environment_of_run() -> dict[str, str]:
    folders = [str(ROOT), str(ROOT / "examples/agents"), str(ROOT / "examples/environments")]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(folders)}


def train(folder: Path, **changes: Any) -> list[dict[str, Any]]:
    """The metrics of a short run. Fails if the run does."""
    settings = SMALL | {"trainer.output_dir": folder} | changes
    arguments = [f"{key}={value}" for key, value in settings.items()]
    finished = subprocess.run(
        [*PROGRAM, CONFIG, *arguments],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env=environment_of_run(),
    )
    assert finished.returncode == 0, finished.stdout[-3000:] + finished.stderr[-3000:]
    rows = read_rows(folder, "metrics.jsonl")
    assert len(rows) == STEPS
    return rows


def assert_reward_rises(rows: list[dict[str, Any]]) -> None:
    """And no agent failed."""
    rewards = [row["reward/mean"] for row in rows]
    assert sum(row["agent/errors"] for row in rows) == 0
    assert mean(rewards[-3:]) > mean(rewards[:3]) + RISE, rewards


@pytest.mark.parametrize(
    ("framework", "command"),
    [
        ("openai", "openai_sdk:run"),
        ("anthropic", "anthropic_sdk:run"),
        ("openai_agents", "openai_agents_sdk:run"),
        ("smolagents", "smolagents_agent:run"),
    ],
)
def test_an_agent_of_a_framework_learns_to_use_its_tool(framework, command, tmp_path):
    changes = {"agent.command": command, "agent.python": python_of(framework)}
    rows = train(tmp_path / "run", **changes)
    assert_reward_rises(rows)
    turns = [row["agent/turns/mean"] for row in rows]
    if framework == "smolagents":  # its answer is what the tool said
        assert set(turns) == {1.0}
    else:
        assert mean(turns[-3:]) > mean(turns[:3])


def test_a_verifiers_environment_trains_by_its_own_taskset_and_rewards(tmp_path):
    rows = train(
        tmp_path / "run",
        **{
            "agent.command": "",
            "agent.environment": "verifiers:products_verifiers",
            "agent.python": python_of("verifiers"),
            "data.train_files": "environment",
        },
    )
    assert_reward_rises(rows)
    for row in rows:
        assert row["reward/right_answer/mean"] == row["reward/mean"]


@contextmanager
def openenv_server(python: str, folder: Path) -> Iterator[str]:
    """A server of products in its own venv; its URL."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    program = str(ROOT / "examples/environments/products_openenv.py")
    with open(folder / "server.log", "w") as log:
        server = subprocess.Popen([python, program, str(port)], stdout=log, stderr=log)
    try:
        deadline = time.monotonic() + START_S
        while not _listens(port):
            assert server.poll() is None, (folder / "server.log").read_text()[-2000:]
            assert time.monotonic() < deadline, "the server does not listen"
            time.sleep(0.1)
        yield f"http://127.0.0.1:{port}"
    finally:
        server.kill()
        server.wait()


def _listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def test_an_openenv_server_trains_by_its_own_rewards(tmp_path):
    with openenv_server(python_of("openenv"), tmp_path) as url:
        rows = train(
            tmp_path / "run",
            **{
                "agent.command": "",
                "agent.environment": f"openenv:{url}",
                "data.train_files": "environment",
            },
        )
    assert_reward_rises(rows)


def test_a_missing_package_of_an_environment_is_one_line_before_any_engine(tmp_path):
    """The interpreter of the run has no verifiers."""
    arguments = [
        "agent.command=",
        "agent.environment=verifiers:products_verifiers",
        "data.train_files=environment",
        "data.val_files=",
        "trainer.test_freq=-1",
        f"trainer.output_dir={tmp_path}",
    ]
    finished = subprocess.run(
        [*PROGRAM, CONFIG, *arguments], capture_output=True, text=True, cwd=ROOT
    )
    assert finished.returncode == 2
    assert "has no package verifiers" in finished.stderr + finished.stdout
    assert sys.executable in finished.stderr + finished.stdout
