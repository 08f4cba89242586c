"""What the weight-sync benchmark reports of its measurements: medians, table, plot."""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any

from benchmarks.common.report import (
    BLUE,
    GREY,
    ORANGE,
    RED,
    markdown_table,
    pyplot,
    row_not_run,
    save_figure,
    spread,
    with_range,
)

PHASE_COLORS = {
    "gather": RED,
    "write": "#937860",
    "pause": "#cccccc",
    "prepare": GREY,
    "wait": "#a1c9f4",
    "wire": BLUE,
    "apply": "#da8bc3",
    "verify": "#55a868",
    "load": ORANGE,
    "finish": "#8172b3",
}
HEADINGS = [
    "arm",
    "seconds",
    "times raw",
    "of a receiver's time",
    "wire, in parallel",
    "of a sender's",
    "MB sent",
    "extra memory, MB: sender",
    "receiver",
]
NEGLIGIBLE_S = 1e-5


def medians(rows: list[dict[str, float]]) -> dict[str, float]:
    """The median of each key, over the rows that have it."""
    keys = dict.fromkeys(key for row in rows for key in row)
    return {key: statistics.median(row[key] for row in rows if key in row) for key in keys}


def summarize(runs: list[Any], raw_seconds: list[float]) -> dict[str, Any]:
    """Summarize one arm.

    Args:
        runs: what `arms.Arm.run` returned in each repeat.
        raw_seconds: of the raw broadcast in the same repeats.
    """
    ratios = [run.seconds / raw for run, raw in zip(runs, raw_seconds, strict=True)]
    return {
        "seconds": spread([run.seconds for run in runs], "all"),
        "ratio_to_raw": spread(ratios, "all"),
        "split": medians([run.split for run in runs]),
        "sender": medians([run.sender for run in runs]),
        "extra": medians([run.extra for run in runs]),
        "runs": [vars(run) for run in runs],
    }


def _phases_in_words(split: dict[str, float]) -> str:
    phases = [f"{name} {seconds:.3g}" for name, seconds in split.items() if seconds > NEGLIGIBLE_S]
    return ", ".join(phases) or "-"


def _row(name: str, arm: dict[str, Any], model_bytes: float) -> list[str]:
    extra = arm["extra"]
    memory = arm["memory"]
    wire = extra.get("wire")
    sent_bytes = extra.get("bytes", model_bytes)
    return [
        name,
        with_range(arm["seconds"], "{:.3g}"),
        with_range(arm["ratio_to_raw"], "{:.2f}"),
        _phases_in_words(arm["split"]),
        f"{wire:.3g}" if wire else "-",
        _phases_in_words(arm["sender"]),
        f"{sent_bytes / 1e6:.3g}",
        f"{memory['sender'] / 1e6:.0f}" if memory else "-",
        f"{memory['receiver'] / 1e6:.0f}" if memory else "-",
    ]


def table(result: dict[str, Any]) -> str:
    """The result in Markdown."""
    rows = [_row(name, arm, result["bytes"]) for name, arm in result["arms"].items()]
    lines = [result["what"], "", *markdown_table(HEADINGS, rows)]
    for name, reason in result["skipped"].items():
        lines.append(row_not_run(name, f"not run: {reason}", len(HEADINGS)))
    lines += [
        "",
        f"Medians of {result['repeats']} repeats (range), each arm against the raw broadcast of",
        "the same repeat. A receiver's phases follow one another, each that of the slowest",
        "receiver. If the wire runs in parallel, `wait` is the part of it that was not hidden.",
        "Memory: resident, in the largest process of a side, from before the arm's setup to the",
        "peak of its first update. A file in /dev/shm is not in it, the product's canary in the",
        "engine is. The canary checked every update but the raw one, and that an arm's first",
        "update changed the engine's weights.",
        "",
    ]
    lines += [f"- {name}: {arm['said']}" for name, arm in result["arms"].items()]
    return "\n".join(lines) + "\n"


class _Bars:
    """Draws the bars of the arms. Each mark gets one entry in the legend."""

    def __init__(self, axes: Any) -> None:
        self.axes = axes
        self.labeled: set[str] = set()

    def _label(self, name: str) -> str | None:
        if name in self.labeled:
            return None
        self.labeled.add(name)
        return name

    def draw(self, y: int, arm: dict[str, Any]) -> None:
        """The phases of a receiver, the wire below them, and the median of the whole as a line."""
        left = 0.0
        for phase, color in PHASE_COLORS.items():
            seconds = arm["split"].get(phase, 0.0)
            if seconds:
                label = self._label(phase)
                self.axes.barh(y, seconds, 0.6, left=left, color=color, label=label)
                left += seconds
        wire = arm["extra"].get("wire")
        if wire:
            label = self._label("wire, in parallel")
            color = PHASE_COLORS["wire"]
            self.axes.barh(y + 0.36, wire, 0.12, color=color, alpha=0.6, label=label)
        median = arm["seconds"]["median"]
        label = self._label("whole")
        self.axes.plot([median] * 2, [y - 0.4, y + 0.4], color="black", label=label)


def plot(result: dict[str, Any], path: Path) -> None:
    """What fills a receiver's time in each arm, and the raw broadcast as a line."""
    arms = {name: arm for name, arm in result["arms"].items() if name != "raw"}
    raw_seconds = result["arms"]["raw"]["seconds"]["median"]
    figure, axes = pyplot().subplots(figsize=(7, 1.2 + 0.5 * len(arms)))
    bars = _Bars(axes)
    for y, arm in enumerate(arms.values()):
        bars.draw(y, arm)
    axes.axvline(raw_seconds, color="black", linestyle=":", label="raw broadcast")
    axes.set_yticks(range(len(arms)), list(arms))
    axes.invert_yaxis()
    axes.set_xlabel("seconds")
    axes.legend(ncols=5, loc="lower center", bbox_to_anchor=(0.5, 1.0), frameon=False)
    save_figure(figure, path, dpi=150)
