"""Does a config learn? Whole runs with several seeds: reward and held-out reward over the steps, and with tools
the share of samples that call one.

    python -m benchmarks.learning --out DIR [--config config/ppo_gae.yaml] [--seeds 0 1 2] [--test-freq 5] [section.key=value ...]

Writes result.json, result.md and learning.png into DIR.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from benchmarks.throughput import run_arm

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
        figures = [sum(part) / len(part) for name in names for part in (run[name][:5], run[name][-5:])]
        figures += [run["held out"][0], run["held out"][-1]]
        lines.append(f"| {seed} | " + " | ".join(f"{figure:.3f}" for figure in figures) + " |")
    return "\n".join(lines) + "\n"


def plot(runs: dict[int, dict[str, Any]], path: Path) -> None:
    """A panel each for the reward of each step, for tool calls if there are any, and for the held-out reward of each
    version evaluated; a line for each seed."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    titles = {"reward": "reward in training, sampled", "tool calls": "share that calls a tool"}
    names = [name for name in titles if name in next(iter(runs.values()))]
    figure, panels = pyplot.subplots(1, len(names) + 1, figsize=(4 * len(names) + 4, 2.8), sharey=True)
    right = panels[-1]
    for seed, run in runs.items():
        for name, axes in zip(names, panels, strict=False):
            axes.plot(range(1, len(run[name]) + 1), run[name], label=f"seed {seed}")
            axes.set(xlabel="step", title=titles[name])
        right.plot(run["versions"], run["held out"], marker="o", markersize=3, label=f"seed {seed}")
    right.set(xlabel="weight version", title="reward held out, greedy", ylim=(-0.02, 1.02))
    for axes in panels:
        axes.grid(alpha=0.3)
    right.legend(frameon=False, loc="lower right")
    figure.savefig(path, dpi=130, bbox_inches="tight")


def main() -> None:
    """Parse, run the seeds one after the other, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", required=True)
    parser.add_argument("--config", default="config/ppo_gae.yaml")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--test-freq", type=int, default=5, help="steps between evaluations")
    args, overrides = parser.parse_known_args()
    out, runs = Path(args.out), {}
    for seed in args.seeds:
        folder = out / f"seed_{seed}"
        rows = run_arm(args.config, [f"trainer.seed={seed}", f"trainer.test_freq={args.test_freq}"], folder, overrides)
        evaluations = [json.loads(line) for line in (folder / "evaluations.jsonl").read_text().splitlines()]
        runs[seed] = summarise(rows, evaluations)
        print(table({seed: runs[seed]}).splitlines()[-1], flush=True)
    result = {"config": args.config, "overrides": overrides, "runs": runs}
    (out / "result.json").write_text(json.dumps(result, indent=2) + "\n")
    (out / "result.md").write_text(table(runs))
    plot(runs, out / "learning.png")
    print(table(runs))


if __name__ == "__main__":
    main()
