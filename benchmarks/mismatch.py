"""What does the difference between engine and trainer cost, and which correction learns best?

    python -m benchmarks.mismatch --out DIR [--config config/gsm8k_tiny_cpu.yaml] [--dtype bfloat16]
        [--seeds 0 1 2] [--steps 40] [--probe-steps 10]
        [--arms rollout recompute recompute+tis fp8 fp8+tis] [section.key=value ...]

At the same weights, engine and trainer compute different log-probs for the same token, because
their kernels round differently, and because a quantized engine has other weights (the arms fp8).
Two kinds of runs show what follows:

- synchronous runs with one optimizer step per batch, one per arm. There the true ratio is 1. So the
  clipped share and the ratio's distance from 1 come from rounding alone;
- runs of the config, one step off, one per arm and seed: reward in training and held out.

Writes result.json and result.md into DIR.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from pathlib import Path
from typing import Any

from benchmarks.common.command_line import Parser
from benchmarks.common.machine import machine, machine_line
from benchmarks.common.paths import config_path
from benchmarks.common.report import markdown_table, write_results
from benchmarks.common.runs import RunFailed, alternated, run_arm

ROLLOUT = ["algorithm.old_log_probs=rollout"]
RECOMPUTE = ["algorithm.old_log_probs=recompute"]
TIS = [*RECOMPUTE, "algorithm.rollout_correction=tis"]
FP8 = ["rollout.quantization=fp8_per_channel"]
ARMS = {
    "rollout": ROLLOUT,
    "recompute": RECOMPUTE,
    "recompute+tis": TIS,
    "fp8": [*FP8, *ROLLOUT],
    "fp8+tis": [*FP8, *TIS],
}
PROBED = {
    "clipped share": "actor/clip_frac",
    "mean ratio": "ratio/mean",
    "largest ratio": "ratio/max",
    "mean difference, nats": "logprob_diff/mean",
    "largest difference, nats": "logprob_diff/max",
    "gradient norm": "actor/grad_norm",
}
"""Figure of a synchronous run -> its metric."""


def probe(rows: list[dict[str, Any]]) -> dict[str, float]:
    """The figures of a synchronous run: means over its steps; of the "largest" ones the maximum."""
    found = {}
    for name, metric in PROBED.items():
        values = [row[metric] for row in rows]
        found[name] = max(values) if name.startswith("largest") else statistics.fmean(values)
    return found


def learning_figures(rows: list[dict[str, Any]], folder: Path) -> dict[str, float]:
    """The figures of a run one step off.

    Args:
        rows: metrics.jsonl of the run.
        folder: the run folder.
    """
    reward = [row["reward/mean"] for row in rows]
    last_evaluation = (folder / "evaluations.jsonl").read_text().splitlines()[-1]
    return {
        "reward": statistics.fmean(reward),
        "reward, last five steps": statistics.fmean(reward[-5:]),
        "held out at the end": json.loads(last_evaluation)["val/reward"],
        "clipped share": statistics.fmean(row["actor/clip_frac"] for row in rows),
        "step, s": statistics.median(row["time/step_s"] for row in rows),
    }


def run_probes(args: argparse.Namespace, common: list[str]) -> dict[str, dict[str, float]]:
    """The synchronous runs. Returns the figures of each arm. Raises RunFailed."""
    probes = {}
    for arm in args.arms:
        keys = [
            *ARMS[arm],
            f"trainer.total_steps={args.probe_steps}",
            "pipeline.staleness=0",
            "trainer.val_after_train=false",
        ]
        probes[arm] = probe(run_arm(args.config, keys, args.out / f"probe_{arm}", common))
        print(f"synchronous, {arm}: {probes[arm]}", flush=True)
    return probes


def run_seeds(
    args: argparse.Namespace, common: list[str]
) -> dict[str, dict[int, dict[str, float]]]:
    """The runs one step off, the arms in alternating order.

    Returns:
        Arm -> seed -> figures.

    Raises:
        RunFailed: a run ended with an error.
    """
    runs: dict[str, dict[int, dict[str, float]]] = {arm: {} for arm in args.arms}
    for number, seed in enumerate(args.seeds):
        for arm in alternated(args.arms, number):
            folder = args.out / f"{arm}_seed_{seed}"
            keys = [*ARMS[arm], f"trainer.total_steps={args.steps}", f"trainer.seed={seed}"]
            rows = run_arm(args.config, keys, folder, common)
            runs[arm][seed] = learning_figures(rows, folder)
            print(f"one step off, {arm}, seed {seed}: {runs[arm][seed]}", flush=True)
    return runs


def _mean_and_each(values: list[float]) -> str:
    each = ", ".join(f"{value:.3g}" for value in values)
    return f"{statistics.fmean(values):.3g} ({each})"


def table(found: dict[str, Any]) -> str:
    """Both kinds of runs in Markdown."""
    probe_rows = []
    for arm, figures in found["probes"].items():
        probe_rows.append([arm, *(f"{figures[name]:.3g}" for name in PROBED)])
    lines = ["Synchronous, one optimizer step per batch, so that the true ratio is 1:", ""]
    lines += markdown_table(["arm", *PROBED], probe_rows)
    if not any(found["runs"].values()):
        return "\n".join(lines) + "\n"
    first_arm = next(iter(found["runs"].values()))
    names = list(next(iter(first_arm.values())))
    rows = []
    for arm, seeds in found["runs"].items():
        values_of = {name: [figures[name] for figures in seeds.values()] for name in names}
        rows.append([arm, *(_mean_and_each(values_of[name]) for name in names)])
    lines += ["", "One step off, mean of the seeds (and each one):", ""]
    lines += markdown_table(["arm", *names], rows)
    return "\n".join(lines) + "\n"


def arguments(argv: list[str] | None = None) -> tuple[argparse.Namespace, list[str]]:
    """Parse the command line. Returns the flags and the config keys."""
    parser = Parser(__doc__)
    parser.add_argument("--out", required=True, type=Path, help="folder for the results")
    parser.add_argument("--config", default=config_path("gsm8k_tiny_cpu.yaml"))
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float32"))
    parser.add_argument(
        "--seeds", type=int, nargs="*", default=[0, 1, 2], help="none: synchronous runs only"
    )
    parser.add_argument("--steps", type=int, default=40, help="of each run one step off")
    parser.add_argument("--probe-steps", type=int, default=10, help="of each synchronous run")
    parser.add_argument(
        "--arms", nargs="+", choices=tuple(ARMS), default=["rollout", "recompute", "recompute+tis"]
    )
    return parser.parse(argv)


def main(argv: list[str] | None = None) -> int:
    """Run the arms and write the results. Returns the exit code."""
    args, overrides = arguments(argv)
    args.out.mkdir(parents=True, exist_ok=True)
    common = [
        *overrides,
        f"model.dtype={args.dtype}",
        "trainer.val_before_train=false",
        "trainer.test_freq=-1",
        "trainer.save_hf_model=false",
    ]
    result: dict[str, Any] = {
        "machine": machine(),
        "config": args.config,
        "dtype": args.dtype,
        "overrides": overrides,
    }
    try:
        result["probes"] = run_probes(args, common)
        result["runs"] = run_seeds(args, common)
    except RunFailed as e:
        print(e, file=sys.stderr)
        return e.code
    text = f"{args.dtype}, {args.config}. {machine_line(result['machine'])}\n\n{table(result)}"
    write_results(args.out, result, text)
    print(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
