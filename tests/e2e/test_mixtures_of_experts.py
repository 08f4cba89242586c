"""Mixtures of experts and hybrid models under FSDP2 through the whole program: experts that lie in
one tensor in training, and layers with a state, go into vLLM, a checkpoint and `hf_model/` by the
names that they have in the files."""

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
CANARY_TOLERANCE = 1e-5  # a stale expert shows as 0.1 and more, packed sequences that leak as 0.02

FOUR_LOCAL = {"num_local_experts": 4, "num_experts_per_tok": 2}
ROUTED = {
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "moe_intermediate_size": 64,
    "first_k_dense_replace": 1,
}
LINEAR_ATTENTION = {
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
    "layer_types": ["linear_attention", "full_attention"],
}
MODELS: dict[str, dict[str, Any]] = {
    "qwen3_moe": MIXTURE_OF_EXPERTS,
    "glm4_moe": ROUTED,
    "mixtral": FOUR_LOCAL,
    "olmoe": {"num_experts": 4, "num_experts_per_tok": 2},
    "qwen3_5_text": LINEAR_ATTENTION,
    "qwen3_5_moe_text": {
        **MIXTURE_OF_EXPERTS,
        **LINEAR_ATTENTION,
        "shared_expert_intermediate_size": 64,
    },
}


DIVIDED = {"actor.expert_parallel_size": 2}
BALANCED = {"actor.router_bias_update_rate": 0.01}


def config_of(model: str, folder: Path, ranks: int, steps: int, **changes: Any) -> Config:
    settings = {
        "placement.pools": {"rollout": [1], "actor": [ranks]},
        "trainer.total_steps": steps,
        "trainer.save_freq": FIRST_STEPS,
        "algorithm.entropy_coef": 0.1,  # a random model has no reward, and so no other gradient
    }
    return tiny_config(model, str(folder), **settings, **changes)


def assert_synced_exactly(folder: Path) -> None:
    """Each sync left the engine with the trainer's log-probs; the last went into its parameters."""
    rows = read_rows(folder, "metrics.jsonl")
    assert max(row["canary/logprob_diff_max"] for row in rows) < CANARY_TOLERANCE
    assert rows[-1]["sync/in_place"] == 1.0


def train_resume_and_serve(kind: str, ranks: int, tmp_path: Path, **changes: Any) -> None:
    """Train a model, resume it, and start another run from what was written. Most of its tensors
    have changed in training.

    Args:
        kind: of `MODELS`.
        ranks: of the trainer.
        changes: of the config, by dotted key.
    """
    from one_step_off.runtime import launch

    model = tiny_qwen.build(
        kind, str(tmp_path / "model"), tie_word_embeddings=False, **MODELS[kind]
    )
    folder = tmp_path / "run"
    assert launch.run(config_of(model, folder, ranks, FIRST_STEPS, **changes)) == 0
    assert launch.run(config_of(model, folder, ranks, STEPS, **changes)) == 0
    rows = read_rows(folder, "metrics.jsonl")
    assert len(rows) == STEPS
    assert all(row["actor/grad_norm"] > 0 for row in rows)
    assert_synced_exactly(folder)

    stored = load_file(f"{model}/model.safetensors")
    trained = model_weights(folder)
    assert {n: t.shape for n, t in trained.items()} == {n: t.shape for n, t in stored.items()}
    names_of = {part: [n for n in stored if part in n] for part in (".experts.", ".linear_attn.")}
    assert any(names_of.values())
    for names in names_of.values():
        changed = [name for name in names if not torch.equal(stored[name], trained[name])]
        assert len(changed) >= len(names) / 2
    exported = str(folder / "hf_model")
    loaded = transformers.AutoModelForCausalLM.from_pretrained(exported, dtype=torch.float32)
    assert (
        type(loaded).__name__
        == type(transformers.AutoModelForCausalLM.from_pretrained(model)).__name__
    )

    # The first sync of another run compares what vLLM loaded with what the trainer loaded.
    served = tmp_path / "served"
    one_rank = changes | {"actor.expert_parallel_size": 1}
    assert launch.run(config_of(exported, served, 1, FIRST_STEPS, **one_rank)) == 0
    assert_synced_exactly(served)


@pytest.mark.parametrize(
    ("kind", "ranks", "changes"),
    [
        pytest.param("qwen3_moe", 2, DIVIDED, id="qwen3_moe-divided"),
        pytest.param("qwen3_moe", 2, {}, id="qwen3_moe-2"),
        pytest.param("qwen3_moe", 1, {}, id="qwen3_moe-1"),
        pytest.param("glm4_moe", 1, BALANCED, id="glm4_moe-balanced"),
        pytest.param("mixtral", 1, {}, id="mixtral-1"),
        pytest.param("olmoe", 1, {}, id="olmoe-1"),
    ],
)
def test_a_mixture_of_experts_trains_resumes_and_is_served_again(kind, ranks, changes, tmp_path):
    train_resume_and_serve(kind, ranks, tmp_path, **changes)
    rows = read_rows(tmp_path / "run", "metrics.jsonl")
    assert all(0 <= row["actor/expert_load_min"] < 1 < row["actor/expert_load_max"] for row in rows)
    stored = load_file(f"{tmp_path}/model/model.safetensors")
    trained = model_weights(tmp_path / "run")
    biases = [name for name in stored if name.endswith(ROUTER_BIAS)]
    assert all(torch.equal(stored[n], trained[n]) is (changes != BALANCED) for n in biases)


@pytest.mark.parametrize(("kind", "ranks"), [("qwen3_5_text", 1), ("qwen3_5_moe_text", 2)])
def test_a_hybrid_model_trains_resumes_and_is_served_again(kind, ranks, tmp_path):
    train_resume_and_serve(kind, ranks, tmp_path, **{"actor.packing": "on"})
