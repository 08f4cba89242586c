"""Does a config learn? Whole runs with several seeds: reward and held-out reward over the steps,
and with tools the share of samples that call one.

    python -m benchmarks.learning --out DIR [--config config/ppo_gae.yaml] [--seeds 0 1 2]
        [--arms sync async] [--test-freq 5] [section.key=value ...]

With `--arms sync async` it compares the two: reward at equal samples
(benchmarks/learning/comparison.py). Writes result.json, result.md and learning.png into DIR.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from benchmarks.common.command_line import Parser
from benchmarks.common.machine import machine
from benchmarks.common.paths import config_path
from benchmarks.common.report import write_results
from benchmarks.common.runs import RunFailed, alternated, run_arm
from benchmarks.learning import comparison, curves
from benchmarks.learning.comparison import ARMS
from one_step_off.config.errors import ConfigError
from one_step_off.config.loading import load_config
from one_step_off.runtime.validation import validate


def arguments(argv: list[str] | None = None) -> tuple[argparse.Namespace, list[str]]:
    """Parse the command line. Returns the flags and the config keys."""
    parser = Parser(__doc__)
    parser.add_argument("--out", required=True, type=Path, help="folder for the results")
    parser.add_argument("--config", default=config_path("ppo_gae.yaml"))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument(
        "--arms",
        nargs="+",
        choices=tuple(ARMS),
        default=["config"],
        help="sync async: compare the two",
    )
    parser.add_argument("--test-freq", type=int, default=5, help="steps between evaluations")
    args, keys = parser.parse(argv)
    repeated_seed = len(set(args.seeds)) < len(args.seeds)
    repeated_arm = len(set(args.arms)) < len(args.arms)
    if repeated_seed or repeated_arm:
        parser.error(f"--seeds {args.seeds} --arms {args.arms}: each one once")
    test_freq = f"trainer.test_freq={args.test_freq}"
    try:
        for arm in args.arms:
            validate(load_config([f"config={args.config}", *keys, *ARMS[arm], test_freq]))
    except ConfigError as e:
        parser.error(str(e))
    return args, keys


def _evaluations(folder: Path) -> list[dict[str, Any]]:
    path = folder / "evaluations.jsonl"
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text().splitlines()]


def measure(
    args: argparse.Namespace, overrides: list[str]
) -> tuple[dict[str, dict[int, curves.Run]], float]:
    """Run every seed with every arm, the arms in alternating order.

    Returns:
        Per arm and seed what `curves.summarize` returns; and the samples of a step.

    Raises:
        RunFailed: a run ended with an error.
    """
    runs: dict[str, dict[int, curves.Run]] = {arm: {} for arm in args.arms}
    samples_per_step = 0.0
    for number, seed in enumerate(args.seeds):
        for arm in alternated(args.arms, number):
            name = f"seed_{seed}" if args.arms == ["config"] else f"{arm}_seed_{seed}"
            folder = args.out / name
            keys = [f"trainer.seed={seed}", f"trainer.test_freq={args.test_freq}", *ARMS[arm]]
            rows = run_arm(args.config, keys, folder, overrides)
            samples_per_step = rows[0]["samples"]
            run = curves.summarize(rows, _evaluations(folder))
            runs[arm][seed] = run
            last_line = curves.table({seed: run}).splitlines()[-1]
            print(f"{arm}: {last_line}", flush=True)
    return runs, samples_per_step


def _report_arms(runs: dict[str, dict[int, curves.Run]], out: Path) -> str:
    """Plot each arm. Returns the tables of the arms."""
    if len(runs) == 1:
        (seeds,) = runs.values()
        curves.plot(seeds, out / "learning.png")
        return curves.table(seeds)
    text = ""
    for arm, seeds in runs.items():
        text += f"{arm}:\n\n{curves.table(seeds)}\n"
        curves.plot(seeds, out / f"learning_{arm}.png")
    return text


def main(argv: list[str] | None = None) -> int:
    """Run the seeds and write the results. Returns the exit code."""
    args, overrides = arguments(argv)
    args.out.mkdir(parents=True, exist_ok=True)
    result: dict[str, Any] = {
        "machine": machine(),
        "config": args.config,
        "overrides": overrides,
    }
    try:
        runs, samples_per_step = measure(args, overrides)
    except RunFailed as e:
        print(e, file=sys.stderr)
        return e.code
    text = _report_arms(runs, args.out)
    if len(runs) == 1:
        (result["runs"],) = runs.values()
    else:
        result["runs"] = runs
    if {"sync", "async"} <= set(runs):
        first_run = next(iter(runs["sync"].values()))
        samples = samples_per_step * len(first_run["reward"])
        text += comparison.table(runs, samples)
        comparison.plot(runs, samples_per_step, args.out / "learning.png")
        result["comparison"] = comparison.compare(runs)
        result["samples_per_step"] = samples_per_step
    write_results(args.out, result, text)
    print(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
