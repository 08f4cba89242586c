"""The config section model."""

import os
import re
from dataclasses import dataclass

from one_step_off.config.errors import ConfigError, refuse_here, value_error
from one_step_off.config.keys import config_key, path_key
from one_step_off.config.text import did_you_mean, format_value

TINY_MODELS = ("tiny:qwen2", "tiny:qwen3", "tiny:tools", "tiny:teacher", "tiny:vision")
TINY_LAYERS = r"(-[1-9])?"
"""What may follow: the number of layers, such as tiny:qwen2-1."""
# A model directory holds at least one file of each of these endings.
MODEL_FILES = (
    ("config.json",),
    ("tokenizer.json", "tokenizer.model", "vocab.json"),
    (".safetensors", ".bin"),
)


ALL_LINEAR = "all-linear"
"""In model.lora_target_modules."""


@dataclass
class ModelConfig:
    """The policy."""

    path: str = path_key(
        "",
        "HF model directory or hub id; tiny:qwen2, tiny:qwen3, tiny:tools, tiny:vision: a small "
        "model that is built on this machine and briefly pretrained (tiny:qwen2-1: with one layer)",
    )
    dtype: str = config_key(
        "bfloat16",
        "dtype of trainer and engine (the trainer's master weights are fp32)",
        choices="bfloat16 float32",
    )
    trust_remote_code: bool = config_key(
        False, "run Python code that comes with the model (only if you trust its author)"
    )
    attn_implementation: str = config_key(
        "auto",
        "attention of the trainer; auto: flash_attn or torch's own for packed batches, else SDPA",
        choices="auto sdpa flash_attention_2 eager",
    )
    lora_rank: int = config_key(
        0, "rank of the actor's LoRA adapters (the base weights are frozen); 0: no LoRA", low=0
    )
    lora_alpha: int = config_key(32, "LoRA scaling is lora_alpha / lora_rank", low=1)
    lora_target_modules: str = config_key(
        ALL_LINEAR,
        "names of the linear layers that get adapters; all-linear: all but the language model head",
    )
    freeze: list[str] = config_key(
        [],
        "parts of the actor that are not trained, by the names of their parameters, such as "
        "[visual]; they are still sent and verified",
    )


def split_target_modules(target_modules: str) -> list[str]:
    """The names in model.lora_target_modules; [ALL_LINEAR]: all layers but the head."""
    return [name.strip() for name in target_modules.split(",")]


def check_model(model: ModelConfig, actor_backend: str, device: str) -> None:
    """Check the section model. Raises ConfigError."""
    if model.lora_rank and actor_backend != "fsdp":
        raise value_error(
            "model.lora_rank",
            model.lora_rank,
            "only the fsdp back end trains adapters; set it to 0, or actor.backend=fsdp",
        )
    if model.freeze and actor_backend != "fsdp":
        problem = "only the fsdp back end freezes parts of a model; remove it"
        raise value_error("model.freeze", model.freeze, problem)
    if model.freeze and model.lora_rank:
        problem = "with adapters all other parameters are frozen; remove it, or set lora_rank to 0"
        raise value_error("model.freeze", model.freeze, problem)
    layer_names = split_target_modules(model.lora_target_modules)
    are_names = all(re.fullmatch(r"[\w.-]+", name) for name in layer_names)
    if model.lora_rank and not are_names:
        raise value_error(
            "model.lora_target_modules",
            model.lora_target_modules,
            "must be all-linear, or names of layers such as q_proj,v_proj",
        )
    runs_flash_attention = device != "cpu" and model.dtype == "bfloat16"
    if model.attn_implementation == "flash_attention_2" and not runs_flash_attention:
        actual = "on CPU" if device == "cpu" else f"in {model.dtype}"
        raise value_error(
            "model.attn_implementation",
            model.attn_implementation,
            f"needs GPUs and model.dtype=bfloat16, and this run is {actual}; use auto or sdpa",
        )
    check_model_path("model.path", model.path)


def check_model_path(key: str, path: str) -> None:
    """Check that a path is a tiny model, a directory with a model, or may be a hub id.

    `key`: the config key that holds it. Raises ConfigError.
    """
    location = f"{key}={format_value(path)}"
    if path.startswith("tiny"):
        name = re.sub(f"{TINY_LAYERS}$", "", path)
        has_one_size = name == "tiny:vision"
        if name not in TINY_MODELS or (has_one_size and name != path):
            fix = did_you_mean(path, TINY_MODELS, f"use {' or '.join(TINY_MODELS)}", cutoff=0.8)
            raise ConfigError(f"{location}: unknown tiny model; {fix}")
        if not os.path.isdir(path):
            return
    if os.path.isdir(path):
        _check_model_directory(location, path)
        return
    is_hub_id = re.fullmatch(r"[A-Za-z0-9][\w.-]*/[\w.-]+", path)
    if os.path.exists(path) or not is_hub_id:
        error = ConfigError(
            f"{location}: no such directory, and not a hub id such as "
            "Qwen/Qwen2.5-0.5B-Instruct; check the path"
        )
        may_be_elsewhere = os.path.isabs(path) and not os.path.exists(path)
        if not may_be_elsewhere:
            raise error
        refuse_here(error)


def _check_model_directory(location: str, path: str) -> None:
    names = os.listdir(path)
    for endings in MODEL_FILES:
        if not any(name.endswith(endings) for name in names):
            raise ConfigError(
                f"{location}: the directory has no {' or '.join(endings)}; "
                "give one saved by save_pretrained"
            )
