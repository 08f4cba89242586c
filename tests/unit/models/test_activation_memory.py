"""The estimate of activations against what torch keeps for a backward pass."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import transformers

from one_step_off.models.activation_memory import activation_memory
from one_step_off.training import packed_attention

TOKENS = 128
SIZES = {"vocab_size": 64, "hidden_size": 256, "num_attention_heads": 4}
CONFIGS = {
    "qwen2": transformers.Qwen2Config(**SIZES, intermediate_size=1024, num_key_value_heads=1),
    "qwen3": transformers.Qwen3Config(
        **SIZES, intermediate_size=512, num_key_value_heads=2, head_dim=128
    ),
    "llama": transformers.LlamaConfig(**SIZES, intermediate_size=768, num_key_value_heads=4),
}


def kept_bytes(hf_config: Any, layers: int) -> int:
    """Of the tensors that autograd keeps in a forward pass, without the weights."""
    packed_attention.register()
    hf_config.num_hidden_layers = layers
    model = transformers.AutoModelForCausalLM.from_config(
        hf_config, dtype=torch.bfloat16, attn_implementation=packed_attention.PACKED
    )
    weights = {p.untyped_storage().data_ptr() for p in model.parameters()}
    kept: dict[int, torch.Tensor] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        model.model(
            input_ids=torch.zeros(1, TOKENS, dtype=torch.int64),
            position_ids=torch.arange(TOKENS)[None],
            use_cache=False,
            cu_seq_lens_q=torch.tensor([0, TOKENS], dtype=torch.int32),
            packed_kernel=packed_attention.PER_SEQUENCE,
            sequence_lengths=np.array([TOKENS]),
        )
    return sum(t.untyped_storage().nbytes() for p, t in kept.items() if p not in weights)


@pytest.mark.parametrize("name", CONFIGS)
def test_a_layer_keeps_what_is_estimated(name):
    hf_config = CONFIGS[name]
    of_layer = (kept_bytes(hf_config, 3) - kept_bytes(hf_config, 1)) / 2 / TOKENS
    memory = activation_memory(hf_config)
    # Only some families have norms of queries and keys, which are always counted.
    assert of_layer <= 1.05 * memory.layer <= 1.35 * of_layer
    assert memory.layer_input == 2 * hf_config.hidden_size


def test_of_an_update():
    CONFIGS["qwen2"].num_hidden_layers = 3
    memory = activation_memory(CONFIGS["qwen2"])
    whole = memory.of_update(1000, 100, recomputes=False)
    assert whole == 3 * memory.layer * 1000 + memory.logits * 100
    recomputed = memory.of_update(1000, 100, recomputes=True)
    assert recomputed == memory.layer_inputs(1000) + memory.besides(1000, 100)
    assert memory.layer_inputs(1000) == 3 * 2 * 256 * 1000
