"""Which layers get adapters, by names alone: those to which peft gives them."""

from __future__ import annotations

import pytest

from one_step_off.config.errors import ConfigError
from one_step_off.models import adapted_layers, hf_model
from one_step_off.models.model_checks import check_models
from one_step_off.runtime.prepare import warn_of_experts
from one_step_off.training import lora
from tests.conftest import tiny_config
from tests.unit.models.families import CONFIGS


@pytest.mark.parametrize(
    ("kind", "tied", "targets"),
    [
        ("qwen2", True, "all-linear"),
        ("llama", False, "all-linear"),
        ("qwen3", True, "q_proj, down_proj"),
        ("qwen3", True, "self_attn.o_proj"),
        ("qwen2", True, "model.layers.1.mlp.up_proj"),
    ],
)
def test_the_names_are_those_that_peft_chooses(models, kind, tied, targets):
    changes = {"model.lora_rank": 2, "model.lora_target_modules": targets}
    cfg = tiny_config(models(kind, tied), "", **changes)
    adapted_layers.check_adapted_layers(cfg)
    model = hf_model.empty_model(cfg, "actor", None, None)
    names = adapted_layers.adapted_layers(model, targets)
    lora.inject(model, cfg.model)
    by_peft = [name for name, layer in model.named_modules() if hasattr(layer, "lora_A")]
    assert names == by_peft
    assert names
    last_parts = {name.split(".")[-1] for name in names}
    assert adapted_layers.engine_targets(cfg) == sorted(last_parts)


@pytest.mark.parametrize(
    ("tied", "targets", "words"),
    [
        (True, "q_prj", "no layer q_prj; did you mean q_proj"),
        (True, "q_proj,gate", "no layer gate; .*gate_proj"),
        (True, "q_proj, all-linear", "no layer all-linear; use all-linear alone, or .*down_proj"),
        (True, "proj", "no layer proj; "),
        (True, "embed_tokens", "model.embed_tokens is not a linear layer"),
        (True, "q_proj,lm_head", "lm_head is not a linear layer with weights of its own"),
        (False, "layers.7.mlp.up_proj", "no layer layers.7.mlp.up_proj; "),
    ],
)
def test_names_that_fit_no_layer_are_refused_before_anything_starts(models, tied, targets, words):
    changes = {"model.lora_rank": 2, "model.lora_target_modules": targets}
    cfg = tiny_config(models("qwen2", tied), "", **changes)
    with pytest.raises(ConfigError, match=words) as refused:
        check_models(cfg, 100)
    assert str(refused.value).startswith(f"model.lora_target_modules={targets}: ")
    assert "\n" not in str(refused.value)


def test_experts_are_refused(models):
    cfg = tiny_config(models("qwen3_moe"), "", **{"model.lora_rank": 2})
    with pytest.raises(ConfigError, match=r"is a mixture of experts; use weight_sync.lora=merged"):
        adapted_layers.engine_targets(cfg)


def test_all_linear_layers_of_a_mixture_of_experts_are_refused_with_names_that_can_be(models):
    """peft would take the stacked experts for linear layers."""
    cfg = tiny_config(models("qwen3_moe"), "", **{"model.lora_rank": 2})
    words = r"is a mixture of experts; name layers outside of them: k_proj,o_proj,q_proj,v_proj$"
    with pytest.raises(ConfigError, match=words):
        adapted_layers.check_adapted_layers(cfg)
    cfg.model.lora_target_modules = "k_proj,o_proj,q_proj,v_proj"
    adapted_layers.check_adapted_layers(cfg)
    lora.inject(hf_model.empty_model(cfg, "actor", None, None), cfg.model)


@pytest.mark.parametrize(
    ("family", "targets", "expected"),
    [
        ("qwen2_moe", "q_proj, up_proj", ["up_proj"]),  # its shared experts have such a layer
        ("qwen2_moe", "q_proj, shared_expert.up_proj", []),
        ("deepseek_v3", "gate_proj,down_proj", ["gate_proj", "down_proj"]),
        ("qwen3_moe", "q_proj", []),
        ("qwen3", "up_proj", []),
        ("qwen3", "all-linear", []),
    ],
)
def test_names_that_pass_over_routed_experts_are_told(tmp_path, family, targets, expected):
    CONFIGS[family]().save_pretrained(tmp_path)
    changes = {"model.lora_rank": 2, "model.lora_target_modules": targets}
    cfg = tiny_config(str(tmp_path), "", **changes)
    assert adapted_layers.targets_without_experts(cfg) == expected
    lines: list[str] = []
    warn_of_experts(cfg, lines.append)
    assert len(lines) == bool(expected)
    assert all(f"no adapters, only the other layers named {expected[0]}" in line for line in lines)
    cfg.model.lora_rank = 0
    warn_of_experts(cfg, lines.append)
    assert len(lines) == bool(expected)
