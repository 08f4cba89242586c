"""What does the difference between engine and trainer cost, and which way of correcting it learns best?

    python -m benchmarks.mismatch --out DIR [--config config/gsm8k_tiny_cpu.yaml] [--dtype bfloat16] [--seeds 0 1 2]
        [--steps 40] [--probe-steps 10] [--arms rollout recompute recompute+tis] [section.key=value ...]

Engine and trainer give the same token other log-probs at the same weights, by the rounding of their kernels. Two kinds of
runs tell what follows from that:

- synchronous ones with one optimiser step for a batch: there the true ratio is 1, so what is clipped, and what the ratio
  differs from 1 by, is rounding alone (one run per arm);
- runs of the config, one step off: reward in training and held out (one run per arm and seed).

Writes result.json and result.md into DIR.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from pathlib import Path
from typing import Any

from benchmarks.common.command_line import ROOT, Parser, RunFailed, machine, machine_line, run_arm

ARMS = {
    "rollout": ["algorithm.old_log_probs=rollout"],
    "recompute": ["algorithm.old_log_probs=recompute"],
    "recompute+tis": ["algorithm.old_log_probs=recompute", "algorithm.rollout_correction=tis"],
}
PROBED = {
    "clipped share": "actor/clip_frac",
    "mean ratio": "ratio/mean",
    "largest ratio": "ratio/max",
    "mean difference, nats": "logprob_diff/mean",
    "largest difference, nats": "logprob_diff/max",
    "gradient norm": "actor/grad_norm",
}
"""What a synchronous run tells -> its metric."""


def probe(rows: list[dict[str, Any]]) -> dict[str, float]:
    """Of a synchronous run: means over its steps, the largest values over all of them."""
    found = {}
    for name, metric in PROBED.items():
        values = [row[metric] for row in rows]
        found[name] = max(values) if name.startswith("largest") else statistics.fmean(values)
    return found


def learnt(rows: list[dict[str, Any]], folder: Path) -> dict[str, float]:
    """Of a run one step off: mean reward over all steps and over the last five, held-out reward at the end, seconds of a
    step (median)."""
    reward = [row["reward/mean"] for row in rows]
    evaluations = [
        json.loads(line) for line in (folder / "evaluations.jsonl").read_text().splitlines()
    ]
    return {
        "reward": statistics.fmean(reward),
        "reward, last five steps": statistics.fmean(reward[-5:]),
        "held out at the end": evaluations[-1]["val/reward"],
        "clipped share": statistics.fmean(row["actor/clip_frac"] for row in rows),
        "step, s": statistics.median(row["time/step_s"] for row in rows),
    }


def measure(args: argparse.Namespace, overrides: list[str]) -> dict[str, Any]:
    """All runs, the arms one after the other and in reverse with every second seed. Raises RunFailed."""
    common = [
        *overrides,
        f"model.dtype={args.dtype}",
        "trainer.val_before_train=false",
        "trainer.test_freq=-1",
    ]
    common += ["trainer.save_hf_model=false"]
    probes: dict[str, Any] = {}
    for name in args.arms:
        keys = ARMS[name]
        own = [
            *keys,
            f"trainer.total_steps={args.probe_steps}",
            "pipeline.staleness=0",
            "trainer.val_after_train=false",
        ]
        probes[name] = probe(run_arm(args.config, own, args.out / f"probe_{name}", common))
        print(f"synchronous, {name}: {probes[name]}", flush=True)
    runs: dict[str, dict[int, dict[str, float]]] = {name: {} for name in args.arms}
    for turn, seed in enumerate(args.seeds):
        for name in args.arms if turn % 2 == 0 else reversed(args.arms):
            folder = args.out / f"{name}_seed_{seed}"
            keys = [*ARMS[name], f"trainer.total_steps={args.steps}", f"trainer.seed={seed}"]
            runs[name][seed] = learnt(run_arm(args.config, keys, folder, common), folder)
            print(f"one step off, {name}, seed {seed}: {runs[name][seed]}", flush=True)
    return {"probes": probes, "runs": runs}


def table(found: dict[str, Any]) -> str:
    """Both kinds of runs in Markdown."""
    lines = ["Synchronous, one optimiser step for a batch, so that the true ratio is 1:", ""]
    lines += ["| arm | " + " | ".join(PROBED) + " |", "| --- " * (1 + len(PROBED)) + "|"]
    for name, figures in found["probes"].items():
        lines.append(
            f"| {name} | " + " | ".join(f"{figures[figure]:.3g}" for figure in PROBED) + " |"
        )
    if not any(found["runs"].values()):
        return "\n".join(lines) + "\n"
    names = list(next(iter(next(iter(found["runs"].values())).values())))
    lines += ["", "One step off, mean of the seeds (and each one):", ""]
    lines += ["| arm | " + " | ".join(names) + " |", "| --- " * (1 + len(names)) + "|"]
    for arm, own in found["runs"].items():
        cells = []
        for name in names:
            values = [figures[name] for figures in own.values()]
            cells.append(
                f"{statistics.fmean(values):.3g} ({', '.join(f'{value:.3g}' for value in values)})"
            )
        lines.append(f"| {arm} | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def arguments(argv: list[str] | None = None) -> tuple[Parser, argparse.Namespace, list[str]]:
    """The command line; what is left of it are keys of the config."""
    parser = Parser(__doc__)
    parser.add_argument("--out", required=True, type=Path)
    parser.add_argument("--config", default=str(ROOT / "config/gsm8k_tiny_cpu.yaml"))
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float32"))
    parser.add_argument(
        "--seeds", type=int, nargs="*", default=[0, 1, 2], help="none: synchronous runs only"
    )
    parser.add_argument("--steps", type=int, default=40, help="of each run one step off")
    parser.add_argument("--probe-steps", type=int, default=10, help="of each synchronous run")
    parser.add_argument("--arms", nargs="+", choices=tuple(ARMS), default=list(ARMS))
    args, keys = parser.parse(argv)
    return parser, args, keys


def main(argv: list[str] | None = None) -> int:
    """Run, write, and return the exit code."""
    _, args, overrides = arguments(argv)
    args.out.mkdir(parents=True, exist_ok=True)
    result: dict[str, Any] = {
        "machine": machine(),
        "config": args.config,
        "dtype": args.dtype,
        "overrides": overrides,
    }
    try:
        result |= measure(args, overrides)
    except RunFailed as e:
        print(e, file=sys.stderr)
        return e.code
    text = f"{args.dtype}, {args.config}. {machine_line(result['machine'])}\n\n{table(result)}"
    (args.out / "result.json").write_text(json.dumps(result, indent=2) + "\n")
    (args.out / "result.md").write_text(text)
    print(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
