"""Partial rollouts with the real engine: what a sync interrupts goes on with the new weights, and exactly with them."""

from __future__ import annotations

import json

import numpy as np
import pytest

from tests.conftest import tiny_config

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]
TELLS = "tests.e2e.test_pipeline:half_letters"


def test_interrupted_samples_go_on_with_the_new_weights_and_nothing_is_lost(
    models, tmp_path, monkeypatch
):
    """Random models end after any number of tokens. The trainer scores each batch by its newest weights: tokens that the
    engine made with those, also behind an interruption, must be alike, and older ones must not. That would fail if the
    interrupted samples kept any of the old weights' KV cache."""
    from one_step_off import ray_trainer
    from one_step_off.runtime import launch

    batches, fill_advantages = [], ray_trainer.fill_advantages

    def recorded(batch, *args):
        batches.append((batch.step, batch.samples, batch.old_log_probs))
        return fill_advantages(batch, *args)

    monkeypatch.setattr(ray_trainer, "fill_advantages", recorded)
    keys = {
        "pipeline.partial_rollout": True,
        "rollout.oversample": 1.5,
        "data.max_response_length": 384,
    }
    keys |= {
        "algorithm.old_log_probs": "recompute",
        "trainer.total_steps": 8,
        "actor.lr": 3e-3,
        "reward.function": TELLS,
    }
    assert launch.run(tiny_config(models("qwen2", True), str(tmp_path), **keys)) == 0
    newest, older, behind = [], [], 0
    for step, samples, scored in batches:
        for s, now in zip(samples, scored, strict=True):
            assert max(0, step - 2) <= s.versions.min() and s.versions.max() <= step
            assert (np.diff(s.versions) >= 0).all()
            diff = np.abs(s.log_probs - now)
            newest += diff[s.versions == step].tolist()
            older += diff[s.versions < step].tolist()
            behind += int((s.versions == step).sum()) * bool(s.versions[0] < step)
    assert behind > 50, "too few tokens behind an interruption to tell anything"
    assert max(newest) < 2e-4 and np.mean(older) > 5e-3
    ledger = [
        json.loads(line)["prompts"] for line in (tmp_path / "ledger.jsonl").read_text().splitlines()
    ]
    used = [tuple(p) for prompts in ledger for p in prompts]
    assert len(used) == len(set(used)) == 8 * 4
    metrics = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert (
        max(row["carry/interrupted"] for row in metrics) > 0
        and max(row["carry/groups"] for row in metrics) > 0
    )
    assert all(row["staleness/max"] <= 2 for row in metrics)
