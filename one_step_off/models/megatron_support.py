"""Which Hugging Face models the Megatron back end builds, and in which sizes. It needs no
megatron-core."""

import math
from dataclasses import dataclass
from typing import Any

from transformers.utils.hub import has_file

from one_step_off.config.errors import ConfigError
from one_step_off.config.pool_checks import nearest_divisor
from one_step_off.config.roles import load_hf_config, role_model_path, role_settings
from one_step_off.config.schema import Config
from one_step_off.config.sections.roles import BackendConfig
from one_step_off.models import rope

FAMILIES = ("llama", "qwen2", "qwen3", "qwen3_moe")
UNSUPPORTED_SWITCHES = ("use_sliding_window", "attention_bias", "mlp_bias")
LLAMA3_ROPE = {
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
"""Megatron's constants for rotary embeddings of the type llama3."""


@dataclass(frozen=True)
class Divisor:
    """A degree of parallelism and the size that it must divide.

    Attributes:
        key: of the role's section.
        value: the number of parts.
        size: what is divided.
        unit: what `size` counts, for messages.
    """

    key: str
    value: int
    size: int
    unit: str


def read_config(cfg: Config, role: str) -> Any:
    """The model's config.json, after the checks that Megatron makes the same model of it.

    Raises:
        ConfigError: a family, or a variant of one, that the Megatron back end does not know, or
            sizes that do not divide.
    """
    path = role_model_path(cfg, role)
    role_config = role_settings(cfg, role)
    hf_config = load_hf_config(cfg, path)
    where = f"{role}.backend=megatron with {path!r}"
    _check_family(hf_config, path, where)
    _check_variant(hf_config, where)
    _check_sizes(hf_config, role_config, role, path)
    return hf_config


def _check_family(hf_config: Any, path: str, where: str) -> None:
    family = hf_config.model_type
    if family not in FAMILIES:
        known = ", ".join(FAMILIES)
        raise ConfigError(f"{where}: model type {family} is not one of {known}; use backend=fsdp")
    one_file = has_file(path, "model.safetensors")
    if not one_file and not has_file(path, "model.safetensors.index.json"):
        raise ConfigError(
            f"{where}: it has no model.safetensors, the only format that this back end reads; "
            "use backend=fsdp"
        )


def _check_variant(hf_config: Any, where: str) -> None:
    unsupported = [name for name in UNSUPPORTED_SWITCHES if getattr(hf_config, name, False)]
    if not _is_known_rope(hf_config):
        unsupported.append("rope_parameters")
    if hf_config.hidden_act != "silu":
        unsupported.append("hidden_act")
    if unsupported:
        name = unsupported[0]
        value = getattr(hf_config, name)
        raise ConfigError(
            f"{where}: its {name}={value} is not supported by this back end; use backend=fsdp"
        )


def _is_known_rope(hf_config: Any) -> bool:
    """Whether Megatron reads all that the settings say: it has the base, and the factor of
    llama3."""
    settings = rope.rope_parameters(hf_config).get("", {})
    kind = rope.rope_type(settings)
    own_keys = settings.keys() - rope.PLAIN_KEYS
    if settings.get(rope.PARTIAL) in (None, 1.0):
        own_keys -= {rope.PARTIAL}
    if kind == "default":
        return bool(settings) and not own_keys
    if kind != "llama3" or own_keys != {"factor", *LLAMA3_ROPE}:
        return False
    return all(settings[name] == value for name, value in LLAMA3_ROPE.items())


def expert_count(hf_config: Any) -> int:
    """Experts in each sparse layer; 0: a dense model."""
    if hf_config.model_type != "qwen3_moe":
        return 0
    return getattr(hf_config, "num_experts", 0) or 0


def _fitting_size(hf_config: Any, divisor: Divisor, configured: int) -> int:
    """The size nearest to the configured one that the model can be split by."""
    size = divisor.size
    if divisor.key == "tensor_parallel_size":
        size = math.gcd(hf_config.num_key_value_heads, hf_config.intermediate_size)
    per_stage = divisor.value // configured  # virtual stages
    if size % per_stage:
        return 1
    return nearest_divisor(size // per_stage, configured)


def _check_sizes(hf_config: Any, role_config: BackendConfig, role: str, path: str) -> None:
    tensor_parallel = role_config.tensor_parallel_size
    expert_parallel = role_config.expert_parallel_size
    virtual_stages = role_config.virtual_pipeline_parallel_size or 1
    stages = role_config.pipeline_parallel_size * virtual_stages
    experts = expert_count(hf_config)
    divisors = (
        Divisor(
            "tensor_parallel_size",
            tensor_parallel,
            hf_config.num_key_value_heads,
            "key-value heads",
        ),
        Divisor(
            "tensor_parallel_size",
            tensor_parallel,
            hf_config.intermediate_size,
            "columns of the MLP",
        ),
        Divisor("pipeline_parallel_size", stages, hf_config.num_hidden_layers, "layers"),
        Divisor("expert_parallel_size", expert_parallel, experts, "experts"),
    )
    for divisor in divisors:
        if divisor.size % divisor.value:
            configured = getattr(role_config, divisor.key)
            given = f"{role}.{divisor.key}={configured}"
            if divisor.value != configured:
                given += f", in all {divisor.value} stages,"
            raise ConfigError(
                f"{given} does not divide the {divisor.size} {divisor.unit} of {path!r}; "
                f"use {_fitting_size(hf_config, divisor, configured)}"
            )
    if expert_parallel > 1 and not experts:
        raise ConfigError(
            f"{role}.expert_parallel_size={expert_parallel}: {path!r} is a dense model, "
            "without experts; set it to 1"
        )
    if experts and tensor_parallel > 1 and not role_config.sequence_parallel:
        raise ConfigError(
            f"{role}.sequence_parallel=false: tensor parallelism of {path!r}, with experts, "
            "needs it to be true"
        )
