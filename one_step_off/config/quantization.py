"""Quantized engines: what may go with `rollout.quantization` and `rollout.kv_cache_dtype`.

The trainer computes in `model.dtype`; the engine alone quantizes, again at each weight sync. Its
log-probs are those of the distribution that it samples from, which is not quite the trainer's.
"""

from one_step_off.config.errors import key_error
from one_step_off.config.lora_checks import sends_adapters
from one_step_off.config.schema import Config

ON_CPU = {"rollout.quantization": "fp8_per_channel", "rollout.kv_cache_dtype": "fp8"}
"""What vLLM's kernels for CPUs compute, besides what is not quantized."""


def has_quantized_weights(cfg: Config) -> bool:
    """Whether the engine quantizes the weights."""
    return cfg.rollout.quantization != "none"


def is_quantized(cfg: Config) -> bool:
    """Whether the engine quantizes weights or its KV cache."""
    return has_quantized_weights(cfg) or cfg.rollout.kv_cache_dtype != "auto"


def quantized_keys(cfg: Config) -> str:
    """The keys that quantize something, separated by blanks."""
    keys = []
    if has_quantized_weights(cfg):
        keys.append("rollout.quantization")
    if cfg.rollout.kv_cache_dtype != "auto":
        keys.append("rollout.kv_cache_dtype")
    return " ".join(keys)


def check_quantization(cfg: Config, device: str) -> None:
    """Check what a quantized engine needs. Raises ConfigError.

    Args:
        device: "cpu" or "cuda".
    """
    if not is_quantized(cfg):
        return
    _check_correction(cfg)
    if device == "cpu":
        _check_cpu(cfg)
    if has_quantized_weights(cfg):
        _check_weights(cfg)


def _check_correction(cfg: Config) -> None:
    algorithm = cfg.algorithm
    if algorithm.old_log_probs == "recompute" and algorithm.rollout_correction == "none":
        raise key_error(
            cfg,
            f"{quantized_keys(cfg)} algorithm.rollout_correction",
            "tokens are sampled from another distribution than the trainer's, and nothing would "
            "correct for it; set rollout_correction=tis, or old_log_probs=rollout",
        )


def _check_cpu(cfg: Config) -> None:
    for key in quantized_keys(cfg).split():
        possible = ON_CPU[key]
        if getattr(cfg.rollout, key.removeprefix("rollout.")) != possible:
            raise key_error(cfg, key, f"vLLM's CPU build computes {possible} alone; use that")


def _check_weights(cfg: Config) -> None:
    if cfg.model.dtype != "bfloat16":
        raise key_error(
            cfg,
            "rollout.quantization model.dtype",
            "vLLM quantizes bfloat16 alone; use model.dtype=bfloat16 (the master weights are fp32)",
        )
    if cfg.weight_sync.mode == "delta":
        raise key_error(
            cfg,
            "rollout.quantization weight_sync.mode",
            "a quantized engine has no weights to which a delta applies; use weight_sync.mode=full",
        )
    if sends_adapters(cfg):
        raise key_error(
            cfg,
            "rollout.quantization weight_sync.lora",
            "not tried with adapters apart from the weights; use weight_sync.lora=merged",
        )
