"""What the runs of one arm show: reward and held-out reward over the steps, per seed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from benchmarks.common.report import markdown_table, pyplot, save_figure

Run = dict[str, Any]

TOOL_CALLS = "agent/used_tools/mean"
PANEL_TITLES = {"reward": "reward in training, sampled", "tool calls": "share that calls a tool"}


def summarize(rows: list[dict[str, Any]], evaluations: list[dict[str, Any]]) -> Run:
    """Summarize one run.

    Args:
        rows: metrics.jsonl of the run.
        evaluations: evaluations.jsonl of the run.

    Returns:
        "reward": of each step. "versions" and "held out": each evaluated weight version and its
        reward. "tool calls", where the run has tools: the share of each step's samples that call
        one.
    """
    run = {
        "reward": [row["reward/mean"] for row in rows],
        "versions": [evaluation["val/version"] for evaluation in evaluations],
        "held out": [evaluation["val/reward"] for evaluation in evaluations],
    }
    if TOOL_CALLS in rows[0]:
        run["tool calls"] = [row[TOOL_CALLS] for row in rows]
    return run


def _step_curves(runs: dict[int, Run]) -> list[str]:
    """Names of the curves with a value per step."""
    first_run = next(iter(runs.values()))
    return [name for name in PANEL_TITLES if name in first_run]


def _cells(run: Run, names: list[str]) -> list[str]:
    cells = []
    for name in names:
        for steps in (run[name][:5], run[name][-5:]):
            cells.append(f"{sum(steps) / len(steps):.3f}")
    if run["held out"]:
        return [*cells, f"{run['held out'][0]:.3f}", f"{run['held out'][-1]:.3f}"]
    return [*cells, "-", "-"]


def table(runs: dict[int, Run]) -> str:
    """First and last figures of each seed in Markdown. Those of steps are means of five."""
    names = _step_curves(runs)
    headings = ["seed"]
    for name in names:
        headings += [f"{name}, first five steps", f"{name}, last five steps"]
    headings += ["held out before", "after"]
    rows = [[str(seed), *_cells(run, names)] for seed, run in runs.items()]
    return "\n".join(markdown_table(headings, rows)) + "\n"


def plot(runs: dict[int, Run], path: Path) -> None:
    """A line per seed.

    One panel has the reward of each step, one the tool calls if there are any, and the last one the
    held-out reward of each evaluated weight version.
    """
    plt = pyplot()
    names = _step_curves(runs)
    size = (4 * len(names) + 4, 2.8)
    figure, panels = plt.subplots(1, len(names) + 1, figsize=size, sharey=True)
    held_out = panels[-1]
    for seed, run in runs.items():
        label = f"seed {seed}"
        for name, axes in zip(names, panels, strict=False):
            steps = range(1, len(run[name]) + 1)
            axes.plot(steps, run[name], label=label)
            axes.set(xlabel="step", title=PANEL_TITLES[name])
        held_out.plot(run["versions"], run["held out"], marker="o", markersize=3, label=label)
    held_out.set(xlabel="weight version", title="reward held out", ylim=(-0.02, 1.02))
    for axes in panels:
        axes.grid(alpha=0.3)
    held_out.legend(frameon=False, loc="lower right")
    save_figure(figure, path)
