"""Whole runs with `rollout.engine=transformers`: real Ray, gloo and trainers on a tiny random
model."""

from __future__ import annotations

import importlib.util

import pytest

from tests.e2e.run_folder import read_rows
from tests.e2e.sync_checks import check_syncs_to_another_model
from tests.e2e.test_agent_loop import config_of_two_loops

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]

HAS_MEGATRON = importlib.util.find_spec("megatron") is not None
REFERENCE = {"rollout.engine": "transformers", "rollout.engine_kwargs": {}}


def test_two_replicas_serve_agent_loops_with_the_log_probs_of_the_trainer(models, tmp_path):
    """Several turns, stop tokens, more samples than the agents' limit. In the first step theta is
    mu, so the trainer's log-probs must equal the engine's."""
    from one_step_off.runtime import launch

    cfg = config_of_two_loops(models("qwen3"), tmp_path)
    cfg.rollout.engine = "transformers"
    cfg.placement.pools = {"rollout": [2], "actor": [1]}
    assert launch.run(cfg) == 0
    rows = read_rows(tmp_path, "metrics.jsonl")
    assert rows[0]["ratio/mean"] == pytest.approx(1.0, abs=1e-5)
    assert rows[0]["ratio/max"] == pytest.approx(1.0, abs=3e-4)
    for row in rows:
        assert row["staleness/max"] == min(1, row["step"])
        assert row["canary/logprob_diff_max"] < 1e-4
        assert row["agent/turns/mean"] > 1.5


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "trainer"),
    [
        pytest.param("qwen2", {"placement.pools": {"rollout": [1], "actor": [2]}}, id="fsdp"),
        pytest.param(
            "qwen3_moe",
            {
                "placement.pools": {"rollout": [1], "actor": [2]},
                "actor.backend": "megatron",
                "actor.expert_parallel_size": 2,
            },
            id="megatron-experts",
            marks=pytest.mark.skipif(not HAS_MEGATRON, reason="megatron-core is not installed"),
        ),
    ],
)
def test_engine_equals_hf_after_each_sync(models, tmp_path, kind, trainer):
    """The second sync brings what an update has changed, and writes into the parameters."""
    model = models(kind, tied=False, seed=2)
    metrics = check_syncs_to_another_model(model, model, tmp_path, REFERENCE | trainer)
    assert [row["sync/in_place"] for row in metrics] == [0.0, 1.0]
