"""What `benchmarks.rollout` reports."""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any

from benchmarks.common.machine import machine_line
from benchmarks.common.report import (
    BLUE,
    GREEN,
    GREY,
    ORANGE,
    RED,
    markdown_table,
    pyplot,
    save_figure,
    spread,
    with_range,
)
from benchmarks.rollout.host import PARTS

BARE = "bare vLLM"
REPLICA = "replica"

CORE = ("schedule", "output update", "encoding")
"""What the engine's core does between two steps; the thread that encodes shares its interpreter."""


def core_milliseconds(repeat: dict[str, float], rows: int) -> float:
    """Of a step with a token for each row."""
    return 1e-3 * rows * sum(repeat[part] for part in CORE)


def _host_lines(result: dict[str, Any]) -> list[str]:
    rows = []
    for arm, repeats in result["host"].items():
        cells = [with_range(spread([one[part] for one in repeats]), "{:.2f}") for part in PARTS]
        steps = [core_milliseconds(one, result["rows"]) for one in repeats]
        rows.append([arm, *cells, with_range(spread(steps), "{:.1f}")])
    headings = ["microseconds per token", *PARTS, f"core, ms per step of {result['rows']}"]
    own = with_range(spread(result["layers"]), "{:.2f}")
    return [
        *markdown_table(headings, rows),
        "",
        f"From vLLM's answer to the samples of a call (our layers): {own} microseconds per token.",
        "",
    ]


def _speed_lines(result: dict[str, Any]) -> list[str]:
    speeds = result["end_to_end"]
    pairs = zip(speeds[REPLICA], speeds[BARE], strict=True)
    rows = [[arm, with_range(spread(values), "{:,.0f}")] for arm, values in speeds.items()]
    ratio = with_range(spread([replica / bare for replica, bare in pairs]), "{:.3f}")
    return [
        *markdown_table([f"end to end, {result['device']}", "tokens/s"], rows),
        "",
        f"Replica / bare vLLM in the same repeat: {ratio}.",
        "",
    ]


def table(result: dict[str, Any]) -> str:
    """The result in Markdown."""
    lines = ["Median (range) of the repeats.", ""]
    if "host" in result:
        lines += _host_lines(result)
    if "end_to_end" in result:
        lines += _speed_lines(result)
    return "\n".join([*lines, machine_line(result["machine"])]) + "\n"


def plot(result: dict[str, Any], path: Path) -> None:
    """Bars: the parts of the host's work, and tokens per second; of what was measured."""
    drawings = {"host": _draw_host, "end_to_end": _draw_speed}
    measured = [name for name in drawings if name in result]
    width = 5 * len(measured)
    figure, axes = pyplot().subplots(1, len(measured), figsize=(width, 3.2), squeeze=False)
    for name, axis in zip(measured, axes[0], strict=True):
        drawings[name](result[name], axis)
    figure.tight_layout()
    save_figure(figure, path)


def _draw_host(arms: dict[str, list[dict[str, float]]], axis: Any) -> None:
    left = dict.fromkeys(arms, 0.0)
    for part, color in zip(PARTS, (BLUE, ORANGE, GREEN, GREY, RED), strict=True):
        widths = [statistics.median(one[part] for one in repeats) for repeats in arms.values()]
        axis.barh(list(arms), widths, left=list(left.values()), color=color, label=part)
        left = {arm: left[arm] + width for arm, width in zip(arms, widths, strict=True)}
    axis.legend(fontsize="small")
    axis.set_xlabel("microseconds per token")


def _draw_speed(arms: dict[str, list[float]], axis: Any) -> None:
    for arm, values in arms.items():
        axis.bar(arm, statistics.median(values), color=BLUE)
    axis.set_ylabel("tokens/s")
