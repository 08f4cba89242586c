"""Colocated, synchronous on pools of their own, one step off: the same work on the same devices, arms in turns.

    python -m benchmarks.throughput --out DIR [--config FILE] [--runs 3] [--warmup 3] [section.key=value ...]

Each arm is a whole run of `one_step_off.main_ppo` without evaluation. The first `--warmup` steps of each run are dropped.
The colocated arm puts all roles into one pool: on GPUs of as many as the others have together, on a CPU of as many
processes as the largest pool, each with more cores.
Writes result.json, result.md and throughput.png into DIR.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

from one_step_off.config import Config, ConfigError
from one_step_off.config_checks import resolved_device, validate
from one_step_off.config_io import load

COLOCATED, APART, AHEAD = "colocated sync", "disaggregated sync", "one step off"
TIMES = {"step": "time/step_s", "T_gen": "time/generate_s", "T_train": "time/train_s", "T_sync": "time/sync_s"}
UNEVALUATED = ["data.val_files=", "trainer.test_freq=-1", "trainer.save_hf_model=false"]


def arms_of(cfg: Config) -> dict[str, list[str]]:
    """Arm -> its keys, over a config whose rollout has a pool of its own."""
    pools, device = cfg.placement.pools, resolved_device(cfg)
    most = max(pools.values(), key=lambda shape: (len(shape), sum(shape)))
    if device == "cuda":
        padded = [shape + [0] * (len(most) - len(shape)) for shape in pools.values()]
        most = [sum(node) for node in zip(*padded, strict=True)]
    roles = ", ".join(f"{role}: all" for role in cfg.placement.roles)
    colocated = [f"placement.pools={{all: {most}}}", f"placement.roles={{{roles}}}", "pipeline.staleness=0"]
    return {COLOCATED: colocated, APART: ["pipeline.staleness=0"], AHEAD: ["pipeline.staleness=1"]}


def run_arm(
    config: str, keys: list[str], folder: Path, overrides: list[str], module: str = "one_step_off.main_ppo"
) -> list[dict[str, Any]]:
    """One run; returns its metrics, a row per step. Raises RuntimeError with the run's last words if it fails."""
    command = [sys.executable, "-m", module, f"config={config}", *overrides, *keys]
    done = subprocess.run(
        [*command, "trainer.resume=never", f"trainer.output_dir={folder}"], capture_output=True, text=True
    )
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} ended with {done.returncode}:\n{(done.stdout + done.stderr)[-2000:]}")
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def summarise(runs: list[list[dict[str, Any]]]) -> dict[str, Any]:
    """Medians over the runs' medians, and their range; `runs` hold the rows after the warm-up."""
    found: dict[str, Any] = {}
    for name, column in TIMES.items():
        each = [statistics.median(row[column] for row in rows) for rows in runs]
        found[name] = {"median": statistics.median(each), "min": min(each), "max": max(each), "runs": each}
    speed = [sum(r["samples"] for r in rows) / sum(r["time/step_s"] for r in rows) for rows in runs]
    found["samples/s"] = {"median": statistics.median(speed), "min": min(speed), "max": max(speed), "runs": speed}
    return found


def headline(arms: dict[str, dict[str, Any]]) -> dict[str, float]:
    """How much faster, and how close to the limit max(T_gen, T_train) of the disaggregated arm's own phases."""
    sync, ahead = arms[APART], arms[AHEAD]
    limit = max(sync["T_gen"]["median"], sync["T_train"]["median"])
    return {
        "speedup": sync["step"]["median"] / ahead["step"]["median"],
        "speedup_over_colocated": arms[COLOCATED]["step"]["median"] / ahead["step"]["median"],
        "speedup_at_the_limit": sync["step"]["median"] / limit,
        "step_over_limit": ahead["step"]["median"] / limit,
    }


def table(result: dict[str, Any]) -> str:
    """The result in Markdown."""
    names = [*TIMES, "samples/s"]
    lines = ["| arm | " + " | ".join(names) + " |", "| --- |" + " --- |" * len(names)]
    for arm, found in result["arms"].items():
        cells = [f"{found[n]['median']:.3g} ({found[n]['min']:.3g} to {found[n]['max']:.3g})" for n in names]
        lines.append(f"| {arm} | " + " | ".join(cells) + " |")
    h = result["headline"]
    return "\n".join(
        [
            *lines,
            "",
            f"Medians over {result['runs']} runs per arm (range of the runs' medians), seconds, in turns; the first "
            f"{result['warmup']} steps of each dropped.",
            f"One step off is {h['speedup']:.2f} times as fast as {APART}, {h['speedup_over_colocated']:.2f} times as fast "
            f"as {COLOCATED}; its step is {h['step_over_limit']:.2f} times max(T_gen, T_train) of {APART} (at 1.00 it "
            f"would be {h['speedup_at_the_limit']:.2f} times as fast).",
        ]
    ) + "\n"  # fmt: skip


def plot(result: dict[str, Any], path: Path) -> None:
    """Bars: the phases of each arm beside its step."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 3.4))
    colours = {"T_gen": "#4878cf", "T_train": "#ee854a", "T_sync": "#8c8c8c"}
    for row, (arm, found) in enumerate(result["arms"].items()):
        left = 0.0
        for name, colour in colours.items():
            # One step off, generation runs at the same time as training: it starts again at 0.
            start = left if arm != AHEAD or name == "T_sync" else 0.0
            y = row + (0.18 if name == "T_gen" else -0.18 if name == "T_train" else 0)
            axes.barh(y, found[name]["median"], 0.34, left=start, color=colour, label=name if row == 0 else None)
            left = max(left, start + found[name]["median"])
        axes.plot(
            [found["step"]["median"]] * 2, [row - 0.4, row + 0.4], color="black", label="step" if row == 0 else None
        )
    axes.set_yticks(range(len(result["arms"])), list(result["arms"]))
    axes.invert_yaxis()
    axes.set_xlabel("seconds")
    axes.legend(ncols=4, loc="upper center", bbox_to_anchor=(0.5, 1.2), frameon=False)
    figure.savefig(path, dpi=150, bbox_inches="tight")


def main() -> None:
    """Parse, run the arms in turns, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", required=True)
    parser.add_argument("--config", default="config/gsm8k_tiny_cpu.yaml")
    parser.add_argument("--runs", type=int, default=3, help="runs of each arm")
    parser.add_argument("--warmup", type=int, default=3, help="steps dropped from each run")
    args, overrides = parser.parse_known_args()
    if args.runs < 1 or args.warmup < 0:
        parser.error(f"--runs {args.runs} --warmup {args.warmup}: at least 1 run, and 0 or more steps of warm-up")
    try:
        for argument in overrides:
            if argument.startswith("-"):
                parser.error(f"unrecognized argument {argument}; keys of the config are written section.key=value")
        cfg = load([f"config={args.config}", *overrides])
        arms = arms_of(cfg)
        for keys in arms.values():
            validate(load([f"config={args.config}", *overrides, *keys]))
    except ConfigError as e:
        parser.error(str(e))
    out = Path(args.out)
    out.mkdir(parents=True, exist_ok=True)
    print(f"{args.runs} runs of each arm, in turns; a line comes after each, in some minutes", flush=True)
    collected: dict[str, list[list[dict[str, Any]]]] = {arm: [] for arm in arms}
    for run in range(args.runs):
        order = list(arms.items())
        for arm, keys in order if run % 2 == 0 else reversed(order):
            rows = run_arm(args.config, [*UNEVALUATED, *keys], out / f"{arm.replace(' ', '_')}_run{run}", overrides)
            if len(rows) <= args.warmup:
                parser.error(f"--warmup {args.warmup} leaves none of the {len(rows)} steps")
            collected[arm].append(rows[args.warmup :])
            step_s = statistics.median(row["time/step_s"] for row in collected[arm][-1])
            print(f"run {run + 1} of {args.runs}, {arm}: {step_s:.3f} s/step", flush=True)
    found = {arm: summarise(runs) for arm, runs in collected.items()}
    result = {"config": args.config, "overrides": overrides, "runs": args.runs, "warmup": args.warmup, "arms": found}
    result["headline"] = headline(found)
    (out / "result.json").write_text(json.dumps(result, indent=2) + "\n")
    (out / "result.md").write_text(table(result))
    plot(result, out / "throughput.png")
    print(table(result))


if __name__ == "__main__":
    main()
