"""The config section weight_sync."""

from dataclasses import dataclass
from typing import Optional

from one_step_off.config.errors import value_error
from one_step_off.config.hardware import RANKS_SHARE_GPU, ranks_may_share_gpu
from one_step_off.config.keys import config_key
from one_step_off.config.registry import TRANSPORTS, check_name, import_object


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
        "full: send all weights; delta: only the elements whose bits changed, where that is faster",
        choices="full delta",
    )
    lora: str = config_key(
        "merged",
        "with model.lora_rank, merged: send all weights, with the adapters in them; adapter: send "
        "the adapters alone into vLLM's LoRA",
        choices="merged adapter",
    )
    full_every: int = config_key(
        50,
        "delta: number of syncs from one that sends all weights to the next, and to the next trial "
        "of deltas where all weights are faster",
        low=1,
    )
    max_senders: int = config_key(
        8,
        "most trainer ranks that send to replicas; more ranks give theirs to these; 0: all send",
        low=0,
    )
    bucket_mb: Optional[int] = config_key(
        None,
        "size of a bucket, in MiB; sender and receiver reuse two each; null: 64 on CPUs, on GPUs a "
        "128th of what the smallest trainer may use, or an 8th of what a replica has beside its "
        "engine if that is less, as a power of two up to 1024",
        low=1,
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


def check_weight_sync(settings: WeightSyncConfig, device: str, is_one_device: bool) -> None:
    """Check the section weight_sync.

    Args:
        device: "cpu" or "cuda".
        is_one_device: whether the actor and a replica share a device.

    Raises:
        ConfigError: a value that cannot be used.
    """
    transport = settings.transport
    key = "weight_sync.transport"
    check_name(key, transport, TRANSPORTS)
    if ":" in transport:
        import_object(key, transport)
    if transport == "shared_folder" and settings.mode == "delta":
        problem = "shared_folder sends all weights; use mode=full"
        raise value_error("weight_sync.mode", settings.mode, problem)
    one_gpu = device != "cpu" and is_one_device
    if transport == "collective" and one_gpu and not ranks_may_share_gpu():
        problem = (
            "NCCL refuses two processes on one GPU; use auto, or separate GPUs. To try it: NCCL "
            f"2.30 or later, and {RANKS_SHARE_GPU}=1 in the environment"
        )
        raise value_error(key, transport, problem)
