"""Which keys about experts a model can be trained with."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers.integrations import moe

from one_step_off.config.errors import ConfigError
from one_step_off.config.schema import Config
from one_step_off.models.experts import check_experts, fused_experts, router_biases
from one_step_off.models.model_checks import check_models
from tests.unit.models.families import CONFIGS
from tests.unit.training.fsdp_helpers import config, write_model

DENSE = ("qwen3", "gemma2")
BIASED = ("glm4_moe", "deepseek_v3", "minimax_m2")
FUSED = (*BIASED, "qwen2_moe", "qwen3_moe", "qwen3_next", "mixtral", "olmoe", "ernie4_5_moe")


def meta_model(name: str) -> Any:
    with torch.device("meta"):
        return transformers.AutoModelForCausalLM.from_config(CONFIGS[name]())


@pytest.mark.parametrize("name", [*DENSE, *FUSED])
def test_the_experts_of_many_families_are_found_without_a_name_of_any(name):
    model = meta_model(name)
    experts = fused_experts(model)
    assert bool(experts) is (name in FUSED)
    assert all(module.num_experts == 4 for module in experts.values())
    biases = router_biases(model)
    assert list(biases) == (list(experts) if name in BIASED else [])
    assert all(bias.shape == (4,) for bias in biases.values())


def test_transformers_registry_takes_a_function_of_ones_own():
    """What the trainer relies on: an attribute of every class that asks the registry, and that the
    function receives the module, the tokens, the choice and its weights."""
    received = []

    def own_function(module: Any, *inputs: Any) -> torch.Tensor:
        received.append((module, *inputs))
        return moe.grouped_mm_experts_forward(module, *inputs)

    moe.ALL_EXPERTS_FUNCTIONS.register("of_a_test", own_function)
    torch.manual_seed(0)
    model: Any = transformers.AutoModelForCausalLM.from_config(CONFIGS["glm4_moe"]())
    assert model.config._experts_implementation == "grouped_mm"
    ids = torch.arange(1, 8)[None]
    expected = model(ids).logits
    [module] = fused_experts(model).values()
    module.config._experts_implementation = "of_a_test"
    assert torch.equal(model(ids).logits, expected)
    [(asking, hidden, chosen, weights)] = received
    assert asking is module
    assert (hidden.shape, chosen.shape, weights.shape) == ((7, 32), (7, 2), (7, 2))


def config_of(folder: Path, family: str, **changes: Any) -> Config:
    write_model(CONFIGS[family](), folder)
    cfg = config(str(folder), **changes)
    cfg.placement.roles = {"rollout": "rollout", "actor": "actor"}
    cfg.placement.pools = {"rollout": [1], "actor": [6]}
    return cfg


@pytest.mark.parametrize(
    ("family", "changes", "words"),
    [
        (
            "qwen3_moe",
            {"actor__expert_parallel_size": 3},
            "actor.expert_parallel_size=3: does not divide the 4 experts of .*; use 2",
        ),
        (
            "qwen3",
            {"actor__expert_parallel_size": 2},
            "actor.expert_parallel_size=2: .* is a dense model, .*; set it to 1",
        ),
        (
            "qwen3_moe",
            {"actor__router_bias_update_rate": 0.001},
            "actor.router_bias_update_rate=0.001: the routers of .* have no .*; set it to 0",
        ),
        (
            "glm4_moe",
            {
                "actor__router_bias_update_rate": 0.001,
                "model__lora_rank": 2,
                "model__lora_target_modules": "q_proj",
            },
            "router_bias_update_rate=0.001: with model.lora_rank=2 only adapters change",
        ),
    ],
)
def test_a_key_that_the_model_cannot_follow_is_refused(tmp_path, family, changes, words):
    with pytest.raises(ConfigError, match=words) as caught:
        check_models(config_of(tmp_path, family, **changes), 32)
    assert len(str(caught.value).splitlines()) == 1


def test_keys_that_the_models_can_follow(tmp_path):
    keys = {"actor__expert_parallel_size": 2, "actor__router_bias_update_rate": 0.001}
    cfg = config_of(tmp_path / "policy", "glm4_moe", **keys)
    check_experts(cfg)
    # The actor's size holds for a critic that sets none.
    write_model(CONFIGS["qwen3"](), tmp_path / "critic")
    cfg.placement.roles["critic"] = "actor"
    cfg.critic.path = str(tmp_path / "critic")
    with pytest.raises(ConfigError, match="critic.expert_parallel_size=2: .* is a dense model"):
        check_experts(cfg)
    cfg.critic.expert_parallel_size = 1
    check_experts(cfg)
