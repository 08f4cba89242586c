"""Does a config learn? Whole runs with several seeds: reward and held-out reward over the steps, and with tools
the share of samples that call one.

    python -m benchmarks.learning --out DIR [--config config/ppo_gae.yaml] [--seeds 0 1 2] [--arms sync async]
        [--test-freq 5] [section.key=value ...]

With `--arms sync async` it compares the two: reward at equal samples (benchmarks/learning/comparison.py). Writes result.json, result.md and learning.png into DIR.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from benchmarks.common.command_line import ROOT, Parser, RunFailed, machine, run_arm
from benchmarks.learning import comparison
from benchmarks.learning.comparison import ARMS
from one_step_off.config.loading import load_config
from one_step_off.config.schema import ConfigError
from one_step_off.runtime.validation import validate

CALLS = "agent/used_tools/mean"


def summarise(rows: list[dict[str, Any]], evaluations: list[dict[str, Any]]) -> dict[str, Any]:
    """One run: its reward in each step, the held-out reward of each version evaluated."""
    return {
        "reward": [row["reward/mean"] for row in rows],
        "versions": [e["val/version"] for e in evaluations],
        "held out": [e["val/reward"] for e in evaluations],
    } | ({"tool calls": [row[CALLS] for row in rows]} if CALLS in rows[0] else {})


def table(runs: dict[int, dict[str, Any]]) -> str:
    """First and last figures in Markdown; those of steps are means of five."""
    names = [name for name in ("reward", "tool calls") if name in next(iter(runs.values()))]
    heads = [
        *(f"{name}, {which} five steps" for name in names for which in ("first", "last")),
        "held out before",
        "after",
    ]
    lines = ["| seed | " + " | ".join(heads) + " |", "| --- |" + " --- |" * len(heads)]
    for seed, run in runs.items():
        figures = [
            sum(part) / len(part) for name in names for part in (run[name][:5], run[name][-5:])
        ]
        cells = [f"{figure:.3f}" for figure in figures]
        cells += [f"{run['held out'][i]:.3f}" if run["held out"] else "-" for i in (0, -1)]
        lines.append(f"| {seed} | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def plot(runs: dict[int, dict[str, Any]], path: Path) -> None:
    """A panel each for the reward of each step, for tool calls if there are any, and for the held-out reward of each
    version evaluated; a line for each seed."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    titles = {"reward": "reward in training, sampled", "tool calls": "share that calls a tool"}
    names = [name for name in titles if name in next(iter(runs.values()))]
    figure, panels = pyplot.subplots(
        1, len(names) + 1, figsize=(4 * len(names) + 4, 2.8), sharey=True
    )
    right = panels[-1]
    for seed, run in runs.items():
        for name, axes in zip(names, panels, strict=False):
            axes.plot(range(1, len(run[name]) + 1), run[name], label=f"seed {seed}")
            axes.set(xlabel="step", title=titles[name])
        right.plot(run["versions"], run["held out"], marker="o", markersize=3, label=f"seed {seed}")
    right.set(xlabel="weight version", title="reward held out", ylim=(-0.02, 1.02))
    for axes in panels:
        axes.grid(alpha=0.3)
    right.legend(frameon=False, loc="lower right")
    figure.savefig(path, dpi=130, bbox_inches="tight")


def arguments(argv: list[str] | None = None) -> tuple[Parser, argparse.Namespace, list[str]]:
    """The command line; what is left of it are keys of the config."""
    parser = Parser(__doc__)
    parser.add_argument("--out", required=True, type=Path)
    parser.add_argument("--config", default=str(ROOT / "config/ppo_gae.yaml"))
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
    if len(set(args.seeds)) < len(args.seeds) or len(set(args.arms)) < len(args.arms):
        parser.error(f"--seeds {args.seeds} --arms {args.arms}: each one once")
    try:
        for arm in args.arms:
            validate(
                load_config(
                    [
                        f"config={args.config}",
                        *keys,
                        *ARMS[arm],
                        f"trainer.test_freq={args.test_freq}",
                    ]
                )
            )
    except ConfigError as e:
        parser.error(str(e))
    return parser, args, keys


def measure(
    args: argparse.Namespace, overrides: list[str]
) -> tuple[dict[str, dict[int, dict[str, Any]]], float]:
    """Per arm and seed what `summarise` makes of a run, the arms in turns; and the samples of a step. Raises RunFailed."""
    runs: dict[str, dict[int, dict[str, Any]]] = {arm: {} for arm in args.arms}
    for turn, seed in enumerate(args.seeds):
        for arm in args.arms if turn % 2 == 0 else reversed(args.arms):
            folder = args.out / (
                f"seed_{seed}" if args.arms == ["config"] else f"{arm}_seed_{seed}"
            )
            keys = [f"trainer.seed={seed}", f"trainer.test_freq={args.test_freq}", *ARMS[arm]]
            rows = run_arm(args.config, keys, folder, overrides)
            path = folder / "evaluations.jsonl"
            lines = path.read_text().splitlines() if path.exists() else []
            runs[arm][seed] = summarise(rows, [json.loads(line) for line in lines])
            print(f"{arm}: {table({seed: runs[arm][seed]}).splitlines()[-1]}", flush=True)
    return runs, rows[0]["samples"]


def main(argv: list[str] | None = None) -> int:
    """Parse, run the seeds one after the other, write. Returns the exit code."""
    _, args, overrides = arguments(argv)
    args.out.mkdir(parents=True, exist_ok=True)
    result: dict[str, Any] = {"machine": machine(), "config": args.config, "overrides": overrides}
    try:
        runs, samples = measure(args, overrides)
    except RunFailed as e:
        print(e, file=sys.stderr)
        return e.code
    parts = []
    for arm, own in runs.items():
        alone = len(runs) == 1
        parts += ["" if alone else f"{arm}:\n\n", table(own), "" if alone else "\n"]
        plot(own, args.out / ("learning.png" if alone else f"learning_{arm}.png"))
    result["runs"] = runs if len(runs) > 1 else own
    if {"sync", "async"} <= set(runs):
        result |= {"comparison": comparison.compare(runs), "samples_per_step": samples}
        steps = len(next(iter(runs["sync"].values()))["reward"])
        parts.append(comparison.table(runs, samples * steps))
        comparison.plot(runs, samples, args.out / "learning.png")
    (args.out / "result.json").write_text(json.dumps(result, indent=2) + "\n")
    (args.out / "result.md").write_text("".join(parts))
    print("".join(parts))
    return 0


if __name__ == "__main__":
    sys.exit(main())
