"""Checks of models whose sequences are divided over ranks (`sequence_parallel_size`)."""

from typing import Any

from one_step_off.config.errors import ConfigError
from one_step_off.config.pool_checks import nearest_divisor
from one_step_off.config.roles import role_model_path, role_settings
from one_step_off.config.schema import Config
from one_step_off.config.teachers import configs_of_roles


def check_sequence_parallel(cfg: Config) -> None:
    """Check `sequence_parallel_size` against the models of the roles that FSDP2 trains or runs.

    Raises:
        ConfigError: a model's sequences cannot be divided by it.
    """
    from transformers import AutoConfig  # slow to import

    for own_cfg, role in configs_of_roles(cfg):
        settings = role_settings(own_cfg, role)
        if settings.backend == "fsdp" and settings.sequence_parallel_size > 1:  # files are read
            hf_config = AutoConfig.from_pretrained(
                role_model_path(own_cfg, role), trust_remote_code=cfg.model.trust_remote_code
            )
            check_divided_model(hf_config, own_cfg, role)


def check_divided_model(hf_config: Any, cfg: Config, role: str) -> None:
    """As `check_sequence_parallel`, of one role's model. `hf_config`: its Hugging Face config."""
    from one_step_off.models import hf_model, vision  # transformers: slow to import

    size = role_settings(cfg, role).sequence_parallel_size
    if size == 1:
        return
    path = role_model_path(cfg, role)
    key = f"{role}.sequence_parallel_size={size}"
    if vision.is_vision_config(hf_config):
        raise ConfigError(f"{key}: {path!r} reads images, whose rows stay whole; set it to 1")
    if hf_model.has_state_layers(hf_config):
        raise ConfigError(
            f"{key}: {path!r} has layers whose state runs along the whole sequence; set it to 1"
        )
    if role == "actor" and cfg.rollout.replay_routing:
        raise ConfigError(
            f"{key}: has not been tried with rollout.replay_routing=true; set that to false, or "
            "this to 1"
        )
    heads = hf_config.get_text_config().num_attention_heads
    if heads % size:
        raise ConfigError(
            f"{key}: does not divide the {heads} attention heads of {path!r}; "
            f"use {nearest_divisor(heads, size)}"
        )
