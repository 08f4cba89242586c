"""The same task in TRL's GRPOTrainer: samples/s of both on the same cores, the arms in turns.

    python -m benchmarks.trl_comparison --out DIR [--config FILE] [--runs 3] [--warmup 3] [--steps N] [--cores 0 1]
        [--arms ours trl-1 trl-all] [section.key=value ...]

TRL is no dependency of this project, and installs into a folder of its own, without touching other packages:

    pip install --target trl_site --no-deps "trl>=1.16,<2"
    PYTHONPATH=trl_site python -m benchmarks.trl_comparison --out DIR

Both take the same prompts in the same steps, sample as many answers of the same lengths from the same model, score them
with the same function and make the same fp32 AdamW update; the settings of both are in the result. On a CPU TRL generates
with transformers' `generate`, in turns with training, for its way to vLLM's CPU build does not work (`--arms trl-vllm`
tries it and says what happens). Torch in TRL's process has one thread (`trl-1`) or one for each core (`trl-all`), of
which the better one counts. Ours runs as its config says: vLLM on one part of the cores, the trainer on the other.

Writes result.json, result.md and trl_comparison.png into DIR.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import statistics
import sys
from pathlib import Path
from typing import Any

from benchmarks.common.command_line import ROOT, Parser, RunFailed, machine, machine_line, run_arm
from benchmarks.throughput.cases import UNEVALUATED
from benchmarks.trl_comparison.trl_arm import role_settings
from one_step_off.config.loading import load_config
from one_step_off.config.schema import ConfigError
from one_step_off.runtime.validation import validate

ARMS = {
    "ours": "one_step_off",
    "ours-sync": "one_step_off, synchronous",
    "trl-1": "TRL, 1 thread",
    "trl-all": "TRL, a thread per core",
}
ARMS |= {"trl-vllm": "TRL, vLLM colocate"}
INSTALL = 'pip install --target trl_site --no-deps "trl>=1.16,<2", then PYTHONPATH=trl_site before the command'
FIGURES = {
    "step, s": "{:.3f}",
    "samples/s": "{:,.0f}",
    "response tokens": "{:.1f}",
    "reward": "{:.3f}",
}


def arguments(argv: list[str] | None = None) -> tuple[Parser, argparse.Namespace, list[str]]:
    """The command line; what is left of it are keys of the config."""
    parser = Parser(__doc__)
    parser.add_argument("--out", required=True, type=Path, help="folder for the results")
    parser.add_argument("--config", default=str(ROOT / "config/gsm8k_tiny_cpu.yaml"))
    parser.add_argument(
        "--arms", nargs="+", choices=tuple(ARMS), default=["ours", "trl-1", "trl-all"]
    )
    parser.add_argument("--runs", type=int, default=3, help="runs of each arm")
    parser.add_argument("--warmup", type=int, default=3, help="steps dropped from each run")
    parser.add_argument("--steps", type=int, help="steps of each run; default: the config's")
    parser.add_argument(
        "--cores",
        type=int,
        nargs="+",
        help="those that every arm may use; default: all of this process",
    )
    args, keys = parser.parse(argv)
    if args.runs < 1 or args.warmup < 0:
        parser.error(
            f"--runs {args.runs} --warmup {args.warmup}: at least 1 run, and 0 or more steps of warm-up"
        )
    mine = os.sched_getaffinity(0)
    args.cores = set(args.cores or mine)
    if not args.cores <= mine:
        parser.error(f"--cores {sorted(args.cores)}: this process may use {sorted(mine)}")
    if any(arm.startswith("trl") for arm in args.arms) and importlib.util.find_spec("trl") is None:
        parser.error(f"TRL is not installed: {INSTALL}")
    return parser, args, keys


def run(arm: str, args: argparse.Namespace, keys: list[str], folder: Path) -> list[dict[str, Any]]:
    """One run of one arm: its rows after the warm-up. Raises RunFailed."""
    if arm.startswith("ours"):
        more = ["pipeline.staleness=0"] if arm == "ours-sync" else []
        rows = run_arm(args.config, [*keys, *more], folder, [], cores=args.cores)[
            :-1
        ]  # beside the last none are made
    else:
        flags = {
            "trl-1": ["--threads", "1"],
            "trl-all": ["--threads", str(len(args.cores))],
            "trl-vllm": ["--vllm"],
        }
        rows = run_arm(
            args.config,
            [*keys, *flags[arm]],
            folder,
            [],
            "benchmarks.trl_comparison.trl_arm",
            args.cores,
        )
    return rows[args.warmup :]


def figures(rows: list[dict[str, Any]]) -> dict[str, float]:
    """Of one run."""
    return {
        "step, s": statistics.median(row["time/step_s"] for row in rows),
        "samples/s": sum(row["samples"] for row in rows) / sum(row["time/step_s"] for row in rows),
        "response tokens": statistics.fmean(row["response_length/mean"] for row in rows),
        "reward": statistics.fmean(row["reward/mean"] for row in rows),
    }


def summarise(runs: list[dict[str, float]]) -> dict[str, Any]:
    """Medians over the runs, and their range."""
    found = {}
    for name in FIGURES:
        own = [one[name] for one in runs]
        found[name] = {
            "median": statistics.median(own),
            "min": min(own),
            "max": max(own),
            "runs": own,
        }
    return found


def headline(arms: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """How many times TRL's samples/s ours are, TRL's better arm taken. Empty where one of the two has not run."""
    theirs = {
        arm: found["samples/s"]["median"] for arm, found in arms.items() if arm.startswith("TRL")
    }
    if ARMS["ours"] not in arms or not theirs:
        return {}
    best = max(theirs, key=lambda arm: theirs[arm])
    return {
        "best of TRL": best,
        "times as many samples/s": arms[ARMS["ours"]]["samples/s"]["median"] / theirs[best],
    }


def table(result: dict[str, Any]) -> str:
    """The result in Markdown."""
    lines = [
        machine_line(result["machine"]),
        "",
        "| arm | " + " | ".join(FIGURES) + " |",
        "| --- |" + " --- |" * 4,
    ]
    for arm, found in result["arms"].items():
        cells = (
            " to ".join(form.format(found[n][k]) for k in ("min", "max"))
            for n, form in FIGURES.items()
        )
        middle = (form.format(found[n]["median"]) for n, form in FIGURES.items())
        lines.append(
            f"| {arm} | "
            + " | ".join(f"{m} ({c})" for m, c in zip(middle, cells, strict=True))
            + " |"
        )
    lines += [f"| {arm} | failed: {why} |" + " |" * 3 for arm, why in result["failed"].items()]
    lines += [
        "",
        f"Medians over {result['runs']} run(s) of each arm in turns (range); the first {result['warmup']} steps",
    ]
    lines += [f"of each are dropped. All arms may use the cores {result['cores']}, and no others."]
    if result["headline"]:
        h = result["headline"]
        lines += [
            "",
            f"one_step_off makes {h['times as many samples/s']:.2f} times the samples/s of {h['best of TRL']}.",
        ]
    lines += ["", "| TRL's setting | value |", "| --- | --- |"]
    lines += [f"| `{name}` | {value} |" for name, value in result["trl_settings"].items()]
    lines += [
        "",
        "Keys of the run over "
        + f"`{Path(result['config']).name}`: "
        + ", ".join(result["keys"])
        + ".",
    ]
    return "\n".join(lines) + "\n"


def plot(result: dict[str, Any], path: Path) -> None:
    """Samples/s of each arm, with the range of its runs."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    arms = result["arms"]
    figure, axes = pyplot.subplots(figsize=(7, 0.6 * len(arms) + 0.9))
    for y, (arm, found) in enumerate(arms.items()):
        rate = found["samples/s"]
        around = [[rate["median"] - rate["min"]], [rate["max"] - rate["median"]]]
        colour = "#ee854a" if arm.startswith("TRL") else "#4878cf"
        axes.barh(y, rate["median"], 0.6, xerr=around, color=colour, ecolor="black", capsize=3)
        axes.text(
            rate["median"] / 2, y, f"{rate['median']:,.0f}", va="center", ha="center", color="white"
        )
    axes.set_yticks(range(len(arms)), list(arms))
    axes.invert_yaxis()
    axes.set_xlabel("samples/s")
    figure.savefig(path, dpi=130, bbox_inches="tight")
    pyplot.close(figure)


def main(argv: list[str] | None = None) -> int:
    """Parse, run the arms in turns, write. Returns the exit code."""
    parser, args, overrides = arguments(argv)
    keys = [
        *UNEVALUATED,
        *overrides,
        *([f"trainer.total_steps={args.steps}"] if args.steps is not None else []),
    ]
    try:
        cfg = load_config([f"config={args.config}", *keys])
        validate(cfg)
        settings = role_settings(cfg)
        if cfg.trainer.total_steps - args.warmup < 2:
            raise ValueError(
                f"--warmup {args.warmup} leaves none of {cfg.trainer.total_steps} steps; raise --steps"
            )
    except (ConfigError, ValueError) as e:
        parser.error(str(e))
    args.out.mkdir(parents=True, exist_ok=True)
    before = machine()
    collected: dict[str, list[list[dict[str, Any]]]] = {}
    failed: dict[str, str] = {}
    for turn in range(args.runs):
        start = turn % len(args.arms)
        for arm in args.arms[start:] + args.arms[:start]:
            name = ARMS[arm]
            if name in failed:
                continue
            try:
                rows = run(arm, args, keys, args.out / f"{arm}_run{turn}")
            except RunFailed as e:
                failed[name] = str(e).strip().splitlines()[-1] if arm == "trl-vllm" else ""
                if not failed[name]:
                    print(e, file=sys.stderr)
                    return e.code
                print(f"run {turn + 1} of {args.runs}, {name}: failed: {failed[name]}", flush=True)
                continue
            collected.setdefault(name, []).append(rows)
            rate = figures(rows)["samples/s"]
            print(f"run {turn + 1} of {args.runs}, {name}: {rate:,.0f} samples/s", flush=True)
    arms = {
        ARMS[arm]: summarise([*map(figures, collected[ARMS[arm]])])
        for arm in args.arms
        if ARMS[arm] in collected
    }
    result = {"machine": before, "cores": sorted(args.cores), "config": args.config, "keys": keys}
    result |= {
        "runs": args.runs,
        "warmup": args.warmup,
        "arms": arms,
        "failed": failed,
        "headline": headline(arms),
    }
    result |= {"trl_settings": settings, "rows": collected}
    (args.out / "result.json").write_text(json.dumps(result, indent=1) + "\n")
    (args.out / "result.md").write_text(table(result))
    if arms:
        plot(result, args.out / "trl_comparison.png")
    print(table(result))
    return 0


if __name__ == "__main__":
    sys.exit(main())
