"""Estimators that ask the run for more than samples, with real Ray, vLLM and FSDP2 on tiny models."""

from __future__ import annotations

import json

import pytest

from tests.conftest import tiny_config
from tests.test_e2e_pipeline import IN_PARTS, VARIED, rows

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]


def test_remax_has_greedy_baselines(models, tmp_path):
    """In parts as well: each baseline is the sum of the greedy response's parts, as its reward would be."""
    from one_step_off import launch

    changes = VARIED | {
        "algorithm.adv_estimator": "remax",
        "reward.function": IN_PARTS,
        "trainer.total_steps": 3,
        "trainer.save_freq": 2,
        "trainer.val_before_train": False,
    }
    assert launch.run(tiny_config(models(), str(tmp_path), **changes)) == 0
    for step, row in enumerate(rows(tmp_path, "metrics.jsonl")):
        assert row["samples"] == 16 and row["staleness/max"] == min(step, 1)
        samples = rows(tmp_path, f"samples/step_{step:06d}.jsonl")
        assert [s["index"] for s in samples] == [0, 1, 2, 3] * 4
        baselines = {tuple(s["prompt_id"]): s["baseline"] for s in samples}
        assert len(baselines) == 4 and len(rows(tmp_path, "ledger.jsonl")[step]["prompts"]) == 4
        for s in samples:
            assert s["baseline"] == baselines[tuple(s["prompt_id"])]
            assert s["reward"] == pytest.approx(sum(s["reward_parts"].values()))
            assert s["advantage/mean"] == pytest.approx(s["reward"] - s["baseline"], abs=1e-5)
        assert row["reward/even/mean"] + row["reward/short/mean"] == pytest.approx(row["reward/mean"])
    saved = [json.loads(line) for line in (tmp_path / "checkpoints/step_000002/samples.jsonl").read_text().splitlines()]
    assert [s["index"] for s in saved if s["extra"].get("greedy")] == [4] * 4, "a checkpoint keeps them"
