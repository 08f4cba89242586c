"""The engine's model, and the memory that its cache may take."""

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from one_step_off.config.lengths import engine_length
from one_step_off.config.placement import device_share
from one_step_off.config.schema import Config
from one_step_off.models.rope import fix_frequencies


def load_model(cfg: Config, device: str) -> PreTrainedModel:
    """The policy's model in model.dtype on "cpu" or "cuda". Raises what transformers raises."""
    model = AutoModelForCausalLM.from_pretrained(
        cfg.model.path,
        dtype=getattr(torch, cfg.model.dtype),
        trust_remote_code=cfg.model.trust_remote_code,
    )
    # Before the cast to the device: the table is computed on the CPU.
    fix_frequencies(model, engine_length(cfg))
    model.requires_grad_(False)
    return model.eval().to(device)


def cache_limit(cfg: Config, model: PreTrainedModel) -> int:
    """Bytes of the keys and values of one call at most."""
    if model.device.type == "cpu":
        return cfg.rollout.kv_cache_mb << 20
    share = device_share(cfg, cfg.placement.roles["rollout"])
    total = torch.cuda.get_device_properties(model.device).total_memory
    usable = int(share * cfg.rollout.gpu_memory_utilization * total)
    # transformers' cache grows by copying itself, a layer at a time; logits need memory, too.
    return max(0, usable - torch.cuda.memory_allocated(model.device)) // 2


def cached_bytes_per_token(model: PreTrainedModel) -> int:
    """Bytes of one token's keys and values, as far as the model's config tells."""
    config = model.config.get_text_config()
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    head_size = getattr(config, "head_dim", None)
    head_size = head_size or config.hidden_size // config.num_attention_heads
    return 2 * config.num_hidden_layers * heads * head_size * model.dtype.itemsize
