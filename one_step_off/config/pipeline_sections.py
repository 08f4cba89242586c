"""The config sections of the pipeline and of the weight sync. They import neither torch nor Ray nor
vLLM."""

from dataclasses import dataclass
from typing import Optional

from one_step_off.config.keys import config_key


@dataclass
class PipelineConfig:
    """The pipeline."""

    staleness: int = config_key(
        1,
        "k: a token that is trained is at most k versions old. 0: synchronous; 1: one step off "
        "(rollout and training overlap); more: longer responses delay training less",
        low=0,
        high=16,
    )
    partial_rollout: Optional[bool] = config_key(
        None,
        "the old name of weight_sync.in_flight=recompute with pipeline.staleness = 1 + max_carry",
    )
    max_carry: Optional[int] = config_key(
        None, "with partial_rollout: pipeline.staleness less 1", low=0, high=15
    )


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
    max_senders: int = config_key(
        8,
        "most trainer ranks that send to replicas; more ranks give theirs to these; 0: all send",
        low=0,
    )
    bucket_mb: int = config_key(
        64, "size of a bucket, in MiB; sender and receiver reuse two each", low=1
    )
    transport: str = config_key(
        "auto",
        "auto: NCCL or gloo, and shared memory on one device; collective: NCCL or gloo; "
        "shared_folder: files; or your own as module:Class",
    )
    folder: str = config_key(
        "", "shared_folder: where the files are, for this run alone; empty: in trainer.output_dir"
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
    canary_tolerance: Optional[float] = config_key(
        None,
        "largest allowed log-prob difference of the canary; null: 1e-3 in fp32, measured in bf16",
        above=0.0,
    )
