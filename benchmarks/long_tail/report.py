"""What `benchmarks.long_tail` reports of its runs."""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any

from benchmarks.common.machine import machine_line
from benchmarks.common.report import (
    BLUE,
    GREY,
    ORANGE,
    markdown_table,
    pyplot,
    save_figure,
    spread,
)

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
    "open requests": "{:.0f}",
    "preemptions": "{:.0f}",
}
"""Name of a figure -> its format. "Carried" are the groups of prompts that another step has
begun.
"""


def figures(rows: list[Row], groups: int) -> dict[str, float]:
    """The figures of one run.

    Rates are sums over sums: with partial rollouts, steps with much and with little work alternate.

    Args:
        rows: the steps after the warm-up.
        groups: prompts of a step.
    """

    def mean(name: str) -> float:
        return statistics.fmean(row.get(name) or 0.0 for row in rows)

    seconds = sum(row["time/step_s"] for row in rows)
    length_bias = [
        row["carry/length_bias"] for row in rows if row.get("carry/length_bias") is not None
    ]
    return {
        "samples/s": sum(row["samples"] for row in rows) / seconds,
        "tokens/s": sum(row["tokens/response"] for row in rows) / seconds,
        "median step, s": statistics.median(row["time/step_s"] for row in rows),
        "trainer waits, s": mean("time/wait_rollout_s"),
        "carried groups": mean("carry/groups") / groups,
        "interrupted": mean("carry/interrupted"),
        "tokens older than 1": mean("carry/old_tokens"),
        "longest staleness": max(row["staleness/max"] for row in rows),
        "uncarried / all lengths": statistics.fmean(length_bias or [1.0]),
        "open requests": max(row.get("rollout/open_requests") or 0.0 for row in rows),
        "preemptions": mean("rollout/preemptions"),
    }


def summarize(runs: list[dict[str, float]]) -> dict[str, dict[str, Any]]:
    """Median and range of each figure over the runs of an arm."""
    return {name: spread([run[name] for run in runs]) for name in COLUMNS}


def _cells(arm: dict[str, dict[str, Any]], plain_rate: float) -> list[str]:
    cells = [form.format(arm[name]["median"]) for name, form in COLUMNS.items()]
    rate = arm["samples/s"]
    cells[0] += f" ({rate['min']:.1f} to {rate['max']:.1f})"
    return [*cells, f"{rate['median'] / plain_rate:.2f}"]


def table(result: dict[str, Any]) -> str:
    """The result in Markdown."""
    arms = result["arms"]
    plain_rate = arms["plain"]["samples/s"]["median"]
    rows = [[name, *_cells(arm, plain_rate)] for name, arm in arms.items()]
    lines = markdown_table(["arm", *COLUMNS, "times plain"], rows)
    lines += [
        "",
        f"Medians of {result['runs']} runs of each arm, the arms alternating; the first "
        f"{result['warmup']} steps are dropped. The start of a run, which fills the pipeline, and "
        f"its end, which drains it, are included. {result['what']} "
        f"{machine_line(result['machine'])}",
    ]
    return "\n".join(lines) + "\n"


def plot(result: dict[str, Any], path: Path) -> None:
    """On the left samples/s of each arm, on the right its carried groups and its old tokens."""
    arms = result["arms"]
    size = (9, 0.5 * len(arms) + 1.2)
    figure, (left, right) = pyplot().subplots(1, 2, figsize=size, sharey=True)
    for y, arm in enumerate(arms.values()):
        rate = arm["samples/s"]
        left.barh(y, rate["median"], 0.6, color=BLUE)
        left.plot([rate["min"], rate["max"]], [y, y], color="black")
        for name, offset, color in (
            ("carried groups", -0.15, ORANGE),
            ("tokens older than 1", 0.15, GREY),
        ):
            percent = 100 * arm[name]["median"]
            label = name if y == 0 else None
            right.barh(y + offset, percent, 0.28, color=color, label=label)
    left.set_yticks(range(len(arms)), list(arms))
    left.invert_yaxis()
    left.set_xlabel("samples/s (line: range of the runs)")
    right.set_xlabel("percent")
    right.legend(frameon=False)
    save_figure(figure, path, dpi=150)
