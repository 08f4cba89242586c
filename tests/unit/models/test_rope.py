"""The rotary embeddings of a model in training are those that vLLM's own classes compute."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers

from one_step_off.config.errors import ConfigError
from one_step_off.models import rope
from tests.unit.models.ropes import LONGROPE, ROPES, TRAINED_LENGTH, YARN, hf_config, nested_config

LENGTHS = (TRAINED_LENGTH, TRAINED_LENGTH + 1, 200)


def fixed_model(config: Any, length: int) -> transformers.PreTrainedModel:
    model = transformers.AutoModelForCausalLM.from_config(config)
    rope.fix_frequencies(model, length)
    return model


def tables(model: Any, positions: torch.Tensor, layer_type: str = "") -> tuple:
    """Cosines and sines [T, frequencies] as the model computes them."""
    embedding = model.base_model.rotary_emb
    options = {"layer_type": layer_type} if layer_type else {}
    cosines, sines = embedding(torch.zeros(1), positions[None], **options)
    frequencies = getattr(embedding, f"{layer_type}_inv_freq" if layer_type else "inv_freq").numel()
    return cosines[0, :, :frequencies], sines[0, :, :frequencies]


def engine_tables(config: Any, settings: dict, length: int) -> tuple:
    """The same by vLLM, for an engine whose max_model_len is `length`."""
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.model_executor.layers.rotary_embedding import get_rope
    from vllm.transformers_utils.config import patch_rope_parameters

    patch_rope_parameters(config)
    vllm_config = VllmConfig()
    vllm_config.model_config = SimpleNamespace(max_model_len=length)  # all that the class reads
    head_size = getattr(config, "head_dim", None) or config.hidden_size // 4
    with set_current_vllm_config(vllm_config):
        embedding: Any = get_rope(
            head_size,
            max_position=config.max_position_embeddings,
            rope_parameters=settings | {"not_cached": length},
            dtype=torch.float32,
        )
    if hasattr(embedding, "long_short_cos_sin_cache"):
        first = TRAINED_LENGTH if embedding.use_long_rope else 0
        table = embedding.long_short_cos_sin_cache[first : first + length]
    else:
        table = embedding.cos_sin_cache[:length]
    return table.chunk(2, dim=-1)


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("name", ROPES)
def test_the_tables_are_those_of_the_engine(name, length):
    model_type, settings = ROPES[name]
    config = hf_config(model_type, settings)
    model = fixed_model(config, length)
    rope.check_settings(config, "model.path=x")
    rope.check_rope(model, "model.path=x", length, has_engine=True)
    cosines, sines = tables(model, torch.arange(length))
    engine_cosines, engine_sines = engine_tables(config, dict(config.rope_parameters), length)
    torch.testing.assert_close(cosines, engine_cosines, rtol=1e-5, atol=2e-5)
    torch.testing.assert_close(sines, engine_sines, rtol=1e-5, atol=2e-5)


def test_layers_with_frequencies_of_their_own():
    config = nested_config()
    model = fixed_model(config, 200)
    rope.check_settings(config, "model.path=x")
    rope.check_rope(model, "model.path=x", 200, has_engine=True)
    for layer_type, settings in config.rope_parameters.items():
        cosines, _ = tables(model, torch.arange(200), layer_type)
        engine_cosines, _ = engine_tables(config, dict(settings), 200)
        torch.testing.assert_close(cosines, engine_cosines, rtol=1e-5, atol=2e-5)


@pytest.mark.parametrize("name", [*ROPES, "nested"])
def test_a_position_is_embedded_alike_in_every_call(name):
    config = nested_config() if name == "nested" else hf_config(*ROPES[name])
    model = fixed_model(config, 200)
    for layer_type in rope.rope_parameters(config):
        first = tables(model, torch.arange(8), layer_type)
        tables(model, torch.arange(200), layer_type)
        beside_a_long_one = tables(model, torch.arange(200), layer_type)
        again = tables(model, torch.arange(8), layer_type)
        for i in range(2):
            assert torch.equal(first[i], beside_a_long_one[i][:8])
            assert torch.equal(first[i], again[i])


def test_transformers_itself_chooses_by_the_longest_sequence():
    """What `fix_frequencies` is for; without it the check refuses the model."""
    model = transformers.AutoModelForCausalLM.from_config(hf_config(*ROPES["longrope"]))
    short = tables(model, torch.arange(8))[0]
    long = tables(model, torch.arange(200))[0][:8]
    assert not torch.equal(short, long)
    with pytest.raises(ConfigError, match="chooses its rotary frequencies by the longest sequence"):
        rope.check_rope(model, "model.path=x", 200, has_engine=True)


REFUSED = {
    "longrope with a scale": (
        ("phi3", LONGROPE | {"attention_factor": 1.9}),
        r"of its rope_parameters, attention_factor=1.9 scales the attention by 1.9000, and vLLM",
    ),
    "longrope with a factor": (
        ("phi3", LONGROPE | {"factor": 2.0}),
        "factor=2.0 scales the attention by",
    ),
    "longrope with vLLM's scales": (
        ("phi3", LONGROPE | {"long_mscale": 2.0}),
        "long_mscale=2.0 is read by only one of transformers and vLLM for rope_type=longrope",
    ),
    "dynamic with vLLM's length": (
        ("llama", ROPES["dynamic"][1] | {"max_trained_positions": 64}),
        "max_trained_positions=64 is read by only one",
    ),
    "dynamic with alpha": (
        ("llama", ROPES["dynamic"][1] | {"alpha": 2.0}),
        "alpha=2.0 is read by only one",
    ),
    "proportional with a factor": (
        ("llama", ROPES["proportional"][1] | {"factor": 2.0}),
        "factor=2.0 is read by only one",
    ),
    "a part of each head": (
        ("llama", {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}),
        "LlamaForCausalLM does not rotate the part of each head that its partial_rotary_factor=0.5",
    ),
    "a part of each head, linear": (
        ("llama", ROPES["linear"][1] | {"partial_rotary_factor": 0.5}),
        "does not rotate the part of each head",
    ),
    "vLLM's own size": (
        ("llama", {"rope_type": "default", "rope_theta": 1e4, "rope_dim": 8}),
        "rope_dim=8 is read by only one",
    ),
    "yarn with a misspelled key": (("qwen2", YARN | {"beta_quick": 2}), "beta_quick=2 is read by"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_only_one_side_reads_is_refused(name):
    (model_type, settings), words = REFUSED[name]
    model = fixed_model(hf_config(model_type, settings), 200)
    assert not rope.is_plain(model.config)
    with pytest.raises(ConfigError, match=words) as caught:
        rope.check_settings(model.config, "model.path=x")
        rope.check_rope(model, "model.path=x", 200, has_engine=True)
    assert str(caught.value).startswith("model.path=x: ")


def test_dual_chunk_attention_is_refused():
    config = hf_config(*ROPES["another base"], dual_chunk_attention_config={"chunk_size": 64})
    assert not rope.is_plain(config)
    with pytest.raises(ConfigError, match="its dual_chunk_attention_config is read by vLLM and"):
        rope.check_settings(config, "model.path=x")


def test_a_model_whose_scale_depends_on_the_batch_is_refused():
    settings = LONGROPE | {"short_mscale": 1.1, "long_mscale": 1.4}
    changes = {"num_local_experts": 2, "num_experts_per_tok": 1}
    model = fixed_model(hf_config("phimoe", settings, **changes), 200)
    with pytest.raises(ConfigError, match="depend on the longest sequence of a batch"):
        rope.check_rope(model, "critic.path=x", 200, has_engine=False)
