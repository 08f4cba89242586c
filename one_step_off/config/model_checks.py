"""Checks of the model: LoRA, attention, and whether its path can be a model."""

import os
import re

from one_step_off.config.errors import ConfigError, key_error, refuse_here
from one_step_off.config.schema import Config
from one_step_off.config.text import did_you_mean, format_value

TINY_MODELS = ("tiny:qwen2", "tiny:qwen3", "tiny:tools", "tiny:teacher")
TINY_LAYERS = r"(-[1-9])?"
"""What may follow: the number of layers, such as tiny:qwen2-1."""
# A model directory holds at least one file of each of these endings.
MODEL_FILES = (
    ("config.json",),
    ("tokenizer.json", "tokenizer.model", "vocab.json"),
    (".safetensors", ".bin"),
)


def check_model(cfg: Config, device: str) -> None:
    """Check the section model. Raises ConfigError."""
    model = cfg.model
    if model.lora_rank and cfg.actor.backend != "fsdp":
        raise key_error(
            cfg,
            "model.lora_rank",
            "only the fsdp back end trains adapters; set it to 0, or actor.backend=fsdp",
        )
    layer_names = [name.strip() for name in model.lora_target_modules.split(",")]
    are_names = all(re.fullmatch(r"[\w.-]+", name) for name in layer_names)
    if model.lora_rank and not are_names:
        raise key_error(
            cfg,
            "model.lora_target_modules",
            "must be all-linear, or names of layers such as q_proj,v_proj",
        )
    runs_flash_attention = device != "cpu" and model.dtype == "bfloat16"
    if model.attn_implementation == "flash_attention_2" and not runs_flash_attention:
        actual = "on CPU" if device == "cpu" else f"in {model.dtype}"
        raise key_error(
            cfg,
            "model.attn_implementation",
            f"needs GPUs and model.dtype=bfloat16, and this run is {actual}; use auto or sdpa",
        )
    check_model_path("model.path", model.path)


def check_model_path(key: str, path: str) -> None:
    """Check that a path is a tiny model, a directory with a model, or may be a hub id.

    `key`: the config key that holds it. Raises ConfigError.
    """
    location = f"{key}={format_value(path)}"
    if path.startswith("tiny"):
        if re.sub(f"{TINY_LAYERS}$", "", path) not in TINY_MODELS:
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
