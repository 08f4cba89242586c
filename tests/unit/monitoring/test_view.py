"""The viewer: what it shows of a run's samples, and what it says of bad input."""

from __future__ import annotations

import json
import os
import pty
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest

from one_step_off.config.command_line import exit_code
from one_step_off.monitoring import view

ROOT = Path(__file__).parents[3]
main = partial(exit_code, view.main)


@pytest.fixture
def run(tmp_path):
    """Steps 0, 1 and 4 of two prompts with two samples each, and an evaluation of v3."""
    folder = tmp_path / "run" / "samples"
    folder.mkdir(parents=True)

    def row(step, prompt, index, reward, length):
        return {
            "prompt_id": [0, prompt],
            "index": index,
            "reward": reward,
            "length": length,
            "finish_reason": "stop",
            "versions": [step],
            "ground_truth": "42",
            "prompt": f"question {prompt}",
            "response": f"[s{step}p{prompt}i{index}]",
        }

    for name, step in (
        ("step_000000", 0),
        ("step_000001", 1),
        ("step_000004", 4),
        ("val_v000003", 3),
    ):
        rows = [
            row(step, 8, 0, 1.0, 5),
            row(step, 8, 1, 1.0, 9),
            row(step, 9, 0, 0.0, 3),
            row(step, 9, 1, None, 4),
        ]
        rows += [row(step, 7, 0, 1.0, 5)]
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    return tmp_path / "run"


def shown(capsys) -> list[str]:
    return [
        line.strip(" |")
        for line in capsys.readouterr().out.splitlines()
        if "[s" in line or "[bold" in line
    ]


def test_the_last_step_best_worst_and_longest(run, capsys):
    assert main([str(run)]) == 0
    out = capsys.readouterr().out
    assert "step_000004.jsonl: 5 samples, reward 0.750, length 5.2 (max 9)" in out
    best = "--- best 1 of 3: reward 1  5 tokens  ended with EOS  made by v4"
    assert f"{best}  prompt (0, 8) sample 0  ground truth 42" in out
    assert "question 8" in out
    assert out.count("--- worst") == 3
    assert out.count("--- longest") == 1


def test_parts_of_rewards_are_shown(run, capsys):
    path = run / "samples" / "step_000004.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    rows[0]["reward_parts"] = {"right": 1, "form": 0.125}
    rows[1]["reward_parts"] = {"right": 0}
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert main([str(run), "--best", "1"]) == 0
    out = capsys.readouterr().out
    assert "5 samples, reward 0.750 (right 0.500, form 0.125), length 5.2" in out
    assert "--- best 1 of 1: reward 1 (right 1, form 0.125)  5 tokens" in out


def test_choices(run, capsys):
    assert main([str(run), "--step", "1", "--best", "2"]) == 0
    assert shown(capsys) == ["[s1p8i0]", "[s1p7i0]"], "of equal rewards other prompts first"
    main([str(run), "--worst", "1"])
    assert shown(capsys) == ["[s4p9i0]"], "an unscored sample is not the worst"
    main([str(run), "--val", "3", "--longest", "2", "--best", "0"])
    assert shown(capsys)[0] == "[s3p8i1]"


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (
            ["nowhere"],
            "error: nowhere: no samples of --step LAST: there are none; "
            "give the trainer.output_dir",
        ),
        (["RUN", "--step", "3"], "no samples of --step 3: there are 3, from 0 to 4"),
        (["RUN", "--val", "1"], "no samples of --val 1: there are 1, from 3 to 3"),
        (["RUN", "--best", "-1"], "must be at least 0"),
        (
            ["EMPTY"],
            "there are none; give the trainer.output_dir of a run with logging.sample_dump=true",
        ),
    ],
)
def test_one_line_for_bad_input(run, tmp_path, capsys, argv, words):
    (tmp_path / "empty").mkdir()
    places = {"RUN": str(run), "EMPTY": str(tmp_path / "empty")}
    assert main([places.get(a, a) for a in argv]) == 2
    err = capsys.readouterr().err
    assert words in err
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    "text",
    [
        "{broken",
        "[]",
        '{"reward": 1}',
        '{"reward": 1, "response": "", "length": 1, "reward_parts": 3}',
        "",
    ],
)
def test_a_damaged_file_is_named_with_its_line(run, capsys, text):
    (run / "samples" / "step_000004.jsonl").write_text(text)
    assert main([str(run)]) == 2
    assert "step_000004.jsonl" in capsys.readouterr().err


def test_a_models_output_does_not_steer_the_terminal(run, capsys):
    path = run / "samples" / "step_000004.jsonl"
    row = json.loads(path.read_text().splitlines()[0]) | {"response": "a\x1b[2Jb\x07 [bold]c"}
    path.write_text(json.dumps(row) + "\n")
    main([str(run), "--best", "1"])
    out = capsys.readouterr().out
    assert "\x1b" not in out
    assert "\x07" not in out
    assert "[bold]c" in out


def test_colours_on_a_terminal(run):
    master, slave = pty.openpty()
    command = [sys.executable, "-m", "one_step_off.view", str(run), "--best", "1"]
    environment = os.environ | {"TERM": "xterm", "COLUMNS": "100"}
    done = subprocess.run(
        command, stdout=slave, stderr=slave, cwd=ROOT, env=environment, timeout=60
    )
    os.close(slave)
    out = os.read(master, 100_000).decode()
    os.close(master)
    assert done.returncode == 0
    assert "\x1b[1m--- best 1 of 1" in out
    assert "[s4p8i0]" in out
