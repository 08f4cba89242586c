"""Does a config learn? Whole runs with several seeds: reward and held-out reward over the steps.

    python -m benchmarks.learning --out DIR [--config config/ppo_gae.yaml] [--seeds 0 1 2] [--test-freq 5] [section.key=value ...]

Writes result.json, result.md and learning.png into DIR.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from benchmarks.throughput import run_arm


def summarise(rows: list[dict[str, Any]], evaluations: list[dict[str, Any]]) -> dict[str, Any]:
    """One run: its reward in each step, the held-out reward of each version evaluated."""
    return {
        "reward": [row["reward/mean"] for row in rows],
        "versions": [e["val/version"] for e in evaluations],
        "held out": [e["val/reward"] for e in evaluations],
    }


def table(runs: dict[int, dict[str, Any]]) -> str:
    """First and last figures in Markdown; rewards are means of five steps."""
    lines = ["| seed | reward, first five steps | last five | held out before | after |", "| --- |" + " --- |" * 4]
    for seed, run in runs.items():
        first, last = (sum(part) / len(part) for part in (run["reward"][:5], run["reward"][-5:]))
        lines.append(f"| {seed} | {first:.3f} | {last:.3f} | {run['held out'][0]:.3f} | {run['held out'][-1]:.3f} |")
    return "\n".join(lines) + "\n"


def plot(runs: dict[int, dict[str, Any]], path: Path) -> None:
    """Two panels: the reward of each step, the held-out reward of each version evaluated; a line for each seed."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(8, 2.8), sharey=True)
    for seed, run in runs.items():
        left.plot(range(1, len(run["reward"]) + 1), run["reward"], label=f"seed {seed}")
        right.plot(run["versions"], run["held out"], marker="o", markersize=3, label=f"seed {seed}")
    left.set(xlabel="step", ylabel="mean reward", ylim=(-0.02, 1.02), title="training, sampled")
    right.set(xlabel="weight version", title="held out, greedy")
    for axes in (left, right):
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
