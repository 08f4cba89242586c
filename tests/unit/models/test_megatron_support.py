"""Which models the Megatron back end accepts; no megatron-core is needed."""

import pytest
import transformers

from one_step_off.config.errors import ConfigError
from one_step_off.models.megatron_support import read_config
from tests.unit.models.ropes import LONGROPE, ROPES
from tests.unit.training.fsdp_helpers import config

SIZES = {
    "vocab_size": 67,
    "hidden_size": 64,
    "intermediate_size": 40,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 5e3,
    "factor": 8.0,
    "low_freq_factor": 2.0,  # Megatron has 1
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
LINEAR_ROPE = {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}
HALF_OF_EACH_HEAD = ROPES["half of each head"][1]
WITH_A_SCALE = ROPES["default"][1] | {"attention_factor": 1.2}
TP = {"tensor_parallel_size": 2}
PP = {"pipeline_parallel_size": 2}
VPP = {**PP, "virtual_pipeline_parallel_size": 2}
EP = {"expert_parallel_size": 2}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}


def write_config(folder, model, **changes):
    """A folder with a model's config, and an empty file in place of its weights."""
    transformers.AutoConfig.for_model(model, **SIZES | changes).save_pretrained(folder)
    (folder / "model.safetensors").touch()


def megatron_config(path, layout):
    keys = {f"actor__{key}": value for key, value in layout.items()}
    return config(str(path), actor__backend="megatron", **keys)


@pytest.mark.parametrize(
    ("model", "odd", "layout", "words"),
    [
        (
            "gemma",
            {},
            {},
            "model type gemma is not one of llama, qwen2, qwen3, qwen3_moe; use backend=fsdp",
        ),
        ("llama", {"hidden_act": "gelu"}, {}, "its hidden_act=gelu is not supported"),
        ("llama", {"mlp_bias": True}, {}, "its mlp_bias=True"),
        ("qwen3", {"attention_bias": True}, {}, "its attention_bias=True"),
        ("qwen2", {"use_sliding_window": True}, {}, "its use_sliding_window=True"),
        ("llama", {"rope_parameters": LLAMA3}, {}, "its rope_parameters="),
        ("llama", {"rope_parameters": LINEAR_ROPE}, {}, "its rope_parameters="),
        ("llama", {"rope_parameters": ROPES["dynamic"][1]}, {}, "its rope_parameters="),
        ("qwen2", {"rope_parameters": ROPES["yarn"][1]}, {}, "its rope_parameters="),
        ("llama", {"rope_parameters": LONGROPE}, {}, "its rope_parameters="),
        ("llama", {"rope_parameters": ROPES["proportional"][1]}, {}, "its rope_parameters="),
        ("llama", {"rope_parameters": HALF_OF_EACH_HEAD}, {}, "its rope_parameters="),
        ("llama", {"partial_rotary_factor": 0.5}, {}, "its rope_parameters=.*rotary_factor': 0.5"),
        ("qwen3", {"rope_parameters": WITH_A_SCALE}, {}, "its rope_parameters="),
        (
            "llama",
            {"num_key_value_heads": 1},
            TP,
            "tensor_parallel_size=2 does not divide the 1 key-value heads .*use 1",
        ),
        (
            "llama",
            {"intermediate_size": 41},
            TP,
            "actor.tensor_parallel_size=2 does not divide the 41 columns",
        ),
        (
            "llama",
            {"num_hidden_layers": 3},
            PP,
            "actor.pipeline_parallel_size=2 does not divide the 3 layers",
        ),
        (
            "llama",
            {"num_hidden_layers": 6},
            VPP,
            "pipeline_parallel_size=2, in all 4 stages, does not divide",
        ),
        (
            "qwen3",
            {},
            EP,
            "actor.expert_parallel_size=2: .* is a dense model, without experts; set it to 1",
        ),
    ],
)
def test_a_model_that_megatron_would_build_otherwise_is_refused(
    tmp_path, model, odd, layout, words
):
    write_config(tmp_path, model, **odd)
    with pytest.raises(ConfigError, match=words):
        read_config(megatron_config(tmp_path, layout), "actor")


def test_a_model_without_safetensors_is_refused(tmp_path):
    write_config(tmp_path, "llama")
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(ConfigError, match="it has no model.safetensors, .*; use backend=fsdp"):
        read_config(megatron_config(tmp_path, {}), "actor")
    (tmp_path / "model.safetensors.index.json").touch()
    assert read_config(megatron_config(tmp_path, {}), "actor").model_type == "llama"


def test_experts_and_tensor_parallelism_need_sequence_parallelism(tmp_path):
    write_config(tmp_path, "qwen3_moe", **EXPERTS)
    with pytest.raises(ConfigError, match="actor.sequence_parallel=false.*needs it to be true"):
        read_config(megatron_config(tmp_path, TP), "actor")
    read_config(megatron_config(tmp_path, TP | {"sequence_parallel": True}), "actor")


def test_a_dense_model_needs_none(tmp_path):
    write_config(tmp_path, "qwen2")
    read_config(megatron_config(tmp_path, TP), "actor")
