"""Partial rollouts with the real engine: what a sync interrupts goes on with the new weights, and
exactly with them."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from tests.conftest import tiny_config

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]
TELLS = "tests.e2e.test_pipeline:half_letters"


def compare_log_probs(batches: list[tuple]) -> dict[str, list[float]]:
    """How far the engine's log-probs are from the trainer's at the newest weights.

    Returns:
        "newest" and "older": the differences of the tokens of the newest version and of older ones;
        "resumed": those of the newest version in samples that began with an older one.
    """
    differences: dict[str, list[float]] = {"newest": [], "older": [], "resumed": []}
    for step, samples, trainer_log_probs in batches:
        for sample, log_probs in zip(samples, trainer_log_probs, strict=True):
            assert max(0, step - 2) <= sample.versions.min()
            assert sample.versions.max() <= step
            assert (np.diff(sample.versions) >= 0).all()
            difference = np.abs(sample.log_probs - log_probs)
            newest = difference[sample.versions == step].tolist()
            differences["newest"] += newest
            differences["older"] += difference[sample.versions < step].tolist()
            if sample.versions[0] < step:
                differences["resumed"] += newest
    return differences


def read_rows(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_interrupted_samples_continue_with_the_new_weights_and_nothing_is_lost(
    models, tmp_path, monkeypatch
):
    """Random models end after any number of tokens. The trainer scores each batch by its newest
    weights: tokens that the engine made with those, also after an interruption, must be alike, and
    older ones must not. That would fail if the interrupted samples kept any of the old weights' KV
    cache."""
    from one_step_off import ray_trainer
    from one_step_off.runtime import launch

    batches = []
    fill_advantages = ray_trainer.fill_advantages

    def recorded(batch, *args):
        batches.append((batch.step, batch.samples, batch.old_log_probs))
        return fill_advantages(batch, *args)

    monkeypatch.setattr(ray_trainer, "fill_advantages", recorded)
    changes = {
        "pipeline.partial_rollout": True,
        "rollout.oversample": 1.5,
        "data.max_response_length": 384,
        "algorithm.old_log_probs": "recompute",
        "trainer.total_steps": 8,
        "actor.lr": 3e-3,
        "reward.function": TELLS,
    }
    assert launch.run(tiny_config(models("qwen2", True), str(tmp_path), **changes)) == 0
    differences = compare_log_probs(batches)
    assert len(differences["resumed"]) > 50, "too few tokens after an interruption to tell anything"
    assert max(differences["newest"]) < 2e-4
    assert np.mean(differences["older"]) > 5e-3
    ledger = read_rows(tmp_path / "ledger.jsonl")
    used = [tuple(prompt) for row in ledger for prompt in row["prompts"]]
    assert len(used) == len(set(used)) == 8 * 4
    metrics = read_rows(tmp_path / "metrics.jsonl")
    assert max(row["carry/interrupted"] for row in metrics) > 0
    assert max(row["carry/groups"] for row in metrics) > 0
    assert all(row["staleness/max"] <= 2 for row in metrics)
