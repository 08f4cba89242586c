"""The memory of the activations of an update, from a model's config: an estimate, no measurement.

Counted is what torch keeps for the backward pass in a decoder layer of the Llama and Qwen kind that
is not compiled, with fused attention, in bfloat16. A test compares it with what torch keeps.
"""

from dataclasses import dataclass
from typing import Any

RESERVED_BYTES = 8e9
"""For what a GPU has beside state, activations and logits: gathered layers, buffers, CUDA."""

LOGIT_BYTES = 6
"""Of a logit: in bfloat16, its gradient, and a pass in float32 over a part of them."""


@dataclass(frozen=True)
class ActivationMemory:
    """Bytes of the activations of one token.

    Attributes:
        layers: of the decoder.
        layer_input: what activation checkpointing keeps of a layer.
        layer: what a layer keeps that is not computed again.
        logits: of the token.
    """

    layers: int
    layer_input: float
    layer: float
    logits: float

    def layer_inputs(self, tokens: int) -> float:
        """Bytes that activation checkpointing keeps of a micro-batch with `tokens` on a rank."""
        return self.layers * self.layer_input * tokens

    def besides(self, tokens: int, chunk: int) -> float:
        """Bytes that an update needs besides `layer_inputs` with activation checkpointing: one
        layer, computed again, and `chunk` rows of logits."""
        return self.layer * tokens + self.logits * min(chunk, tokens)

    def of_update(self, tokens: int, chunk: int, recomputes: bool) -> float:
        """Bytes of the activations of a micro-batch with `tokens` on a rank. `recomputes`: with
        activation checkpointing."""
        if recomputes:
            return self.layer_inputs(tokens) + self.besides(tokens, chunk)
        return self.layers * self.layer * tokens + self.logits * min(chunk, tokens)


def activation_memory(hf_config: Any) -> ActivationMemory | None:
    """That of a model by its Hugging Face config; None: the config lacks the usual names."""
    config = hf_config.get_text_config()
    names = ("hidden_size", "num_attention_heads", "num_hidden_layers", "vocab_size")
    if not all(getattr(config, name, None) for name in names):
        return None
    hidden = config.hidden_size
    heads = config.num_attention_heads
    head_size = getattr(config, "head_dim", None) or hidden // heads
    queries = heads * head_size
    keys = (getattr(config, "num_key_value_heads", None) or heads) * head_size
    # Two norms, which compute in float32; queries and keys with norms of their own.
    attention = 16 * hidden + 12 * queries + 10 * keys
    layer = attention + _mlp_bytes(config, hidden)
    return ActivationMemory(
        config.num_hidden_layers, 2 * hidden, layer, LOGIT_BYTES * config.vocab_size
    )


def _mlp_bytes(config: Any, hidden: int) -> float:
    """Gate, its activation, the other half and their product; of experts for each that a token
    passes, with its copies of the token and of the output."""
    experts = getattr(config, "num_experts_per_tok", None)
    width = getattr(config, "moe_intermediate_size", None)
    dense_width = getattr(config, "intermediate_size", None) or 4 * hidden
    if not experts:
        return 8 * dense_width
    shared = getattr(config, "shared_expert_intermediate_size", None) or 0
    return experts * (8 * (width or dense_width) + 4 * hidden) + 8 * shared
