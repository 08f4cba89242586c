"""Colocated, synchronous on pools of their own, one step off, one step off with overlapped sync: the same work on the
same devices, the arms in turns.

    python -m benchmarks.throughput --out DIR [--config FILE] [--models M ...] [--lengths L ...] [--batches B ...]
        [--splits S ...] [--arms A ...] [--runs 3] [--warmup 3] [--steps N] [section.key=value ...]

A case is one combination of the flags --models, --lengths, --batches and --splits; each is as the config has it where
its flag is not given. Each arm of a case is a whole run of `one_step_off.main_ppo` without evaluation, on all the cores
(or GPUs) that this process may use: the arms differ in nothing but placement.pools of the colocated arm,
pipeline.staleness and weight_sync.overlap. Each repeat runs every arm once, and begins with another one.
docs/measured/benchmarks.md tells how to read the result.

Writes result.json, result.md, throughput_CASE.png and headline.png into DIR, and the runs' folders.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import sys
from pathlib import Path
from typing import Any

from benchmarks.common.command_line import ROOT, Parser, RunFailed, machine, run_arm
from benchmarks.common.lengths import keys_of
from benchmarks.throughput import report
from benchmarks.throughput.cases import (
    ARMS,
    RANDOM,
    UNEVALUATED,
    Case,
    arms_of,
    cases_of,
    model_path,
    what_model,
)
from one_step_off.config.loading import load_config
from one_step_off.config.schema import Config, ConfigError
from one_step_off.runtime.validation import validate


def arguments(argv: list[str] | None = None) -> tuple[Parser, argparse.Namespace, list[str]]:
    """The command line; what is left of it are keys of the config."""
    parser = Parser(__doc__)
    parser.add_argument("--out", required=True, type=Path, help="folder for the results")
    parser.add_argument("--config", default=str(ROOT / "config/gsm8k_tiny_cpu.yaml"))
    random = ", ".join(RANDOM)
    parser.add_argument(
        "--models", nargs="+", default=[], help=f"directories, hub ids, tiny:qwen2; or {random}"
    )
    parser.add_argument(
        "--lengths",
        nargs="+",
        default=["short"],
        help="short (the config's), fixed:TOKENS, longtail:MOST_TOKENS",
    )
    parser.add_argument(
        "--batches",
        nargs="+",
        default=[],
        help="of a step: PROMPTS or PROMPTSxSAMPLES, as 16 or 16x8",
    )
    parser.add_argument(
        "--splits",
        nargs="+",
        default=[],
        help="processes that generate : that train, as 1:1 or 2:1",
    )
    parser.add_argument("--arms", nargs="+", choices=tuple(ARMS), default=list(ARMS))
    parser.add_argument("--runs", type=int, default=3, help="runs of each arm")
    parser.add_argument("--warmup", type=int, default=3, help="steps dropped from each run")
    parser.add_argument(
        "--steps", type=int, help="steps of each run; default: the config's trainer.total_steps"
    )
    args, keys = parser.parse(argv)
    if args.runs < 1 or args.warmup < 0:
        parser.error(
            f"--runs {args.runs} --warmup {args.warmup}: at least 1 run, and 0 or more steps of warm-up"
        )
    return parser, args, keys


def base_keys(args: argparse.Namespace, overrides: list[str]) -> list[str]:
    """What all arms of all cases have over the config."""
    return [
        *UNEVALUATED,
        *overrides,
        *([f"trainer.total_steps={args.steps}"] if args.steps is not None else []),
    ]


def plan(
    args: argparse.Namespace, overrides: list[str]
) -> list[tuple[Case, list[str], dict[str, list[str]]]]:
    """The cases, the keys of each and of its arms; all are valid. A random model's path is not among the keys yet.

    Raises:
        ConfigError, ValueError: a flag or a key is wrong, in one line.
    """
    found = []
    base = [f"config={args.config}", *base_keys(args, overrides)]
    for case in cases_of(args.models, args.lengths, args.batches, args.splits):
        if case.model.startswith("random:") and case.model not in RANDOM:
            model_path(case.model)
        model = [f"model.path={case.model}"] if case.model and case.model not in RANDOM else []
        keys = [*model, *case.keys(load_config(base))]
        arms = arms_of(load_config([*base, *keys]))
        chosen = {name: arms[name] for name in (ARMS[word] for word in args.arms)}
        for own in chosen.values():
            cfg = load_config([*base, *keys, *own])
            validate(cfg)
            steps = cfg.trainer.total_steps
            if steps is not None and steps - args.warmup < 2:
                mend = "raise --steps, or lower --warmup"
                raise ValueError(
                    f"--warmup {args.warmup} of {steps} steps leaves none to measure, the last apart; {mend}"
                )
        found.append((case, keys, chosen))
    return found


def what(case: Case, cfg: Config) -> str:
    """A case in words."""
    pools = ", ".join(f"{name} {shape}" for name, shape in cfg.placement.pools.items())
    return (
        f"{what_model(case.model or cfg.model.path)}, {cfg.model.dtype}; {cfg.data.train_batch_size} prompts x "
        f"{cfg.rollout.n} samples a step; lengths: {keys_of(case.length)[1]}; pools {pools}"
    )


def run_case(
    args: argparse.Namespace, folder: Path, keys: list[str], arms: dict[str, list[str]]
) -> dict[str, Any]:
    """Per arm and run the rows after the warm-up. Raises RunFailed."""
    collected: dict[str, list[list[dict[str, Any]]]] = {arm: [] for arm in arms}
    for run in range(args.runs):
        order = list(arms.items())
        turn = run % len(order)
        for arm, own in order[turn:] + order[:turn]:
            rows = run_arm(args.config, [*keys, *own], folder / f"{_slug(arm)}_run{run}", [])
            rows = [report.slim(row) for row in rows[args.warmup :]]
            if len(rows) < 2:
                raise RunFailed(f"{arm}: --warmup {args.warmup} leaves none of its steps", 2)
            collected[arm].append(rows)
            step = statistics.median(row["time/step_s"] for row in rows[:-1])
            print(f"  run {run + 1} of {args.runs}, {arm}: {step:.3f} s/step", flush=True)
    return collected


def _slug(text: str) -> str:
    return re.sub(r"[^\w.-]+", "_", text)


def write(out: Path, result: dict[str, Any]) -> None:
    """result.json, result.md and the plots of the cases there are so far."""
    (out / "result.json").write_text(json.dumps(result, indent=1) + "\n")
    (out / "result.md").write_text(report.table(result))
    for case in result["cases"]:
        report.plot_case(case, out / f"throughput_{_slug(case['name'])}.png")
    told = [
        case
        for case in result["cases"]
        if any(key.startswith("speedup/") for key in case["headline"])
    ]
    if told:
        report.plot_headline(told, out / "headline.png")


def main(argv: list[str] | None = None) -> int:
    """Parse, run the arms of each case in turns, write. Returns the exit code."""
    parser, args, overrides = arguments(argv)
    try:
        planned = plan(args, overrides)
    except (ConfigError, ValueError) as e:
        parser.error(str(e))
    args.out.mkdir(parents=True, exist_ok=True)
    count = sum(len(arms) for _, _, arms in planned) * args.runs
    print(f"{len(planned)} case(s), {count} runs; a line comes after each", flush=True)
    known = {
        "runs": args.runs,
        "warmup": args.warmup,
        "config": args.config,
        "overrides": overrides,
    }
    result: dict[str, Any] = {"machine": machine(), **known, "cases": []}
    for case, keys, arms in planned:
        own = [*base_keys(args, overrides), *keys]
        cfg = load_config([f"config={args.config}", *own])
        name = case.name if case.model else f"{cfg.model.path.rpartition('/')[2]} {case.name}"
        print(f"{name}: {what(case, cfg)}", flush=True)
        if case.model in RANDOM:
            own.append(f"model.path={model_path(case.model)}")
        try:
            runs = run_case(args, args.out / _slug(name), own, arms)
        except RunFailed as e:
            print(e, file=sys.stderr)
            return e.code
        found = {arm: report.summarise(rows, arm) for arm, rows in runs.items()}
        made = {"name": name, "what": what(case, cfg), "keys": own, "arm_keys": arms, "arms": found}
        result["cases"].append(made | {"headline": report.headline(found), "rows": runs})
        write(args.out, result)  # after each case, so that a later failure takes nothing with it
    print(report.table(result))
    return 0


if __name__ == "__main__":
    sys.exit(main())
