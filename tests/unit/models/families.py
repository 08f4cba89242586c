"""Small random models of many families: the config of each, by its `model_type`."""

from collections.abc import Callable
from typing import Any

import transformers

SIZES: dict[str, Any] = {
    "vocab_size": 67,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
}
FOUR_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
ROUTED = {
    "moe_intermediate_size": 16,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
}
LINEAR_ATTENTION = {
    "head_dim": 16,
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "layer_types": ["linear_attention", "full_attention"],
}


def _of(name: str, **settings: Any) -> Callable[[], Any]:
    """Makes the config of this class; `settings` beside, or in place of, those of `SIZES`. None
    leaves one out."""
    chosen = {key: value for key, value in (SIZES | settings).items() if value is not None}
    return lambda: getattr(transformers, name)(**chosen)


CONFIGS: dict[str, Callable[[], Any]] = {
    "qwen2_moe": _of("Qwen2MoeConfig", **FOUR_EXPERTS, shared_expert_intermediate_size=24),
    "qwen3_moe": _of("Qwen3MoeConfig", **FOUR_EXPERTS, head_dim=16),
    "qwen3_next": _of(
        "Qwen3NextConfig", **FOUR_EXPERTS, **LINEAR_ATTENTION, shared_expert_intermediate_size=24
    ),
    "qwen3_5_text": _of("Qwen3_5TextConfig", **LINEAR_ATTENTION),
    "qwen3_5_moe_text": _of(
        "Qwen3_5MoeTextConfig",
        **FOUR_EXPERTS,
        **LINEAR_ATTENTION,
        shared_expert_intermediate_size=24,
        intermediate_size=None,
    ),
    "mixtral": _of("MixtralConfig", num_local_experts=4),
    "glm4_moe": _of("Glm4MoeConfig", **ROUTED, head_dim=16),
    "deepseek_v3": _of(
        "DeepseekV3Config",
        **ROUTED,
        num_key_value_heads=2,
        n_group=1,
        topk_group=1,
        q_lora_rank=16,
        kv_lora_rank=8,
        qk_rope_head_dim=8,
        qk_nope_head_dim=8,
        v_head_dim=16,
    ),
    "olmoe": _of("OlmoeConfig", num_experts=4, num_experts_per_tok=2, eos_token_id=1),
    "ernie4_5_moe": _of(
        "Ernie4_5_MoeConfig",
        moe_intermediate_size=16,
        moe_num_experts=4,
        moe_k=2,
        moe_num_shared_experts=1,
        moe_layer_start_index=1,
    ),
    "minimax_m2": _of("MiniMaxM2Config", num_local_experts=4, num_experts_per_tok=2, head_dim=16),
    "hunyuan_v1_moe": _of("HunYuanMoEV1Config", num_experts=4, moe_topk=2, head_dim=16),
    "granitemoe": _of("GraniteMoeConfig", num_local_experts=4, num_experts_per_tok=2),
    "phimoe": _of("PhimoeConfig", num_local_experts=4),
    "gemma2": _of("Gemma2Config", head_dim=16),
    "gemma3_text": _of("Gemma3TextConfig", head_dim=16),
    "llama": _of("LlamaConfig"),
    "qwen2": _of("Qwen2Config", tie_word_embeddings=True),
    "qwen3": _of("Qwen3Config", head_dim=16),
    "phi3": _of("Phi3Config"),
    "mistral": _of("MistralConfig"),
    "olmo2": _of("Olmo2Config"),
    "starcoder2": _of("Starcoder2Config"),
    "smollm3": _of("SmolLM3Config"),
}
