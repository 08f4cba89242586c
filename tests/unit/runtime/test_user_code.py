"""The message when a function of the user's own fails: its line, the response, the traceback; and
where output goes.
"""

from __future__ import annotations

import asyncio
import pickle
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from agent_loop import tools
from agent_loop.base import AgentLoop, Generated, Loops, Trajectory
from one_step_off.config.errors import ConfigError
from one_step_off.config.registry import import_object
from one_step_off.config.schema import Config, RewardConfig
from one_step_off.data.samples import Prompt
from one_step_off.models import tiny_qwen
from one_step_off.rewards.reward import RewardError, RewardItem
from one_step_off.rewards.scoring import Scorer
from one_step_off.rollout.replica import RolloutReplica
from one_step_off.rollout.sampling import Sampling
from one_step_off.runtime.failure_report import report_failure
from tests.unit.stand_ins import tiny_tokenizer

MODULE = """
import json
import time


def inner(text):
    return json.loads(text)


def raises(response, **kwargs):
    return inner(response)


def sleeps(response, **kwargs):
    time.sleep(30)


def nothing(response, **kwargs):
    return None
"""


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of an importable module, where the user stands."""
    (tmp_path / "own_code.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    sys.modules.pop("own_code", None)
    return tmp_path


def line_of(text: str) -> int:
    return 1 + MODULE[: MODULE.index(text)].count("\n")


LONG = "not JSON: " + "x" * 200


def error_of(function: str, timeout_s: float = 5.0) -> RewardError:
    cfg = RewardConfig(function=f"own_code:{function}", timeout_s=timeout_s)
    (error,) = Scorer(cfg).score_batch(
        [RewardItem((0, 3), 1, "q", LONG, "7", where="rows.jsonl:4")]
    )
    assert isinstance(error, RewardError)
    return error


def test_a_reward_that_raises_names_the_users_line_and_the_response(own):
    """The deepest frame is json's; the line is the user's. All of it survives the way to another
    process."""
    error = pickle.loads(pickle.dumps(error_of("raises")))
    line = line_of("return json.loads")
    sample = "prompt (0, 3), sample 1, data row rows.jsonl:4"
    assert f"{sample}: raised JSONDecodeError at own_code.py:{line}: " in str(error)
    assert str(error).endswith(f"the response begins {LONG[:80]!r}...")
    (details,) = error.__notes__
    assert 'own_code.py", line 7, in inner' in details
    assert "json/decoder.py" in details


def test_a_reward_that_takes_too_long_names_the_line_where_it_was(own):
    error = error_of("sleeps", 0.2)
    line = line_of("time.sleep")
    limit = f"took longer than reward.timeout_s=0.2 s at own_code.py:{line}"
    assert f"{limit}; the response begins 'not" in str(error)
    assert error.kind == "reward/timeouts"


def test_a_wrong_reward_names_the_response(own):
    assert "returned None, not a finite number" in str(error_of("nothing"))
    assert LONG[:80] in str(error_of("nothing"))


def test_a_function_of_an_installed_package_has_its_line_too(own, monkeypatch):
    """What lies in site-packages counts as a library's, unless it is the reward function's own
    file."""
    folder = own / "site-packages"
    folder.mkdir()
    (folder / "installed_code.py").write_text(MODULE)
    monkeypatch.syspath_prepend(str(folder))
    cfg = RewardConfig(function="installed_code:raises")
    (error,) = Scorer(cfg).score_batch([RewardItem((0, 0), 0, "q", "x", "7")])
    line = line_of("return json.loads")
    assert f"raised JSONDecodeError at site-packages/installed_code.py:{line}: " in str(error)


def test_the_line_is_named_from_a_working_directory_that_is_gone(own, monkeypatch):
    scorer = Scorer(RewardConfig(function="own_code:raises"))
    gone = own / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    (error,) = scorer.score_batch([RewardItem((0, 0), 0, "q", "x", "7")])
    assert f"raised JSONDecodeError at {own}/own_code.py:{line_of('return json.loads')}: " in str(
        error
    )


class Fails(AgentLoop):
    """Speaks, and then fails."""

    async def run(self, prompt, generate, score, limits):
        trajectory = Trajectory(prompt.ids, limits)
        await trajectory.generate(generate)
        raise KeyError("mood")


def test_a_loop_that_raises_names_its_line_and_the_response():
    cfg = Config()
    tokenizer = tiny_tokenizer()
    cfg.agent.loop = f"{__name__}:Fails"

    async def engine(*_):
        ids = np.array(tokenizer.encode("#### 12"), np.int32)
        return Generated(ids, np.zeros(len(ids)), np.zeros(len(ids)), 0, "stop")

    replica = RolloutReplica(cfg, 0, "cpu", [])
    replica.tokenizer = tokenizer
    replica._generate = engine
    prompt = Prompt((0, 0), np.arange(2), "q", "1", where="rows.jsonl:1")
    with pytest.raises(RewardError) as e:
        asyncio.run(replica._trajectory(prompt, 0, Sampling(1, 1.0, None)))
    line = 1 + Path(__file__).read_text().partition('        raise KeyError("mood")')[0].count("\n")
    message = str(e.value)
    sample = f"agent loop {__name__}:Fails, prompt (0, 0), sample 0, data row rows.jsonl:1"
    place = f"tests/unit/runtime/test_user_code.py:{line}"
    assert f"{sample}: raised KeyError at {place}: 'mood'" in message
    assert message.endswith("the response begins '#### 12'")
    assert "in run" in e.value.__notes__[0]


def weather(city: str) -> str:
    """The weather.

    Args:
        city: Its name.
    """
    return {}[city]


@pytest.mark.parametrize(
    ("name", "arguments", "told"),
    [
        ("weather", {"city": "Ulm"}, True),
        ("weather", {"town": "Ulm"}, False),
        ("calculator", {"expression": "1 +"}, False),
    ],
)
def test_a_tools_failure_is_logged_where_it_is_the_users_code(name, arguments, told, capfd):
    """The model's faults, and built-in tools, are not."""
    cfg = Config()
    cfg.agent.tools = f"calculator,{__name__}:weather"
    answer, good = asyncio.run(tools.Toolbox(cfg.agent).call(name, arguments, 5.0))
    assert not good
    assert answer.startswith("error: ")
    assert "test_user_code" not in answer, "the model reads no traceback"
    log = capfd.readouterr().err
    assert ("KeyError: 'Ulm'" in log and "in weather" in log) == told


def test_a_module_that_cannot_be_imported_names_its_line(own):
    (own / "broken_code.py").write_text("import json\n\njson.loads('')\n")
    with pytest.raises(
        ConfigError,
        match=r"cannot be imported: JSONDecodeError: .* \(broken_code.py:3\); check the name",
    ):
        import_object("agent.tools", "broken_code:f")


def test_an_environment_that_raises_names_its_line():
    cfg = Config()
    tokenizer = tiny_tokenizer()
    cfg.agent.loop = "environment"
    cfg.agent.loop_kwargs = {"environment": {"env": "tests.environments:Moody"}}

    async def engine(ids, max_tokens):
        ids = np.array(tokenizer.encode(" raise"), np.int32)
        return Generated(ids, np.zeros(len(ids)), np.zeros(len(ids)), 0, "stop")

    async def main():
        loops = Loops(cfg, tokenizer)
        prompt = Prompt((0, 0), np.array(tiny_qwen.prompt_ids(tokenizer, "?"), np.int32), "?", "7")
        await loops.get().run(prompt, engine, None, loops.limits(200))

    with pytest.raises(
        RuntimeError, match=r"Moody.step: KeyError: 'mood' \(tests/environments.py:\d+\)"
    ) as e:
        asyncio.run(main())
    assert "in step" in e.value.__notes__[0]


def test_a_failure_in_the_driver_names_the_users_line(own):
    cfg = Config()
    cfg.trainer.output_dir = str(own / "run")
    try:
        import_object("reward.function", "own_code:inner")("oops")
    except ValueError as e:
        message = report_failure(cfg, e)
    assert message.splitlines()[1] == f"  raised at own_code.py:{line_of('return json.loads')}"
    log = (own / "run" / "error.log").read_text()
    first = f"own_code.py:{line_of('return json.loads')}: JSONDecodeError: Expecting value"
    assert log.startswith(first), "before the frames of others"
    assert "\n\nTraceback (most recent call last)" in log


OUTPUT = """
import os, sys
from one_step_off.config.user_code import log_traceback, redirect_output
redirect_output(sys.argv[1])
print("printed")
print("\\udfff to stderr", file=sys.stderr)
os.system("echo by a child")
for i in range(103):
    log_traceback(f"failure {i} of http://me:hunter2pass@h/", "its traceback")
os.kill(os.getpid(), 9)
"""


def test_output_goes_to_the_file_at_once_and_behind_what_is_there(tmp_path):
    log = tmp_path / "logs" / "reward_0.log"
    for _ in range(2):
        done = subprocess.run(
            [sys.executable, "-c", OUTPUT, str(log)], capture_output=True, text=True, timeout=60
        )
        assert done.returncode == -9
        assert done.stdout == done.stderr == ""
    text = log.read_text()
    assert (
        text.count("printed\n") == text.count("\\udfff to stderr") == text.count("by a child") == 2
    )
    assert text.count("failure 99 of http://***@h/\nits traceback") == 2
    assert "failure 100" not in text
    assert text.count("further tracebacks are left out") == 2


def test_a_log_that_cannot_be_opened_leaves_the_output_where_it_was(tmp_path):
    (tmp_path / "logs").write_text("a file")
    done = subprocess.run(
        [sys.executable, "-c", OUTPUT, str(tmp_path / "logs" / "x.log")],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert "by a child" in done.stdout
    assert "failure 99" in done.stderr
