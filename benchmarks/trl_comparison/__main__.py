"""The same task in TRL's GRPOTrainer: samples/s of both on the same cores, the arms alternating.

    python -m benchmarks.trl_comparison --out DIR [--config FILE] [--model DIR] [--runs 3]
        [--warmup 3] [--steps N] [--cores 0 1] [--arms ours trl-1 trl-all] [section.key=value ...]

TRL is no dependency of this project. It installs into a folder of its own, without touching other
packages:

    pip install --target trl_site --no-deps "trl>=1.16,<2"
    PYTHONPATH=trl_site python -m benchmarks.trl_comparison --out DIR

Both take the same prompts in the same steps, sample equally many answers of the same lengths from
the same model, score them with the same function and make the same fp32 AdamW update. The settings
of both are in the result. On a CPU TRL generates with transformers' `generate`, and trains
afterwards, because its way to vLLM's CPU build does not work (`--arms trl-vllm` tries it and
reports what happens). Torch in TRL's process has one thread (`trl-1`) or one per core (`trl-all`);
the better one counts. Ours runs as its config says: vLLM on one part of the cores, the trainer on
the other.

`--model DIR` compares a larger model: DIR has SmolLM2-135M-Instruct as Hugging Face files
(docs/tutorials/recipes.md). Its case is two-digit sums, 4 prompts x 4 samples of 80 tokens at most.

Writes result.json, result.md and trl_comparison.png into DIR.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import sys
from pathlib import Path
from typing import Any

from benchmarks.common.command_line import Parser, add_run_flags, check_run_flags, step_keys
from benchmarks.common.machine import machine
from benchmarks.common.paths import config_path
from benchmarks.common.report import write_results
from benchmarks.common.runs import NO_EVALUATION, RunFailed, rotated, run_arm
from benchmarks.trl_comparison.report import OURS, figures, headline, plot, summarize, table
from benchmarks.trl_comparison.trl_arm import grpo_config_fields
from one_step_off.config.errors import ConfigError
from one_step_off.config.loading import load_config
from one_step_off.runtime.validation import validate

ARMS = {
    "ours": OURS,
    "ours-sync": "one_step_off, synchronous",
    "trl-1": "TRL, 1 thread",
    "trl-all": "TRL, a thread per core",
    "trl-vllm": "TRL, vLLM colocate",
}
"""Values of the flag `--arms` -> names of the arms in tables."""

KEYS_OF_ARM = {
    "ours": [],
    "ours-sync": ["pipeline.staleness=0"],
}
"""Config keys of this program's arms."""

SMOLLM2_KEYS = [
    "data.train_batch_size=4",
    "actor.ppo_mini_batch_size=4",
    "rollout.n=4",
    "data.max_response_length=80",
]
"""Config keys of the case of `--model`, over config/smollm2_addition_cpu.yaml."""

INSTALL = (
    'pip install --target trl_site --no-deps "trl>=1.16,<2", '
    "then PYTHONPATH=trl_site before the command"
)


def arguments(argv: list[str] | None = None) -> tuple[Parser, argparse.Namespace, list[str]]:
    """Parse the command line. Returns the parser, the flags and the config keys."""
    parser = Parser(__doc__)
    parser.add_argument("--out", required=True, type=Path, help="folder for the results")
    parser.add_argument(
        "--config", help="default: the tiny model's; with --model smollm2_addition_cpu.yaml"
    )
    parser.add_argument("--model", type=Path, help="directory with SmolLM2-135M-Instruct")
    parser.add_argument(
        "--arms", nargs="+", choices=tuple(ARMS), default=["ours", "trl-1", "trl-all"]
    )
    add_run_flags(parser, "steps of each run; default: the config's")
    parser.add_argument(
        "--cores",
        type=int,
        nargs="+",
        help="those that every arm may use; default: all of this process",
    )
    args, keys = parser.parse(argv)
    check_run_flags(parser, args)
    case = "gsm8k_tiny_cpu.yaml"
    if args.model:
        if not (args.model / "config.json").is_file():
            parser.error(f"--model {args.model}: has no config.json; give a directory with a model")
        case = "smollm2_addition_cpu.yaml"
        keys = [f"model.path={args.model.resolve()}", *SMOLLM2_KEYS, *keys]
    args.config = args.config or config_path(case)
    available = os.sched_getaffinity(0)
    args.cores = set(args.cores or available)
    if not args.cores <= available:
        parser.error(f"--cores {sorted(args.cores)}: this process may use {sorted(available)}")
    needs_trl = any(arm.startswith("trl") for arm in args.arms)
    if needs_trl and importlib.util.find_spec("trl") is None:
        parser.error(f"TRL is not installed: {INSTALL}")
    return parser, args, keys


def run_once(
    arm: str, args: argparse.Namespace, keys: list[str], folder: Path
) -> list[dict[str, Any]]:
    """Run one arm once. Returns its rows after the warm-up.

    Raises:
        RunFailed: the run ended with an error.
    """
    if arm in KEYS_OF_ARM:
        rows = run_arm(args.config, [*keys, *KEYS_OF_ARM[arm]], folder, [], cores=args.cores)
        # Nothing is generated during the last step, so it is shorter than the others.
        return rows[args.warmup : -1]
    flags = {
        "trl-1": ["--threads", "1"],
        "trl-all": ["--threads", str(len(args.cores))],
        "trl-vllm": ["--vllm"],
    }
    module = "benchmarks.trl_comparison.trl_arm"
    rows = run_arm(args.config, [*keys, *flags[arm]], folder, [], module, args.cores)
    return rows[args.warmup :]


def measure(
    args: argparse.Namespace, keys: list[str]
) -> tuple[dict[str, list[list[dict[str, Any]]]], dict[str, str]]:
    """Run all arms.

    Returns:
        Per arm the rows of each run; and per arm that does not work the last line of its error.

    Raises:
        RunFailed: a run of another arm than `trl-vllm` ended with an error.
    """
    collected: dict[str, list[list[dict[str, Any]]]] = {}
    failed: dict[str, str] = {}
    for run in range(args.runs):
        label = f"run {run + 1} of {args.runs}"
        for arm in rotated(args.arms, run):
            name = ARMS[arm]
            if name in failed:
                continue
            try:
                rows = run_once(arm, args, keys, args.out / f"{arm}_run{run}")
            except RunFailed as e:
                error_lines = str(e).strip().splitlines()
                if arm != "trl-vllm":
                    raise
                failed[name] = error_lines[-1]
                print(f"{label}, {name}: failed: {failed[name]}", flush=True)
                continue
            collected.setdefault(name, []).append(rows)
            rate = figures(rows)["samples/s"]
            print(f"{label}, {name}: {rate:,.0f} samples/s", flush=True)
    return collected, failed


def trl_settings(args: argparse.Namespace, keys: list[str]) -> dict[str, Any]:
    """TRL's settings for the config.

    Raises:
        ConfigError, ValueError: a key is wrong, or TRL has no such setting, or the run is too
        short.
    """
    cfg = load_config([f"config={args.config}", *keys])
    validate(cfg)
    settings = grpo_config_fields(cfg)
    steps = cfg.trainer.total_steps
    if steps - args.warmup < 2:
        raise ValueError(f"--warmup {args.warmup} leaves none of {steps} steps; raise --steps")
    return settings


def main(argv: list[str] | None = None) -> int:
    """Run the arms and write the results. Returns the exit code."""
    parser, args, overrides = arguments(argv)
    keys = [*NO_EVALUATION, *overrides, *step_keys(args.steps)]
    try:
        settings = trl_settings(args, keys)
    except (ConfigError, ValueError) as e:
        parser.error(str(e))
    args.out.mkdir(parents=True, exist_ok=True)
    machine_before = machine()
    try:
        collected, failed = measure(args, keys)
    except RunFailed as e:
        print(e, file=sys.stderr)
        return e.code
    arms = {}
    for name in (ARMS[arm] for arm in args.arms):
        if name in collected:
            arms[name] = summarize([figures(rows) for rows in collected[name]])
    result = {
        "machine": machine_before,
        "cores": sorted(args.cores),
        "config": args.config,
        "keys": keys,
        "runs": args.runs,
        "warmup": args.warmup,
        "arms": arms,
        "failed": failed,
        "headline": headline(arms),
        "trl_settings": settings,
        "rows": collected,
    }
    markdown = table(result)
    write_results(args.out, result, markdown, indent=1)
    if arms:
        plot(result, args.out / "trl_comparison.png")
    print(markdown)
    return 0


if __name__ == "__main__":
    sys.exit(main())
