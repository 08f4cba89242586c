"""Checks of models whose sequences are divided over ranks (`sequence_parallel_size`)."""

import math
from typing import Any

from one_step_off.config.errors import ConfigError
from one_step_off.config.lengths import longest_trained
from one_step_off.config.placement import devices_of_pool
from one_step_off.config.pool_checks import nearest_divisor
from one_step_off.config.roles import load_hf_config, role_model_path, role_settings
from one_step_off.config.schema import Config
from one_step_off.config.teachers import configs_of_roles


def check_sequence_parallel(cfg: Config) -> None:
    """Check `sequence_parallel_size` against the models of the roles that FSDP2 trains or runs.

    Raises:
        ConfigError: a model's sequences cannot be divided by it.
    """
    for own_cfg, role in configs_of_roles(cfg):
        settings = role_settings(own_cfg, role)
        if settings.backend == "fsdp" and settings.sequence_parallel_size > 1:  # files are read
            hf_config = load_hf_config(own_cfg, role_model_path(own_cfg, role))
            check_divided_model(hf_config, own_cfg, role)


def check_divided_model(hf_config: Any, cfg: Config, role: str) -> None:
    """As `check_sequence_parallel`, of one role's model. `hf_config`: its Hugging Face config."""
    size = role_settings(cfg, role).sequence_parallel_size
    if size == 1:
        return
    path = role_model_path(cfg, role)
    key = f"{role}.sequence_parallel_size={size}"
    reason = why_not_divided(hf_config)
    if reason:
        raise ConfigError(f"{key}: {path!r} {reason}; set it to 1")
    heads = hf_config.get_text_config().num_attention_heads
    if heads % size:
        raise ConfigError(
            f"{key}: does not divide the {heads} attention heads of {path!r}; "
            f"use {nearest_divisor(heads, size)}"
        )


def why_not_divided(hf_config: Any) -> str:
    """Why the sequences of a model cannot be divided; "" if they can. `hf_config`: its Hugging Face
    config."""
    from one_step_off.models import hf_model, vision  # transformers: slow to import

    if vision.is_vision_config(hf_config):
        return "reads images, whose rows stay whole"
    if hf_model.has_state_layers(hf_config):
        return "has layers whose state runs along the whole sequence"
    return ""


def more_ranks_shorten(cfg: Config, role: str) -> bool:
    """Whether a larger `sequence_parallel_size` of a role is allowed, and gives its ranks fewer
    tokens of the longest sequence: a rank has `micro_batch_tokens` in any case."""
    settings = role_settings(cfg, role)
    size = settings.sequence_parallel_size
    is_packed = settings.packing != "off" and cfg.model.attn_implementation != "eager"
    if settings.backend != "fsdp" or not is_packed:
        return False
    if longest_trained(cfg) / size <= settings.micro_batch_tokens:
        return False
    hf_config = load_hf_config(cfg, role_model_path(cfg, role))
    ranks = devices_of_pool(cfg, cfg.placement.roles[role])
    heads = hf_config.get_text_config().num_attention_heads
    return not why_not_divided(hf_config) and math.gcd(heads, ranks) > size
