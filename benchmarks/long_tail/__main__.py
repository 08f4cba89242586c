"""Long-tailed response lengths: plain one step off, and with requests that continue across syncs.

    python -m benchmarks.long_tail --out DIR [--config FILE] [--most 256] [--limits 32,64]
        [--runs 3] [--warmup 0] [section.key=value ...]

Response lengths are drawn per sample (log-normal, see benchmarks/common/lengths.py), so all arms do
the same work: over a whole run each trains on the same prompts. The arms differ in when a step may
begin: with all of its own samples (plain), or with the first complete groups of those that are
being generated (partial rollouts). How many requests an engine works on follows its KV cache; arms
with a fixed limit show what a guess would give. A small rollout.kv_cache_mb makes it count on CPUs.
benchmarks.staleness compares further ages. The arms alternate.
Writes result.json, result.md and long_tail.png into DIR, and the run folders.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from benchmarks.common.command_line import Parser, check_run_flags
from benchmarks.common.lengths import keys_of
from benchmarks.common.machine import machine
from benchmarks.common.paths import config_path
from benchmarks.common.report import write_results
from benchmarks.common.runs import NO_EVALUATION, RunFailed, rotated, run_arm
from benchmarks.long_tail.report import figures, plot, summarize, table
from one_step_off.config.errors import ConfigError
from one_step_off.config.loading import load_config
from one_step_off.config.schema import Config
from one_step_off.runtime.validation import validate

PARTIAL = ["pipeline.staleness=2", "weight_sync.in_flight=recompute"]


def arms_of(limits: list[int]) -> dict[str, list[str]]:
    """Arm -> its config keys. `limits`: values of agent.max_concurrency, an arm each."""
    arms = {"plain": [], "partial rollouts": PARTIAL}
    for limit in limits:
        arms[f"partial, at most {limit}"] = [*PARTIAL, f"agent.max_concurrency={limit}"]
    return arms


def arguments(argv: list[str] | None = None) -> tuple[Parser, argparse.Namespace, list[str]]:
    """Parse the command line. Returns the parser, the flags and the config keys."""
    parser = Parser(__doc__)
    parser.add_argument("--out", required=True, type=Path, help="folder for the results")
    parser.add_argument("--config", default=config_path("gsm8k_tiny_cpu.yaml"))
    parser.add_argument("--most", type=int, default=256, help="longest response, in tokens")
    parser.add_argument(
        "--limits", default="32,64", help="values of agent.max_concurrency, with commas"
    )
    parser.add_argument("--runs", type=int, default=3, help="runs of each arm")
    parser.add_argument(
        "--warmup",
        type=int,
        default=0,
        help="steps dropped from each run; what is generated meanwhile still counts later",
    )
    args, overrides = parser.parse(argv)
    check_run_flags(parser, args)
    return parser, args, overrides


def validated_config(config: str, keys: list[str], arms: dict[str, list[str]]) -> Config:
    """The config of the last arm, after the configs of all arms have been validated.

    Raises:
        ConfigError: a key is wrong.
    """
    cfg = Config()
    for arm_keys in arms.values():
        cfg = load_config([f"config={config}", *keys, *arm_keys])
        validate(cfg)
    return cfg


def measure(
    args: argparse.Namespace, keys: list[str], arms: dict[str, list[str]], groups: int
) -> dict[str, list[dict[str, float]]]:
    """Run the arms. Returns per arm the figures of each run.

    Args:
        args: the flags.
        keys: config keys of all arms.
        arms: arm -> its config keys.
        groups: prompts of a step.

    Raises:
        RunFailed: a run ended with an error, or the warm-up leaves none of its steps.
    """
    collected: dict[str, list[dict[str, float]]] = {arm: [] for arm in arms}
    for run in range(args.runs):
        for number, (arm, arm_keys) in enumerate(rotated(list(arms.items()), run)):
            folder = args.out / f"run{run}_{number}"
            rows = run_arm(args.config, [*keys, *arm_keys], folder, [])[args.warmup :]
            if not rows:
                raise RunFailed(f"error: --warmup {args.warmup}: leaves none of the steps", 2)
            found = figures(rows, groups)
            collected[arm].append(found)
            print(f"run {run + 1}, {arm}: {found['samples/s']:.1f} samples/s", flush=True)
    return collected


def main(argv: list[str] | None = None) -> int:
    """Run the arms and write the results. Returns the exit code."""
    parser, args, overrides = arguments(argv)
    try:
        arms = arms_of([int(limit) for limit in args.limits.split(",") if limit])
        length_keys, lengths = keys_of(f"longtail:{args.most}")
        keys = [*NO_EVALUATION, *length_keys, *overrides]
        cfg = validated_config(args.config, keys, arms)
    except (ConfigError, ValueError) as e:
        parser.error(str(e))
    args.out.mkdir(parents=True, exist_ok=True)
    prompts = cfg.data.train_batch_size
    result: dict[str, Any] = {
        "machine": machine(),
        "runs": args.runs,
        "warmup": args.warmup,
        "keys": keys,
        "what": f"{prompts} prompts x {cfg.rollout.n} samples a step; lengths {lengths}.",
    }
    try:
        collected = measure(args, keys, arms, prompts)
    except RunFailed as e:
        print(e, file=sys.stderr)
        return e.code
    result["arms"] = {arm: summarize(runs) for arm, runs in collected.items()}
    markdown = table(result)
    write_results(args.out, result, markdown, indent=1)
    plot(result, args.out / "long_tail.png")
    print(markdown)
    return 0


if __name__ == "__main__":
    sys.exit(main())
