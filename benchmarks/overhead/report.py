"""What `benchmarks.overhead` reports of its cells."""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any

from benchmarks.common.report import markdown_table, pyplot
from benchmarks.overhead.cell import SAMPLES_PER_PROMPT, Cell

REFERENCE_STEP_S = 10.0
"""Seconds of the step of which the overhead is a share in the table."""


def cell_name(cell: Cell) -> str:
    """The cell's key in result.json: "REPLICAS x SAMPLES"."""
    return f"{cell.replicas} x {cell.samples}"


def _sizes(name: str) -> tuple[str, str]:
    """Replicas and samples of a cell's key."""
    replicas, samples = name.split(" x ")
    return replicas, samples


def medians(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """Medians over the repeats of a cell."""
    first = runs[0]
    numbers = [name for name, value in first.items() if isinstance(value, (int, float))]
    found: dict[str, Any] = {name: statistics.median(run[name] for run in runs) for name in numbers}
    found["phases_ms"] = {
        phase: statistics.median(run["phases_ms"][phase] for run in runs)
        for phase in first["phases_ms"]
    }
    found["runs"] = [run["cpu_ms"] for run in runs]
    return found


def _cells(figures: dict[str, Any]) -> list[str]:
    cpu_ms = figures["cpu_ms"]
    percent = 100 * cpu_ms / (1e3 * REFERENCE_STEP_S)
    return [
        f"{cpu_ms:.0f}",
        f"{percent:.2f}",
        f"{figures['excess_ms']:.0f}",
        f"{figures['generate_excess_ms']:.0f}",
        f"{figures['calls']:.0f}",
    ]


def table(result: dict[str, Any]) -> str:
    """The result in Markdown."""
    arms = result["arms"]
    headings = ["replicas", "samples"]
    for arm in arms:
        headings += [
            f"{arm}: CPU ms",
            f"% of {REFERENCE_STEP_S:g} s",
            "step longer by, ms",
            "generation longer by, ms",
            "calls",
        ]
    names = list(next(iter(arms.values())))
    rows = []
    for name in names:
        row = [*_sizes(name)]
        for cells in arms.values():
            row += _cells(cells[name])
        rows.append(row)
    cell = result["cell"]
    loggers = "on" if cell["loggers"] else "off"
    lines = markdown_table(headings, rows)
    lines += [
        "",
        f"{cell['tokens']} tokens per sample, {SAMPLES_PER_PROMPT} samples per prompt, "
        f"{cell['ranks']} ranks, {cell['routing']} routing, loggers {loggers}. Medians of "
        f"{result['repeats']} runs, alternating. Of the CPU time, in ms:",
        "",
    ]
    for arm, cells in arms.items():
        phases = cells[names[-1]]["phases_ms"]
        in_words = ", ".join(
            f"{phase} {milliseconds:.0f}" for phase, milliseconds in phases.items()
        )
        lines.append(f"- {arm}, {names[-1]}: {in_words}")
    return "\n".join(lines) + "\n"


def plot(result: dict[str, Any], path: Path) -> None:
    """CPU time per step over samples, a line per number of replicas."""
    plt = pyplot()
    figure, axes = plt.subplots(figsize=(7, 4.5))
    for (arm, cells), style in zip(result["arms"].items(), ("-o", "--x"), strict=False):
        lines: dict[int, list[tuple[int, float]]] = {}
        for name, figures in cells.items():
            replicas, samples = _sizes(name)
            lines.setdefault(int(replicas), []).append((int(samples), figures["cpu_ms"]))
        for replicas, points in lines.items():
            samples_of_points, milliseconds = zip(*points, strict=True)
            label = f"{arm}, {replicas} replicas"
            axes.loglog(samples_of_points, milliseconds, style, label=label)
    one_percent_ms = 10 * REFERENCE_STEP_S
    axes.axhline(one_percent_ms, color="grey", linewidth=0.8)
    axes.set_xlabel("samples per step")
    axes.set_ylabel(f"CPU of the driver per step, ms (line: 1 % of {REFERENCE_STEP_S:g} s)")
    axes.legend(fontsize=7)
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    plt.close(figure)
