"""Each reward function of the user's own is called once on its first row, before any engine
starts.
"""

from __future__ import annotations

import contextlib
import json
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from one_step_off.checkpoint import write_batch
from one_step_off.data.samples import Batch, Sample
from one_step_off.runtime import launch
from one_step_off.tools import replay as replay_module
from one_step_off.tools.replay import replay
from tests.bad_input import base, refused
from tests.conftest import tiny_config

MODULE = """
import ctypes
import itertools
import json
import os
import subprocess
import time


def raises(response, **kwargs):
    return {}[response]


def hangs(**kwargs):
    time.sleep(60)


def deep_in_c(**kwargs):
    sum(itertools.repeat(0))


def crashes(**kwargs):
    ctypes.string_at(0)


def ends(**kwargs):
    os._exit(3)


def nothing(**kwargs):
    return None


def leaves_a_child(**kwargs):
    subprocess.Popen(["sleep", "60"])
    time.sleep(60)


def writes(prompt, response, ground_truth, data_source, extra_info, file=""):
    print("not for the terminal")
    with open(file, "a") as f:
        f.write(json.dumps([prompt, response, ground_truth, data_source, extra_info]) + "\\n")
    return {"right": 1.0, "form": 0.5}


def needs_columns(extra_info, **kwargs):
    return float(extra_info["level"])
"""
ROWS = [
    {"question": "1 + 1", "answer": "2\n#### 2", "data_source": "sums", "level": 3},
    {"question": "2 + 2", "answer": "4\n#### 4", "data_source": "sums", "level": 4},
    {"question": "3 * 3", "answer": "9\n#### 9", "data_source": "products", "level": 5},
]


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with data and an importable module, where the user stands."""
    (tmp_path / "own_trial.py").write_text(MODULE)
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    sys.modules.pop("own_trial", None)
    return tmp_path


def line_of(function: str) -> int:
    """The line of the first statement of a function."""
    return 2 + MODULE[: MODULE.index(f"def {function}(")].count("\n")


BEFORE = "called before the start, with the ground truth as the response"
WHO = "prompt (0, 0), sample 0, data row TMP/rows.jsonl:1: "

# (function, parts of the line)
FAULTS = [
    (
        "raises",
        [
            "raised KeyError at own_trial.py:LINE: '2'; the response begins '2'",
            "set reward.on_error=drop",
        ],
    ),
    (
        "hangs",
        ["took longer than reward.timeout_s=0.5 s at own_trial.py:LINE", "raise reward.timeout_s"],
    ),
    (
        "deep_in_c",
        [
            "did not end within reward.timeout_s=0.5 s at own_trial.py:LINE",
            "raise reward.timeout_s",
        ],
    ),
    ("crashes", ["killed its process (signal 11)", "fix the function"]),
    ("ends", ["ended its process (code 3)", "fix the function"]),
    ("nothing", ["returned None, not a finite number", "fix the function"]),
    ("leaves_a_child", ["took longer than reward.timeout_s=0.5 s", "raise reward.timeout_s"]),
]


@pytest.mark.parametrize(("function", "parts"), FAULTS, ids=[f[0] for f in FAULTS])
def test_a_function_that_fails_on_the_first_row(function, parts, models, own, capsys):
    parts = [part.replace("LINE", str(line_of(function))) for part in parts]
    argv = [
        *base(own, models()),
        f"data.train_files={own}/rows.jsonl",
        f"reward.function=own_trial:{function}",
        "reward.timeout_s=0.5",
    ]
    refused(argv, [f"reward.function='own_trial:{function}', ", WHO, BEFORE, *parts], own, capsys)


def config(own: Path, model: str, **changes: object):
    rows = {"data.train_files": str(own / "rows.jsonl"), "data.val_files": ""}
    return tiny_config(model, str(own / "run"), **(rows | changes))


def test_a_replay_scores_nothing_so_it_calls_no_function(models, own, monkeypatch):
    cfg = config(own, models(), **{"reward.function": "own_trial:crashes"})
    sample = Sample(
        (0, 0),
        0,
        np.ones(3, np.int32),
        np.ones(2, np.int32),
        np.zeros(2),
        np.ones(2, bool),
        np.zeros(2),
    )
    write_batch(Batch(0, [sample], (0,)), own / "step_000000")
    ran = []

    async def replay_on_trainers(batch, prepared, tracker):
        ran.append(prepared)

    monkeypatch.setattr(launch, "ray_session", lambda cfg, tracker: contextlib.nullcontext())
    monkeypatch.setattr(replay_module, "_replay_on_trainers", replay_on_trainers)
    assert replay(cfg, str(own / "step_000000")) == 0
    assert len(ran) == 1


@pytest.mark.parametrize("on_error", ["zero", "drop"])
def test_where_errors_do_not_end_the_run_a_warning_says_so(on_error, models, own):
    printed_lines: list[str] = []
    changes = {"reward.function": "own_trial:crashes", "reward.on_error": on_error}
    launch.prepare(config(own, models(), **changes), printed_lines.append)
    assert [
        BEFORE in line
        for line in printed_lines
        if line.startswith("warning: reward.function='own_trial:crashes'")
    ] == [True]


def test_each_function_sees_its_first_row_with_all_its_columns(models, own, capfd):
    changes = {
        "reward.functions": {"sums": "own_trial:writes", "products": "own_trial:needs_columns"}
    }
    changes["reward.kwargs"] = {}
    cfg = config(own, models(), **changes)
    cfg.reward.functions["products"] = "own_trial:writes"
    cfg.reward.kwargs = {"file": str(own / "seen.jsonl")}
    launch.prepare(cfg, lambda line: None)
    seen = [json.loads(line) for line in (own / "seen.jsonl").read_text().splitlines()]
    assert [
        (response, truth, source, columns["level"]) for _, response, truth, source, columns in seen
    ] == [
        ("2", "2", "sums", 3),
        ("9", "9", "products", 5),
    ]
    assert "not for the terminal" not in "".join(capfd.readouterr())


def test_built_in_functions_are_not_tried_and_rows_without_a_function_are_refused(
    models, own, capsys
):
    begin = time.monotonic()
    cfg = config(own, models(), **{"reward.functions": {"sums": "gsm8k", "products": "math"}})
    launch.prepare(cfg, lambda line: None)
    assert "one_step_off.rewards.trial_call" in sys.modules
    assert time.monotonic() - begin < 60
    argv = [
        *base(own, models()),
        f"data.train_files={own}/rows.jsonl",
        "reward.functions={sums: gsm8k}",
    ]
    parts = [
        "data row TMP/rows.jsonl:3: reward.functions: no function for the data_source 'products'",
        "defined: sums",
    ]
    refused(argv, parts, own, capsys)


def test_a_module_that_cannot_be_imported_twice(models, own, capsys):
    """As one that takes a port, or a lock, at its import."""
    text = (
        "import os\n"
        "if os.path.exists('lock'):\n    raise OSError('it is taken')\n"
        "open('lock', 'w')\n"
        "def f(**_): return 1.0\n"
    )
    (own / "own_locked.py").write_text(text)
    argv = [
        *base(own, models()),
        f"data.train_files={own}/rows.jsonl",
        "reward.function=own_locked:f",
    ]
    try:
        refused(
            argv,
            [WHO, "cannot be imported in a separate process: ", "OSError: it is taken"],
            own,
            capsys,
        )
    finally:
        sys.modules.pop("own_locked", None)


def test_rows_of_an_environment_need_no_function(models, own):
    (own / "rows.jsonl").write_text(
        json.dumps(ROWS[0] | {"agent_loop": "environment", "answer": "#### 7"}) + "\n"
    )
    changes = {
        "reward.function": "own_trial:crashes",
        "agent.loop_kwargs": {"environment": {"env": "tests.environments:Moody"}},
    }
    launch.prepare(config(own, models(), **changes), lambda line: None)


# (arguments, parts)
REFUSED = [
    (["reward.functions={sums: own_trial:nowhere}"],
     ["reward.functions.sums='own_trial:nowhere'", "check the name"]),
    (["reward.functions={sums: gsm9k}"],
     ["reward.functions.sums=gsm9k", "did you mean gsm8k?"]),
    (["reward.functions={sums: gsm8k}", "reward.function=math"],
     ["reward.function=math", "remove one of the two"]),
    (["reward.functions={sums: gsm8k}", "reward.kwargs.a=1"],
     ["reward.kwargs", "takes none; remove them"]),
    (["reward.functions={sums: own_trial:writes}", "reward.kwargs.b=1"],
     ["reward.functions.sums=", "unexpected keyword argument 'b'"]),
    (["reward.function=own_trial:writes", "reward.kwargs.extra_info=1"],
     ["multiple values for keyword argument 'extra_info'", "rename"]),
    (["reward.functions=gsm8k"], ["reward.functions=gsm8k: must be a mapping"]),
]  # fmt: skip


@pytest.mark.parametrize(("argv", "parts"), REFUSED)
def test_functions_that_cannot_be_had(argv, parts, models, own, capsys):
    refused([*base(own, models()), f"data.train_files={own}/rows.jsonl", *argv], parts, own, capsys)
