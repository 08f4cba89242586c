"""The sync into `rollout.engine=transformers`: real Ray, gloo and trainers on a tiny random model.
Many other tests use that engine."""

from __future__ import annotations

import importlib.util

import pytest

from tests.e2e.sync_checks import check_syncs_to_another_model

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]

HAS_MEGATRON = importlib.util.find_spec("megatron") is not None
REFERENCE = {"rollout.engine": "transformers", "rollout.engine_kwargs": {}}


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
