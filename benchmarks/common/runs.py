"""Whole runs of the program as arms of a benchmark, in processes of their own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeVar

from benchmarks.common.paths import ROOT

Item = TypeVar("Item")

NO_EVALUATION = ["data.val_files=", "trainer.test_freq=-1", "trainer.save_hf_model=false"]
"""Config keys of a run that is timed: it neither evaluates nor exports the model."""


class RunFailed(RuntimeError):
    """A run ended with an error. `code` is its exit code."""

    def __init__(self, text: str, code: int) -> None:
        super().__init__(text)
        self.code = code


def run_arm(
    config: str,
    keys: list[str],
    folder: Path,
    overrides: list[str],
    module: str = "one_step_off.main_ppo",
    cores: set[int] | None = None,
) -> list[dict[str, Any]]:
    """Run the program once.

    Args:
        config: path of the config file.
        keys: config keys of the arm, which win over `overrides`.
        folder: the run folder. An older run in it is overwritten.
        overrides: config keys that the user gave to the benchmark.
        module: the module to run.
        cores: CPU cores that the run may use. Default: all cores of this process.

    Returns:
        The rows of metrics.jsonl, one per step.

    Raises:
        RunFailed: the run ended with an error. The message has the end of its output.
    """
    command = [sys.executable, "-P", "-m", module, f"config={config}", *overrides, *keys]
    command += ["trainer.resume=never", "trainer.overwrite=true", f"trainer.output_dir={folder}"]
    run_process(command, cores)
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def run_process(command: list[str], cores: set[int] | None = None) -> str:
    """Run a command and return its standard output.

    The command finds this repository's packages in any working directory.

    Args:
        command: program and arguments.
        cores: CPU cores that it may use. Default: all cores of this process.

    Raises:
        RunFailed: the exit code is not 0.
    """
    search_path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    environment = os.environ | {"PYTHONPATH": search_path}
    own_cores = os.sched_getaffinity(0)
    # A child process starts with the cores of its parent.
    os.sched_setaffinity(0, cores or own_cores)
    try:
        done = subprocess.run(command, capture_output=True, text=True, env=environment)
    finally:
        os.sched_setaffinity(0, own_cores)
    if done.returncode:
        output_end = (done.stdout + done.stderr)[-2000:]
        raise RunFailed(
            f"{' '.join(command)} ended with {done.returncode}:\n{output_end}", done.returncode
        )
    return done.stdout


def rotated(items: Sequence[Item], repeat: int) -> list[Item]:
    """The items in an order that starts with another item in each repeat, so that no arm is always
    first.
    """
    start = repeat % len(items)
    return [*items[start:], *items[:start]]


def alternated(items: Sequence[Item], repeat: int) -> list[Item]:
    """The items in order in even repeats, and reversed in odd ones."""
    return list(items) if repeat % 2 == 0 else list(reversed(items))
