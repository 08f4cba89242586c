"""Estimators that ask the run for more than samples, with real Ray, vLLM and FSDP2 on tiny models."""

from __future__ import annotations

import json
import shutil

import pytest
import torch

from tests.conftest import tiny_config
from tests.test_e2e_pipeline import VARIED, rows
from tests.test_e2e_resume import TIMES, weights

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]


def in_parts(response, **_):
    """A reward in two parts that random models vary in."""
    return {"even": float(len(response) % 2 == 0), "short": -0.01 * len(response)}


def learnt(folder) -> list[dict]:
    """The rows without what a clock or a memory gauge says."""
    return [{k: v for k, v in row.items() if not k.startswith(TIMES)} for row in rows(folder, "metrics.jsonl")]


def test_remax_has_greedy_baselines_and_resumes_exactly(models, tmp_path):
    """In parts as well: each baseline is the sum of the greedy response's parts, as its reward would be."""
    from one_step_off import launch

    whole, parts = tmp_path / "whole", tmp_path / "parts"
    changes = VARIED | {
        "algorithm.adv_estimator": "remax",
        "reward.function": f"{__name__}:in_parts",
        "trainer.total_steps": 4,
        "trainer.save_freq": 2,
        "trainer.val_before_train": False,
    }
    assert launch.run(tiny_config(models(), str(whole), **changes)) == 0
    for step, row in enumerate(rows(whole, "metrics.jsonl")):
        assert row["samples"] == 16 and row["staleness/max"] == min(step, 1)
        samples = rows(whole, f"samples/step_{step:06d}.jsonl")
        assert [s["index"] for s in samples] == [0, 1, 2, 3] * 4
        baselines = {tuple(s["prompt_id"]): s["baseline"] for s in samples}
        assert len(baselines) == 4 and len(rows(whole, "ledger.jsonl")[step]["prompts"]) == 4
        for s in samples:
            assert s["baseline"] == baselines[tuple(s["prompt_id"])]
            assert s["reward"] == pytest.approx(sum(s["reward_parts"].values()))
            assert s["advantage/mean"] == pytest.approx(s["reward"] - s["baseline"], abs=1e-5)
        assert row["reward/even/mean"] + row["reward/short/mean"] == pytest.approx(row["reward/mean"])
    saved = [json.loads(line) for line in (whole / "checkpoints/step_000002/samples.jsonl").read_text().splitlines()]
    assert [s["index"] for s in saved if s["extra"].get("greedy")] == [4] * 4, "a checkpoint keeps them"
    shutil.copytree(whole, parts)
    shutil.rmtree(parts / "checkpoints" / "step_000004")
    assert launch.run(tiny_config(models(), str(parts), **changes)) == 0
    assert learnt(whole) == learnt(parts)
    for name, tensor in weights(whole).items():
        assert torch.equal(tensor, weights(parts)[name]), name


@pytest.mark.parametrize("estimator", ["gdpo", "optimal_token_baseline"])
def test_the_others_train(models, tmp_path, estimator):
    from one_step_off import launch

    changes = VARIED | {"algorithm.adv_estimator": estimator, "reward.function": f"{__name__}:in_parts"}
    assert launch.run(tiny_config(models(), str(tmp_path), **changes)) == 0
    for row in rows(tmp_path, "metrics.jsonl"):
        assert row["actor/grad_norm"] > 0 and row["samples"] == 16
    last = rows(tmp_path, "samples/step_000002.jsonl")
    assert len({s["advantage/mean"] for s in last}) > 4
