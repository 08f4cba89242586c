"""Mixtures of experts under FSDP2 through the whole program: experts that lie in one tensor in
training go into vLLM, a checkpoint and `hf_model/` by the names that they have in the files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file

from one_step_off.config.schema import Config
from one_step_off.models import tiny_qwen
from one_step_off.models.experts import ROUTER_BIAS
from tests.conftest import MIXTURE_OF_EXPERTS, tiny_config
from tests.e2e.run_folder import model_weights, read_rows

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(900)]

FIRST_STEPS = 2
STEPS = 4
CANARY_TOLERANCE = 1e-5  # a stale expert shows as 0.1 and more

FOUR_LOCAL = {"num_local_experts": 4, "num_experts_per_tok": 2}
ROUTED = {
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "moe_intermediate_size": 64,
    "first_k_dense_replace": 1,
}
MODELS: dict[str, dict[str, Any]] = {
    "qwen3_moe": MIXTURE_OF_EXPERTS,
    "glm4_moe": ROUTED,
    "mixtral": FOUR_LOCAL,
    "olmoe": {"num_experts": 4, "num_experts_per_tok": 2},
}


DIVIDED = {"actor.expert_parallel_size": 2}
BALANCED = {"actor.router_bias_update_rate": 0.01}


def config_of(model: str, folder: Path, ranks: int, steps: int, changes: dict[str, Any]) -> Config:
    settings = {
        "placement.pools": {"rollout": [1], "actor": [ranks]},
        "trainer.total_steps": steps,
        "trainer.save_freq": FIRST_STEPS,
        "algorithm.entropy_coef": 0.1,  # a random model has no reward, and so no other gradient
        **changes,
    }
    return tiny_config(model, str(folder), **settings)


def assert_synced_exactly(folder: Path) -> None:
    """Each sync left the engine with the trainer's log-probs; the last went into its parameters."""
    rows = read_rows(folder, "metrics.jsonl")
    assert max(row["canary/logprob_diff_max"] for row in rows) < CANARY_TOLERANCE
    assert rows[-1]["sync/in_place"] == 1.0


@pytest.mark.parametrize(
    ("kind", "ranks", "changes"),
    [
        pytest.param("qwen3_moe", 2, DIVIDED, id="qwen3_moe-divided", marks=pytest.mark.ci),
        pytest.param("qwen3_moe", 2, {}, id="qwen3_moe-2"),
        pytest.param("qwen3_moe", 1, {}, id="qwen3_moe-1"),
        pytest.param("glm4_moe", 1, BALANCED, id="glm4_moe-balanced"),
        pytest.param("mixtral", 1, {}, id="mixtral-1"),
        pytest.param("olmoe", 1, {}, id="olmoe-1"),
    ],
)
def test_a_mixture_of_experts_trains_resumes_and_is_served_again(kind, ranks, changes, tmp_path):
    from one_step_off.runtime import launch

    model = tiny_qwen.build(
        kind, str(tmp_path / "model"), tie_word_embeddings=False, **MODELS[kind]
    )
    folder = tmp_path / "run"
    assert launch.run(config_of(model, folder, ranks, FIRST_STEPS, changes)) == 0
    assert launch.run(config_of(model, folder, ranks, STEPS, changes)) == 0
    rows = read_rows(folder, "metrics.jsonl")
    assert len(rows) == STEPS
    assert all(0 <= row["actor/expert_load_min"] < 1 < row["actor/expert_load_max"] for row in rows)
    assert all(row["actor/grad_norm"] > 0 for row in rows)
    assert_synced_exactly(folder)

    stored = load_file(f"{model}/model.safetensors")
    trained = model_weights(folder)
    assert {n: t.shape for n, t in trained.items()} == {n: t.shape for n, t in stored.items()}
    experts = [name for name in stored if ".experts." in name]
    assert experts
    assert sum(not torch.equal(stored[name], trained[name]) for name in experts) > len(experts) / 2
    biases = [name for name in stored if name.endswith(ROUTER_BIAS)]
    assert all(torch.equal(stored[n], trained[n]) is (changes != BALANCED) for n in biases)
    exported = str(folder / "hf_model")
    loaded = transformers.AutoModelForCausalLM.from_pretrained(exported, dtype=torch.float32)
    assert (
        type(loaded).__name__
        == type(transformers.AutoModelForCausalLM.from_pretrained(model)).__name__
    )

    # The first sync of another run compares what vLLM loaded with what the trainer loaded.
    served = tmp_path / "served"
    assert launch.run(config_of(exported, served, 1, FIRST_STEPS, {})) == 0
    assert_synced_exactly(served)
