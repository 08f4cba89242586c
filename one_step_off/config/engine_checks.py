"""Checks of what goes to vLLM: sampling parameters, engine arguments, and the weight sync.

The trainer computes the log-probs of the sampled tokens itself. A setting that changes the
distribution that vLLM samples from, or that keeps weights where the sync does not write them, would
silently train on wrong log-probs. So such settings are refused.
"""

from collections.abc import Callable, Iterable
from typing import Any

from one_step_off.config.errors import ConfigError, key_error
from one_step_off.config.lengths import longest_sequence
from one_step_off.config.schema import Config
from one_step_off.config.text import did_you_mean, format_value


def _is_flag(value: Any) -> bool:
    return isinstance(value, bool)


def _is_token_id_list(value: Any) -> bool:
    return isinstance(value, list) and all(type(item) is int for item in value)


def _is_text_or_texts(value: Any) -> bool:
    texts = value if isinstance(value, list) else [value]
    return all(text and type(text) is str for text in texts)


_FLAG = ("true or false", _is_flag)
# Fields of SamplingParams that only say where a sample ends or how it is written out, and what each
# takes. Any other field might change the distribution that is sampled from.
ALLOWED_SAMPLING_FIELDS: dict[str, tuple[str, Callable[[Any], bool]]] = {
    "stop": ("a text or a list of texts", _is_text_or_texts),
    "stop_token_ids": ("a list of whole numbers", _is_token_id_list),
    "ignore_eos": _FLAG,
    "include_stop_str_in_output": _FLAG,
    "skip_special_tokens": _FLAG,
    "spaces_between_special_tokens": _FLAG,
}

# Fields of SamplingParams and AsyncEngineArgs that one of our keys sets under another name.
KEYS_OF_VLLM_FIELDS = {
    "model": "model.path",
    "kv_cache_memory_bytes": "rollout.kv_cache_mb",
    "seed": "trainer.seed",
    "max_tokens": "data.max_response_length",
    "data_parallel_size": "placement.pools: each replica has tensor_parallel_size of its GPUs",
}

# Fields of AsyncEngineArgs that the program sets; they are refused whatever their value.
ENGINE_FIELDS_SET_BY_US = """pipeline_parallel_size prefill_context_parallel_size
    decode_context_parallel_size nnodes device_ids distributed_executor_backend logprobs_mode
    max_logprobs weight_transfer_config worker_extension_cls worker_cls""".split()

# Fields that are refused unless they are off. With them the engine's log-probs would not be the
# policy's, or the engine would hold another model, or parts of one that the weight sync does not
# write: adapters, draft models, offloaded or quantized weights, values cached with older weights.
UNSAFE_ENGINE_FIELDS = """logits_processors watermark_config diffusion_config kv_cache_dtype
    hf_overrides hf_config_path revision model_class_overrides model_weights code_revision
    quantization quantization_config enable_lora cpu_offload_gb offload_group_size enable_eplb
    speculative_config spec_method spec_model spec_tokens kv_transfer_config
    ec_transfer_config kv_offloading_size""".split()

# A seeded request whose prompt is split crashes vLLM's CPU engine.
UNSAFE_ENGINE_FIELDS_ON_CPU = ("enable_chunked_prefill", "long_prefill_token_threshold")


def key_of_vllm_field(cfg: Config, field: str) -> str | None:
    """Our key that sets a field of vLLM; None if there is none."""
    for section in ("model", "rollout"):
        if hasattr(getattr(cfg, section), field):
            return f"{section}.{field}"
    if field.startswith("data_parallel_"):
        field = "data_parallel_size"
    return KEYS_OF_VLLM_FIELDS.get(field)


def check_sampling(cfg: Config) -> None:
    """Check `rollout.sampling_kwargs`. Raises ConfigError."""
    for name, value in cfg.rollout.sampling_kwargs.items():
        location = f"rollout.sampling_kwargs.{format_value(name)}={format_value(value)}"
        our_key = key_of_vllm_field(cfg, name)
        if our_key:
            raise ConfigError(f"{location}: use {our_key}")
        if name not in ALLOWED_SAMPLING_FIELDS:
            allowed = ", ".join(ALLOWED_SAMPLING_FIELDS)
            fix = did_you_mean(
                name, ALLOWED_SAMPLING_FIELDS, f"remove it (allowed are {allowed})", cutoff=0.8
            )
            raise ConfigError(
                f"{location}: only fields that keep the engine's log-probs equal to "
                f"the policy's may be set; {fix}"
            )
        type_text, is_valid = ALLOWED_SAMPLING_FIELDS[name]
        if not is_valid(value):
            raise ConfigError(f"{location}: must be {type_text}")


def check_engine(cfg: Config, device: str) -> None:
    """Check `rollout.engine_kwargs`. Raises ConfigError."""
    for name, value in cfg.rollout.engine_kwargs.items():
        location = f"rollout.engine_kwargs.{format_value(name)}={format_value(value)}"
        our_key = key_of_vllm_field(cfg, name)
        if our_key:
            raise ConfigError(f"{location}: use {our_key}")
        if name in ENGINE_FIELDS_SET_BY_US:
            raise ConfigError(f"{location}: the program sets it; remove it")
        if name in UNSAFE_ENGINE_FIELDS and value and value != "auto":
            raise ConfigError(
                f"{location}: the engine's log-probs would not be the policy's, "
                "or the weight sync would miss a part of the model; remove it"
            )
        if name == "scheduler_cls" and cfg.weight_sync.in_flight == "keep":
            raise ConfigError(
                f"{location}: with weight_sync.in_flight=keep the run's own scheduler keeps "
                "prompts from cached prefixes of older weights; remove it, or use "
                "in_flight=recompute"
            )
        if device == "cpu" and name in UNSAFE_ENGINE_FIELDS_ON_CPU and value:
            raise ConfigError(
                f"{location}: a prompt computed in parts crashes vLLM's CPU engine; remove it"
            )
        _check_engine_length(cfg, name, value, location, device)


def _check_engine_length(cfg: Config, name: str, value: Any, location: str, device: str) -> None:
    """Check the engine's limits on tokens: the longest sequence must fit."""
    limits_sequence = name == "max_model_len"
    limits_batch_on_cpu = name == "max_num_batched_tokens" and device == "cpu"
    if not limits_sequence and not limits_batch_on_cpu:
        return
    longest = longest_sequence(cfg)
    if not isinstance(value, int) or value < longest:
        raise ConfigError(
            f"{location}: prompt plus response may have {longest} tokens; "
            f"remove it, or use at least {longest}"
        )


def check_engine_names(cfg: Config, section: str, names: Iterable[str]) -> None:
    """Refuse `engine_kwargs` of a section that the installed vLLM does not know. This is not part
    of `validate`, because importing vLLM takes long.

    Args:
        section: "rollout" or "teacher".
        names: the fields of vLLM's AsyncEngineArgs.

    Raises:
        ConfigError: vLLM has no such field.
    """
    # Fields that start with an underscore are vLLM's own bookkeeping.
    known = {name for name in names if not name.startswith("_")}
    for name, value in getattr(cfg, section).engine_kwargs.items():
        if name not in known:
            location = f"{section}.engine_kwargs.{format_value(name)}={format_value(value)}"
            fix = did_you_mean(name, known, "remove it")
            raise ConfigError(f"{location}: the installed vLLM has no such field; {fix}")


def check_weight_sync(cfg: Config) -> None:
    """Check the section weight_sync. Raises ConfigError."""
    settings = cfg.weight_sync
    gathers = settings.sender == "gather"
    if settings.overlap == "true" and gathers:
        raise key_error(
            cfg,
            "weight_sync.sender",
            "gather uses the trainer's collectives, which training uses at the same time; "
            "set weight_sync.overlap=false or auto",
        )
    if gathers and settings.receive_ahead:
        raise key_error(
            cfg,
            "weight_sync.receive_ahead",
            "gather uses the trainer's collectives; use weight_sync.sender=sharded",
        )
    if gathers and settings.mode == "delta":
        raise key_error(
            cfg,
            "weight_sync.mode",
            "each rank compares its own shard; use weight_sync.sender=sharded",
        )
