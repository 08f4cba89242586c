"""The Megatron back end with real Ray, gloo and vLLM: its shards into the engine, and a whole run
that equals one with FSDP."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.e2e.commands import TINY_CONFIG, run_to_the_end
from tests.e2e.run_folder import read_rows
from tests.e2e.sync_checks import check_syncs_to_another_model

HAS_MEGATRON = importlib.util.find_spec("megatron") is not None

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.timeout(600),
    pytest.mark.skipif(not HAS_MEGATRON, reason="megatron-core is not installed"),
]

TENSOR_PARALLEL = {"actor.tensor_parallel_size": 2}
PIPELINE_PARALLEL = {"actor.pipeline_parallel_size": 2}
EXPERT_PARALLEL = {"actor.expert_parallel_size": 2}
SLOW = pytest.mark.slow

MEGATRON = ("actor.backend=megatron", "placement.pools={rollout: [1], actor: [2]}")


@pytest.mark.parametrize(
    ("kind", "tied", "layout"),
    [
        pytest.param("qwen2", True, TENSOR_PARALLEL, id="qwen2-tp", marks=[SLOW, pytest.mark.ci]),
        pytest.param("llama", False, PIPELINE_PARALLEL, id="llama-pp", marks=SLOW),
        pytest.param("qwen2", True, PIPELINE_PARALLEL, id="qwen2-pp", marks=SLOW),
        pytest.param("qwen3", False, TENSOR_PARALLEL, id="qwen3-tp", marks=SLOW),
        pytest.param("qwen3_moe", False, EXPERT_PARALLEL, id="moe-ep", marks=SLOW),
    ],
)
def test_engine_equals_hf_after_sync(models, tmp_path, kind, tied, layout):
    engine_model = models(kind, tied=tied, seed=1)
    trainer_model = models(kind, tied=tied, seed=2)
    changes = {
        "placement.pools": {"rollout": [1], "actor": [2]},
        "actor.backend": "megatron",
        **layout,
    }
    check_syncs_to_another_model(engine_model, trainer_model, tmp_path, changes)


def run_tiny_qwen3(folder: Path, steps: int, *overrides: str) -> list[dict[str, Any]]:
    """Run the tiny config up to this step, in a process of its own. Returns its metrics."""
    run_to_the_end(
        TINY_CONFIG,
        "model.path=tiny:qwen3",
        f"trainer.output_dir={folder}",
        f"trainer.total_steps={steps}",
        "trainer.save_freq=20",
        *overrides,
    )
    return read_rows(folder, "metrics.jsonl")


def rewards_of(rows: list[dict[str, Any]]) -> list[float]:
    """The mean reward of each step."""
    return [row["reward/mean"] for row in rows]


def assert_learns_alike(fsdp: list[dict[str, Any]], megatron: list[dict[str, Any]]) -> None:
    """20 steps with one seed: equal figures first, then both learn."""
    fsdp_rewards = rewards_of(fsdp)
    megatron_rewards = rewards_of(megatron)
    assert len(fsdp_rewards) == 20
    assert len(megatron_rewards) == 20
    assert megatron_rewards[:5] == pytest.approx(fsdp_rewards[:5], abs=1e-3)
    assert len(set(fsdp_rewards[:5])) > 1
    # Later, rounding makes a sample fall on the other side of a random number, by chance.
    assert megatron_rewards == pytest.approx(fsdp_rewards, abs=0.1)
    assert np.mean(megatron_rewards[-5:]) > np.mean(megatron_rewards[:5]) + 0.2
    for name in ("actor/grad_norm", "actor/loss", "actor/entropy"):
        assert fsdp[0][name] == pytest.approx(megatron[0][name], rel=1e-3, abs=1e-6), name


def assert_evaluations_improve(folder: Path) -> None:
    """The held-out reward rises by 0.5 from the first evaluation to the last."""
    evaluations = read_rows(folder, "evaluations.jsonl")
    assert len(evaluations) >= 2
    assert evaluations[-1]["val/reward"] > evaluations[0]["val/reward"] + 0.5


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_learns_as_fsdp_does_and_resumes_in_another_layout(tmp_path):
    """The tiny run with one seed on both back ends. Then the checkpoint of two shards resumes on
    two stages."""
    fsdp_folder = tmp_path / "fsdp"
    megatron_folder = tmp_path / "megatron"
    fsdp = run_tiny_qwen3(fsdp_folder, 20)
    megatron = run_tiny_qwen3(megatron_folder, 20, *MEGATRON, "actor.tensor_parallel_size=2")
    resumed = run_tiny_qwen3(megatron_folder, 22, *MEGATRON, "actor.pipeline_parallel_size=2")
    assert_learns_alike(fsdp, megatron)
    assert_evaluations_improve(fsdp_folder)
    assert_evaluations_improve(megatron_folder)
    assert len(resumed) == 22, "the run of two stages resumed where that of two shards had stopped"
    first_rewards = rewards_of(megatron)[:5]
    for row in resumed[20:]:
        assert row["canary/logprob_diff_max"] < 1e-4
        assert row["actor/grad_norm"] > 0
        assert row["reward/mean"] > np.mean(first_rewards) + 0.2
