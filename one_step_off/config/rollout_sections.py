"""The config sections of placement and generation. They import neither torch nor Ray nor vLLM."""

from dataclasses import dataclass
from typing import Any, Optional

from one_step_off.config.keys import config_key


@dataclass
class PlacementConfig:
    """Which role runs on which processes."""

    pools: dict[str, list[int | float]] = config_key(
        {"rollout": [1], "actor": [1]},
        "pool name: GPUs (processes) on each node, e.g. [4, 4], or a share of one GPU, e.g. [0.5]",
    )
    roles: dict[str, str] = config_key(
        {"rollout": "rollout", "actor": "actor"}, "role name: pool name"
    )
    device: str = config_key(
        "auto",
        "cuda, cpu, or auto: cuda if this machine has GPUs, else cpu",
        choices="auto cuda cpu",
    )
    pin_cores: bool = config_key(
        True,
        "CPU runs on one machine: pin each process to its own cores, "
        "separate for rollout and trainer",
    )
    share_idle_cores: bool = config_key(
        False,
        "with pinned cores: while rollout or trainer waits for the other, "
        "the other also works on its cores",
    )


@dataclass
class RolloutConfig:
    """Generation."""

    engine: str = config_key(
        "vllm", "vllm, transformers (slow; any platform), or your own as module:Class"
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
    gpu_memory_utilization: float = config_key(
        0.85,
        "fraction of the pool's part of each GPU's memory that vLLM may use",
        above=0.0,
        high=1.0,
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
    oversample: Optional[float] = config_key(
        None,
        "with in_flight=recompute or keep: batches of prompts in progress beside the one that "
        "trains; null: as many as pipeline.staleness allows",
        low=1.0,
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
