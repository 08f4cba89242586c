"""The config section weight_sync."""

from dataclasses import dataclass
from typing import Optional

from one_step_off.config.errors import value_error
from one_step_off.config.keys import config_key


@dataclass
class WeightSyncConfig:
    """Transfer of the weights from the trainer into vLLM."""

    in_flight: str = config_key(
        "wait",
        "requests at a sync. wait: all have ended; recompute: they are paused, and their KV cache "
        "is computed again with the new weights; keep: they are paused and keep it",
        choices="wait recompute keep",
    )
    overlap: str = config_key(
        "auto",
        "true: send during the first forward and backward pass of the next step (with staleness "
        "above 0); auto: where training is longer than generation",
        choices="auto true false",
    )
    mode: str = config_key(
        "full",
        "full: send all weights; delta: only the elements whose bits changed",
        choices="full delta",
    )
    lora: str = config_key(
        "merged",
        "with model.lora_rank, merged: send all weights, with the adapters in them; adapter: send "
        "the adapters alone into vLLM's LoRA",
        choices="merged adapter",
    )
    full_every: int = config_key(
        50, "delta: number of syncs from one that sends all weights to the next", low=1
    )
    sender: str = config_key(
        "sharded",
        "sharded: each rank sends its own shard; gather: rank 0 gathers and sends (for comparison)",
        choices="sharded gather",
    )
    max_senders: int = config_key(
        8,
        "most trainer ranks that send to replicas; more ranks give theirs to these; 0: all send",
        low=0,
    )
    bucket_mb: int = config_key(
        64, "size of a bucket, in MiB; sender and receiver reuse two each", low=1
    )
    receive_ahead: bool = config_key(
        False,
        "replicas receive new weights into spare memory while they still generate",
    )
    receive_ahead_mb: int = config_key(
        0,
        "receive_ahead: most spare memory of a vLLM worker, in MiB; 0: as much as it keeps of the "
        "model",
        low=0,
    )
    keep_sent: bool = config_key(
        True,
        "senders keep the last weights they sent in host memory, for replicas that are restarted",
    )
    timeout_s: float = config_key(120.0, "time limit for each phase of a sync", above=0.0)
    canary_sequences: int = config_key(
        4,
        "the canary: sequences that engine and trainer both score after each sync, to compare",
        low=1,
    )
    canary_overlap: bool = config_key(
        False,
        "replicas score the canary beside the next prompts; their samples wait until it was "
        "accepted",
    )
    canary_tolerance: Optional[float] = config_key(
        None,
        "largest allowed log-prob difference of the canary; null: 1e-3 in fp32, measured in bf16",
        above=0.0,
    )


def check_weight_sync(settings: WeightSyncConfig) -> None:
    """Check the section weight_sync. Raises ConfigError."""
    gathers = settings.sender == "gather"
    if settings.overlap == "true" and gathers:
        raise value_error(
            "weight_sync.sender",
            settings.sender,
            "gather uses the trainer's collectives, which training uses at the same time; "
            "set weight_sync.overlap=false or auto",
        )
    if gathers and settings.receive_ahead:
        raise value_error(
            "weight_sync.receive_ahead",
            settings.receive_ahead,
            "gather uses the trainer's collectives; use weight_sync.sender=sharded",
        )
    if gathers and settings.mode == "delta":
        raise value_error(
            "weight_sync.mode",
            settings.mode,
            "each rank compares its own shard; use weight_sync.sender=sharded",
        )
