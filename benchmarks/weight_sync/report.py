"""What the weight-sync benchmark makes of its measurements: medians, table, picture."""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any

PHASES = {
    "gather": "#c44e52",
    "write": "#937860",
    "pause": "#cccccc",
    "prepare": "#8c8c8c",
    "wait": "#a1c9f4",
    "wire": "#4878cf",
    "apply": "#da8bc3",
    "verify": "#55a868",
    "load": "#ee854a",
    "finish": "#8172b3",
}


def spread(values: list[float]) -> dict[str, Any]:
    """Median, range and all of them."""
    return {
        "median": statistics.median(values),
        "min": min(values),
        "max": max(values),
        "all": values,
    }


def medians(rows: list[dict[str, float]]) -> dict[str, float]:
    """The median of each key, over the rows that have it."""
    keys = dict.fromkeys(key for row in rows for key in row)
    return {key: statistics.median(row[key] for row in rows if key in row) for key in keys}


def summarise(runs: list[Any], raws: list[float]) -> dict[str, Any]:
    """One arm's runs (`sync_arms.Took`), against the raw broadcast of the same repeat."""
    ratios = [run.seconds / raw for run, raw in zip(runs, raws, strict=True)]
    return {
        "seconds": spread([run.seconds for run in runs]),
        "ratio_to_raw": spread(ratios),
        "split": medians([run.split for run in runs]),
        "sender": medians([run.sender for run in runs]),
        "extra": medians([run.extra for run in runs]),
        "runs": [vars(run) for run in runs],
    }


def _phases(split: dict[str, float]) -> str:
    return (
        ", ".join(f"{name} {seconds:.3g}" for name, seconds in split.items() if seconds > 1e-5)
        or "-"
    )


def table(result: dict[str, Any]) -> str:
    """The result in Markdown."""
    heads = "seconds | times raw | of a receiver's time | wire, beside it | of a sender's | MB sent"
    heads += " | extra memory, MB: sender | receiver"
    lines = [result["what"], "", f"| arm | {heads} |", "| --- |" + " --- |" * 8]
    for name, arm in result["arms"].items():
        t, r, memory = arm["seconds"], arm["ratio_to_raw"], arm["memory"]
        cells = [
            f"{t['median']:.3g} ({t['min']:.3g} to {t['max']:.3g})",
            f"{r['median']:.2f} ({r['min']:.2f} to {r['max']:.2f})",
            _phases(arm["split"]),
            f"{arm['extra']['wire']:.3g}" if arm["extra"].get("wire") else "-",
            _phases(arm["sender"]),
            f"{arm['extra'].get('bytes', result['bytes']) / 1e6:.3g}",
            *(f"{memory[side] / 1e6:.0f}" if memory else "-" for side in ("sender", "receiver")),
        ]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    lines += [f"| {name} | not run: {why} |" + " |" * 7 for name, why in result["skipped"].items()]
    lines += [
        "",
        f"Medians of {result['repeats']} repeats (range), each arm against the raw broadcast of the same repeat.",
        "A receiver's phases follow one another, each that of the slowest receiver. Where the wire is beside them, they",
        "show only what was not hidden of it, as wait. Memory: resident, the largest process of a side, from before the",
        "arm's setup to its first update's peak; a file in /dev/shm is not in it, the product's canary in the engine is. Every update but the raw one was checked",
        "by the canary, and an arm's first one to change it.",
        "",
    ]
    lines += [f"- {name}: {arm['said']}" for name, arm in result["arms"].items()]
    return "\n".join(lines) + "\n"


def plot(result: dict[str, Any], path: Path) -> None:
    """Bars: what fills a receiver's time in each arm, its whole, and the raw broadcast as a line."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    arms = {name: arm for name, arm in result["arms"].items() if name != "raw"}
    figure, axes = pyplot.subplots(figsize=(7, 1.2 + 0.5 * len(arms)))
    named: set[str] = set()
    for row, arm in enumerate(arms.values()):
        left = 0.0
        for phase, colour in PHASES.items():
            if seconds := arm["split"].get(phase, 0.0):
                label = None if phase in named else phase
                axes.barh(row, seconds, 0.6, left=left, color=colour, label=label)
                named.add(phase)
                left += seconds
        if beside := arm["extra"].get("wire"):
            label = None if "beside" in named else "wire, beside"
            axes.barh(row + 0.36, beside, 0.12, color=PHASES["wire"], alpha=0.6, label=label)
            named.add("beside")
        label = "whole" if row == 0 else None
        axes.plot(
            [arm["seconds"]["median"]] * 2, [row - 0.4, row + 0.4], color="black", label=label
        )
    axes.axvline(
        result["arms"]["raw"]["seconds"]["median"],
        color="black",
        linestyle=":",
        label="raw broadcast",
    )
    axes.set_yticks(range(len(arms)), list(arms))
    axes.invert_yaxis()
    axes.set_xlabel("seconds")
    axes.legend(ncols=5, loc="lower center", bbox_to_anchor=(0.5, 1.0), frameon=False)
    figure.savefig(path, dpi=150, bbox_inches="tight")
    pyplot.close(figure)
