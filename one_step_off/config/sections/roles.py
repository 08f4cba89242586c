"""The config sections of the roles with a model: actor, critic, ref, reward_model, teacher.

All but the actor take the actor's settings where they set none of their own.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Optional

from one_step_off.config import packages
from one_step_off.config.errors import ConfigError, refuse_here
from one_step_off.config.keys import config_key, path_key, shared_key, with_actor_defaults
from one_step_off.config.text import did_you_mean, format_value
from one_step_off.config.user_code import did_you_mean_function, is_user_spec

ADAMW = "adamw"
ADAMW_8BIT = "adamw_8bit"
MUON = "muon"
OPTIMIZERS = (ADAMW, ADAMW_8BIT, MUON)

BLOCK_SIZE = 256
"""Of adamw_8bit where the config names none, as torchao has it."""

LEARNING_RATE_ADJUSTMENTS = ("match_rms_adamw", "original")
"""How Muon scales an orthogonal update by the shape of its matrix, by torch's names."""

RESERVED_SETTINGS = {
    "lr": "ROLE.lr sets it",
    "params": "they are the model's",
}
"""What a class of the user's own receives from elsewhere."""

LOSS_AGGREGATIONS = "token-mean token-sum sequence-mean seq-mean-token-sum seq-sum-norm"


@dataclass
class BackendConfig:
    """The training back end of a role, trained or frozen."""

    backend: str = shared_key(
        "fsdp", "training back end: fsdp, megatron, or your own as module:TABLE of workers by role"
    )
    micro_batch_tokens: int = shared_key(
        16384, "tokens per forward pass and rank, padding included", low=1
    )
    packing: str = shared_key(
        "auto",
        "lay the sequences of a micro-batch one after the other, without padding; "
        "auto: on GPUs in bfloat16, where the model and its layout allow it; "
        "off: and compute a prompt again for each of its samples",
        choices="auto on off",
    )
    tensor_parallel_size: int = shared_key(1, "megatron: tensor parallel size", low=1)
    pipeline_parallel_size: int = shared_key(1, "megatron: pipeline stages", low=1)
    virtual_pipeline_parallel_size: Optional[int] = config_key(
        None, "megatron: virtual stages of each pipeline stage; null: one", low=2
    )
    context_parallel_size: int = shared_key(1, "megatron: context parallel size", low=1)
    expert_parallel_size: int = shared_key(
        1, "ranks that divide the experts of each layer among them", low=1
    )
    sequence_parallel_size: int = shared_key(
        1,
        "fsdp: ranks that divide the tokens of each sequence among them, for long contexts",
        low=1,
    )
    sequence_parallel: bool = shared_key(
        False, "megatron: split the norms over the tensor-parallel ranks too"
    )
    fsdp_size: int = config_key(
        -1, "fsdp: ranks that share one copy of the model (HSDP); -1: all", low=1, also=-1
    )
    torch_compile: Optional[bool] = config_key(
        None,
        "compile the log-probs, and with fsdp each decoder layer, by torch.compile, while the "
        "engines start; null: on GPUs",
    )
    param_offload: bool = config_key(
        False, "GPUs: keep parameters in host memory while they are not used"
    )


@dataclass
class TrainedConfig(BackendConfig):
    """The training back end and optimizer of a role that is trained."""

    optimizer: str = shared_key(
        "adamw",
        "adamw, adamw_8bit, muon, or your own subclass of torch.optim.Optimizer as module:Class",
    )
    optimizer_kwargs: dict[str, Any] = shared_key(
        {}, "settings of the optimizer, e.g. {momentum: 0.95} of muon"
    )
    lr: float = config_key(1.0e-6, "peak learning rate", above=0.0)
    betas: list[float] = config_key([0.9, 0.999], "AdamW's two betas")
    eps: float = config_key(1.0e-8, "AdamW's epsilon", above=0.0)
    weight_decay: float = config_key(
        0.01, "decoupled weight decay; norms and biases have none", low=0.0
    )
    grad_clip: float = config_key(1.0, "clip the global gradient norm at this value", above=0.0)
    max_grad_norm_skip: Optional[float] = config_key(
        None,
        "skip the optimizer step if the gradient norm is above this; null: never skip",
        above=0.0,
    )
    lr_schedule: str = config_key(
        "constant", "learning rate after the warm-up", choices="constant cosine linear"
    )
    warmup_steps: int = config_key(0, "optimizer steps of linear warm-up", low=0)
    min_lr_ratio: float = config_key(
        0.0, "cosine and linear: the last learning rate, as a fraction of lr", low=0.0, high=1.0
    )
    ppo_mini_batch_size: int = shared_key(
        64, "prompts per optimizer step; must divide data.train_batch_size", low=1
    )
    ppo_epochs: int = shared_key(1, "passes over each batch", low=1)
    optimizer_offload: bool = config_key(
        False, "GPUs: keep the optimizer state in host memory between updates"
    )
    activation_checkpointing: bool = config_key(False, "recompute activations in the backward pass")


@dataclass
class ActorConfig(TrainedConfig):
    """Training of the policy."""

    log_prob_chunk: int = config_key(
        2048, "compute logits for this many tokens at a time, to save memory", low=1
    )
    router_bias_update_rate: float = config_key(
        0.0,
        "fsdp: after each optimizer step, change the correction bias of each expert by this, "
        "towards an even load (DeepSeek-V3, GLM-4.5); 0: frozen",
        low=0.0,
    )


@dataclass
class CriticConfig(with_actor_defaults(TrainedConfig)):
    """The critic: the model with a scalar head instead of the language model head."""

    path: str = path_key(
        "",
        "HF model directory or hub id (the head of a reward model is kept); empty: model.path",
    )
    lr: float = config_key(1.0e-5, "peak learning rate", above=0.0)
    loss_agg: str = config_key(
        "token-mean",
        "aggregation of the value loss, as algorithm.loss_agg",
        choices=LOSS_AGGREGATIONS,
    )
    clip_range_value: float = config_key(
        0.5, "value clipping: how far a value may move from the old one", above=0.0
    )


@dataclass
class RefConfig(with_actor_defaults(BackendConfig)):
    """The frozen reference policy."""

    path: str = path_key("", "HF model directory or hub id; empty: model.path")


@dataclass
class RewardModelConfig(with_actor_defaults(BackendConfig)):
    """A reward model: a sequence classifier with one output in its own pool, or a server."""

    path: str = path_key("", "HF sequence-classification model (role reward_model)")
    url: str = config_key(
        "",
        "a server instead of the role; "
        "it answers POST {prompts, responses, ground_truths} with {scores}",
    )
    weight: float = config_key(
        1.0,
        "weight of the model's score in the reward; reward.weight is that of the reward function",
        low=-1e6,
        high=1e6,
    )
    timeout_s: float = config_key(60.0, "time limit for one request to the server", above=0.0)
    retries: int = config_key(3, "how often a failed request is repeated", low=0)
    max_concurrency: int = config_key(8, "requests in flight at the same time", low=1)
    request_size: int = config_key(32, "samples per request", low=1)


@dataclass
class TeacherConfig(with_actor_defaults(BackendConfig)):
    """On-policy distillation: frozen teachers with the policy's token ids."""

    path: str = path_key("", "HF model directory or hub id of the teacher (role teacher)")
    by_source: dict[str, str] = config_key(
        {},
        "other teachers for some rows, as {source: path}; source: the name of a source in "
        "data.train_files, or the data_source of a row",
    )
    backend: Optional[str] = config_key(
        None,
        "training back end as the actor's, or vllm: an engine in a pool of its own; null: the "
        "actor's value",
    )
    weight: float = config_key(
        1.0,
        "weight of the distillation beside the reward's advantages "
        "(algorithm.adv_estimator=none: it stands alone)",
        above=0.0,
    )
    top_k: int = config_key(
        0,
        "0: the reverse KL of the sampled tokens, as advantages; k: the reverse KL over the "
        "teacher's k likeliest tokens and the rest, as a loss",
        low=0,
        high=1000,
    )
    engine_kwargs: dict[str, Any] = config_key(
        {}, "backend vllm: further arguments of its engine, e.g. {gpu_memory_utilization: 0.5}"
    )


def check_optimizer(role: str, settings: Any) -> None:
    """Check the optimizer of a role and its own settings. A class of the user's own is imported and
    tried when the run is prepared.

    Args:
        settings: of `role_settings`.

    Raises:
        ConfigError: there is no such optimizer, its back end or its package is missing, or it has
            no such setting.
    """
    _check_optimizer_name(role, settings)
    _check_optimizer_settings(role, settings.optimizer, settings.optimizer_kwargs)


def _check_optimizer_name(role: str, settings: Any) -> None:
    name = settings.optimizer
    location = f"{role}.optimizer={format_value(name)}"
    if name not in OPTIMIZERS and not is_user_spec(name):
        otherwise = (
            f"use {', '.join(OPTIMIZERS)}, or your own as module:Class, where the module exists"
        )
        fix = did_you_mean_function(name, OPTIMIZERS, otherwise)
        raise ConfigError(f"{location}: no such optimizer; {fix}")
    if settings.backend == "megatron" and name != ADAMW:
        raise ConfigError(
            f"{location}: the megatron back end has adamw alone; "
            f"use that, or set {role}.backend=fsdp"
        )
    if name == ADAMW_8BIT and not packages.is_installed("torchao"):
        fix = "pip install 'torchao>=0.18,<0.19', or use adamw"
        refuse_here(ConfigError(f"{location}: the package torchao is missing; {fix}"))


# Optimizer -> its own settings -> what a value must be, and the check of it.
OPTIMIZER_SETTINGS: dict[str, dict[str, tuple[str, Callable[[Any], bool]]]] = {
    ADAMW: {},
    ADAMW_8BIT: {
        "block_size": (
            "a whole number from 32 to 4096",
            lambda value: type(value) is int and 32 <= value <= 4096,
        )
    },
    MUON: {
        "momentum": (
            "a number, at least 0 and below 1",
            lambda value: type(value) in (int, float) and 0 <= value < 1,
        ),
        "nesterov": ("true or false", lambda value: type(value) is bool),
        "ns_steps": (
            "a whole number from 1 to 20",
            lambda value: type(value) is int and 1 <= value <= 20,
        ),
        "adjust_lr_fn": (
            " or ".join(LEARNING_RATE_ADJUSTMENTS),
            lambda value: value in LEARNING_RATE_ADJUSTMENTS,
        ),
    },
}


def _check_optimizer_settings(role: str, name: str, kwargs: dict[str, Any]) -> None:
    if name not in OPTIMIZERS:
        for key, reason in RESERVED_SETTINGS.items():
            if key in kwargs:
                raise ConfigError(
                    f"{role}.optimizer_kwargs.{key}={format_value(kwargs[key])}: "
                    f"{reason.replace('ROLE', role)}; remove it"
                )
        return
    known = OPTIMIZER_SETTINGS[name]
    for key, value in kwargs.items():
        location = f"{role}.optimizer_kwargs.{format_value(key)}={format_value(value)}"
        if key not in known:
            otherwise = f"use {', '.join(known)}" if known else "remove it"
            fix = did_you_mean(str(key), known, otherwise)
            raise ConfigError(f"{location}: no such setting of {name}; {fix}")
        wanted, is_valid = known[key]
        if not is_valid(value):
            raise ConfigError(f"{location}: must be {wanted}")
