"""What the frameworks' packages say to the endpoint of a real run, and what they make of its
answers: all forms of requests, streamed and whole, in one run."""

from __future__ import annotations

import json
import os
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.agent_frameworks import venvs
from tests.e2e.commands import PROGRAM, assert_all_ended, descendants
from tests.e2e.run_folder import read_rows

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.ci, pytest.mark.timeout(900)]

ROOT = Path(__file__).parents[2]
PROTOCOLS = ROOT / "tests" / "agent_frameworks" / "protocols"
FRAMEWORKS = ("openai", "anthropic", "openai_agents", "smolagents")
START_S = 180.0
PROTOCOL_S = 120.0
SETTINGS = {
    "agent.command": "",
    "agent.max_turns": 1000,
    "agent.timeout_s": 900,  # the four are offered at once, and taken one after another
    "data.train_batch_size": 2,
    "actor.ppo_mini_batch_size": 2,
    "rollout.n": 2,
    "data.val_files": "",
    "data.generator_size": 16,
    "data.max_prompt_length": 512,
    "data.max_response_length": 1024,
    "trainer.total_steps": 1,
    "trainer.test_freq": -1,
}
"""One step of four episodes, one for each framework."""


@contextmanager
def run_that_offers_episodes(folder: Path) -> Iterator[subprocess.Popen]:
    settings = SETTINGS | {"trainer.output_dir": folder}
    arguments = [f"{key}={value}" for key, value in settings.items()]
    run = subprocess.Popen(
        [*PROGRAM, f"config={ROOT}/config/external_agent.yaml", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    processes = []
    try:
        yield run
    finally:
        if run.poll() is None:
            processes = descendants(run.pid)
            run.terminate()
            run.wait(60)
        assert_all_ended(processes)


def read_address(folder: Path, run: subprocess.Popen) -> dict[str, Any]:
    """The endpoint's URL and service key. Fails if the run ends before they are there."""
    file = folder / "endpoint.json"
    deadline = time.monotonic() + START_S
    while not file.exists():
        assert run.poll() is None, run.stdout.read()[-3000:]
        assert time.monotonic() < deadline, "no endpoint"
        time.sleep(0.2)
    return json.loads(file.read_text())


def request(url: str, key: str, content: dict[str, Any] | None = None) -> dict[str, Any] | None:
    """The JSON of an answer; None where it is empty."""
    data = None if content is None else json.dumps(content).encode()
    headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
    with urllib.request.urlopen(urllib.request.Request(url, data, headers), timeout=90) as answer:
        text = answer.read()
    return json.loads(text) if text else None


def next_episode(address: dict[str, Any], deadline: float) -> dict[str, Any]:
    """An episode that waits for an agent."""
    while time.monotonic() < deadline:
        work = request(f"{address['base_url']}/v1/episodes/next?wait=30", address["service_key"])
        if work is not None:
            return work
    pytest.fail("no episode is offered")


def complaint_of(framework: str, python: str, work: dict[str, Any]) -> str:
    """What the framework's program complains of; "": nothing."""
    program = str(PROTOCOLS / f"{framework}_protocol.py")
    finished = subprocess.run(
        [python, program, f"{work['base_url']}/v1", work["key"]],
        capture_output=True,
        text=True,
        timeout=PROTOCOL_S,
        env={**os.environ, "PYTHONPATH": ""},
    )
    if finished.returncode == 0:
        return ""
    return f"{framework}: {finished.stdout[-1000:]}{finished.stderr[-3000:]}"


def test_every_form_of_request_of_the_real_packages_is_served(tmp_path):
    try:
        pythons = {framework: venvs.ensure(framework) for framework in FRAMEWORKS}
    except venvs.NoIndex as error:
        pytest.skip(str(error))
    folder = tmp_path / "run"
    complaints = []
    with run_that_offers_episodes(folder) as run:
        address = read_address(folder, run)
        for framework, python in pythons.items():
            work = next_episode(address, time.monotonic() + START_S)
            complaints.append(complaint_of(framework, python, work))
            request(
                f"{work['base_url']}/v1/episodes/{work['key']}/end",
                work["key"],
                {"reward": 1.0 if framework == "openai" else 0.0},
            )
        assert [complaint for complaint in complaints if complaint] == []
        output, _ = run.communicate(timeout=START_S)
        assert run.returncode == 0, output[-3000:]
    (row,) = read_rows(folder, "metrics.jsonl")
    assert 0.0 < row["reward/mean"] < 1.0
    assert row["agent/errors"] == 0
    assert row["samples"] > 20  # segments of the four episodes
    # The trainer's log-probs of all turns are those of the engine.
    assert row["ratio/mean"] == pytest.approx(1.0, abs=1e-5)
    assert row["ratio/max"] == pytest.approx(1.0, abs=3e-4)
