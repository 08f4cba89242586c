"""Samples per second of five arms: colocated, synchronous on separate pools, one step off, one step
off with overlapped weight sync, and that on a single shared device. All arms do the same work on
the same devices.

    python -m benchmarks.throughput --out DIR --headline SMOLLM2 [--runs 3] [--arms auto ...]
        [--regimes 3x4:48 ...]
    python -m benchmarks.throughput --out DIR [--config FILE] [--models M ...] [--lengths L ...]
        [--batches B ...] [--splits S ...] [--arms A ...] [--runs 3] [--warmup 3] [--steps N]
        [section.key=value ...]

The first form answers one question: how close a step comes to its longer phase, for SmolLM2-135M
(SMOLLM2: its directory or hub id) in three regimes and for the tiny model. It takes about 25
minutes on two cores; with `--arms disaggregated auto` twice as long.

A case is one combination of the flags --models, --lengths, --batches and --splits. A flag that is
not given keeps what the config has. Each arm of a case is a whole run of `one_step_off.main_ppo`
without evaluation, on all cores (or GPUs) that this process may use. The arms differ only in
placement.pools (colocated arm), pipeline.staleness and weight_sync.overlap; the arms ngram and fp8
also in rollout.speculation and rollout.quantization. Each repeat runs every
arm once and starts with another arm. docs/measured/throughput.md explains how to read the result.

Writes result.json, result.md, throughput_CASE.png and headline.png into DIR, and the run folders.
"""

from __future__ import annotations

import argparse
import re
import statistics
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.common.command_line import Parser, add_run_flags, check_run_flags, step_keys
from benchmarks.common.lengths import keys_of
from benchmarks.common.machine import machine
from benchmarks.common.paths import config_path
from benchmarks.common.report import write_results
from benchmarks.common.runs import NO_EVALUATION, RunFailed, rotated, run_arm
from benchmarks.throughput import headline, plots, report
from benchmarks.throughput.cases import (
    ARMS,
    RANDOM_MODELS,
    Case,
    arms_of,
    cases_of,
    default_arms,
    model_in_words,
    model_path,
)
from one_step_off.config.errors import ConfigError
from one_step_off.config.loading import load_config
from one_step_off.config.schema import Config
from one_step_off.runtime.validation import validate


@dataclass(frozen=True)
class PlannedCase:
    """A case with its config keys. `arms`: name of each arm -> the keys that only this arm has."""

    case: Case
    keys: list[str]
    arms: dict[str, list[str]]


def arguments(argv: list[str] | None = None) -> tuple[Parser, argparse.Namespace, list[str]]:
    """Parse the command line. Returns the parser, the flags and the config keys."""
    parser = Parser(__doc__)
    parser.add_argument("--out", required=True, type=Path, help="folder for the results")
    parser.add_argument("--config", default=config_path("gsm8k_tiny_cpu.yaml"))
    random_models = ", ".join(RANDOM_MODELS)
    parser.add_argument(
        "--models",
        nargs="+",
        default=[],
        help=f"directories, hub ids, tiny:qwen2; or {random_models}",
    )
    parser.add_argument(
        "--lengths",
        nargs="+",
        default=["short"],
        help="short (the config's), fixed:TOKENS, longtail:MAX_TOKENS",
    )
    parser.add_argument(
        "--batches",
        nargs="+",
        default=[],
        help="batch of a step: PROMPTS or PROMPTSxSAMPLES, such as 16 or 16x8",
    )
    parser.add_argument(
        "--splits",
        nargs="+",
        default=[],
        help="processes that generate : processes that train, such as 1:1 or 2:1",
    )
    parser.add_argument(
        "--arms",
        nargs="+",
        choices=tuple(ARMS),
        help="default: colocated, disaggregated, plain and overlapped; with a single GPU colocated "
        "and shared; with --headline auto",
    )
    _add_headline_flags(parser)
    add_run_flags(parser, "steps of each run; default: the config's trainer.total_steps")
    args, keys = parser.parse(argv)
    check_run_flags(parser, args)
    return parser, args, keys


def _add_headline_flags(parser: Parser) -> None:
    parser.add_argument(
        "--headline",
        metavar="SMOLLM2",
        help="the headline table with this model; --steps and --warmup then hold for all regimes",
    )
    parser.add_argument(
        "--regimes",
        nargs="+",
        default=[],
        metavar="PROMPTSxSAMPLES:TOKENS",
        help="SmolLM2's batches of --headline, where the default ones do not give its ratios",
    )


def base_keys(args: argparse.Namespace, overrides: list[str]) -> list[str]:
    """The config keys that all arms of all cases share."""
    return [*NO_EVALUATION, *overrides, *step_keys(args.steps)]


def _check_arm(keys: list[str], warmup: int) -> None:
    """Validate the config of an arm.

    Raises:
        ConfigError, ValueError: a key is wrong, or no step is left to measure.
    """
    cfg = load_config(keys)
    validate(cfg)
    steps = cfg.trainer.total_steps
    # Two: the last step of a run is not measured.
    if steps is not None and steps - warmup < 2:
        raise ValueError(
            f"--warmup {warmup} of {steps} steps leaves none to measure, the last apart; "
            "raise --steps, or lower --warmup"
        )


def _chosen_arms(cfg: Config, flags: list[str] | None) -> dict[str, list[str]]:
    """The arms of `--arms`, or the default ones. Raises ValueError: the config cannot have one."""
    all_arms = arms_of(cfg)
    names = [ARMS[flag] for flag in flags] if flags else default_arms(cfg)
    for name in names:
        if name not in all_arms:
            raise ValueError(
                f"--arms: {name!r} does not use the same devices as placement.pools="
                f"{cfg.placement.pools}; leave it out, or change the pools"
            )
    return {name: all_arms[name] for name in names}


def plan(args: argparse.Namespace, overrides: list[str]) -> list[PlannedCase]:
    """The cases with validated config keys. The path of a random model is not yet among the keys.

    Raises:
        ConfigError, ValueError: a flag or a key is wrong. The message is one line.
    """
    planned = []
    base = [f"config={args.config}", *base_keys(args, overrides)]
    for case in cases_of(args.models, args.lengths, args.batches, args.splits):
        if case.model.startswith("random:") and case.model not in RANDOM_MODELS:
            model_path(case.model)  # raises ValueError
        keys = []
        if case.model and case.model not in RANDOM_MODELS:
            keys.append(f"model.path={case.model}")
        keys += case.keys(load_config(base))
        arms = _chosen_arms(load_config([*base, *keys]), args.arms)
        for arm_keys in arms.values():
            _check_arm([*base, *keys, *arm_keys], args.warmup)
        planned.append(PlannedCase(case, keys, arms))
    return planned


def describe(case: Case, cfg: Config) -> str:
    """A case in words."""
    pools = ", ".join(f"{name} {shape}" for name, shape in cfg.placement.pools.items())
    model = model_in_words(case.model or cfg.model.path)
    _, lengths = keys_of(case.length)
    return (
        f"{model}, {cfg.model.dtype}; {cfg.data.train_batch_size} prompts x {cfg.rollout.n} "
        f"samples a step; lengths: {lengths}; pools {pools}"
    )


def run_case(
    args: argparse.Namespace, folder: Path, keys: list[str], arms: dict[str, list[str]]
) -> dict[str, list[list[dict[str, Any]]]]:
    """Run the arms of a case. Returns per arm and run the rows after the warm-up.

    Raises:
        RunFailed: a run ended with an error, or was too short.
    """
    collected: dict[str, list[list[dict[str, Any]]]] = {arm: [] for arm in arms}
    for run in range(args.runs):
        for arm, arm_keys in rotated(list(arms.items()), run):
            run_folder = folder / f"{_slug(arm)}_run{run}"
            all_rows = run_arm(args.config, [*keys, *arm_keys], run_folder, [])
            rows = [report.needed_columns(row) for row in all_rows[args.warmup :]]
            if len(rows) < 2:
                raise RunFailed(f"{arm}: --warmup {args.warmup} leaves none of its steps", 2)
            collected[arm].append(rows)
            step = statistics.median(row["time/step_s"] for row in rows[:-1])
            print(f"  run {run + 1} of {args.runs}, {arm}: {step:.3f} s/step", flush=True)
    return collected


def measure_case(
    planned: PlannedCase, args: argparse.Namespace, overrides: list[str]
) -> dict[str, Any]:
    """Run a case and summarize it, as an entry of result.json.

    Raises:
        RunFailed: a run ended with an error.
    """
    case = planned.case
    keys = [*base_keys(args, overrides), *planned.keys]
    cfg = load_config([f"config={args.config}", *keys])
    name = case.name
    if not case.model:
        name = f"{cfg.model.path.rpartition('/')[2]} {case.name}"
    description = describe(case, cfg)
    print(f"{name}: {description}", flush=True)
    if case.model in RANDOM_MODELS:
        keys.append(f"model.path={model_path(case.model)}")
    runs = run_case(args, args.out / _slug(name), keys, planned.arms)
    arms = {arm: report.summarize(rows, arm) for arm, rows in runs.items()}
    return {
        "name": name,
        "what": description,
        "keys": keys,
        "arm_keys": planned.arms,
        "arms": arms,
        "headline": report.headline(arms),
        "rows": runs,
    }


def _slug(text: str) -> str:
    return re.sub(r"[^\w.-]+", "_", text)


def write(out: Path, result: dict[str, Any]) -> None:
    """Write result.json, result.md and the plots of the cases that are complete."""
    write_results(out, result, report.table(result), indent=1)
    for case in result["cases"]:
        plots.plot_case(case, out / f"throughput_{_slug(case['name'])}.png")
    with_speedup = [
        case
        for case in result["cases"]
        if any(key.startswith("speedup/") for key in case["headline"])
    ]
    if with_speedup:
        plots.plot_headline(with_speedup, out / "headline.png")


def main(argv: list[str] | None = None) -> int:
    """Run the cases and write the results. Returns the exit code."""
    parser, args, overrides = arguments(argv)
    if args.headline:
        return _headline(parser, args, overrides)
    try:
        planned_cases = plan(args, overrides)
    except (ConfigError, ValueError) as e:
        parser.error(str(e))
    args.out.mkdir(parents=True, exist_ok=True)
    count = sum(len(planned.arms) for planned in planned_cases) * args.runs
    print(f"{len(planned_cases)} case(s), {count} runs; a line comes after each", flush=True)
    result: dict[str, Any] = {
        "machine": machine(),
        "runs": args.runs,
        "warmup": args.warmup,
        "config": args.config,
        "overrides": overrides,
        "cases": [],
    }
    for planned in planned_cases:
        try:
            result["cases"].append(measure_case(planned, args, overrides))
        except RunFailed as e:
            print(e, file=sys.stderr)
            return e.code
        # After each case: a later failure must not take the results so far with it.
        write(args.out, result)
    print(report.table(result))
    return 0


def _headline(parser: Parser, args: argparse.Namespace, overrides: list[str]) -> int:
    """Run the headline table and print it. Returns the exit code."""
    if args.models or args.batches or args.splits or args.lengths != ["short"]:
        parser.error("--headline: its cases are fixed; leave out the flags of other cases")
    try:
        print(headline.measure(args, overrides))
    except (ConfigError, ValueError) as e:
        parser.error(str(e))
    except RunFailed as e:
        print(e, file=sys.stderr)
        return e.code
    return 0


if __name__ == "__main__":
    sys.exit(main())
