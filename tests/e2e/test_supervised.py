"""Supervised fine-tuning as a run, its model in RL, and supervised steps before RL."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import pytest

from one_step_off.config.schema import Config
from one_step_off.runtime.validation import validate_supervised
from tests.conftest import tiny_config
from tests.e2e.commands import assert_all_ended, descendants, start_run, wait_for_steps
from tests.e2e.run_folder import (
    assert_same_weights,
    learned_metrics,
    model_weights,
    read_rows,
    read_summary,
    used_prompts,
)

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]


def supervised_run(model: str, folder: Path, **changes: object) -> Config:
    """A supervised run of six steps, on two ranks unless `changes` say otherwise."""
    settings = {
        "placement.pools": {"actor": [2]},
        "placement.roles": {"actor": "actor"},
        "data.train_batch_size": 8,
        "sft.lr": 1e-2,
        "sft.lr_schedule": "cosine",
        "trainer.total_steps": 6,
        "trainer.test_freq": 2,
        "trainer.save_freq": 3,
    }
    return validate_supervised(tiny_config(model, str(folder), **settings | changes))


@pytest.mark.slow
def test_supervised_steps_and_rl_with_their_model(models, tmp_path):
    """Six supervised steps on two ranks, then a step of RL that begins with hf_model/."""
    from one_step_off.runtime import launch

    folder = tmp_path / "sft"
    assert launch.run_supervised(supervised_run(models(), folder)) == 0
    metrics = read_rows(folder, "metrics.jsonl")
    losses = [row["sft/loss"] for row in metrics]
    assert len(losses) == 6
    assert losses[-1] < 0.8 * losses[0]
    assert used_prompts(folder)
    evaluations = read_rows(folder, "evaluations.jsonl")
    assert [row["val/version"] for row in evaluations] == [0, 2, 4, 6]
    assert evaluations[-1]["val/loss"] < 0.8 * evaluations[0]["val/loss"]
    summary = read_summary(folder)
    assert summary["val/losses"] == [row["val/loss"] for row in evaluations]
    assert (folder / "report.html").exists()

    after = tmp_path / "rl"
    cfg = tiny_config(str(folder / "hf_model"), str(after), **{"trainer.total_steps": 1})
    assert launch.run(cfg) == 0
    (row,) = read_rows(after, "metrics.jsonl")
    assert row["ratio/mean"] == pytest.approx(1.0, abs=1e-4)
    assert row["canary/logprob_diff_max"] < 1e-3


@pytest.mark.slow
@pytest.mark.ci
def test_supervised_steps_resume_exactly(models, tmp_path, monkeypatch):
    """The second run fails in step 4, after its checkpoint of step 3. On one rank:
    tests/unit/training has the checkpoints of several."""
    from one_step_off import supervised_trainer
    from one_step_off.runtime import launch

    def config(folder: Path) -> Config:
        return supervised_run(models(), folder, **{"placement.pools": {"actor": [1]}})

    whole = tmp_path / "whole"
    halves = tmp_path / "halves"
    assert launch.run_supervised(config(whole)) == 0
    real_batch = supervised_trainer.SupervisedPipeline._batch

    def fail_in_step_4(self, version, rows):
        if version == 4 and rows is not self.val:
            raise RuntimeError("pulled the plug")
        return real_batch(self, version, rows)

    with monkeypatch.context() as patch:
        patch.setattr(supervised_trainer.SupervisedPipeline, "_batch", fail_in_step_4)
        with pytest.raises(RuntimeError, match="pulled the plug"):
            launch.run_supervised(config(halves))
    assert len(read_rows(halves, "metrics.jsonl")) == 4
    assert launch.run_supervised(config(halves)) == 0
    assert read_rows(whole, "ledger.jsonl") == read_rows(halves, "ledger.jsonl")
    assert learned_metrics(whole) == learned_metrics(halves)
    assert_same_weights(whole, halves)


@pytest.mark.slow
def test_supervised_steps_before_rl(models, tmp_path):
    """RL starts at version 0 with the warmed-up model, which is the reference too. The repeated
    command trains RL further, and makes no supervised step again."""
    from one_step_off.runtime import launch

    def config(steps: int, **changes: object) -> Config:
        settings = {
            "trainer.sft_steps": 4,
            "trainer.total_steps": steps,
            "trainer.save_freq": 2,
            "trainer.val_before_train": False,
            "sft.lr": 1e-2,
            "sft.batch_size": 8,
            "algorithm.kl_coef": 0.1,
            "placement.roles": {"rollout": "rollout", "actor": "actor", "ref": "actor"},
        }
        return tiny_config(models(), str(tmp_path), **settings | changes)

    assert launch.run(config(2)) == 0
    supervised = read_rows(tmp_path / "sft", "metrics.jsonl")
    assert [row["actor/lr"] for row in supervised] == [1e-2] * 4
    assert supervised[-1]["sft/loss"] < supervised[0]["sft/loss"]
    rows = read_rows(tmp_path, "metrics.jsonl")
    assert [row["weight_version"] for row in rows] == [0, 1]
    assert [row["staleness/max"] for row in rows] == [0, 1]
    assert rows[0]["actor/kl"] == pytest.approx(0.0, abs=1e-6), "the reference is warmed up too"
    assert rows[0]["ratio/mean"] == pytest.approx(1.0, abs=1e-4)
    made = (tmp_path / "sft/metrics.jsonl").stat().st_mtime_ns
    assert launch.run(config(3)) == 0
    assert (tmp_path / "sft/metrics.jsonl").stat().st_mtime_ns == made
    rows = read_rows(tmp_path, "metrics.jsonl")
    assert [row["step"] for row in rows] == [0, 1, 2]
    warmed_up = model_weights(tmp_path / "sft")
    trained = model_weights(tmp_path)
    changes = [float((trained[name] - warmed_up[name]).abs().max()) for name in trained]
    assert 0 < max(changes) < 0.02, "three steps of RL away from the warmed-up model"


@pytest.mark.slow
def test_a_dead_trainer_and_ctrl_c(models, tmp_path):
    """The trainer is killed, and the run resumes by itself. Ctrl-C saves and stops it, and the same
    command resumes it."""
    program = (sys.executable, "-m", "one_step_off.main_sft")
    config = "config=config/sft_tiny_cpu.yaml"
    changes = {"trainer.save_freq": 2, "trainer.test_freq": -1, "trainer.total_steps": 5000}
    run = start_run(models, tmp_path, program, config, **changes)
    wait_for_steps(tmp_path, 4, run)
    workers = [
        process
        for process in descendants(run.pid)
        if "SupervisedWorker" in " ".join(process.cmdline())
    ]
    assert len(workers) == 1
    workers[0].kill()
    wait_for_steps(tmp_path, 60, run)
    processes = descendants(run.pid)
    os.killpg(run.pid, signal.SIGINT)
    output, _ = run.communicate(timeout=60)
    assert run.returncode == 130, output
    assert "its process died" in output and "as attempt 1" in output
    assert "the same command resumes from" in output
    assert "Traceback" not in output
    assert_all_ended(processes)
    rows = read_rows(tmp_path, "metrics.jsonl")
    steps_done = len(rows)
    assert [row["step"] for row in rows] == list(range(steps_done))
    assert rows[-1]["restarts/trainer"] == 1
    changes["trainer.total_steps"] = steps_done + 2
    run = start_run(models, tmp_path, program, config, **changes)
    output, _ = run.communicate(timeout=120)
    assert run.returncode == 0, output
    assert f"resuming from step {steps_done} of {steps_done + 2}" in output
    assert used_prompts(tmp_path)
