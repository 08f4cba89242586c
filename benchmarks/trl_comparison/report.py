"""What `benchmarks.trl_comparison` reports of its runs."""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any

from benchmarks.common.machine import machine_line
from benchmarks.common.report import (
    BLUE,
    ORANGE,
    markdown_table,
    pyplot,
    row_not_run,
    save_figure,
    spread,
    with_range,
)

OURS = "one_step_off"
FIGURES = {
    "step, s": "{:.3f}",
    "samples/s": "{:,.0f}",
    "response tokens": "{:.1f}",
    "reward": "{:.3f}",
}
"""Name of a figure -> its format."""


def figures(rows: list[dict[str, Any]]) -> dict[str, float]:
    """The figures of one run."""
    return {
        "step, s": statistics.median(row["time/step_s"] for row in rows),
        "samples/s": sum(row["samples"] for row in rows) / sum(row["time/step_s"] for row in rows),
        "response tokens": statistics.fmean(row["response_length/mean"] for row in rows),
        "reward": statistics.fmean(row["reward/mean"] for row in rows),
    }


def summarize(runs: list[dict[str, float]]) -> dict[str, Any]:
    """Median and range of each figure over the runs of an arm."""
    return {name: spread([run[name] for run in runs]) for name in FIGURES}


def headline(arms: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """How many times the samples/s of TRL's best arm ours are. Empty if one of the two did not
    run.
    """
    rates = {arm: found["samples/s"]["median"] for arm, found in arms.items()}
    trl_rates = {arm: rate for arm, rate in rates.items() if arm.startswith("TRL")}
    if OURS not in rates or not trl_rates:
        return {}
    best = max(trl_rates, key=lambda arm: trl_rates[arm])
    return {"best of TRL": best, "times as many samples/s": rates[OURS] / trl_rates[best]}


def table(result: dict[str, Any]) -> str:
    """The result in Markdown."""
    rows = []
    for arm, found in result["arms"].items():
        rows.append([arm, *(with_range(found[name], form) for name, form in FIGURES.items())])
    lines = [machine_line(result["machine"]), "", *markdown_table(["arm", *FIGURES], rows)]
    for arm, reason in result["failed"].items():
        lines.append(row_not_run(arm, f"failed: {reason}", len(FIGURES) + 1))
    lines += [
        "",
        f"Medians over {result['runs']} run(s) of each arm, the arms alternating (range); the "
        f"first {result['warmup']} steps of each are dropped. All arms may use the cores "
        f"{result['cores']}, and no others.",
    ]
    found = result["headline"]
    if found:
        times = found["times as many samples/s"]
        lines += [
            "",
            f"one_step_off makes {times:.2f} times the samples/s of {found['best of TRL']}.",
        ]
    settings = [[f"`{name}`", str(value)] for name, value in result["trl_settings"].items()]
    config = Path(result["config"]).name
    lines += [
        "",
        *markdown_table(["TRL's setting", "value"], settings),
        "",
        f"Keys of the run over `{config}`: {', '.join(result['keys'])}.",
    ]
    return "\n".join(lines) + "\n"


def plot(result: dict[str, Any], path: Path) -> None:
    """Samples/s of each arm, with the range of its runs."""
    arms = result["arms"]
    figure, axes = pyplot().subplots(figsize=(7, 0.6 * len(arms) + 0.9))
    for y, (arm, found) in enumerate(arms.items()):
        rate = found["samples/s"]
        median = rate["median"]
        error = [[median - rate["min"]], [rate["max"] - median]]
        color = ORANGE if arm.startswith("TRL") else BLUE
        axes.barh(y, median, 0.6, xerr=error, color=color, ecolor="black", capsize=3)
        axes.text(median / 2, y, f"{median:,.0f}", va="center", ha="center", color="white")
    axes.set_yticks(range(len(arms)), list(arms))
    axes.invert_yaxis()
    axes.set_xlabel("samples/s")
    save_figure(figure, path)
