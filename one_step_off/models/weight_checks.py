"""Checks of a model's weights: can the back end load them, and do they fit into memory?"""

import contextlib
import os
from pathlib import Path
from typing import Any

import psutil

from one_step_off.config.errors import ConfigError
from one_step_off.config.placement import processes_per_node, resolved_device
from one_step_off.config.roles import load_hf_config, role_model_path, role_settings
from one_step_off.config.schema import Config
from one_step_off.config.sections.roles import ADAMW_8BIT, MUON
from one_step_off.config.teachers import config_of_teacher, teacher_paths
from one_step_off.models.quantization import quantization_method, weight_file_bytes

# Bytes per parameter of a trained role: fp32 weights and gradients, and what its optimizer keeps.
WEIGHT_AND_GRADIENT_BYTES = 8
# Two moments; of adamw_8bit codes of a byte and the scales of their blocks; of muon the momentum of
# a hidden matrix. A user's own is taken for AdamW.
ADAMW_BYTES = 8
EIGHT_BIT_BYTES = 2.1
MUON_BYTES = 4
CGROUP_MEMORY_LIMIT = Path("/sys/fs/cgroup/memory.max")
GIB = 2**30


def check_weights(cfg: Config) -> None:
    """Check the weights of every role: with Megatron whether it builds the same model from them;
    otherwise the headers of local weight files, and on CPUs whether this machine has the memory for
    the run.

    Raises:
        ConfigError: another model, broken files, other tensors than the model's, or too little
            memory.
    """
    bytes_by_role: dict[str, int] = {}
    for role in cfg.placement.roles:
        if role in ("rollout", "teacher"):
            continue
        model = _checked_model(cfg, role)
        if model is not None:
            bytes_by_role[role] = _trainer_bytes(cfg, role, model)
            if role == "actor" and "rollout" in cfg.placement.roles:
                bytes_by_role["rollout"] = _rollout_bytes(cfg, model.num_parameters())
    for name in teacher_paths(cfg):
        weight_bytes = _teacher_weight_bytes(config_of_teacher(cfg, name))
        if weight_bytes is not None:
            bytes_by_role[f"teacher {name}"] = _teacher_bytes(cfg, weight_bytes)
    is_other_machine = bool(os.environ.get("RAY_ADDRESS"))
    if resolved_device(cfg) == "cpu" and not is_other_machine:
        _require_memory(cfg, bytes_by_role)


def _checked_model(cfg: Config, role: str) -> Any:
    """Check a role's model. Returns it without weights; None: its parameters are not known."""
    if role_settings(cfg, role).backend == "megatron":
        from one_step_off.models import megatron_support  # transformers: slow to import

        megatron_support.read_config(cfg, role)
        return None
    return _model_without_weights(cfg, role) if _has_readable_weights(cfg, role) else None


def _teacher_weight_bytes(cfg: Config) -> int | None:
    """Check the weights of a teacher; returns their size in memory, None: it is not known.

    The tensors of a quantized checkpoint are not those of the model. vLLM checks them. They have
    about the size of their files.

    Args:
        cfg: of `config_of_teacher`.
    """
    if _has_readable_weights(cfg, "teacher") and _is_quantized(cfg):
        return weight_file_bytes(cfg.teacher.path)
    model = _checked_model(cfg, "teacher")
    return None if model is None else model.num_parameters() * _weight_bytes(cfg)


def _is_quantized(cfg: Config) -> bool:
    hf_config = load_hf_config(cfg, cfg.teacher.path)
    return quantization_method(cfg.teacher.path, hf_config) is not None


def _teacher_bytes(cfg: Config, weight_bytes: int) -> int:
    """Weights of a teacher, and the KV cache of each of its engines."""
    if role_settings(cfg, "teacher").backend != "vllm":
        return weight_bytes
    engines = sum(processes_per_node(cfg, cfg.placement.roles["teacher"]))
    return engines * (weight_bytes + (cfg.rollout.kv_cache_mb << 20))


def _has_readable_weights(cfg: Config, role: str) -> bool:
    """A model's own code may compute with its weights, so they cannot be read without loading
    them."""
    return os.path.isdir(role_model_path(cfg, role)) and not cfg.model.trust_remote_code


def _model_without_weights(cfg: Config, role: str) -> Any:
    """A role's model on the device meta. Raises ConfigError: its files are broken, or hold other
    tensors than the model's."""
    import torch

    from one_step_off.models import hf_model

    dtype = getattr(torch, cfg.model.dtype)
    model, _ = hf_model.read_checkpoint(cfg, role, None, dtype, "meta")
    return model


def _weight_bytes(cfg: Config) -> int:
    """Bytes of one weight in the dtype of the run."""
    import torch

    return getattr(torch, cfg.model.dtype).itemsize


def _trainer_bytes(cfg: Config, role: str, model: Any) -> int:
    """Weights, and of a role that trains all of them gradients and optimizer state."""
    trains_all_weights = role == "critic" or (role == "actor" and not cfg.model.lora_rank)
    if not trains_all_weights:
        return model.num_parameters() * _weight_bytes(cfg)
    optimizer_bytes = _optimizer_bytes(role_settings(cfg, role).optimizer, model)
    return model.num_parameters() * WEIGHT_AND_GRADIENT_BYTES + optimizer_bytes


def _optimizer_bytes(optimizer: str, model: Any) -> int:
    from one_step_off.models.parameter_kinds import parameter_kinds  # transformers: slow to import

    num_parameters = model.num_parameters()
    if optimizer == ADAMW_8BIT:
        return int(num_parameters * EIGHT_BIT_BYTES)
    if optimizer == MUON:
        matrices = parameter_kinds(model).hidden_matrices
        saved_bytes = (ADAMW_BYTES - MUON_BYTES) * sum(matrix.numel() for matrix in matrices)
        return num_parameters * ADAMW_BYTES - saved_bytes
    return num_parameters * ADAMW_BYTES


def _rollout_bytes(cfg: Config, num_parameters: int) -> int:
    """Weights and KV cache of all replicas."""
    num_replicas = sum(processes_per_node(cfg, cfg.placement.roles["rollout"]))
    kv_cache_bytes = cfg.rollout.kv_cache_mb << 20
    return num_replicas * (num_parameters * _weight_bytes(cfg) + kv_cache_bytes)


def _memory_limit_bytes() -> int:
    """This machine's memory, or that of the container in which this process runs."""
    limits = [psutil.virtual_memory().total]
    # ValueError: the file holds "max" where the container has no limit.
    with contextlib.suppress(OSError, ValueError):
        limits.append(int(CGROUP_MEMORY_LIMIT.read_text()))
    return min(limits)


def _require_memory(cfg: Config, bytes_by_role: dict[str, int]) -> None:
    needed_bytes = sum(bytes_by_role.values())
    limit_bytes = _memory_limit_bytes()
    if needed_bytes <= limit_bytes:
        return
    parts = ", ".join(f"{role} {needed / GIB:.3g}" for role, needed in bytes_by_role.items())
    raise ConfigError(
        f"model.path={cfg.model.path}: weights, optimizer states and KV cache take "
        f"{needed_bytes / GIB:.3g} GiB ({parts}), "
        f"and this machine has {limit_bytes / GIB:.3g} GiB; "
        "use a smaller model, or lower placement.pools or rollout.kv_cache_mb"
    )
