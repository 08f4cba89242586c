"""Code of the user's own in real processes: where its output goes, and what is said when it
fails."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from one_step_off.data.word_problems import make
from tests.bad_input import base

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]
ROOT = Path(__file__).parents[2]

MODULE = '''
import os

from agent_loop.base import AgentLoop, Trajectory
from agent_loop.tools import Toolbox


def broken(city: str) -> str:
    """The weather.

    Args:
        city: Its name.
    """
    print("the tool was called")
    return {}[city]


class Asks(AgentLoop):
    """Calls the tool, whatever the model says, and has itself judged."""

    async def run(self, prompt, generate, score, limits):
        trajectory = Trajectory(prompt.ids, limits)
        said = await trajectory.generate(generate)
        print("the loop speaks")
        answer, good = await Toolbox(self.cfg.agent).call("broken", {"city": "Ulm"}, 5.0)
        trajectory.count("failed", not good)
        judged = await score(self.text(said.ids))
        trajectory.reward = judged.scaled(0.5)
        return trajectory


def parts(prompt, response, ground_truth, data_source, extra_info):
    print("judging", data_source, extra_info["level"])
    os.system("echo from a child of the function")
    return {"right": float(response.strip() == ground_truth), "length": len(response) / 100}


def other(response, **kwargs):
    return 0.25


def raises_later(response, ground_truth, **kwargs):
    def look_up(table):
        return table[ground_truth]

    if kwargs["extra_info"]["level"] == 2:
        look_up({})
    return 1.0
'''


def line_of(text: str) -> int:
    """Its line in the module."""
    return 1 + MODULE[: MODULE.index(text)].count("\n")


def start(folder: Path, model: str, *argv: str) -> subprocess.CompletedProcess:
    """A run of two steps on rows of two sources, as a user starts it."""
    rows = make("train", 16, 0)
    for i, row in enumerate(rows):
        row |= {"data_source": "even" if i % 2 == 0 else "odd", "level": i}
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "my_code.py").write_text(MODULE)
    arguments = [
        *base(folder, model),
        f"data.train_files={folder}/rows.jsonl",
        f"data.val_files={folder}/rows.jsonl",
        "data.val_size=4",
        "data.shuffle=false",
        "trainer.save_hf_model=false",
        *argv,
    ]
    return subprocess.run(
        [sys.executable, "-m", "one_step_off.main_ppo", *arguments],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=500,
    )


def test_output_parts_and_columns_of_ones_own_code(models, tmp_path):
    """Two reward functions by data_source, one in parts; a loop that scales them; a tool that
    fails."""
    done = start(
        tmp_path,
        models(),
        "reward.functions={even: 'my_code:parts', odd: 'my_code:other'}",
        "agent.loop=my_code:Asks",
        "agent.tools=my_code:broken",
        "agent.tool_timeout_s=30",
    )
    assert done.returncode == 0, done.stderr
    run = tmp_path / "run"
    reward, rollout = ((run / f"logs/{name}_0.log").read_text() for name in ("reward", "rollout"))
    assert "judging even 0" in reward
    assert "from a child of the function" in reward
    assert "the loop speaks" in rollout
    assert "the tool was called" in rollout
    assert "KeyError: 'Ulm'" in rollout
    assert f'my_code.py", line {line_of("return {}[city]")}, in broken' in rollout
    assert "speaks" not in done.stdout
    assert "judging" not in done.stdout
    rows, evaluations = (
        [json.loads(x) for x in (run / f"{n}.jsonl").read_text().splitlines()]
        for n in ("metrics", "evaluations")
    )
    assert rows[0]["agent/failed/mean"] == 1.0
    for row in rows:
        assert row["reward/right/mean"] <= 0.5
        assert 0 < row["reward/length/mean"] < 0.5
    for found in evaluations:  # two of the four rows have no parts, and 0.125 each
        assert found["val/reward"] == pytest.approx(
            (found["val/reward/right"] + found["val/reward/length"] + 0.125) / 2
        )
    line = next(line for line in done.stdout.splitlines() if line.startswith("step 1/2"))
    assert (
        f"(right {rows[0]['reward/right/mean']:.3f}, length {rows[0]['reward/length/mean']:.3f})"
        in line
    )
    assert "(right " in next(
        line for line in done.stdout.splitlines() if line.startswith("held-out reward")
    )
    first = json.loads((run / "samples/step_000000.jsonl").read_text().splitlines()[0])
    assert first["reward"] == pytest.approx(sum(first["reward_parts"].values()))


def test_a_reward_that_raises_in_mid_run_is_told_with_its_line(models, tmp_path):
    done = start(tmp_path, models(), "reward.function=my_code:raises_later", "data.val_files=")
    assert done.returncode == 1, done.stderr
    line = done.stderr.splitlines()[0]
    assert line.startswith("error: the run ended by ")
    assert "RewardError" in line
    deepest = line_of("return table[ground_truth]")
    outer = line_of("look_up({})")
    assert f"raised KeyError at my_code.py:{deepest}: " in line
    assert "the response begins " in line, line
    assert f"prompt (0, 2), sample 0, data row {tmp_path}/rows.jsonl:3: " in line.replace(
        "sample 1", "sample 0"
    ), line
    assert f"logs of the replicas and reward functions: {tmp_path}/run/logs" in done.stderr
    log = (tmp_path / "run" / "error.log").read_text()
    assert f'my_code.py", line {outer}, in raises_later' in log
    assert f'my_code.py", line {deepest}, in look_up' in log
    assert "return table[ground_truth]" in log
    assert f'my_code.py", line {deepest}' in (tmp_path / "run/logs/reward_0.log").read_text()
