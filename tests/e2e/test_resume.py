"""A run that is stopped and resumed equals one that was not: same prompts, same rewards, same
weights, bit for bit."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from one_step_off.config.schema import Config
from tests.conftest import tiny_config
from tests.e2e.commands import (
    REFERENCE_ENGINE,
    assert_all_ended,
    descendants,
    start_run,
    wait_for_steps,
)
from tests.e2e.rewards import EVEN_AND_SHORT
from tests.e2e.run_folder import (
    assert_same_weights,
    learned_metrics,
    read_rows,
    read_summary,
    used_prompts,
)

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]

SMALL = REFERENCE_ENGINE | {
    "data.train_batch_size": 4,
    "rollout.n": 4,
    "actor.ppo_mini_batch_size": 4,
}
"""What comes between the starts is not the subject."""


def assert_greedy_baselines(folder: Path) -> None:
    """ReMax: the baseline of each prompt's samples is the reward of its greedy response, which no
    other figure contains."""
    ledger = read_rows(folder, "ledger.jsonl")
    for step, row in enumerate(read_rows(folder, "metrics.jsonl")):
        assert row["samples"] == 16
        assert row["staleness/max"] == min(step, 1)
        assert len(ledger[step]["prompts"]) == 4
        parts_sum = row["reward/even/mean"] + row["reward/short/mean"]
        assert parts_sum == pytest.approx(row["reward/mean"])
        assert_baselines_of_step(read_rows(folder, f"samples/step_{step:06d}.jsonl"))
    saved_indices = []
    for sample in read_rows(folder, "checkpoints/step_000006/samples.jsonl"):
        if sample["extra"].get("greedy"):
            saved_indices.append(sample["index"])
    assert saved_indices == [4] * 4, "a checkpoint keeps the greedy responses"


def assert_baselines_of_step(samples: list[dict]) -> None:
    """The samples of a prompt share a baseline, and the advantage is the reward above it."""
    assert [sample["index"] for sample in samples] == [0, 1, 2, 3] * 4
    baselines = {tuple(sample["prompt_id"]): sample["baseline"] for sample in samples}
    assert len(baselines) == 4
    for sample in samples:
        baseline = baselines[tuple(sample["prompt_id"])]
        assert sample["baseline"] == baseline
        assert sample["reward"] == pytest.approx(sum(sample["reward_parts"].values()))
        advantage = sample["reward"] - baseline
        assert sample["advantage/mean"] == pytest.approx(advantage, abs=1e-5)


def remax_config(model: str, folder: Path) -> Config:
    """Twelve steps of an estimator with more in flight than samples, and rewards in parts."""
    settings = {
        "algorithm.adv_estimator": "remax",
        "reward.function": EVEN_AND_SHORT,
        "trainer.val_before_train": True,
        "trainer.total_steps": 12,
        "trainer.save_freq": 6,
        "trainer.test_freq": 4,
        "actor.lr_schedule": "cosine",
    }
    return tiny_config(model, str(folder), **settings)


@pytest.mark.slow  # test_roles.py has another one, with a critic
def test_six_and_six_steps_equal_twelve(models, tmp_path, monkeypatch):
    """The first half fails in the middle of step 8, after its checkpoint of step 6."""
    from one_step_off import ray_trainer
    from one_step_off.runtime import launch

    whole = tmp_path / "whole"
    halves = tmp_path / "halves"
    assert launch.run(remax_config(models(), whole)) == 0
    real_train = ray_trainer.Pipeline._train

    async def fail_in_step_8(self, batch):
        if batch.step == 8:
            raise RuntimeError("pulled the plug")
        return await real_train(self, batch)

    with monkeypatch.context() as patch:
        patch.setattr(ray_trainer.Pipeline, "_train", fail_in_step_8)
        with pytest.raises(RuntimeError, match="pulled the plug"):
            launch.run(remax_config(models(), halves))
    assert len(read_rows(halves, "metrics.jsonl")) == 8
    assert launch.run(remax_config(models(), halves)) == 0
    assert read_rows(whole, "ledger.jsonl") == read_rows(halves, "ledger.jsonl")
    assert learned_metrics(whole) == learned_metrics(halves)
    assert_greedy_baselines(whole)
    assert_same_weights(whole, halves)
    summary = read_summary(halves)
    assert summary["steps"] == 12
    assert summary["val/versions"] == [0, 4, 8, 12]


@pytest.mark.slow
@pytest.mark.ci
@pytest.mark.timeout(900)
def test_ctrl_c_saves_and_the_same_command_resumes(models, tmp_path):
    """Ctrl-C as a terminal sends it, to every process of the group. Then the same command, to the
    end."""
    run = start_run(models, tmp_path, **SMALL)
    wait_for_steps(tmp_path, 2, run)
    processes = descendants(run.pid)
    os.killpg(run.pid, signal.SIGINT)
    output, _ = run.communicate(timeout=120)
    assert run.returncode == 130, output
    assert "checkpoint of step" in output
    assert "the same command resumes from" in output
    assert "Traceback" not in output
    assert_all_ended(processes)
    steps_done = len(read_rows(tmp_path, "metrics.jsonl"))
    total_steps = steps_done + 2
    run = start_run(models, tmp_path, **SMALL | {"trainer.total_steps": total_steps})
    output, _ = run.communicate(timeout=300)
    assert run.returncode == 0, output
    assert "its files are replaced" not in output
    assert f"resuming from step {steps_done} of {total_steps}" in output
    ledger = read_rows(tmp_path, "ledger.jsonl")
    assert [row["step"] for row in ledger] == list(range(total_steps))
    assert used_prompts(tmp_path)
