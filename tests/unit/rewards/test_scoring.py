"""The reward worker: the user's functions, what they return, and the time limit."""

from __future__ import annotations

import os
import pickle
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from one_step_off.config.errors import ConfigError
from one_step_off.config.schema import RewardConfig
from one_step_off.rewards.functions import RewardFunctions
from one_step_off.rewards.reward import RewardError, RewardItem
from one_step_off.rewards.scoring import Scorer
from tests.unit.rewards.reward_helpers import item


def test_a_source_has_its_own_function():
    """Whatever its rows are called; prompts of other sources have the config's function."""
    scorer = Scorer(RewardConfig(function="gsm8k"), {"exact": "math"})
    items = [
        RewardItem((0, i), 0, "?", r"\boxed{7} #### 3", "7", source=source)
        for i, source in enumerate(("exact", "other", ""))
    ]
    assert scorer.score_batch(items) == [1.0, 0.0, 0.0]
    with pytest.raises(ConfigError, match="data.train_files, chat: reward='nowhere:score'"):
        RewardFunctions(RewardConfig(), {"chat": "nowhere:score"})


def test_a_response_that_cannot_be_judged_in_time_stops_nothing() -> None:
    scorer = Scorer(RewardConfig(function="math", timeout_s=0.3))
    start = time.monotonic()
    items = [item("\\boxed{9^{9^{9^9}}}", "4"), item("\\boxed{4}", "4")]
    assert scorer.score_batch(items) == [None, 1.0]
    assert time.monotonic() - start < 3


MODULE = """
import itertools
import time
import numpy as np

NOT_CALLABLE = 3

def good(prompt, response, ground_truth, data_source, bonus=0.0):
    return len(response) + bonus

def only_response(response, **kwargs):
    return {"reward": 0.5, "why": response}

def value(prompt, response, ground_truth, data_source):
    return eval(response)

def too_few(response):
    return 1.0

async def later(**kwargs):
    return 1.0

class Judge:
    @staticmethod
    def judge(**kwargs):
        return 2

def spin(**kwargs):
    while True:
        pass

def swallow(**kwargs):
    while True:
        try:
            time.sleep(5)
        except Exception:
            pass

def deep_in_c(**kwargs):
    return sum(itertools.repeat(0))

def swallow_for_ever(**kwargs):
    while True:
        try:
            time.sleep(5)
        except BaseException:
            pass

class Evil:
    def __init__(self, what):
        self.what = what

    def __repr__(self):
        if self.what == "__repr__":
            raise KeyError("no words")
        return self.what

    def __float__(self):
        if self.what == "__float__":
            raise KeyError("no number")
        raise TypeError("no number")

def swallow_all(**kwargs):
    try:
        time.sleep(5)
    except:
        pass
    return 1.0
"""


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The name of an importable module of reward functions."""
    (tmp_path / "own_rewards.py").write_text(MODULE)
    (tmp_path / "broken_rewards.py").write_text("1 / 0")
    (tmp_path / "needy_rewards.py").write_text("import no_such_package_at_all")
    monkeypatch.syspath_prepend(str(tmp_path))
    for name in ("own_rewards", "broken_rewards", "needy_rewards"):
        sys.modules.pop(name, None)
    return "own_rewards"


@pytest.mark.parametrize(
    ("function", "kwargs", "reward"),
    [
        ("good", {}, 6.0),
        ("good", {"bonus": 1.5}, 7.5),
        ("only_response", {}, 0.5),
        ("Judge.judge", {}, 2.0),
    ],
)
def test_own_function(own: str, function: str, kwargs: dict[str, Any], reward: float) -> None:
    scorer = Scorer(RewardConfig(function=f"{own}:{function}", kwargs=kwargs))
    assert scorer.score_batch([item("#### 1")]) == [reward]


def refused(match: str, own: str, what: RewardItem) -> str:
    """What the function `value` is refused with, as text."""
    (error,) = Scorer(RewardConfig(function=f"{own}:value")).score_batch([what])
    assert isinstance(error, RewardError)
    assert error.kind == "reward/errors"
    assert re.search(match, str(error)), str(error)
    return str(error)


@pytest.mark.parametrize(
    "result", ["1", "True", "0.5", "np.float32(0.5)", "np.array(2)", "{'reward': np.int64(1)}"]
)
def test_results_taken(own: str, result: str) -> None:
    (reward,) = Scorer(RewardConfig(function=f"{own}:value")).score_batch([item(result)])
    value = eval(result, {"np": np})
    assert type(reward) is float
    assert reward == float(value["reward"] if isinstance(value, dict) else value)


@pytest.mark.parametrize("result", ["{'right': True, 'form': np.float32(.5)}", "{'right': 1}"])
def test_parts_taken(own: str, result: str) -> None:
    (parts,) = Scorer(RewardConfig(function=f"{own}:value")).score_batch([item(result)])
    assert parts == eval(result, {"np": np})
    assert all(type(part) is float for part in parts.values())


@pytest.mark.parametrize(
    "result",
    ["None", "'1'", "float('nan')", "float('inf')", "{}", "{'reward': None}", "[1.0]",
     "np.zeros(2)", "10**400", "1j", "{'right': 1.0, 'form': None}", "{'right': float('nan')}",
     "{'right': 1.0, 2: 1.0}", "{'right': {'a': 1.0}}",
     "{'a': 1e308, 'b': 1e308}", "1e31", "{'reward': -1e31}", "{'a': 8e29, 'b': 8e29}"],
)  # fmt: skip
def test_results_refused(own: str, result: str) -> None:
    assert "\n" not in refused(
        r"own_rewards:value.*prompt \(2, 17\), sample 4: returned ", own, item(result, n=4)
    )


COLUMNS_MODULE = """
def by_name(response, ground_truth, data_source, prompt, extra_info=None):
    return extra_info["level"]

def by_any(**kwargs):
    return kwargs["extra_info"]["level"]

def of_four(prompt, response, ground_truth, data_source):
    return 7.0
"""


def test_functions_by_data_source_and_the_other_columns_of_the_row(own, tmp_path, monkeypatch):
    """A function of the four texts alone goes on working; one that takes `extra_info`, by name or
    by **kwargs, gets it.
    """
    (tmp_path / "columns_rewards.py").write_text(COLUMNS_MODULE)
    functions = {
        "a": "columns_rewards:by_name",
        "b/c": "columns_rewards:by_any",
        "d": "columns_rewards:of_four",
        "e": "gsm8k",
    }
    scorer = Scorer(RewardConfig(functions=functions))
    items = [
        RewardItem((0, i), 0, "?", "#### 7", "7", source, {"level": float(i)})
        for i, source in enumerate(("a", "b/c", "d", "e", "a"))
    ]
    assert scorer.score_batch(items) == [0.0, 1.0, 7.0, 1.0, 4.0]
    with pytest.raises(
        ConfigError,
        match="reward.functions: no function for the data_source 'f'; add one .*a, b/c, d, e",
    ):
        RewardFunctions(RewardConfig(functions=functions)).find("f")


def test_arguments_go_to_all_functions_of_the_users_own(own):
    functions = {"a": f"{own}:good", "b": "gsm8k"}
    scorer = Scorer(RewardConfig(functions=functions, kwargs={"bonus": 0.5}))
    items = [RewardItem((0, 0), 0, "?", "#### 7", "7", source) for source in ("a", "b")]
    assert scorer.score_batch(items) == [6.5, 1.0]


def test_a_score_beside_other_figures_is_no_part(own: str) -> None:
    """Other trainers' functions return {"score": ..., "acc": ...}: their sum would be a silently
    wrong reward.
    """
    refused(
        'the key "score" of other libraries is "reward" here',
        own,
        item("{'score': 1.0, 'acc': 1.0}"),
    )


def test_a_raising_function_is_named_with_its_prompt(own: str) -> None:
    refused(
        r"own_rewards:value.*prompt \(2, 17\), sample 0: raised ZeroDivisionError",
        own,
        item("1 / 0"),
    )


def test_a_functions_error_shows_no_secret(own: str) -> None:
    error_text = refused(
        "own_rewards:value",
        own,
        item("open('http://me:hunter2pass@h/v1?token=s3cr3tvalue ' + 'x' * 3000)"),
    )
    assert "http://***@h/v1?token=***" in error_text
    assert "hunter2pass" not in error_text
    assert "s3cr3tvalue" not in error_text


@pytest.mark.parametrize(
    "result", ["Evil('__repr__')", "Evil('__float__')", "Evil('boom\\nboom')", "'x' * 10**6"]
)
def test_a_result_that_misbehaves_itself_is_one_line(own: str, result: str) -> None:
    error_text = refused("own_rewards:value", own, item(result))
    assert "\n" not in error_text
    assert len(error_text) <= 1000


def test_one_bad_item_leaves_the_others_their_rewards(own: str) -> None:
    actual = Scorer(RewardConfig(function=f"{own}:value")).score_batch(
        [item("1.0"), item("1 / 0"), item("2.0")]
    )
    assert (actual[0], actual[2]) == (1.0, 2.0)
    assert isinstance(actual[1], RewardError)


@pytest.mark.parametrize("function", ["spin", "swallow", "swallow_all"])
def test_the_limit_stops_any_python_code(own: str, function: str) -> None:
    start = time.monotonic()
    (error,) = Scorer(RewardConfig(function=f"{own}:{function}", timeout_s=0.2)).score_batch(
        [item()]
    )
    assert isinstance(error, RewardError)
    assert error.kind == "reward/timeouts"
    assert re.search(
        rf"{function}.*prompt \(2, 17\), sample 0: took longer than .*=0.2 s", str(error)
    )
    assert time.monotonic() - start < 10


@pytest.mark.parametrize("function", ["deep_in_c", "swallow_for_ever"])
def test_what_no_alarm_ends_ends_with_its_process(own: str, tmp_path: Path, function: str) -> None:
    """A sum of C code with the interpreter's lock, and a loop that swallows every alarm."""
    code = f"""if True:
        from one_step_off.config.schema import RewardConfig
        from one_step_off.rewards.scoring import RewardItem, Scorer
        scorer = Scorer(RewardConfig(function="own_rewards:{function}", timeout_s=0.2))
        scorer.score_batch([RewardItem((0, 0), 0, "", "", "")])
        """
    start = time.monotonic()
    env = dict(os.environ, PYTHONPATH=f"{tmp_path}:{os.getcwd()}")
    done = subprocess.run(
        [sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 1
    assert "Timeout" in done.stderr
    assert function in done.stderr
    assert time.monotonic() - start < 30


def test_an_error_keeps_its_kind_over_a_process_boundary() -> None:
    error = pickle.loads(pickle.dumps(RewardError("why\n so", "reward/timeouts")))
    assert (str(error), error.kind) == ("why so", "reward/timeouts")


def test_no_alarm_is_left_behind(own: str) -> None:
    Scorer(RewardConfig(function=f"{own}:good", timeout_s=0.1)).score_batch([item()])
    time.sleep(0.15)


@pytest.mark.parametrize(
    ("function", "kwargs", "message"),
    [
        ("gsm9k", {}, "did you mean gsm8k?"),
        (":f", {}, "cannot be imported: ValueError: invalid format"),
        ("own_rewards:", {}, "is a module, not callable"),
        (
            "no_such_module_here:f",
            {},
            "cannot be imported: ModuleNotFoundError: No module named 'no_such_module_here'; "
            ".*PYTHONPATH",
        ),
        (
            "needy_rewards:f",
            {},
            "cannot be imported: ModuleNotFoundError: No module named 'no_such_package_at_all'",
        ),
        ("broken_rewards:f", {}, "cannot be imported: ZeroDivisionError"),
        ("own_rewards:nothing", {}, "has no attribute 'nothing'; check the name"),
        ("own_rewards:NOT_CALLABLE", {}, "is a int, not callable"),
        ("own_rewards:later", {}, "asynchronous"),
        ("own_rewards:too_few", {}, "unexpected keyword argument"),
        ("own_rewards:good", {"malus": 1}, "unexpected keyword argument 'malus'"),
        (
            "own_rewards:good",
            {"prompt": "x"},
            "multiple values for keyword argument 'prompt'; .*rename",
        ),
    ],
)
def test_resolve_refusals(own: str, function: str, kwargs: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as e:
        RewardFunctions(RewardConfig(function=function, kwargs=kwargs))
    assert "reward." in str(e.value)
    assert "\n" not in str(e.value)
