"""FSDP2 against Megatron on CPUs: the seconds of an update and of a weight sync, and the memory
that a sync takes.

    python -m benchmarks.backends --out DIR [--models tiny 0.5b] [--arms "FSDP2, 1 rank" ...]
        [--repeats 5]

Real Ray, gloo and vLLM, one arm after the other: each back end on one rank and on two, FSDP2's one
rank also with LoRA, Megatron's two ranks also on pipeline stages. The memory is that of the first
sync, without the canary after it. fp32, random weights, random tokens. Writes result.json and
result.md into DIR.
"""

from __future__ import annotations

import argparse
import asyncio
import re
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil

from benchmarks.common.batches import random_batch
from benchmarks.common.command_line import Parser
from benchmarks.common.models import QWEN25_05B
from benchmarks.common.processes import memory, reset_peak_memory
from benchmarks.common.report import markdown_table, spread, with_range, write_results
from one_step_off.config.schema import Config

if TYPE_CHECKING:
    from one_step_off.ray_trainer import RunGroups


@dataclass(frozen=True)
class Arm:
    """A back end on some ranks. `model_keys` and `actor_keys`: what it sets in these sections."""

    ranks: int
    model_keys: dict[str, Any] = field(default_factory=dict)
    actor_keys: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Work:
    """The model of a case, and the batch of an update. `tokens`: of each prompt and each
    response.
    """

    shape: dict[str, Any]
    prompts: int
    samples_per_prompt: int
    tokens: int


def megatron(ranks: int, **actor_keys: Any) -> Arm:
    """An arm of the Megatron back end."""
    return Arm(ranks, actor_keys={"backend": "megatron", **actor_keys})


ARMS = {
    "FSDP2, 1 rank": Arm(1),
    "FSDP2, 1 rank, LoRA": Arm(1, model_keys={"lora_rank": 8}),
    "Megatron, 1 rank": megatron(1),
    "FSDP2, 2 ranks": Arm(2),
    "Megatron, 2 ranks, TP=2": megatron(2, tensor_parallel_size=2),
    "Megatron, 2 ranks, PP=2": megatron(2, pipeline_parallel_size=2),
    "Megatron, 2 ranks, two replicas": megatron(2),
}
WORK = {
    # Two key-value heads, as many as the tensor-parallel ranks.
    "tiny": Work({"num_key_value_heads": 2}, prompts=16, samples_per_prompt=4, tokens=64),
    "0.5b": Work(QWEN25_05B, prompts=4, samples_per_prompt=2, tokens=32),
}


def make_config(work: Work, path: str, arm: Arm) -> Config:
    """The config of one arm. `path`: of the model."""
    cfg = Config()
    cfg.model.path = path
    cfg.model.dtype = "float32"
    cfg.data.train_files = "generator:word_problems"
    cfg.data.max_prompt_length = 2 * work.tokens
    cfg.data.max_response_length = 2 * work.tokens
    cfg.data.train_batch_size = work.prompts
    cfg.actor.ppo_mini_batch_size = work.prompts
    cfg.actor.micro_batch_tokens = 4096
    cfg.actor.log_prob_chunk = 512
    cfg.placement.device = "cpu"
    cfg.placement.pools = {"rollout": [1], "actor": [arm.ranks]}
    cfg.rollout.n = work.samples_per_prompt
    cfg.rollout.kv_cache_mb = 64
    cfg.pipeline.staleness = 0  # the trainer may use all cores
    cfg.trainer.total_steps = 1
    for name, value in arm.model_keys.items():
        setattr(cfg.model, name, value)
    for name, value in arm.actor_keys.items():
        setattr(cfg.actor, name, value)
    return cfg


def actor_processes() -> list[int]:
    """Process ids of the actor's ranks."""
    pids = []
    for process in psutil.process_iter(["cmdline"]):
        command = " ".join(process.info["cmdline"] or [])
        if re.match(r"ray::\w*ActorWorker", command):
            pids.append(process.pid)
    return pids


async def no_canary(*_: Any) -> dict[str, float]:
    """Stands in for the canary, whose forward passes take memory that is not the sync's."""
    return {}


async def measure_sync_memory(roles: RunGroups) -> tuple[int, int]:
    """Connect the weight sync and run it once.

    Returns:
        Bytes that were sent; and the memory that it took in the largest rank, in bytes.
    """
    before = {pid: memory(pid, "VmRSS") for pid in actor_processes()}
    for pid in before:
        reset_peak_memory(pid)
    await roles.sync.connect()
    check_canary = roles.sync._check_canary
    roles.sync._check_canary = no_canary
    metrics = await roles.sync((0, 0), no_canary())
    roles.sync._check_canary = check_canary
    taken = [memory(pid, "VmHWM") - resident for pid, resident in before.items()]
    return int(metrics["sync/bytes"]), max(taken)


async def measure(cfg: Config, work: Work, repeats: int) -> dict[str, Any]:
    """Measure one arm. The first update and the sync after it warm up."""
    from one_step_off.runtime.prepare import prepare
    from one_step_off.runtime.processes import RunProcesses

    spawned = RunProcesses(prepare(cfg, lambda line: None))
    roles = spawned.roles
    await asyncio.gather(roles.actor.setup(), roles.rollout.setup())
    sent_bytes, peak = await measure_sync_memory(roles)
    updates = []
    syncs = []
    for version in range(repeats + 1):
        batch = random_batch(work.prompts, work.samples_per_prompt, work.tokens, version)
        begin = time.perf_counter()
        await roles.actor.update(batch)
        updates.append(time.perf_counter() - begin)
        metrics = await roles.sync((0, version + 1))
        syncs.append(metrics["sync/transfer_s"])
    await spawned.end()
    return {"bytes": sent_bytes, "peak": peak, "update_s": updates[1:], "sync_s": syncs[1:]}


def table(models: dict[str, dict[str, dict[str, Any]]], repeats: int) -> str:
    """The result in Markdown. `models`: model -> arm -> figures."""
    lines = [f"Medians of {repeats} (range).", ""]
    for model, arms in models.items():
        rows = []
        for name, arm in arms.items():
            times = [with_range(spread(arm[key]), "{:.3f}") for key in ("update_s", "sync_s")]
            rows.append([name, *times, f"{arm['bytes'] / 1e6:.1f}", f"{arm['peak'] / 1e6:.1f}"])
        headings = [
            model,
            "update, s",
            "sync, s",
            "model, MB",
            "memory of the sync, largest rank, MB",
        ]
        lines += [*markdown_table(headings, rows), ""]
    return "\n".join(lines)


def arguments() -> argparse.Namespace:
    """Parse the command line."""
    parser = Parser(__doc__)
    parser.add_argument("--out", required=True, type=Path, help="folder for the results")
    parser.add_argument("--models", nargs="+", choices=tuple(WORK), default=["tiny", "0.5b"])
    parser.add_argument("--arms", nargs="+", choices=tuple(ARMS), default=list(ARMS))
    parser.add_argument("--repeats", type=int, default=5)
    return parser.parse_args()


def main() -> None:
    """Measure the arms and write the results."""
    args = arguments()
    import ray  # this and the others: slow to import
    import transformers

    from one_step_off.cluster.ray_cluster import start_ray
    from one_step_off.models import tiny_qwen

    args.out.mkdir(parents=True, exist_ok=True)
    transformers.utils.logging.disable_progress_bar()
    found: dict[str, dict[str, dict[str, Any]]] = {}
    for model in args.models:
        work = WORK[model]
        with tempfile.TemporaryDirectory() as folder:
            path = tiny_qwen.build("qwen2", f"{folder}/model", **work.shape)
            for name in args.arms:
                cfg = make_config(work, path, ARMS[name])
                cfg.trainer.output_dir = folder
                start_ray(cfg)
                try:
                    figures = asyncio.run(measure(cfg, work, args.repeats))
                finally:
                    ray.shutdown()
                found.setdefault(model, {})[name] = figures
                # After each arm, because the large ones take minutes.
                result = {"repeats": args.repeats, "arms": found}
                write_results(args.out, result, table(found, args.repeats))
                print(f"{model}, {name}: done", flush=True)
    print(table(found, args.repeats))


if __name__ == "__main__":
    main()
