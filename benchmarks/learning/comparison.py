"""Does training one step off cost learning? Reward at equal samples, arm against arm, seed by seed.

Both arms see the same prompts in the same steps, so equal steps are equal samples. One step off,
the reward of step N is that of the weights of step N-1, so the curve lies one step to the right
even if nothing is learned less well. Held-out rewards are compared at equal versions, that is after
equally many updates.
"""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any

from benchmarks.common.report import BLUE, GREEN, ORANGE, markdown_table, pyplot, save_figure

Run = dict[str, Any]
Runs = dict[str, dict[int, Run]]
"""Arm -> seed -> what `curves.summarize` returns."""

ARMS = {
    "config": [],
    "sync": ["pipeline.staleness=0"],
    "async": ["pipeline.staleness=1"],
}
"""Arm -> its config keys. `async` overlaps the weight sync unless `weight_sync.overlap` says
otherwise.
"""

STUDENT_T_95 = {
    1: 12.706,
    2: 4.303,
    3: 3.182,
    4: 2.776,
    5: 2.571,
    6: 2.447,
    7: 2.365,
    8: 2.306,
    9: 2.262,
}
"""Degrees of freedom -> quantile of Student's t, two-sided, 95 %."""

NORMAL_95 = 1.959964


def student_t_95(degrees_of_freedom: int) -> float:
    """The quantile of Student's t, two-sided, 95 %.

    Beyond the table it takes two terms of the expansion of Cornish and Fisher around the normal
    quantile, which is at most 0.003 too low.
    """
    if degrees_of_freedom in STUDENT_T_95:
        return STUDENT_T_95[degrees_of_freedom]
    z = NORMAL_95
    first_term = (z**3 + z) / (4 * degrees_of_freedom)
    second_term = (5 * z**5 + 16 * z**3 + 3 * z) / (96 * degrees_of_freedom**2)
    return z + first_term + second_term


def figures(run: Run, samples_are_older: bool = False) -> dict[str, float]:
    """The figures of one run.

    Args:
        run: what `curves.summarize` returns.
        samples_are_older: the samples of a step come from the weights before it (one step off).

    Returns:
        The mean reward over all samples, over the samples of those versions that both arms sampled
        with, and over the last five steps; and the held-out reward at the end.
    """
    reward = run["reward"]
    found = {"reward, all samples": statistics.fmean(reward)}
    if len(reward) > 1:
        equal_versions = reward[1:] if samples_are_older else reward[:-1]
        found["reward, equal versions"] = statistics.fmean(equal_versions)
    found["reward, last five steps"] = statistics.fmean(reward[-5:])
    if run["held out"]:
        found["held out at the end"] = run["held out"][-1]
    return found


def _interval_95(differences: list[float]) -> list[float] | None:
    """The 95 % confidence interval of the mean; None for a single value."""
    count = len(differences)
    if count == 1:
        return None
    standard_error = statistics.stdev(differences) / count**0.5
    half_width = student_t_95(count - 1) * standard_error
    mean = statistics.fmean(differences)
    return [mean - half_width, mean + half_width]


def compare(runs: Runs) -> dict[str, dict[str, Any]]:
    """Compare the arms "sync" and "async".

    Returns:
        Per figure: "values" of each arm by seed, "differences" async - sync of equal seeds, their
        "mean", and the 95 % "interval" of that mean (None with one seed).
    """
    sync_figures = {seed: figures(run) for seed, run in runs["sync"].items()}
    async_figures = {
        seed: figures(run, samples_are_older=True) for seed, run in runs["async"].items()
    }
    names = next(iter(sync_figures.values()))
    found = {}
    for name in names:
        sync_values = {seed: values[name] for seed, values in sync_figures.items()}
        async_values = {seed: values[name] for seed, values in async_figures.items()}
        differences = [async_values[seed] - sync_values[seed] for seed in sync_values]
        found[name] = {
            "values": {"sync": sync_values, "async": async_values},
            "differences": differences,
            "mean": statistics.fmean(differences),
            "interval": _interval_95(differences),
        }
    return found


def verdict(name: str, compared: dict[str, Any]) -> str:
    """What the seeds show about one figure, and no more.

    Args:
        name: of the figure.
        compared: its entry in what `compare` returns.
    """
    mean = compared["mean"]
    count = len(compared["differences"])
    if compared["interval"] is None:
        return f"{name}: async - sync = {mean:+.3f} with one seed, which tells nothing of chance."
    if not any(compared["differences"]):
        # Without spread an interval would mean nothing.
        return f"{name}: the same with each of {count} seeds."
    low, high = compared["interval"]
    difference = (
        f"{name}: async - sync = {mean:+.3f}, "
        f"95 % interval {low:+.3f} to {high:+.3f} ({count} seeds, paired)"
    )
    if low > 0:
        return f"{difference}: async is better."
    if high < 0:
        return f"{difference}: async is worse."
    excluded = max(0.0, -low)
    return f"{difference}: no difference is shown; a loss of more than {excluded:.3f} is excluded."


def table(runs: Runs, samples: float) -> str:
    """The comparison in Markdown. `samples`: those that each run trains on."""
    compared = compare(runs)
    rows = []
    for name, figure in compared.items():
        for arm, values in figure["values"].items():
            by_seed = ", ".join(f"{seed}: {value:.3f}" for seed, value in values.items())
            smallest = min(values.values())
            largest = max(values.values())
            mean = statistics.fmean(values.values())
            value_range = f"{smallest:.3f} to {largest:.3f}"
            rows.append([name, arm, f"{mean:.3f}", value_range, by_seed])
    lines = markdown_table(["figure", "arm", "mean of the seeds", "range", "by seed"], rows)
    lines += ["", f"Each run trains on {samples:,.0f} samples.", ""]
    lines += [f"- {verdict(name, figure)}" for name, figure in compared.items()]
    lines += [
        "",
        "One step off, a step's samples come from the version before, so its reward in training",
        "comes a step later. Equal versions leaves that out: all steps but async's first and",
        "sync's last.",
    ]
    return "\n".join(lines) + "\n"


def _draw_curves(
    axes: Any, arm: str, x: list[float], curves: list[list[float]], color: str
) -> None:
    """A thin line per seed and a thick one for their mean."""
    for curve in curves:
        axes.plot(x, curve, color=color, alpha=0.3, linewidth=1)
    mean = [statistics.fmean(values) for values in zip(*curves, strict=True)]
    label = f"{arm}, mean of {len(curves)} seeds"
    axes.plot(x, mean, color=color, linewidth=2, label=label)


def plot(runs: Runs, samples_per_step: float, path: Path) -> None:
    """Reward in training and held-out reward, over the samples trained on."""
    plt = pyplot()
    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 3.4), sharey=True)
    for (arm, seeds), color in zip(runs.items(), (BLUE, ORANGE, GREEN), strict=False):
        first_run = next(iter(seeds.values()))
        steps = range(1, len(first_run["reward"]) + 1)
        trained = [step * samples_per_step for step in steps]
        evaluated = [version * samples_per_step for version in first_run["versions"]]
        rewards = [run["reward"] for run in seeds.values()]
        held_out = [run["held out"] for run in seeds.values()]
        _draw_curves(left, arm, trained, rewards, color)
        _draw_curves(right, arm, evaluated, held_out, color)
    left.set(xlabel="samples trained on", title="reward in training, sampled")
    right.set(xlabel="samples trained on", title="reward held out", ylim=(-0.02, 1.02))
    for axes in (left, right):
        axes.grid(alpha=0.3)
    right.legend(frameon=False, loc="lower right")
    save_figure(figure, path)
