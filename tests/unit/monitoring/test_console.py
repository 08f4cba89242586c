"""What is shown: plain lines in a pipe, a bar on a terminal, and errors on both."""

from __future__ import annotations

import io
import logging
import os
import pty
import subprocess
import sys
import textwrap
import threading
import time
import warnings
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from one_step_off.monitoring.console import (
    RunConsole,
    figures_line,
    quiet_libraries,
    step_line,
)

ROOT = Path(__file__).parents[3]


def row(step: int, reward: float = 0.5) -> dict:
    return {
        "step": step,
        "weight_version": step,
        "reward/mean": reward,
        "response_length/mean": 12.3,
        "time/step_s": 2.0,
        "time/generate_s": 1.0,
        "time/train_s": 1.5,
        "time/sync_s": 0.1,
        "time/wait_trainer_s": 0.4,
        "time/wait_rollout_s": 0.05,
        "tokens_per_s/rollout": 1234.5,
    }


def a_run(run_console: RunConsole) -> None:
    with run_console.working("starting engines"):
        for i in range(11):
            run_console.progress("building", i / 10)
    run_console.table([("model", "tiny"), ("placement", "one"), ("", "two")])
    with run_console.training(3):
        for step in range(3):
            run_console.step(row(step, step / 2), 3)
        run_console.print_line("held-out [bold]0.5[/bold]")


def test_plain_lines_are_one_per_step():
    out = io.StringIO()
    with RunConsole(out) as run_console:
        a_run(run_console)
    lines = out.getvalue().splitlines()
    assert [line for line in lines if line.startswith("step ")] == [
        f"step {i + 1}/3 [{i}]  v{i}  reward {i / 2:.3f}  length  12.3  "
        "step 2.00s (gen 1.00, train 1.50, sync 0.10)  ratio nan  canary nan"
        for i in range(3)
    ]
    assert [line for line in lines if line.startswith("building")] == ["building ..."]
    assert "starting engines ..." in lines
    assert "model        tiny" in lines
    assert "             two" in lines
    assert "\x1b" not in out.getvalue()


def test_parts_of_the_reward_stand_behind_it_in_lines_and_in_the_bar():
    out = io.StringIO()
    parts = {"reward/right/mean": 0.25, "reward/form/mean": 0.5, "reward/std": 0.1}
    with RunConsole(out) as run_console, run_console.training(3):
        run_console.step(row(0, 0.75) | parts, 3)
    assert "reward 0.750 (right 0.250, form 0.500)  length  12.3" in out.getvalue()
    assert figures_line(row(0, 0.75) | parts).startswith(
        "reward 0.750 (right 0.250, form 0.500)  length"
    )
    assert figures_line(row(0, 0.75)).startswith("reward 0.750  length")


def test_a_teacher_is_shown():
    distilled = row(0, 0.0) | {"distill/kl": 0.12345}
    assert "reward 0.000  distill/kl 0.1235  length" in step_line(distilled, 3)
    assert "reward 0.000  distill/kl 0.1235  length" in figures_line(distilled)
    assert "distill" not in step_line(row(0), 3)


def test_lost_work_is_at_the_end_of_a_steps_line():
    assert step_line(row(0) | {"rollout/preemptions": 12.0}, 3).endswith("  preempted 12")
    assert "preempted" not in step_line(row(0) | {"rollout/preemptions": 0.0}, 3)


class Clock:
    """Seconds that pass when a test says so."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def test_printed_lines_show_no_secret(monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "hf_abcdefgh123")
    url = "http://me:hunter2pass@h:1/v1?token=s3cr3tvalue"
    out = io.StringIO()
    with RunConsole(out) as run_console:
        run_console.print_line(
            f"warning: the first: reward_model.url={url}: 3 requests failed with hf_abcdefgh123"
        )
        run_console.table([("model", url), ("", "hf_abcdefgh123")])
    assert out.getvalue().count("http://***@h:1/v1?token=***") == 2
    assert not any(
        secret in out.getvalue() for secret in ("hunter2pass", "s3cr3tvalue", "hf_abcdefgh123")
    )


def test_long_work_is_printed_once_and_with_its_time():
    out = io.StringIO()
    clock = Clock()
    with RunConsole(out, clock=clock) as run_console, run_console.working("reading"):
        for i in range(100):
            clock.now += 0.5
            run_console.progress("building (once, then cached)", (i + 1) / 100)
    assert out.getvalue().splitlines() == [
        "reading ...",
        "building (once, then cached) ...",
        "building (once, then cached): 50 s",
        "reading: 50 s",
    ]


def test_work_that_failed_has_no_line_of_its_end():
    out = io.StringIO()
    with pytest.raises(ValueError), RunConsole(out) as run_console, run_console.working("reading"):
        raise ValueError
    assert out.getvalue() == "reading ...\n"


def terminal(width: int = 120) -> Any:
    """A Console whose file is a StringIO."""
    return Console(
        file=io.StringIO(), force_terminal=True, width=width, highlight=False, color_system=None
    )


def drawn(run_console: RunConsole, width: int) -> str:
    """What moves, as it is now."""
    console = terminal(width)
    console.print(run_console.get_renderable())
    return " ".join(console.file.getvalue().split())


@pytest.mark.parametrize("width", [120, 60])
def test_the_bar_and_its_figures(width):
    clock = Clock()
    with RunConsole(terminal(width), clock=clock) as run_console, run_console.training(40):
        assert "0/40 steps" in drawn(run_console, width)
        assert "left" not in drawn(run_console, width), "nothing is known yet"
        clock.now = 100.0  # the first step does not count: buffers and caches warm up in it
        for step in range(10):
            run_console.step(row(step, step / 10), 40)
            clock.now += 70.0
        text = drawn(run_console, width)
    for part in (
        "10/40 steps",
        "━",
        "25%",
        "0:13:20 elapsed, 0:35:00 left",
        "reward 0.900 ",
        "length 12.3",
        "1,234 tok/s",
        "waits: rollout 0.50 s, trainer 0.05 s",
    ):
        assert part in text


def test_other_work_has_a_moving_line_and_leaves_its_time():
    clock = Clock()
    console = terminal()
    with RunConsole(console, clock=clock) as run_console, run_console.working("starting [Ray]"):
        run_console.progress("building", 0.0)
        clock.now = 10.0
        run_console.progress("building", 0.25)
        clock.now = 20.0
        run_console.progress("building", 0.5)
        text = drawn(run_console, 120)
        whole = terminal()
        whole.print(run_console.get_renderable())
        lines = whole.file.getvalue().splitlines()
        run_console.progress("building", 1.0)
        assert "building" not in drawn(run_console, 120)
    assert "starting [Ray] ━" in text
    assert "50% 0:00:20 elapsed, 0:00:20 left" in text
    (stage,) = [line for line in lines if "starting [Ray]" in line]
    assert "0:00:20 elapsed" in stage and "left" not in stage, "its end is not known"
    assert "starting [Ray]: 20 s" in console.file.getvalue()
    assert "building: 20 s" in console.file.getvalue()


def test_the_bar_is_removed_and_printed_lines_stay():
    console = terminal()
    with RunConsole(console) as run_console:
        a_run(run_console)
    out = console.file.getvalue()
    assert "held-out [bold]0.5[/bold]" in out
    assert "placement" in out
    assert out.count("\x1b[?25l") == out.count("\x1b[?25h") > 0, (
        "the cursor is hidden and comes back"
    )


def test_a_long_command_stays_one_line():
    console = terminal(40)
    RunConsole(console).table([("next run", "python -m " + "x" * 100)])
    assert console.file.getvalue() == "next run     python -m " + "x" * 100 + "\n"


def test_an_error_ends_the_live_part_and_threads():
    before = threading.active_count()
    run_console = RunConsole(terminal())
    with pytest.raises(ValueError), run_console, run_console.training(3):
        run_console.progress("building", 0.5)
        raise ValueError
    deadline = time.monotonic() + 5
    while threading.active_count() > before and time.monotonic() < deadline:
        time.sleep(0.01)
    assert threading.active_count() <= before


def test_a_speed_that_is_not_known_is_left_out():
    assert "tok/s" not in figures_line({k: v for k, v in row(0).items() if "tokens" not in k})


PROGRAM = """
import sys, time, warnings
from one_step_off.monitoring.console import RunConsole
from tests.unit.monitoring.test_console import a_run, row
try:
    with RunConsole() as run_console:
        a_run(run_console)
        with run_console.training(3):
            run_console.step(row(0), 3)
            print("from a library")
            warnings.warn("ours")
            time.sleep(0.4)
            raise RuntimeError("engine 0 died")
except RuntimeError as e:
    print(f"error: {e}", file=sys.stderr)
"""


def on_a_terminal(program: str, term: str = "xterm", **variables: str) -> str:
    """What a terminal of 100 columns receives, stdout and stderr."""
    master, slave = pty.openpty()
    environment = {
        k: v for k, v in os.environ.items() if k not in ("NO_COLOR", "FORCE_COLOR")
    } | variables
    done = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(program)],
        stdin=slave,
        stdout=slave,
        stderr=slave,
        cwd=ROOT,
        env=environment | {"TERM": term, "COLUMNS": "100", "LINES": "30"},
    )
    os.close(slave)
    out = b""
    try:
        while part := os.read(master, 65536):
            out += part
    except OSError:  # how Linux says that the other end is closed
        pass
    finally:
        os.close(master)
    assert done.wait(60) == 0
    return out.decode()


def test_on_a_terminal_there_is_a_bar_and_errors_stand_below_it():
    out = on_a_terminal(PROGRAM)
    assert "━" in out
    assert "1/3 steps" in out
    assert "tok/s" in out
    assert out.count("gen 1.00, train") == 1, "the last step of a run leaves its line"
    assert "from a library" in out
    assert "UserWarning: ours" in out
    last = out.rstrip().splitlines()[-1]
    assert last.endswith("error: engine 0 died")
    assert out.rindex("\x1b[?25h") < out.rindex("error:")


def test_in_a_pipe_and_on_a_dumb_terminal_there_are_plain_lines():
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert "\x1b" not in done.stdout
    assert done.stdout.count("gen 1.00, train") == 4
    assert done.stderr.endswith("error: engine 0 died\n")
    assert "gen 1.00, train" in on_a_terminal(PROGRAM, term="dumb")


def test_only_known_warnings_are_hidden(caplog):
    with warnings.catch_warnings(record=True) as caught:
        quiet_libraries()
        warnings.warn_explicit("tip", FutureWarning, "x.py", 1, module="ray._private.worker")
        warnings.warn_explicit(
            "ours", FutureWarning, "x.py", 1, module="one_step_off.runtime.launch"
        )
        warnings.warn_explicit("rays", UserWarning, "x.py", 1, module="ray._private.worker")
    assert [str(w.message) for w in caught] == ["ours", "rays"]
    hub = logging.getLogger("huggingface_hub.utils._http")
    hub.warning("You are sending unauthenticated requests to the HF Hub.")
    hub.warning("Rate limited.")
    torchao = logging.getLogger("torchao")
    torchao.warning("Failed to load _C_mxfp8.so: Could not load this library")
    torchao.warning("AdamW8bit is slow here.")
    logging.getLogger("torch.utils._pytree").warning("<enum 'A'> is an Enum subclass and is now")
    assert [r.getMessage() for r in caplog.records] == ["Rate limited.", "AdamW8bit is slow here."]


def test_rewards_of_sources_stand_behind_the_mean_where_there_are_several():
    several = {"source/sums/reward/mean": 0.25, "source/chat/reward/mean": 0.5}
    one = {"source/sums/reward/mean": 0.25, "source/chat/reward/mean": None}
    assert "reward 0.750 [sums 0.250, chat 0.500]  length" in step_line(row(0, 0.75) | several, 3)
    assert "reward 0.750 [sums 0.250, chat 0.500]  length" in figures_line(row(0, 0.75) | several)
    assert "reward 0.750  length" in step_line(row(0, 0.75) | one, 3)
