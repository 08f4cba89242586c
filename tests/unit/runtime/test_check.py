"""`--check` finds what a run would trip over, without an engine: each fault of a user's own code
has a line that begins with FAIL and names it, and the exit code is 2."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from one_step_off import main_sft
from one_step_off.main_ppo import main
from tests.bad_input import base

MODULE = '''
import json
import os
import time
import urllib.request

from agent_loop.base import AgentLoop, Trajectory


def right(response, ground_truth, **kwargs):
    return {"right": float(ground_truth in response), "form": 0.25}


def alike(response, **kwargs):
    return 0.5


def splits(response, **kwargs):
    return float(response.split("####")[1])


def lookup(city: str) -> str:
    """The weather of a city.

    Args:
        city: Its name.
    """
    return wether[city]


def refuses(city: str) -> str:
    """The weather of a city.

    Args:
        city: Its name.
    """
    raise ValueError(f"no city {city}")


class Stops(AgentLoop):
    async def run(self, prompt, generate, score, limits):
        trajectory = Trajectory(prompt.ids, limits)
        await trajectory.generate(generate)
        return trajectory.nothing


class Blocks(AgentLoop):
    async def run(self, prompt, generate, score, limits):
        time.sleep(1e6)


class Steps:
    def reset(self, ground_truth):
        return "begin"

    def step(self, action):
        return self.nothing


def ask(base_url, api_key):
    body = json.dumps({"messages": [{"role": "user", "content": "hi"}]}).encode()
    headers = {"Authorization": f"Bearer {api_key}", "Content-Type": "application/json"}
    urllib.request.urlopen(urllib.request.Request(f"{base_url}/chat/completions", body, headers))


def asks(row, base_url, api_key):
    ask(base_url, api_key)
    return 0.5


def reads_a_key(row, base_url, api_key):
    ask(base_url, api_key)
    return row["nothing"]


def says_nothing(row, base_url, api_key):
    pass


def never_ends(row, base_url, api_key):
    ask(base_url, api_key)
    time.sleep(1e6)
'''
PROGRAM = """
import os
from own_check import ask
ask(os.environ["OPENAI_BASE_URL"], os.environ["OPENAI_API_KEY"])
"""
ROOT = Path(__file__).parents[3]
EXTERNAL = ["agent.loop=external", "data.max_response_length=64", "agent.timeout_s=20"]
TOOLS = ["agent.loop=tool", "agent.loop_kwargs={tool: {taught: true}}"]


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with modules of the user, where they stand."""
    (tmp_path / "own_check.py").write_text(MODULE)
    (tmp_path / "asks.py").write_text(PROGRAM)
    (tmp_path / "fails.py").write_text("import no_such_module\n")
    (tmp_path / "not_executable.py").write_text("#!/usr/bin/env python\n")
    script = tmp_path / "no_interpreter"
    script.write_text("#!/no/such/interpreter\n")
    script.chmod(0o755)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    sys.modules.pop("own_check", None)
    return tmp_path


def check(argv: list[str], capsys: pytest.CaptureFixture) -> tuple[int, list[str]]:
    """The exit code and the lines of a check."""
    code = main([*argv, "--check"])
    lines = capsys.readouterr().out.splitlines()
    for line in lines[:-1]:
        assert line.split()[0] in ("PASS", "WARN", "FAIL"), line
    return code, lines


def lines_with(lines: list[str], *parts: str) -> list[str]:
    return [line for line in lines if all(part in line for part in parts)]


def test_all_that_works(own, models, capsys):
    argv = [*base(own, models()), "reward.function=own_check:right"]
    code, lines = check(argv, capsys)
    assert code == 0, lines
    assert lines_with(lines, "PASS  imports", "reward.function=own_check:right")
    assert lines_with(lines, "PASS  data", "training data: 16 rows, 16 used", "longest prompt has")
    (reward,) = lines_with(lines, "PASS  reward")
    assert "1.25 (a dict: right 1, form 0.25)" in reward and "0.25 (a dict" in reward
    assert "word_problems[train]:1" in reward and "3 rows" in reward and "s a call" in reward
    assert lines_with(lines, "PASS  agent", "turns 1, reward 1.25")
    assert lines_with(lines, "PASS  run", "2 steps; it starts at step 0")
    assert lines[-1].startswith("all checks passed; not checked: whether the GPUs")
    assert not (own / "run/agents").exists()


@pytest.mark.parametrize(
    ("more", "parts"),
    [
        (["reward.function=own_check:rigth"], ["FAIL  imports", "no attribute 'rigth'"]),
        (["reward.function=own_check:splits"],
         ["FAIL  reward", "IndexError at own_check.py:19", "begins 'I do not know.'", "; fix"]),
        (["agent.loop=own_check:Stops"],
         ["FAIL  agent", "AttributeError at own_check.py:", "'nothing'"]),
        (["agent.loop=environment", "agent.loop_kwargs={environment: {env: 'own_check:Steps'}}",
          "agent.max_turns=2"],
         ["FAIL  agent", "own_check:Steps.step: AttributeError", "own_check.py:"]),
        ([*TOOLS, "agent.tools=own_check:lookup"],
         ["FAIL  agent", 'tool lookup({"city": "1"}) answered', "'wether' is not defined"]),
        ([*EXTERNAL, "agent.command=own_check:reads_a_key"],
         ["FAIL  agent", "KeyError: 'nothing' (own_check.py:"]),
        ([*EXTERNAL, "agent.command=own_check:says_nothing"],
         ["FAIL  agent", "ended without a turn of the policy"]),
        ([*EXTERNAL, "agent.command=own_check:never_ends", "agent.timeout_s=1"],
         ["FAIL  agent", "did not end within 1 s"]),
        ([*EXTERNAL, f"agent.command={sys.executable} fails.py"],
         ["FAIL  agent", "exit code 1", "No module named 'no_such_module'"]),
        ([*EXTERNAL, f"agent.command={sys.executable} -m no_such_module"],
         ["FAIL  agent", "No module named no_such_module"]),
        ([*EXTERNAL, "agent.command=no_such_program"],
         ["FAIL  agent", "there is no program no_such_program; name one"]),
        (["data.train_files=/nowhere/a.jsonl"], ["FAIL  config", "/nowhere/a.jsonl: no such file"]),
        (["actor.ppo_mini_batch_size=3"], ["FAIL  config", "does not divide"]),
    ],
)  # fmt: skip
def test_a_fault_is_a_line_that_fails(more, parts, own, models, capsys):
    code, lines = check([*base(own, models()), *more], capsys)
    assert code == 2
    assert lines_with(lines, *parts), lines
    assert lines[-1] == f"failed: {parts[0].split()[1]}"


@pytest.mark.parametrize(
    ("more", "parts"),
    [
        (["reward.function=own_check:alike"], ["WARN  reward", "right and wrong responses alike"]),
        (["reward.function=own_check:splits", "reward.on_error=drop"],
         ["WARN  reward", "IndexError"]),
        ([*TOOLS, "agent.tools=own_check:refuses"],
         ["WARN  agent", "ValueError: no city 1", "unless the arguments are to blame"]),
        ([*TOOLS, "agent.tools=calculator"],
         ["PASS  agent", 'tool calculator({"expression": "1"}) answered \'1\'']),
        ([*TOOLS, "agent.tools=calculator"], ["PASS  agent", "turns 2"]),
        ([*EXTERNAL, "agent.command=own_check:asks"], ["PASS  agent", "turns 1, reward 0.5"]),
        ([*EXTERNAL, f"agent.command={sys.executable} asks.py"],
         ["PASS  agent", "turns 1, reward 1"]),
        (EXTERNAL, ["WARN  agent", "ask the run's endpoint for work"]),
    ],
)  # fmt: skip
def test_what_may_be_right_passes(more, parts, own, models, capsys):
    code, lines = check([*base(own, models()), *more], capsys)
    assert lines_with(lines, *parts), lines
    assert code == 0


def test_a_loop_that_blocks_does_not_hang_the_check(own, models, capsys, monkeypatch):
    from one_step_off.tools import trial_episode

    monkeypatch.setattr(trial_episode, "LIMIT_S", 0.5)
    code, lines = check([*base(own, models()), "agent.loop=own_check:Blocks"], capsys)
    assert code == 2
    assert lines_with(lines, "FAIL  agent", "did not end within 1 s; it is at own_check.py:"), lines


def test_malformed_rows_are_reported(own, models, capsys):
    rows = ['{"question": "1 + 1?", "answer": "#### 2"}'] * 4 + ["broken"]
    (own / "rows.jsonl").write_text("\n".join(rows) + "\n")
    argv = [*base(own, models()), "data.train_files=rows.jsonl"]
    code, lines = check(argv, capsys)
    assert code == 0
    assert lines_with(lines, "PASS  data", "5 rows, 4 used, 1 malformed skipped")
    assert lines_with(lines, "WARN  data", "rows.jsonl:5", "not valid JSON")
    code, lines = check([*argv, "data.bad_rows=fail"], capsys)
    assert code == 2
    assert lines_with(lines, "FAIL  data", "rows.jsonl:5")


@pytest.mark.parametrize(
    ("command", "part"),
    [
        ("./not_executable.py", "is not executable; run chmod +x ./not_executable.py"),
        ("./no_interpreter", "its first line names /no/such/interpreter, which does not exist"),
        ("python no_file.py", "there is no file no_file.py (working directory"),
        ("bash no_file.sh", "there is no file no_file.sh"),
    ],
)
def test_a_program_that_cannot_begin_is_refused_before_a_run_too(command, part, own):
    from agent_loop.external import fault_of_program

    assert part in fault_of_program(command.split())
    for works in ("python asks.py", "python -m asks", "sh -c true", f"{sys.executable} asks.py"):
        assert fault_of_program(works.split()) == ""


def test_supervised(own, models, capsys):
    argv = [*base(own, models()), "--check"]
    assert main_sft.main(argv) == 0
    out = capsys.readouterr().out
    assert "PASS  sft       2 steps; training data: 16 rows, 16 used" in out
    (own / "rows.jsonl").write_text('{"question": "1 + 1?"}\n')
    assert main_sft.main([*argv, "sft.train_files=rows.jsonl"]) == 2
    assert "FAIL  sft " in capsys.readouterr().out


def test_a_cluster_config_on_a_laptop(own, capsys):
    """Its data and models are elsewhere: --dry-run warns, and a run is refused."""
    (own / "cluster.yaml").write_text(
        "model: {path: /cluster/models/qwen}\n"
        "data: {train_files: /cluster/data/train.parquet, val_files: /cluster/data/test.parquet}\n"
        "placement: {pools: {rollout: [8], actor: [8]}}\n"
        "agent: {loop: external, python: /cluster/venv/bin/python}\n"
        "trainer: {total_steps: 2, output_dir: /proc/nowhere/run}\n"
    )
    env = dict(os.environ, CUDA_VISIBLE_DEVICES="", PYTHONPATH=str(ROOT))
    command = [sys.executable, "-m", "one_step_off.main_ppo", "config=cluster.yaml"]
    done = subprocess.run(
        [*command, "--dry-run"], env=env, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    assert "path: /cluster/models/qwen" in done.stdout
    for missing in ("train.parquet", "test.parquet", "models/qwen", "venv/bin/python"):
        assert missing in done.stderr
    for line in done.stderr.splitlines():
        assert line.startswith("warning: here a run would be refused: "), line
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
