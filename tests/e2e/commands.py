"""Runs in a process of their own, as a user starts them, and the processes that they start."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

PROGRAM = (sys.executable, "-m", "one_step_off.main_ppo")
TINY_CONFIG = "config=config/gsm8k_tiny_cpu.yaml"
REFERENCE_ENGINE = {"rollout.engine": "transformers"}
"""It starts sooner than vLLM. Two of its runs with one seed are not equal bit for bit."""
STEPS_TIMEOUT_S = 300
END_TIMEOUT_S = 20


def start_run(
    models: Callable[..., str],
    folder: Path,
    program: tuple[str, ...] = PROGRAM,
    config: str = TINY_CONFIG,
    **changes: object,
) -> subprocess.Popen:
    """Start the tiny run without evaluations, in a process group of its own.

    Args:
        models: the fixture that builds tiny models.
        folder: the run's folder.
        program: the command without its arguments.
        config: the argument that names the config.
        changes: values by dotted key.
    """
    settings: dict[str, object] = {
        "model.path": models(),
        "trainer.output_dir": folder,
        "trainer.total_steps": 500,
        "data.val_files": "",
    }
    settings.update(changes)
    overrides = [f"{key}={value}" for key, value in settings.items()]
    return subprocess.Popen(
        [*program, config, *overrides],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def run_to_the_end(*arguments: str) -> subprocess.CompletedProcess:
    """Run the program, and fail if it does."""
    finished = subprocess.run([*PROGRAM, *arguments], capture_output=True, text=True)
    assert finished.returncode == 0, finished.stdout + finished.stderr
    return finished


def descendants(pid: int) -> list[psutil.Process]:
    """All processes below this one."""
    return psutil.Process(pid).children(recursive=True)


def wait_for_steps(folder: Path, count: int, run: subprocess.Popen) -> None:
    """Wait until the run has finished this number of steps. Fails if it ends before."""
    metrics = folder / "metrics.jsonl"
    deadline = time.monotonic() + STEPS_TIMEOUT_S
    while time.monotonic() < deadline and run.poll() is None:
        if metrics.exists() and len(metrics.read_text().splitlines()) >= count:
            return
        time.sleep(0.2)
    output = ""
    if run.poll() is not None:
        output = run.stdout.read()
    pytest.fail(f"no {count} steps in {STEPS_TIMEOUT_S} s: {output}")


def assert_all_ended(processes: list[psutil.Process]) -> None:
    """None of the processes still runs. A zombie has ended: only its parent has not noticed."""
    _, alive = psutil.wait_procs(processes, timeout=END_TIMEOUT_S)
    running = []
    for process in alive:
        if process.is_running() and process.status() != psutil.STATUS_ZOMBIE:
            running.append(f"{process.pid} {' '.join(process.cmdline())[:80]}")
    assert not running, f"left behind: {running}"
