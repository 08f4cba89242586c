"""The user's own code in real processes: where its output goes, and which error the user sees when
it fails."""

from __future__ import annotations

import json
import os
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest

from one_step_off.data.word_problems import make
from tests.bad_input import base
from tests.e2e.commands import PROGRAM
from tests.e2e.run_folder import read_rows

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


class CallsTheTool(AgentLoop):
    """Calls the tool after any response, and scales its reward."""

    async def run(self, prompt, generate, score, limits):
        trajectory = Trajectory(prompt.ids, limits)
        response = await trajectory.generate(generate)
        print("the loop was called")
        answer, succeeded = await Toolbox(self.cfg.agent).call("broken", {"city": "Ulm"}, 5.0)
        trajectory.count("failed", not succeeded)
        reward = await score(self.text(response.ids))
        trajectory.reward = reward.scaled(0.5)
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
    """The number of the line in the module that has this text."""
    return 1 + MODULE[: MODULE.index(text)].count("\n")


def write_rows_of_two_sources(path: Path) -> None:
    """Write word problems with two more columns: `data_source`, even or odd, and `level`."""
    rows = make("train", 16, 0)
    for index, row in enumerate(rows):
        row["data_source"] = "odd"
        if index % 2 == 0:
            row["data_source"] = "even"
        row["level"] = index
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def run_user_code(folder: Path, model: str, *overrides: str) -> subprocess.CompletedProcess:
    """Run two steps on rows of two sources, as a user does."""
    write_rows_of_two_sources(folder / "rows.jsonl")
    (folder / "my_code.py").write_text(MODULE)
    arguments = [
        *base(folder, model),
        f"data.train_files={folder}/rows.jsonl",
        f"data.val_files={folder}/rows.jsonl",
        "data.val_size=4",
        "data.shuffle=false",
        "trainer.save_hf_model=false",
        *overrides,
    ]
    return subprocess.run(
        [*PROGRAM, *arguments],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=500,
    )


def assert_output_in_logs(run_folder: Path, stdout: str) -> None:
    """The output of user code is in the logs of its processes, and not on the console."""
    reward_log = (run_folder / "logs/reward_0.log").read_text()
    assert "judging even 0" in reward_log
    assert "from a child of the function" in reward_log
    rollout_log = (run_folder / "logs/rollout_0.log").read_text()
    assert "the loop was called" in rollout_log
    assert "the tool was called" in rollout_log
    assert "KeyError: 'Ulm'" in rollout_log
    assert f'my_code.py", line {line_of("return {}[city]")}, in broken' in rollout_log
    assert "the loop was called" not in stdout
    assert "the tool was called" not in stdout
    assert "judging" not in stdout


def assert_reward_parts(rows: list[dict[str, Any]], evaluations: list[dict[str, Any]]) -> None:
    """The metrics have the scaled parts of the rewards that come in parts."""
    assert rows[0]["agent/failed/mean"] == 1.0
    for row in rows:
        assert row["reward/right/mean"] <= 0.5
        assert 0 < row["reward/length/mean"] < 0.5
    for evaluation in evaluations:
        # Two of the four rows have parts. The other two have none, and a reward of 0.125 each.
        parts_sum = evaluation["val/reward/right"] + evaluation["val/reward/length"]
        assert evaluation["val/reward"] == pytest.approx((parts_sum + 0.125) / 2)


def first_line_that_starts_with(output: str, beginning: str) -> str:
    """A line of the console. Fails if there is none."""
    lines = [line for line in output.splitlines() if line.startswith(beginning)]
    assert lines, output
    return lines[0]


@pytest.mark.slow
def test_output_parts_and_columns_of_user_code(models, tmp_path):
    """Two reward functions by data_source, one in parts; a loop that scales them; a tool that
    fails."""
    finished = run_user_code(
        tmp_path,
        models(),
        "reward.functions={even: 'my_code:parts', odd: 'my_code:other'}",
        "agent.loop=my_code:CallsTheTool",
        "agent.tools=my_code:broken",
        "agent.tool_timeout_s=30",
    )
    assert finished.returncode == 0, finished.stderr
    run_folder = tmp_path / "run"
    assert_output_in_logs(run_folder, finished.stdout)
    rows = read_rows(run_folder, "metrics.jsonl")
    assert_reward_parts(rows, read_rows(run_folder, "evaluations.jsonl"))
    right = rows[0]["reward/right/mean"]
    length = rows[0]["reward/length/mean"]
    step_line = first_line_that_starts_with(finished.stdout, "step 1/2 [0]")
    assert f"(right {right:.3f}, length {length:.3f})" in step_line
    assert "(right " in first_line_that_starts_with(finished.stdout, "held-out reward")
    first_sample = read_rows(run_folder, "samples/step_000000.jsonl")[0]
    assert first_sample["reward"] == pytest.approx(sum(first_sample["reward_parts"].values()))


@pytest.mark.slow  # tests/unit/rewards/test_scoring.py has the message
def test_the_error_of_a_reward_that_raises_in_mid_run_names_its_line(models, tmp_path):
    finished = run_user_code(
        tmp_path, models(), "reward.function=my_code:raises_later", "data.val_files="
    )
    assert finished.returncode == 1, finished.stderr
    error = finished.stderr.splitlines()[0]
    raising_line = line_of("return table[ground_truth]")
    calling_line = line_of("look_up({})")
    assert error.startswith("error: the run ended by ")
    assert "RewardError" in error
    assert f"raised KeyError at my_code.py:{raising_line}: " in error
    assert "the response begins " in error
    row = re.escape(f"data row {tmp_path}/rows.jsonl:3: ")
    assert re.search(rf"prompt \(0, 2\), sample [01], {row}", error), error
    assert f"logs of the replicas and reward functions: {tmp_path}/run/logs" in finished.stderr
    error_log = (tmp_path / "run" / "error.log").read_text()
    assert f'my_code.py", line {calling_line}, in raises_later' in error_log
    assert f'my_code.py", line {raising_line}, in look_up' in error_log
    assert "return table[ground_truth]" in error_log
    reward_log = (tmp_path / "run/logs/reward_0.log").read_text()
    assert f'my_code.py", line {raising_line}' in reward_log
