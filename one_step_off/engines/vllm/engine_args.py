"""The arguments with which vLLM's engine is built."""

from typing import Any

from one_step_off.config.lengths import longest_sequence
from one_step_off.config.lora_checks import engine_rank, sends_adapters
from one_step_off.config.placement import device_share
from one_step_off.config.quantization import has_quantized_weights
from one_step_off.config.schema import Config
from one_step_off.config.sections.rollout import is_seeded

MAX_SEQUENCES = {"cpu": 256, "cuda": 512}
"""Sequences that an engine works on at once, by device, unless `rollout.engine_kwargs` has another
`max_num_seqs`."""

CPU_ENGINE_ARGS: dict[str, Any] = {
    "enforce_eager": True,
    "block_size": 32,
    # A seeded request whose prompt is split over two steps kills vLLM's CPU engine: never split
    # one.
    "enable_chunked_prefill": False,
}
"""What every engine on CPUs needs."""

WORKER_EXTENSION = "one_step_off.engines.vllm.worker_extension.SyncWorkerExtension"
ADAPTER_EXTENSION = "one_step_off.engines.vllm.adapter_extension.AdapterWorkerExtension"

RETURN_EXPERTS = "one_step_off.return_experts"
"""In vLLM's `additional_config`: give the experts of each token, on CPUs. vLLM's own argument is
refused where its second model runner does not work."""

TRY_SPECULATION = "one_step_off.try_speculation"
"""In vLLM's `additional_config`: the scheduler measures whether speculation pays."""

NGRAM_TOKENS = (2, 4)
"""The fewest and most tokens at the end of a sequence that must have come before."""

MAX_BATCHED_TOKENS = 8192
"""Tokens of one engine step. vLLM's default for an engine in a program is 2048, in which long
prompts take many steps."""


def engine_args(cfg: Config, device: str, seed: int = 0) -> dict[str, Any]:
    """The fields of vLLM's `AsyncEngineArgs` for a run. `rollout.engine_kwargs` override them.

    Args:
        device: "cpu" or "cuda".
        seed: see `sampling.engine_seed`.
    """
    width = cfg.rollout.tensor_parallel_size
    longest = longest_sequence(cfg)
    keeps_caches = cfg.weight_sync.in_flight == "keep"
    scheduler = "prefixes_per_version" if keeps_caches else "replica_scheduler"
    args: dict[str, Any] = {
        "model": cfg.model.path,
        "dtype": cfg.model.dtype,
        "trust_remote_code": cfg.model.trust_remote_code,
        "max_model_len": longest,
        "tensor_parallel_size": width,
        "seed": seed,
        "disable_log_stats": True,
        # Inside a Ray actor vLLM would look for a placement group of its own; its workers belong
        # into this actor.
        "distributed_executor_backend": "mp" if width > 1 else "uni",
        # Log-probs after temperature: those of the distribution that was sampled from.
        "logprobs_mode": "processed_logprobs",
        "weight_transfer_config": {"backend": "one_step_off"},
        "max_num_seqs": MAX_SEQUENCES[device],
        "max_num_batched_tokens": max(MAX_BATCHED_TOKENS, longest),
        "worker_extension_cls": WORKER_EXTENSION,
        "scheduler_cls": f"one_step_off.engines.vllm.schedulers.{scheduler}",
        "kv_cache_dtype": cfg.rollout.kv_cache_dtype,
    }
    if has_quantized_weights(cfg):
        args["quantization"] = cfg.rollout.quantization
    if device == "cpu":
        args |= CPU_ENGINE_ARGS | {"kv_cache_memory_bytes": cfg.rollout.kv_cache_mb << 20}
    else:
        pools = list(cfg.placement.roles.values())
        pool = cfg.placement.roles["rollout"]
        shares_pool = pools.count(pool) > 1
        # vLLM counts the whole GPU's memory as 1.
        share = device_share(cfg, pool)
        args["gpu_memory_utilization"] = share * cfg.rollout.gpu_memory_utilization
        args["enable_sleep_mode"] = shares_pool  # its memory belongs to another role meanwhile
    args |= adapter_args(cfg) | cfg.rollout.engine_kwargs
    if cfg.rollout.replay_routing:
        args |= _routing_args(device, args.get("additional_config") or {})
    args |= _speculation_args(cfg, device, args)
    return args


def _speculation_args(cfg: Config, device: str, args: dict[str, Any]) -> dict[str, Any]:
    """The fields with which an engine proposes and verifies draft tokens, see `speculation`; {}
    where it does not. `args`: the others."""
    rollout = cfg.rollout
    if rollout.speculation == "none":
        return {}
    method = rollout.speculation
    if method == "ngram" and device == "cuda":
        method = "ngram_gpu"  # the one with which vLLM schedules ahead
    sequences = args["max_num_seqs"]
    tokens = rollout.speculation_tokens
    config: dict[str, Any] = {
        "method": method,
        "num_speculative_tokens": tokens,
    }
    fields = {"per_request_spec_decode_metrics": "summary", "speculative_config": config}
    if method != "suffix":
        config["prompt_lookup_min"], config["prompt_lookup_max"] = NGRAM_TOKENS
    if is_seeded(rollout, device):
        # Random numbers of a sample would depend on the responses that ended before.
        config["suffix_decoding_max_cached_requests"] = 0
        # Draft tokens by batch size. With such a schedule vLLM pads no row: padding would draw
        # random numbers of a seeded sample where other rows want it.
        config["num_speculative_tokens_per_batch_size"] = [(1, sequences, tokens)]
        return fields
    if method != "suffix" and sequences > 1:
        # vLLM captures CUDA graphs for both widths, and the scheduler chooses.
        schedule = [(1, sequences - 1, tokens), (sequences, sequences, 0)]
        config["num_speculative_tokens_per_batch_size"] = schedule
    own = args.get("additional_config") or {}
    return fields | {"additional_config": own | {TRY_SPECULATION: True}}


def _routing_args(device: str, additional_config: dict[str, Any]) -> dict[str, Any]:
    """The fields with which an engine gives the experts of each token. `additional_config`: the
    user's."""
    if device == "cpu":
        return {"additional_config": additional_config | {RETURN_EXPERTS: True}}
    return {"enable_return_routed_experts": True}


def adapter_args(cfg: Config) -> dict[str, Any]:
    """The fields for an engine that holds the base model and the adapters apart
    (weight_sync.lora=adapter); empty where the adapters are merged."""
    if not sends_adapters(cfg):
        return {}
    from one_step_off.models.adapted_layers import engine_targets  # transformers: slow to import

    return {
        "enable_lora": True,
        "max_loras": 1,
        "max_cpu_loras": 1,
        "max_lora_rank": engine_rank(cfg.model.lora_rank),
        "lora_target_modules": engine_targets(cfg),
        "worker_extension_cls": ADAPTER_EXTENSION,
    }
