"""The plots of `benchmarks.throughput`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from benchmarks.common.report import BLUE, GREEN, GREY, ORANGE, RED, pyplot, save_figure
from benchmarks.throughput.cases import DISAGGREGATED, ONE_STEP_OFF, OVERLAPPED, SHARED

PHASE_COLORS = {"T_gen": BLUE, "T_train": ORANGE, "T_sync": GREY}
ARM_COLORS = {ONE_STEP_OFF: "#a1c9f4", OVERLAPPED: BLUE}
LEGEND_BOTTOM = 0.98  # as a share of the figure's height


def _training_start(arm: str, sync: float, generate: float) -> float:
    """When training starts, in seconds from the start of the step.

    Synchronous arms run one phase after another. One step off, training starts with generation, or
    with the sync where that is overlapped.
    """
    if arm in (OVERLAPPED, SHARED):
        return 0.0
    if arm == ONE_STEP_OFF:
        return sync
    return sync + generate


def _draw_phases(axes: Any, y: float, name: str, arm: dict[str, Any]) -> None:
    """Two bars: the rollout group's phases above, the trainer's below; and the step as a vertical
    line.
    """
    sync = arm["T_sync"]["median"]
    generate = arm["T_gen"]["median"]
    train = arm["T_train"]["median"]
    axes.barh(y - 0.17, sync, 0.34, color=PHASE_COLORS["T_sync"])
    axes.barh(y - 0.17, generate, 0.34, left=sync, color=PHASE_COLORS["T_gen"])
    if name not in (OVERLAPPED, SHARED):
        axes.barh(y + 0.17, sync, 0.34, color=PHASE_COLORS["T_sync"])
    start = _training_start(name, sync, generate)
    axes.barh(y + 0.17, train, 0.34, left=start, color=PHASE_COLORS["T_train"])
    step = arm["step"]
    axes.plot([step["median"]] * 2, [y - 0.42, y + 0.42], color="black", linewidth=2)
    axes.plot([step["min"], step["max"]], [y, y], color="black", linewidth=1)


def _draw_rate(axes: Any, y: float, rate: dict[str, float]) -> None:
    below = rate["median"] - rate["min"]
    above = rate["max"] - rate["median"]
    error = [[below], [above]]
    axes.barh(y, rate["median"], 0.6, xerr=error, color=GREEN, ecolor="black", capsize=3)
    axes.text(rate["median"] / 2, y, f"{rate['median']:.4g}", va="center", ha="center")


def _legend(plt: Any, figure: Any) -> None:
    marks = [plt.Rectangle((0, 0), 1, 1, color=color) for color in PHASE_COLORS.values()]
    marks.append(plt.Line2D([], [], color="black", linewidth=2))
    marks.append(plt.Line2D([], [], color=RED, linestyle="--", linewidth=1))
    names = [*PHASE_COLORS, "step (and its range)", "max(T_gen, T_train), synchronous"]
    figure.legend(
        marks,
        names,
        ncols=5,
        loc="lower center",
        bbox_to_anchor=(0.5, LEGEND_BOTTOM),
        frameon=False,
        fontsize=9,
    )


def plot_case(case: dict[str, Any], path: Path) -> None:
    """One case: on the left the phases of each arm with its step and the limit, on the right
    samples/s.
    """
    plt = pyplot()
    arms = case["arms"]
    size = (10, 0.7 * len(arms) + 1.2)
    figure, (left, right) = plt.subplots(1, 2, figsize=size, width_ratios=(2, 1), sharey=True)
    for y, (name, arm) in enumerate(arms.items()):
        _draw_phases(left, y, name, arm)
        _draw_rate(right, y, arm["samples/s"])
    if "limit" in case["headline"]:
        left.axvline(case["headline"]["limit"], color=RED, linestyle="--", linewidth=1)
    left.set_yticks(range(len(arms)), list(arms))
    left.invert_yaxis()
    left.set_xlabel("seconds")
    right.set_xlabel("samples/s")
    _legend(plt, figure)
    figure.tight_layout()
    # After the layout, which would shrink the panels to make space for the title.
    title_y = LEGEND_BOTTOM + 0.55 / figure.get_figheight()
    figure.suptitle(case["name"], y=title_y, fontsize=11)
    save_figure(figure, path)


def _draw_headline(left: Any, right: Any, y: float, found: dict[str, float], labeled: bool) -> None:
    """The bars of one case in both panels. `labeled`: whether its marks stand in the legend."""
    for offset, (arm, color) in zip((-0.17, 0.17), ARM_COLORS.items(), strict=True):
        for axes, name in ((left, "step_over_limit"), (right, "speedup")):
            value = found.get(f"{name}/{arm}")
            if value is None:
                continue
            axes.barh(y + offset, value, 0.34, color=color, label=arm if labeled else None)
            axes.text(value, y + offset, f" {value:.2f}", va="center", fontsize=8)
    limit = found["speedup_at_the_limit"]
    label = "at the limit" if labeled else None
    right.plot([limit] * 2, [y - 0.4, y + 0.4], color=RED, linestyle="--", label=label)


def plot_headline(cases: list[dict[str, Any]], path: Path) -> None:
    """All cases, one step off.

    On the left step / max(T_gen, T_train). On the right the speedup over the disaggregated
    synchronous arm, with the speedup at the limit as a line.
    """
    plt = pyplot()
    size = (10, 0.6 * len(cases) + 1.4)
    figure, (left, right) = plt.subplots(1, 2, figsize=size, sharey=True)
    names = []
    for y, case in enumerate(cases):
        found = case["headline"]
        _draw_headline(left, right, y, found, labeled=y == 0)
        names.append(f"{case['name']}\n(T_gen / T_train {found['gen_over_train']:.2f})")
    left.axvline(1.0, color=RED, linestyle="--")
    left.set_yticks(range(len(cases)), names)
    left.invert_yaxis()
    left.set_xlabel("step / max(T_gen, T_train); 1.00 is the limit")
    right.set_xlabel(f"times as fast as {DISAGGREGATED}")
    for axes in (left, right):
        axes.margins(x=0.15)
    handles, labels = right.get_legend_handles_labels()
    figure.legend(
        handles,
        labels,
        ncols=3,
        loc="lower center",
        bbox_to_anchor=(0.5, LEGEND_BOTTOM),
        frameon=False,
        fontsize=9,
    )
    figure.tight_layout()
    save_figure(figure, path)
