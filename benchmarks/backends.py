"""FSDP2 against Megatron on CPUs: the seconds of an update and of a weight sync, and the memory that a sync takes.

    python -m benchmarks.backends --out DIR [--models tiny 0.5b] [--arms "FSDP2, 1 rank" ...] [--repeats 5]

Real Ray, gloo and vLLM, one arm after the other in one run: each back end on one rank and on two, FSDP2's one also with
LoRA, Megatron's two also on stages. The memory is that of the first stream, without the canary after it. fp32, random
weights, random tokens. Writes result.json and result.md into DIR.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import re
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import transformers

from benchmarks.common.processes import forget_peak, memory
from benchmarks.weight_sync.layout import SHAPE_05B
from one_step_off.config.schema import Config
from one_step_off.data.samples import Batch, Sample
from one_step_off.models import tiny_qwen
from one_step_off.runtime import launch
from one_step_off.runtime.processes import RunProcesses

MEGATRON = {"backend": "megatron"}
ARMS: dict[str, tuple[int, dict[str, Any]]] = {
    "FSDP2, 1 rank": (1, {}),
    "FSDP2, 1 rank, LoRA": (1, {"lora_rank": 8}),
    "Megatron, 1 rank": (1, MEGATRON),
    "FSDP2, 2 ranks": (2, {}),
    "Megatron, 2 ranks, TP=2": (2, MEGATRON | {"tensor_parallel_size": 2}),
    "Megatron, 2 ranks, PP=2": (2, MEGATRON | {"pipeline_parallel_size": 2}),
    "Megatron, 2 ranks, two replicas": (2, MEGATRON),
}
# prompts, samples of each, tokens of each prompt and response
WORK = {"tiny": (16, 4, 64), "0.5b": (4, 2, 32)}
# Two key-value heads, as many as the tensor-parallel ranks.
SHAPES = {"tiny": {"num_key_value_heads": 2}, "0.5b": SHAPE_05B}


def make_batch(model: str) -> Batch:
    """Random tokens with random advantages."""
    rng, (prompts, n, length) = np.random.default_rng(0), WORK[model]
    samples = []
    for i in range(prompts * n):
        ids = rng.integers(0, 300, (2, length)).astype(np.int32)
        logs, mask, made = (
            np.full(length, -5.9, np.float32),
            np.ones(length, bool),
            np.zeros(length, np.int32),
        )
        samples.append(Sample((0, i // n), i % n, ids[0], ids[1], logs, mask, made))
    batch = Batch(0, samples, expected_stamp=(0, 0))
    batch.advantages = [rng.normal(size=length).astype(np.float32) for _ in samples]
    return batch


def make_config(model: str, path: str, ranks: int, own: dict[str, Any]) -> Config:
    """The run of one arm."""
    cfg, (prompts, n, length) = Config(), WORK[model]
    cfg.model.path, cfg.model.dtype = path, "float32"
    cfg.data.train_files = "generator:word_problems"
    cfg.data.max_prompt_length = cfg.data.max_response_length = 2 * length
    cfg.data.train_batch_size = cfg.actor.ppo_mini_batch_size = prompts
    cfg.actor.micro_batch_tokens, cfg.actor.log_prob_chunk = 4096, 512
    cfg.placement.device, cfg.placement.pools = "cpu", {"rollout": [1], "actor": [ranks]}
    cfg.rollout.n, cfg.rollout.kv_cache_mb = n, 64
    cfg.pipeline.staleness = 0  # the trainer may use all cores
    cfg.trainer.total_steps = 1
    for name, value in own.items():
        setattr(cfg.model if hasattr(cfg.model, name) else cfg.actor, name, value)
    return cfg


def ranks_of_this_run() -> list[psutil.Process]:
    """The processes of the actor."""
    return [
        p
        for p in psutil.process_iter(["cmdline"])
        if re.match(r"ray::\w*ActorWorker", " ".join(p.info["cmdline"] or []))
    ]


async def no_canary(*_: Any) -> dict[str, float]:
    """Its forward passes take memory too, and not for the stream."""
    return {}


async def measure(cfg: Config, model: str, repeats: int) -> dict[str, Any]:
    """One arm; the first update and the first sync warm up, and the first sync's memory is what counts."""
    spawned = RunProcesses(launch.prepare(cfg, lambda line: None))
    roles = spawned.roles
    await asyncio.gather(roles.actor.setup(), roles.rollout.setup())
    processes = ranks_of_this_run()
    before = [memory(p.pid, "VmRSS") for p in processes]
    for process in processes:
        forget_peak(process.pid)
    await roles.sync.connect()
    check, roles.sync._check_canary = roles.sync._check_canary, no_canary
    first = await roles.sync((0, 0), no_canary())
    roles.sync._check_canary = check
    taken = [memory(p.pid, "VmHWM") - was for p, was in zip(processes, before, strict=True)]
    updates, syncs = [], []
    for k in range(repeats + 1):
        batch = make_batch(model)
        batch.expected_stamp = (0, k)
        for sample in batch.samples:
            sample.versions[:] = k
        begin = time.perf_counter()
        await roles.actor.update(batch)
        updates.append(time.perf_counter() - begin)
        syncs.append((await roles.sync((0, k + 1)))["sync/transfer_s"])
    await spawned.end()
    return {
        "bytes": int(first["sync/bytes"]),
        "peak": max(taken),
        "update_s": updates[1:],
        "sync_s": syncs[1:],
    }


def table(found: dict[str, dict[str, dict[str, Any]]], repeats: int) -> str:
    """The result in Markdown."""
    heads = "update, s | sync, s | model, MB | memory of the sync, largest rank, MB"
    lines = [f"Medians of {repeats} (range).", ""]
    for model, arms in found.items():
        lines += [f"| {model} | {heads} |", "| --- |" + " --- |" * 4]
        for name, arm in arms.items():
            times = (
                f"{statistics.median(arm[key]):.3f} ({min(arm[key]):.3f} to {max(arm[key]):.3f})"
                for key in ("update_s", "sync_s")
            )
            lines.append(
                f"| {name} | {' | '.join(times)} | {arm['bytes'] / 1e6:.1f} | {arm['peak'] / 1e6:.1f} |"
            )
        lines.append("")
    return "\n".join(lines)


def main() -> None:
    """Parse, measure, write."""
    import ray

    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", required=True, type=Path)
    parser.add_argument("--models", nargs="+", choices=tuple(WORK), default=["tiny", "0.5b"])
    parser.add_argument("--arms", nargs="+", choices=tuple(ARMS), default=list(ARMS))
    parser.add_argument("--repeats", type=int, default=5)
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    transformers.utils.logging.disable_progress_bar()
    found: dict[str, dict[str, dict[str, Any]]] = {}
    for model in args.models:
        with tempfile.TemporaryDirectory() as folder:
            path = tiny_qwen.build("qwen2", f"{folder}/model", **SHAPES[model])
            for name, (ranks, own) in ((name, ARMS[name]) for name in args.arms):
                cfg = make_config(model, path, ranks, own)
                cfg.trainer.output_dir = folder
                launch.start_ray(cfg)
                try:
                    found.setdefault(model, {})[name] = asyncio.run(
                        measure(cfg, model, args.repeats)
                    )
                finally:
                    ray.shutdown()
                # After each arm, because the large ones take minutes.
                (args.out / "result.json").write_text(
                    json.dumps({"repeats": args.repeats, "arms": found}, indent=2)
                )
                (args.out / "result.md").write_text(table(found, args.repeats))
                print(f"{model}, {name}: done", flush=True)
    print(table(found, args.repeats))


if __name__ == "__main__":
    main()
