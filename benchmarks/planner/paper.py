"""What grows with the number of GPUs, by formulas and with this machine's cost of a sample."""

from __future__ import annotations

import time

import numpy as np

from benchmarks.common.report import markdown_table
from one_step_off.config.schema import WeightSyncConfig
from one_step_off.tools.planner.simulation import simulate
from one_step_off.tools.planner.work import Work

# Of a token of a sample: id, log-prob, mask and version.
TOKEN_BYTES = 4 + 4 + 1 + 4
# GPU hours between two unexpected stops: 419 in 54 days on 16,384 H100. Llama 3,
# arXiv:2407.21783, section 3.3.4.
GPU_HOURS_PER_STOP = 54 * 24 * 16_384 / 419
SAMPLES_PER_GPU = 16
TOKENS_PER_SAMPLE = 4096
STEP_S = 300
WEIGHT_BYTES = 140e9  # 70B parameters in bf16
BUCKET_BYTES = 2**26
MESSAGE_S = 3e-5
RESTART_S = 600


def driver_seconds_per_sample() -> float:
    """What the driver spends on a sample here: schedule, routing, advantages, metrics."""
    steps = 4
    prompts = 256
    lengths = np.full((64, SAMPLES_PER_GPU), TOKENS_PER_SAMPLE)
    work = Work(
        prompts=prompts,
        lengths=lengths,
        prompt_tokens=0.0,
        decode_s=1e-3,
        sequence_s=1e-6,
        train_fixed_s=0.0,
        train_token_s=1e-6,
        sync_s=1.0,
    )
    begin = time.perf_counter()
    simulate(work, 8, 8, steps=steps)
    return (time.perf_counter() - begin) / (steps * prompts * SAMPLES_PER_GPU)


def cluster_figures(gpus: int, sample_s: float) -> dict[str, str]:
    """Figure -> its value on `gpus` GPUs; half of them train. `sample_s`: driver's cost of a
    sample.
    """
    samples = SAMPLES_PER_GPU * gpus
    senders = min(gpus // 2, WeightSyncConfig().max_senders)
    batch_bytes = samples * TOKENS_PER_SAMPLE * TOKEN_BYTES
    messages = WEIGHT_BYTES / BUCKET_BYTES * senders
    hours_between_stops = GPU_HOURS_PER_STOP / gpus
    lost_s = RESTART_S + 5 * STEP_S / 2
    return {
        "samples of a step": f"{samples:,}",
        "bytes of a batch: samples x tokens x 13": f"{batch_bytes / 1e9:.1f} GB",
        "moved by Ray, to each rank its share": f"{batch_bytes / 1e12:.3f} TB",
        "driver, samples x us": f"{samples * sample_s:.2f} s of a step of {STEP_S}",
        "groups of the sync, one a sender": f"{senders:,}",
        "of a bucket of 64 MiB, each sender's part": f"{64 / senders:.0f} MiB",
        "ranks of a sender group": f"{gpus // 2 // senders:,}",
        "a leader sends, and collects almost all of it": f"{WEIGHT_BYTES / senders / 1e9:.1f} GB",
        "messages that a receiver gets in a sync (140 GB)": f"{messages:,.0f}",
        "the same at 30 us one after the other": f"{messages * MESSAGE_S:.0f} s",
        "hours between two stops": f"{hours_between_stops:.1f}",
        "lost to them: (10 min to restart + half of 5 steps) / that": (
            f"{lost_s / 3600 / hours_between_stops:.1%}"
        ),
    }


def paper() -> str:
    """The table in Markdown.

    For 16 samples of 4,096 tokens per GPU, 70B parameters and a step of 300 s.
    """
    sample_s = driver_seconds_per_sample()
    small = cluster_figures(1024, sample_s)
    large = cluster_figures(16_384, sample_s)
    lines = [
        f"this machine's driver: {sample_s * 1e6:.0f} us a sample "
        "(schedule, routing, advantages, metrics; no Ray, no bytes)",
        "",
    ]
    rows = [[name, value, large[name]] for name, value in small.items()]
    lines += markdown_table(["", "1,024 GPUs", "16,384 GPUs"], rows)
    return "\n".join(lines) + "\n"
