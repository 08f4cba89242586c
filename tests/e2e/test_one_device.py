"""Rollout and trainer on a single device: one CPU core stands for the single GPU. Real Ray, vLLM
and FSDP2; the same placement, transport and order of start as on a GPU."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.e2e.commands import TINY_CONFIG
from tests.e2e.run_folder import read_rows

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(400)]

ON_ONE_CORE = """
import os, runpy
os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
runpy.run_module("one_step_off.main_ppo", run_name="__main__")
"""
SHARED = ("placement.pools={rollout: [0.5], actor: [0.5]}", "pipeline.staleness=1")
COLOCATED = (
    "placement.pools={all: [1]}",
    "placement.roles={rollout: all, actor: all}",
    "pipeline.staleness=0",
)


@pytest.mark.parametrize(
    "arrangement",
    [
        pytest.param(SHARED, id="shared", marks=pytest.mark.ci),
        # The check of GPUs, which continuous integration runs on CPUs, has a colocated run too.
        pytest.param(COLOCATED, id="colocated"),
    ],
)
def test_one_core_generates_and_trains(models, tmp_path: Path, arrangement: tuple[str, ...]):
    arguments = [
        TINY_CONFIG,
        *arrangement,
        f"model.path={models()}",
        f"trainer.output_dir={tmp_path}/run",
        "trainer.total_steps=3",
        "data.val_files=",
        "data.train_batch_size=4",
        "rollout.n=4",
        "actor.ppo_mini_batch_size=4",
    ]
    program = [sys.executable, "-c", ON_ONE_CORE]
    finished = subprocess.run([*program, *arguments], capture_output=True, text=True)
    assert finished.returncode == 0, finished.stdout + finished.stderr
    rows = read_rows(tmp_path / "run", "metrics.jsonl")
    assert len(rows) == 3
    staleness = 1 if arrangement is SHARED else 0
    assert rows[-1]["staleness/min"] == rows[-1]["staleness/max"] == staleness
    for row in rows[1:]:
        assert row["sync/bytes"] > 0
        assert row["sync/wire_s"] == 0, "weights go by shared memory, not over a network"
        assert row["canary/logprob_diff_max"] < 1e-3
