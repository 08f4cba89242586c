"""What `benchmarks.staleness` reports of its runs: one table and one picture."""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any

from benchmarks.common.machine import machine_line
from benchmarks.common.report import BLUE, ORANGE, markdown_table, pyplot, save_figure, spread
from benchmarks.staleness.arms import CORRECTIONS

SPEED_COLUMNS = {
    "samples/s": "{:.1f}",
    "rollout idle": "{:.1%}",
    "rollout syncs": "{:.1%}",
    "trainer idle": "{:.1%}",
    "mean age": "{:.2f}",
    "oldest": "{:.0f}",
}
"""Name of a figure of a timed run -> its format."""

REFERENCE = "k=1 wait"
"""The default, one step off, with which the others are compared."""

Result = dict[str, Any]


def _speed_cells(result: Result, arm: str) -> list[str]:
    runs = list(result["speed"].get(arm, {}).values())
    if not runs:
        return ["-"] * (len(SPEED_COLUMNS) + 1)
    cells = []
    for name, form in SPEED_COLUMNS.items():
        cells.append(form.format(statistics.median(run[name] for run in runs)))
    rates = spread([run["samples/s"] for run in runs])
    if len(runs) > 1:
        cells[0] += f" ({rates['min']:.1f} to {rates['max']:.1f})"
    reference = [run["samples/s"] for run in result["speed"].get(REFERENCE, {}).values()]
    times = f"{rates['median'] / statistics.median(reference):.2f}" if reference else "-"
    return [cells[0], times, *cells[1:]]


def _learning_cell(result: Result, arm: str, correction: str) -> str:
    runs = list(result["learning"].get(f"{arm}, {correction}", {}).values())
    if not runs:
        return "-"
    rewards = [run["reward, all samples"] for run in runs]
    cell = f"{statistics.fmean(rewards):.3f}"
    if len(runs) > 1:
        cell += f" ({min(rewards):.3f} to {max(rewards):.3f})"
    held_out = [run["held out"] for run in runs if "held out" in run]
    if held_out:
        cell += f", {statistics.fmean(held_out):.3f}"
    return cell


def _arm_order(name: str) -> tuple[str, int]:
    age, _, mode = name.removeprefix("k=").partition(" ")
    return mode, int(age)


def arm_names(result: Result) -> list[str]:
    """The arms that have figures: by mode (wait last in the alphabet comes first), then by age."""
    names = set(result["speed"]) | {name.partition(",")[0] for name in result["learning"]}
    modes = ["wait", "recompute", "keep"]
    return sorted(names, key=lambda name: (modes.index(_arm_order(name)[0]), _arm_order(name)[1]))


def table(result: Result) -> str:
    """The result in Markdown."""
    shown = [c for c in CORRECTIONS if any(n.endswith(f", {c}") for n in result["learning"])]
    headings = ["arm", "samples/s", f"times {REFERENCE}", *list(SPEED_COLUMNS)[1:]]
    headings += [f"reward, {correction}" for correction in shown]
    rows = []
    for arm in arm_names(result):
        learning = [_learning_cell(result, arm, correction) for correction in shown]
        rows.append([arm, *_speed_cells(result, arm), *learning])
    lines = markdown_table(headings, rows)
    lines += [
        "",
        f"Speed: {result['what']} Medians over the runs, without the start and the end of each. "
        "Idle: the share of the time in which the replicas generate nothing, and in which the "
        "trainer does not train; the replicas' syncs are a part of theirs. Ages in versions.",
        "",
        f"Reward: {result['learns']} The mean over all samples of a run, its mean over the seeds "
        "(its range), then the held-out reward at the end.",
        "",
        machine_line(result["machine"]),
    ]
    return "\n".join(lines) + "\n"


def plot(result: Result, path: Path) -> None:
    """On the left samples/s of each arm, on the right its reward without a correction."""
    names = arm_names(result)
    size = (9, 0.35 * len(names) + 1.2)
    figure, (left, right) = pyplot().subplots(1, 2, figsize=size, sharey=True)
    for y, name in enumerate(names):
        rates = [run["samples/s"] for run in result["speed"].get(name, {}).values()]
        if rates:
            left.barh(y, statistics.median(rates), 0.6, color=BLUE)
            left.plot([min(rates), max(rates)], [y, y], color="black")
        runs = result["learning"].get(f"{name}, none", {}).values()
        rewards = [run["reward, all samples"] for run in runs]
        if rewards:
            right.barh(y, statistics.fmean(rewards), 0.6, color=ORANGE)
            right.plot([min(rewards), max(rewards)], [y, y], color="black")
    left.set_yticks(range(len(names)), names)
    left.invert_yaxis()
    left.set_xlabel("samples/s (line: range of the runs)")
    right.set_xlabel("reward, all samples (line: range of the seeds)")
    save_figure(figure, path, dpi=150)
