"""Long-tailed lengths: plain one step off, partial rollouts, and oversampling besides. The same prompts, arms in turns.

    python -m benchmarks.long_tail --out DIR [--config FILE] [--most 256] [--over 1.5,2] [--runs 3] [--warmup 0]
        [section.key=value ...]

Response lengths are drawn per sample (log-normal, see benchmarks/lengths.py), so all arms have the same work: over a whole
run each trains on the same prompts. What differs is when a step may begin: with all of its own samples (plain), with the
first complete groups of two batches under way (partial rollouts), or of more (oversampling).
Writes result.json, result.md and long_tail.png into DIR, and the runs' folders.
"""

from __future__ import annotations

import json
import statistics
import sys
from pathlib import Path
from typing import Any

from benchmarks.common.command_line import ROOT, Parser, RunFailed, machine, machine_line, run_arm
from benchmarks.common.lengths import keys_of
from benchmarks.throughput.cases import UNEVALUATED
from one_step_off.config.loading import load_config
from one_step_off.config.schema import ConfigError
from one_step_off.runtime.validation import validate

PARTIAL = "pipeline.partial_rollout=true"
Row = dict[str, Any]
COLUMNS = {
    "samples/s": "{:.1f}",
    "tokens/s": "{:,.0f}",
    "median step, s": "{:.2f}",
    "trainer waits, s": "{:.2f}",
    "carried groups": "{:.0%}",
    "interrupted": "{:.0%}",
    "tokens older than 1": "{:.0%}",
    "longest staleness": "{:.0f}",
    "uncarried / all lengths": "{:.2f}",
}


def arms_of(factors: list[float]) -> dict[str, list[str]]:
    """Arm -> its keys."""
    over = {f"partial, oversample {f:g}": [PARTIAL, f"rollout.oversample={f:g}"] for f in factors}
    return {"plain": [], "partial rollouts": [PARTIAL], **over}


def figures(rows: list[Row], groups: int) -> dict[str, float]:
    """Of one run, after the warm-up; `groups` per step. Rates are sums over sums: in an arm that carries, cheap and dear
    steps alternate."""

    def mean(name: str) -> float:
        return statistics.fmean(row.get(name) or 0.0 for row in rows)

    seconds = sum(row["time/step_s"] for row in rows)
    bias = [row["carry/length_bias"] for row in rows if row.get("carry/length_bias") is not None]
    return {
        "samples/s": sum(row["samples"] for row in rows) / seconds,
        "tokens/s": sum(row["tokens/response"] for row in rows) / seconds,
        "median step, s": statistics.median(row["time/step_s"] for row in rows),
        "trainer waits, s": mean("time/wait_rollout_s"),
        "carried groups": mean("carry/groups") / groups,
        "interrupted": mean("carry/interrupted"),
        "tokens older than 1": mean("carry/old_tokens"),
        "longest staleness": max(row["staleness/max"] for row in rows),
        "uncarried / all lengths": statistics.fmean(bias or [1.0]),
    }


def summarise(runs: list[dict[str, float]]) -> dict[str, dict[str, Any]]:
    """Median and range over the runs of an arm."""
    found = {}
    for name in COLUMNS:
        each = [run[name] for run in runs]
        found[name] = {
            "median": statistics.median(each),
            "min": min(each),
            "max": max(each),
            "runs": each,
        }
    return found


def table(result: dict[str, Any]) -> str:
    """The result in Markdown."""
    lines = [
        "| arm | " + " | ".join(COLUMNS) + " | times plain |",
        "| --- |" + " --- |" * (len(COLUMNS) + 1),
    ]
    plain = result["arms"]["plain"]["samples/s"]["median"]
    for arm, found in result["arms"].items():
        cells = [form.format(found[name]["median"]) for name, form in COLUMNS.items()]
        rate = found["samples/s"]
        cells[0] += f" ({rate['min']:.1f} to {rate['max']:.1f})"
        lines.append(f"| {arm} | " + " | ".join(cells) + f" | {rate['median'] / plain:.2f} |")
    told = f"Medians of {result['runs']} runs of each arm, in turns, the first {result['warmup']} steps dropped"
    told += ", the filling up at a run's beginning and the draining at its end included. "
    return (
        "\n".join([*lines, "", f"{told}{result['what']} {machine_line(result['machine'])}"]) + "\n"
    )


def plot(result: dict[str, Any], path: Path) -> None:
    """Two panels: samples/s of each arm, and the age of its tokens and its bias."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(
        1, 2, figsize=(9, 0.5 * len(result["arms"]) + 1.2), sharey=True
    )
    for row, found in enumerate(result["arms"].values()):
        rate = found["samples/s"]
        left.barh(row, rate["median"], 0.6, color="#4878cf")
        left.plot([rate["min"], rate["max"]], [row, row], color="black")
        for k, (name, colour) in enumerate(
            {"carried groups": "#ee854a", "tokens older than 1": "#8c8c8c"}.items()
        ):
            right.barh(
                row + 0.3 * k - 0.15,
                100 * found[name]["median"],
                0.28,
                color=colour,
                label=name if not row else None,
            )
    left.set_yticks(range(len(result["arms"])), list(result["arms"]))
    left.invert_yaxis()
    left.set_xlabel("samples/s (line: range of the runs)")
    right.set_xlabel("percent")
    right.legend(frameon=False)
    figure.savefig(path, dpi=150, bbox_inches="tight")


def main(argv: list[str] | None = None) -> int:
    """Parse, run the arms in turns, write. Returns the exit code."""
    parser = Parser(__doc__)
    parser.add_argument("--out", required=True, type=Path, help="folder for the results")
    parser.add_argument("--config", default=str(ROOT / "config/gsm8k_tiny_cpu.yaml"))
    parser.add_argument("--most", type=int, default=256, help="longest response, in tokens")
    parser.add_argument("--over", default="1.5,2", help="values of rollout.oversample, with commas")
    parser.add_argument("--runs", type=int, default=3, help="runs of each arm")
    parser.add_argument(
        "--warmup",
        type=int,
        default=0,
        help="steps dropped from each run; what is generated beside them still counts later",
    )
    args, overrides = parser.parse(argv)
    if args.runs < 1 or args.warmup < 0:
        parser.error(
            f"--runs {args.runs} --warmup {args.warmup}: at least 1 run, and 0 or more steps of warm-up"
        )
    try:
        arms = arms_of([float(factor) for factor in args.over.split(",") if factor])
        lengths, what = keys_of(f"longtail:{args.most}")
        keys = [*UNEVALUATED, *lengths, *overrides]
        for own in arms.values():
            cfg = load_config([f"config={args.config}", *keys, *own])
            validate(cfg)
    except (ConfigError, ValueError) as e:
        parser.error(str(e))
    args.out.mkdir(parents=True, exist_ok=True)
    result: dict[str, Any] = {
        "machine": machine(),
        "runs": args.runs,
        "warmup": args.warmup,
        "keys": keys,
    }
    result["what"] = (
        f"{cfg.data.train_batch_size} prompts x {cfg.rollout.n} samples a step; lengths {what}."
    )
    collected: dict[str, list[dict[str, float]]] = {arm: [] for arm in arms}
    for run in range(args.runs):
        order = list(arms.items())
        for number, (arm, own) in enumerate(order[run % len(order) :] + order[: run % len(order)]):
            try:
                rows = run_arm(args.config, [*keys, *own], args.out / f"run{run}_{number}", [])[
                    args.warmup :
                ]
            except RunFailed as e:
                print(e, file=sys.stderr)
                return e.code
            if not rows:
                parser.error(f"--warmup {args.warmup}: leaves none of the steps")
            collected[arm].append(figures(rows, cfg.data.train_batch_size))
            print(
                f"run {run + 1}, {arm}: {collected[arm][-1]['samples/s']:.1f} samples/s", flush=True
            )
    result["arms"] = {arm: summarise(runs) for arm, runs in collected.items()}
    (args.out / "result.json").write_text(json.dumps(result, indent=1) + "\n")
    (args.out / "result.md").write_text(table(result))
    plot(result, args.out / "long_tail.png")
    print(table(result))
    return 0


if __name__ == "__main__":
    sys.exit(main())
