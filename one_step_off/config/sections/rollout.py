"""The config section rollout: sampling, and what goes to vLLM.

The trainer computes the log-probs of the sampled tokens itself. A setting that changes the
distribution that vLLM samples from, or that keeps weights where the sync does not write them, would
silently train on wrong log-probs. So such settings are refused.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Optional

from one_step_off.config.errors import ConfigError, value_error
from one_step_off.config.keys import config_key
from one_step_off.config.sections.model import ModelConfig
from one_step_off.config.text import did_you_mean, format_value


def _is_token_id_list(value: Any) -> bool:
    return isinstance(value, list) and all(type(item) is int for item in value)


def _is_text_or_texts(value: Any) -> bool:
    texts = value if isinstance(value, list) else [value]
    return all(text and type(text) is str for text in texts)


_FLAG = ("true or false", lambda value: isinstance(value, bool))
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

NO_DRAFT_MODEL = (
    "the weight sync writes no draft model, which would fall ever further behind the policy"
)

# Fields of SamplingParams and AsyncEngineArgs that one of our keys sets under another name.
KEYS_OF_VLLM_FIELDS = {
    "model": "model.path",
    "kv_cache_memory_bytes": "rollout.kv_cache_mb",
    "seed": "trainer.seed",
    "max_tokens": "data.max_response_length",
    "enable_return_routed_experts": "rollout.replay_routing",
    "spec_method": "rollout.speculation",
    "spec_tokens": "rollout.speculation_tokens",
    "speculative_config": f"rollout.speculation: {NO_DRAFT_MODEL}",
    "spec_model": f"rollout.speculation: {NO_DRAFT_MODEL}",
    "data_parallel_size": "placement.pools: each replica has tensor_parallel_size of its GPUs",
}

# Fields of AsyncEngineArgs that the program sets; they are refused whatever their value.
ENGINE_FIELDS_SET_BY_US = """pipeline_parallel_size prefill_context_parallel_size
    decode_context_parallel_size nnodes device_ids distributed_executor_backend logprobs_mode
    max_logprobs weight_transfer_config worker_extension_cls worker_cls
    per_request_spec_decode_metrics""".split()

# Fields that are refused unless they are off. With them the engine's log-probs would not be the
# policy's, or the engine would hold another model, or parts of one that the weight sync does not
# write: adapters, draft models, offloaded weights, values cached with older weights.
UNSAFE_ENGINE_FIELDS = """logits_processors watermark_config diffusion_config
    hf_overrides hf_config_path revision model_class_overrides model_weights code_revision
    quantization_config enable_lora cpu_offload_gb offload_group_size enable_eplb
    kv_transfer_config ec_transfer_config kv_offloading_size""".split()

# A seeded request whose prompt is split crashes vLLM's CPU engine.
UNSAFE_ENGINE_FIELDS_ON_CPU = ("enable_chunked_prefill", "long_prefill_token_threshold")

MAX_SPECULATION_TOKENS = 31
"""With more, the tokens of 256 sequences would not fit into a step of an engine."""


@dataclass
class RolloutConfig:
    """Generation."""

    engine: str = config_key(
        "vllm", "vllm, transformers (slow; without vLLM), or your own as module:Class"
    )
    n: int = config_key(8, "trajectories per prompt (the group size)", low=1)
    temperature: float = config_key(
        1.0, "sampling temperature; the trainer divides its logits by it too", above=0.0
    )
    top_p: float = config_key(
        1.0,
        "nucleus sampling; only 1 is allowed, because other values change the log-probs",
        low=1.0,
        high=1.0,
    )
    top_k: int = config_key(
        -1,
        "top-k sampling; only -1 is allowed, because other values change the log-probs",
        low=-1,
        high=-1,
    )
    tensor_parallel_size: int = config_key(1, "GPUs per replica", low=1)
    seed_samples: str = config_key(
        "auto",
        "give each sample its own seed, which makes generation reproducible; auto: on CPU only",
        choices="auto on off",
    )
    replay_routing: bool = config_key(
        False,
        "mixtures of experts: the trainer takes the experts that the engine chose for each token, "
        "so that their log-probs agree in bfloat16",
    )
    speculation: str = config_key(
        "none",
        "propose several draft tokens of a response and verify them in one step, at equal "
        "distribution: ngram takes them from the sequence itself, suffix also from earlier "
        "responses",
        choices="none ngram suffix",
    )
    speculation_tokens: int = config_key(
        4, "draft tokens per sequence and step at most", low=1, high=MAX_SPECULATION_TOKENS
    )
    gpu_memory_utilization: float = config_key(
        0.85,
        "fraction of the pool's part of each GPU's memory that vLLM may use",
        above=0.0,
        high=1.0,
    )
    quantization: str = config_key(
        "none",
        "how the engine quantizes the linear layers, anew at each weight sync; the trainer does "
        "not. CPUs: fp8_per_channel alone",
        choices="none fp8_per_tensor fp8_per_channel fp8_per_block mxfp8",
    )
    kv_cache_dtype: str = config_key(
        "auto",
        "dtype of the engine's KV cache; auto: model.dtype; fp8: E4M3 with scale 1",
        choices="auto fp8 fp8_per_token_head",
    )
    kv_cache_mb: int = config_key(256, "KV cache of each replica on CPU, in MiB", low=1)
    sampling_kwargs: dict[str, Any] = config_key(
        {}, "further fields of vLLM's SamplingParams, such as stop and stop_token_ids"
    )
    engine_kwargs: dict[str, Any] = config_key({}, "passed through to vLLM's AsyncEngineArgs")
    routing: str = config_key(
        "auto",
        "how prompts are assigned to replicas; auto: static with seeded samples, else least_loaded",
        choices="auto static least_loaded",
    )
    heartbeat_s: float = config_key(
        5.0, "heartbeat interval of the replicas, in seconds", above=0.0
    )
    heartbeat_timeout_s: float = config_key(
        60.0, "a replica that answers no heartbeat for this many seconds is restarted", above=0.0
    )
    progress_timeout_s: float = config_key(
        1800.0,
        "a busy replica that completes no request for this many seconds is restarted",
        above=0.0,
    )
    val_n: int = config_key(1, "samples per held-out prompt", low=1)
    val_temperature: float = config_key(0.0, "temperature of evaluation; 0: greedy", low=0.0)
    val_passes_at: float = config_key(
        1.0, "pass@k: a held-out sample passes if its reward is at least this"
    )
    val_top_p: float = config_key(1.0, "nucleus sampling of evaluation", above=0.0, high=1.0)
    val_max_response_length: Optional[int] = config_key(
        None, "longest response of evaluation; null: data.max_response_length", low=1
    )


def key_of_vllm_field(field: str) -> str | None:
    """Our key that sets a field of vLLM; None if there is none."""
    for section, keys in {"model": ModelConfig, "rollout": RolloutConfig}.items():
        if field in keys.__dataclass_fields__:
            return f"{section}.{field}"
    if field.startswith("data_parallel_"):
        field = "data_parallel_size"
    return KEYS_OF_VLLM_FIELDS.get(field)


def is_seeded(rollout: RolloutConfig, device: str) -> bool:
    """Whether each sample has a seed of its own. `device`: "cpu" or "cuda"."""
    if rollout.seed_samples == "auto":
        return device == "cpu"
    return rollout.seed_samples == "on"


def check_rollout(rollout: RolloutConfig) -> None:
    """Check the heartbeats, the samples of evaluation and the speculation. Raises ConfigError."""
    if rollout.speculation != "none" and rollout.replay_routing:
        raise value_error(
            "rollout.speculation",
            rollout.speculation,
            "experts of rejected draft tokens are not told from the others; set it to "
            "none, or rollout.replay_routing=false",
        )
    heartbeat_s = rollout.heartbeat_s
    if rollout.heartbeat_timeout_s <= heartbeat_s:
        raise value_error(
            "rollout.heartbeat_timeout_s",
            rollout.heartbeat_timeout_s,
            f"must be above rollout.heartbeat_s={heartbeat_s:g}",
        )
    if rollout.val_n > 1 and rollout.val_temperature == 0:
        raise value_error(
            "rollout.val_n",
            rollout.val_n,
            "greedy samples are all identical; set rollout.val_temperature above 0",
        )


def check_sampling(rollout: RolloutConfig) -> None:
    """Check `rollout.sampling_kwargs`. Raises ConfigError."""
    for name, value in rollout.sampling_kwargs.items():
        location = f"rollout.sampling_kwargs.{format_value(name)}={format_value(value)}"
        our_key = key_of_vllm_field(name)
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


def check_engine(rollout: RolloutConfig, in_flight: str, longest: int, device: str) -> None:
    """Check `rollout.engine_kwargs`.

    Args:
        in_flight: `weight_sync.in_flight`.
        longest: tokens of the longest sequence.
        device: "cpu" or "cuda".

    Raises:
        ConfigError: an argument of the engine is not allowed.
    """
    for name, value in rollout.engine_kwargs.items():
        location = f"rollout.engine_kwargs.{format_value(name)}={format_value(value)}"
        our_key = key_of_vllm_field(name)
        sizes_gpu_cache = name == "kv_cache_memory_bytes" and device == "cuda"
        if our_key and not sizes_gpu_cache:
            raise ConfigError(f"{location}: use {our_key}")
        if sizes_gpu_cache and (type(value) is not int or value < 1):
            raise ConfigError(f"{location}: must be a whole number above 0, in bytes")
        if name in ENGINE_FIELDS_SET_BY_US:
            raise ConfigError(f"{location}: the program sets it; remove it")
        if name in UNSAFE_ENGINE_FIELDS and value and value != "auto":
            raise ConfigError(
                f"{location}: the engine's log-probs would not be the policy's, "
                "or the weight sync would miss a part of the model; remove it"
            )
        if name == "scheduler_cls" and in_flight == "keep":
            raise ConfigError(
                f"{location}: with weight_sync.in_flight=keep the run's own scheduler keeps "
                "prompts from cached prefixes of older weights; remove it, or use "
                "in_flight=recompute"
            )
        if name == "scheduler_cls" and rollout.replay_routing:
            raise ConfigError(
                f"{location}: with rollout.replay_routing the run's own scheduler keeps the "
                "experts; remove it, or set rollout.replay_routing=false"
            )
        if name == "enable_prefix_caching" and not value and rollout.replay_routing:
            raise ConfigError(
                f"{location}: with rollout.replay_routing vLLM keeps the experts of a token with "
                "its cached prefix; remove it, or set rollout.replay_routing=false"
            )
        if device == "cpu" and name in UNSAFE_ENGINE_FIELDS_ON_CPU and value:
            raise ConfigError(
                f"{location}: a prompt computed in parts crashes vLLM's CPU engine; remove it"
            )
        _check_engine_length(name, value, location, longest, device)


def _check_engine_length(name: str, value: Any, location: str, longest: int, device: str) -> None:
    """Check the engine's limits on tokens: the longest sequence must fit."""
    limits_sequence = name == "max_model_len"
    limits_batch_on_cpu = name == "max_num_batched_tokens" and device == "cpu"
    if not limits_sequence and not limits_batch_on_cpu:
        return
    if not isinstance(value, int) or value < longest:
        raise ConfigError(
            f"{location}: prompt plus response may have {longest} tokens; "
            f"remove it, or use at least {longest}"
        )


def check_engine_names(key: str, engine_kwargs: Mapping[str, Any], names: Iterable[str]) -> None:
    """Refuse arguments of the engine that the installed vLLM does not know. This is not part of
    `validate`, because importing vLLM takes long.

    Args:
        key: the config key that holds `engine_kwargs`.
        names: the fields of vLLM's AsyncEngineArgs.

    Raises:
        ConfigError: there is no such field.
    """
    # Fields that start with an underscore are vLLM's own bookkeeping.
    known = {name for name in names if not name.startswith("_")}
    for name, value in engine_kwargs.items():
        if name in known:
            continue
        fix = did_you_mean(name, known, "remove it")
        raise value_error(
            f"{key}.{format_value(name)}", value, f"the installed vLLM has no such field; {fix}"
        )
