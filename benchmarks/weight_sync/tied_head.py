"""A fix for vLLM's weight reload on CPUs, where a tied lm_head keeps its old weights."""

from __future__ import annotations

from typing import Any


def repack_tied_head(model: Any, model_config: Any) -> None:
    """Pack a tied lm_head again after a reload on a CPU.

    On CPUs vLLM computes with a packed copy of lm_head. A reload leaves that copy at the old
    weights if the head is tied to the embeddings. On GPUs, and for a head of its own, there is
    nothing to do.

    Args:
        model: the model in vLLM's worker.
        model_config: the worker's `vllm_config.model_config`.
    """
    head = getattr(model, "lm_head", None)
    tied = getattr(model_config.hf_text_config, "tie_word_embeddings", False)
    on_cpu = next(model.parameters()).device.type == "cpu"
    if on_cpu and tied and hasattr(head, "quant_method"):
        head.quant_method.process_weights_after_loading(head)
