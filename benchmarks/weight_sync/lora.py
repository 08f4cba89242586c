"""LoRA's two ways into vLLM: rows merged by the trainer (weight_sync.lora=merged), or the adapters
alone (weight_sync.lora=adapter).

    python -m benchmarks.lora --out DIR [--model tiny|0.5b] [--dtype bfloat16] [--repeats 5]

Real Ray, FSDP2 and vLLM, all linear layers, rank 8, a trainer rank and an engine; one way after the
other. A third way has vLLM's own LoRA kernels in place of the program's, which are for CPUs alone.
Writes result.json and result.md into DIR.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import statistics
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from benchmarks.common.batches import random_batch
from benchmarks.common.command_line import Parser
from benchmarks.common.report import markdown_table, write_results
from benchmarks.weight_sync.layout import Layout, make_config
from one_step_off.config.schema import Config
from one_step_off.data.samples import Prompt
from one_step_off.rollout.sampling import Sampling

if TYPE_CHECKING:
    from one_step_off.runtime.processes import RunProcesses

RANK = 8
PROMPT_TOKENS = 64
TOKEN_IDS = 300
MAX_DIFFERENCE = 2.0
"""Nats by which engine and trainer may differ here."""


@dataclass(frozen=True)
class Work:
    """What is generated after each sync. `tokens`: of each sample."""

    prompts: int
    samples_per_prompt: int
    tokens: int


WORK = {"tiny": Work(16, 4, 32), "0.5b": Work(4, 4, 16)}


@dataclass(frozen=True)
class Way:
    """How adapters come into the engine."""

    lora: str
    """weight_sync.lora."""
    engine_kwargs: dict[str, Any] = field(default_factory=dict)


WAYS = {
    "merged by the trainer": Way("merged"),
    "adapters alone": Way("adapter"),
    "adapters alone, vLLM's kernels": Way(
        "adapter",
        {"worker_extension_cls": "benchmarks.weight_sync.lora_kernels.VllmKernelsExtension"},
    ),
}

SYNC_FIGURES = {
    "seconds": "sync/transfer_s",
    "bytes": "sync/bytes",
    "pack": "sync/gather_s",
    "load": "sync/load_s",
    "canary, max": "canary/logprob_diff_max",
    "canary, mean": "canary/logprob_diff_mean",
}
"""Figure -> its metric of the sync."""

FIGURES = (*SYNC_FIGURES, "tokens/s")


async def start_way(cfg: Config, way: Way) -> RunProcesses:
    """Start the processes of a way, sync them and make one update."""
    weight_sync = dataclasses.replace(cfg.weight_sync, lora=way.lora)
    rollout = dataclasses.replace(cfg.rollout, engine_kwargs=way.engine_kwargs)
    cfg = dataclasses.replace(cfg, weight_sync=weight_sync, rollout=rollout)
    from one_step_off.runtime.prepare import prepare  # slow to import
    from one_step_off.runtime.processes import RunProcesses

    run = RunProcesses(prepare(cfg, lambda line: None))
    roles = run.roles
    await asyncio.gather(roles.actor.setup(), roles.rollout.setup())
    await roles.sync.connect()
    # An update waits until the weights before it have been sent.
    await roles.sync((0, 0))
    await roles.actor.update(random_batch(prompts=4, samples_per_prompt=2, tokens=32))
    return run


async def measure_once(run: RunProcesses, work: Work, repeat: int) -> dict[str, float]:
    """One sync and the generation after it. Returns the figures."""
    rng = np.random.default_rng(1)
    ids = rng.integers(0, TOKEN_IDS, (work.prompts, PROMPT_TOKENS)).astype(np.int32)
    metrics = await run.roles.sync((0, 1))
    prompts = [Prompt((repeat, row), prompt_ids, "", "1") for row, prompt_ids in enumerate(ids)]
    sampling = Sampling(work.samples_per_prompt, 1.0, 0, max_tokens=work.tokens)
    samples, seconds = await run.roles.rollout.generate(prompts, "measure", sampling)
    tokens = sum(len(sample.response_ids) for sample in samples)
    figures = {figure: metrics[key] for figure, key in SYNC_FIGURES.items()}
    return figures | {"tokens/s": tokens / seconds}


async def measure(cfg: Config, work: Work, repeats: int) -> dict[str, dict[str, list[float]]]:
    """Way -> figure -> its values. The first sync and the first generation of each way warm up."""
    found: dict[str, dict[str, list[float]]] = {
        name: {figure: [] for figure in FIGURES} for name in WAYS
    }
    for name, way in WAYS.items():
        run = await start_way(cfg, way)
        for repeat in range(repeats + 1):
            figures = await measure_once(run, work, repeat)
            if repeat > 0:
                for figure, value in figures.items():
                    found[name][figure].append(value)
        await run.end()
    return found


def run_ways(args: argparse.Namespace, folder: str) -> dict[str, dict[str, list[float]]]:
    """Build the model in the folder, start Ray and measure."""
    import ray

    from one_step_off.cluster.ray_cluster import start_ray

    cfg = make_config(Layout(args.model), folder + "/model")
    cfg.trainer.output_dir = folder
    cfg.actor.lr = 1e-3
    cfg.actor.log_prob_chunk = 128
    cfg.model.dtype = args.dtype
    cfg.rollout.sampling_kwargs = {"ignore_eos": True}
    cfg.model.lora_rank = RANK
    # Random weights amplify the rounding of merged bf16 ones; the canary's difference is a figure.
    cfg.weight_sync.canary_tolerance = MAX_DIFFERENCE
    start_ray(cfg)
    try:
        return asyncio.run(measure(cfg, WORK[args.model], args.repeats))
    finally:
        ray.shutdown()


def table(found: dict[str, dict[str, list[float]]], args: argparse.Namespace) -> str:
    """The result in Markdown."""
    rows = []
    for way, figures in found.items():
        rows.append([way, *(f"{statistics.median(figures[name]):.4g}" for name in FIGURES)])
    headings = [f"{args.model}, {args.dtype}, medians of {args.repeats}", *FIGURES]
    return "\n".join(markdown_table(headings, rows)) + "\n"


def main() -> None:
    """Measure and write the results."""
    parser = Parser(__doc__)
    parser.add_argument("--out", required=True, type=Path, help="folder for the results")
    parser.add_argument(
        "--model", choices=tuple(WORK), default="tiny", help="0.5b: the shape of Qwen2.5-0.5B"
    )
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--repeats", type=int, default=5)
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        found = run_ways(args, folder)
    markdown = table(found, args)
    write_results(args.out, {"repeats": args.repeats, "ways": found}, markdown)
    print(markdown)


if __name__ == "__main__":
    main()
