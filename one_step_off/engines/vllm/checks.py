"""What only vLLM itself knows of a config: the fields of its engine, and the models that it has
code for. Importing vLLM takes ten seconds, so each check does it only where it must."""

from dataclasses import fields
from typing import Any

from one_step_off.config.errors import ConfigError, key_error, value_error
from one_step_off.config.packages import is_installed
from one_step_off.config.placement import resolved_device
from one_step_off.config.quantization import (
    has_quantized_weights,
    is_quantized,
    quantized_keys,
)
from one_step_off.config.schema import Config
from one_step_off.config.sections.rollout import check_engine_names
from one_step_off.config.teachers import config_of_teacher, teacher_key, teacher_paths

MIN_CAPABILITY = {"fp8_per_channel": (8, 9), "fp8_per_token_head": (8, 9)}
"""Weights: its kernels multiply in FP8. KV cache: only Triton's attention stores it, on GPUs with
FP8."""
ANY_CAPABILITY = (8, 0)
"""The other schemes: without FP8 arithmetic vLLM 0.32 multiplies FP8 weights in bfloat16, and
FlashInfer's attention reads a KV cache in FP8."""


def check_policy(cfg: Config) -> None:
    """Check `rollout.engine_kwargs`, and the policy's model. Raises ConfigError."""
    if not is_installed("vllm"):
        raise ConfigError(
            f"rollout.engine={cfg.rollout.engine}: vLLM is not installed; run shell/setup.sh, or "
            "use rollout.engine=transformers, which is slow"
        )
    _check_engine_fields(cfg, "rollout")
    _check_model(cfg, "model.path", cfg.model.path)
    if is_quantized(cfg):
        _check_quantization(cfg)
    _check_speculation(cfg)


def _check_speculation(cfg: Config) -> None:
    speculation = cfg.rollout.speculation
    if speculation == "none":
        return
    # transformers: slow to import.
    from one_step_off.config.roles import load_hf_config
    from one_step_off.models.hf_model import has_state_layers
    from one_step_off.models.vision import is_vision_config

    if speculation == "suffix" and not is_installed("arctic_inference"):
        raise value_error(
            "rollout.speculation",
            speculation,
            "needs the package arctic-inference, which is not installed; run pip install "
            "--no-deps arctic-inference, or use ngram",
        )
    hf_config = load_hf_config(cfg, cfg.model.path)
    if is_vision_config(hf_config):
        raise value_error(
            "rollout.speculation",
            speculation,
            "vLLM forbids no tokens where it speculates, and a policy that reads images must not "
            "generate the tokens of images; set it to none",
        )
    if has_state_layers(hf_config):
        raise value_error(
            "rollout.speculation",
            speculation,
            f"{cfg.model.path} has layers with a state, which was not tried; set it to none",
        )


def check_teachers(cfg: Config) -> None:
    """Check `teacher.engine_kwargs`, and the models of teachers in engines. Raises ConfigError."""
    if not is_installed("vllm"):
        raise ConfigError(
            "teacher.backend=vllm: vLLM is not installed; run shell/setup.sh, or use "
            "teacher.backend=fsdp"
        )
    _check_engine_fields(cfg, "teacher")
    for name in teacher_paths(cfg):
        _check_model(cfg, teacher_key(name), config_of_teacher(cfg, name).teacher.path)


def _check_engine_fields(cfg: Config, section: str) -> None:
    if getattr(cfg, section).engine_kwargs:
        from vllm import AsyncEngineArgs

        names = [field.name for field in fields(AsyncEngineArgs)]
        check_engine_names(f"{section}.engine_kwargs", getattr(cfg, section).engine_kwargs, names)


def _check_quantization(cfg: Config) -> None:
    """Refuse what this machine's device cannot compute, of weights and KV cache."""
    if resolved_device(cfg) == "cpu":
        if not has_quantized_weights(cfg):
            return
        from one_step_off.models.experts import fused_experts
        from one_step_off.models.hf_model import empty_model  # transformers: slow to import

        if fused_experts(empty_model(cfg, "actor", None, None)):
            raise key_error(
                cfg,
                "rollout.quantization",
                f"{cfg.model.path} has experts, which vLLM's CPU build does not quantize; use none",
            )
        return
    from vllm.platforms import current_platform

    capability = current_platform.get_device_capability()
    if capability is None:  # this machine has no GPU: the engine itself will say it elsewhere
        return
    for key in quantized_keys(cfg).split():
        scheme = getattr(cfg.rollout, key.removeprefix("rollout."))
        needed = MIN_CAPABILITY.get(scheme, ANY_CAPABILITY)
        if tuple(capability) < needed:
            raise key_error(
                cfg,
                key,
                f"needs compute capability {needed[0]}.{needed[1]}, and this GPU has "
                f"{capability[0]}.{capability[1]}; use another, or remove it",
            )


def _check_model(cfg: Config, key: str, path: str) -> None:
    """Refuse a model of transformers that vLLM has no code for.

    Args:
        key: the config key that holds `path`.
        path: of a causal language model.
    """
    if cfg.model.trust_remote_code:  # a model's own code decides what kind of model it is
        return
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoConfig

    from one_step_off.models.vision import is_vision_config

    model_config = AutoConfig.from_pretrained(path, trust_remote_code=False)
    if is_vision_config(model_config):  # each of these was tried with vLLM
        if not is_installed("torchvision"):
            raise ConfigError(
                f"{key}={path}: vLLM reads images with torchvision, which is not installed; run "
                "shell/setup.sh"
            )
        return
    model_class: Any = MODEL_FOR_CAUSAL_LM_MAPPING[type(model_config)]
    # vLLM runs any model with the code of transformers where that code accepts vLLM's attention.
    if model_class.is_backend_compatible() or model_class._can_set_attn_implementation():
        return
    from vllm import ModelRegistry, plugins

    plugins.load_general_plugins()  # plugins may add models
    architectures = getattr(model_config, "architectures", None) or [model_class.__name__]
    if architectures[0] not in ModelRegistry.get_supported_archs():
        raise ConfigError(
            f"{key}={path}: vLLM, which generates, has no code for {architectures[0]}; give another"
        )
