"""Tiny models with every type of rotary embedding that a run accepts."""

from __future__ import annotations

from typing import Any

import transformers

TRAINED_LENGTH = 32
"""Tokens from which on longrope has other frequencies."""

SIZES: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 64,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.3,
    "pad_token_id": None,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "short_factor": [1.0] * 8,
    "long_factor": [1.0, 2.0, 4.0, 8.0, 12.0, 16.0, 24.0, 32.0],
    "original_max_position_embeddings": TRAINED_LENGTH,
}
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 8.0}
YARN["original_max_position_embeddings"] = TRAINED_LENGTH
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 5e5,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": TRAINED_LENGTH,
}
ROPES: dict[str, tuple[str, dict[str, Any]]] = {
    "default": ("llama", {"rope_type": "default", "rope_theta": 1e4}),
    "another base": ("qwen2", {"rope_type": "default", "rope_theta": 1e6}),
    "half of each head": (
        "glm",
        {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5},
    ),
    "linear": ("llama", {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}),
    "dynamic": ("llama", {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}),
    "yarn": ("qwen3", YARN),
    "yarn, its scale": ("qwen2", YARN | {"attention_factor": 1.3, "beta_fast": 16.0}),
    "yarn, two scales": ("qwen2", YARN | {"mscale": 0.7, "mscale_all_dim": 0.4, "truncate": False}),
    "longrope": ("phi3", LONGROPE),
    "llama3": ("llama", LLAMA3),
    "proportional": (
        "llama",
        {"rope_type": "proportional", "rope_theta": 1e4, "partial_rotary_factor": 0.25},
    ),
}
"""Name -> (model type, its rope_parameters)."""


def hf_config(model_type: str, settings: dict[str, Any], **changes: Any) -> Any:
    """The config of a tiny model with these settings."""
    sizes = SIZES | changes
    if model_type == "phi3":
        sizes["original_max_position_embeddings"] = TRAINED_LENGTH
    if model_type in ("glm", "qwen3"):
        sizes["head_dim"] = 16
    return transformers.AutoConfig.for_model(model_type, **sizes, rope_parameters=dict(settings))


def nested_config() -> Any:
    """A model whose two kinds of layers have frequencies of their own, one of them longrope."""
    settings = {
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e3},
        "full_attention": LONGROPE,
    }
    return transformers.AutoConfig.for_model(
        "gemma3_text",
        **SIZES,
        head_dim=16,
        sliding_window=16,
        layer_types=["sliding_attention", "full_attention"],
        rope_parameters=settings,
    )
