"""Is learning hurt by being one step off? What `benchmarks.learning --arms sync async` makes of its runs: reward at
equal samples, arm against arm, seed by seed.

Both arms see the same prompts in the same steps, so that equal steps are equal samples. One step off, the reward of step N
is that of the weights of step N-1: the curve lies one step to the right even where nothing is lost. Held-out rewards are
of equal versions: as many updates have been made.
"""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any

Run = dict[str, Any]
ARMS = {
    "config": [],
    "sync": ["pipeline.staleness=0"],
    "async": ["pipeline.staleness=1"],
}
"""Arm -> its keys over the config; async overlaps the sync unless `weight_sync.overlap` says otherwise."""

# Student's t, two-sided 95 %, by degrees of freedom.
T_95 = {1: 12.706, 2: 4.303, 3: 3.182, 4: 2.776, 5: 2.571, 6: 2.447, 7: 2.365, 8: 2.306, 9: 2.262}


def quantile(freedom: int) -> float:
    """Of Student's t, two-sided 95 %. Beyond the table by two terms of Cornish and Fisher's series, 0.003 too low at most."""
    z = 1.959964
    series = z + (z**3 + z) / (4 * freedom) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * freedom**2)
    return T_95.get(freedom, series)


def figures(run: Run, lag: int = 0) -> dict[str, float]:
    """Of one run: reward as a mean over all its samples, over the samples of those versions that both arms sampled with,
    over the last five steps, and held out at the end. `lag`: by how many steps the samples are older."""
    reward = run["reward"]
    found = {"reward, all samples": statistics.fmean(reward)}
    if len(reward) > 1:
        found["reward, equal versions"] = statistics.fmean(reward[1:] if lag else reward[:-1])
    found["reward, last five steps"] = statistics.fmean(reward[-5:])
    return found | ({"held out at the end": run["held out"][-1]} if run["held out"] else {})


def compare(
    runs: dict[str, dict[int, Run]], base: str = "sync", other: str = "async"
) -> dict[str, dict[str, Any]]:
    """Per figure: each arm's values by seed, the differences other - base of equal seeds, their mean, and the 95 %
    interval of that mean (None with one seed)."""
    found = {}
    for name in figures(next(iter(runs[base].values()))):
        values = {
            arm: {seed: figures(run, lag)[name] for seed, run in runs[arm].items()}
            for lag, arm in enumerate((base, other))
        }
        differences = [values[other][seed] - values[base][seed] for seed in values[base]]
        mean, count, interval = statistics.fmean(differences), len(differences), None
        if count > 1:
            half = quantile(count - 1) * statistics.stdev(differences) / count**0.5
            interval = [mean - half, mean + half]
        found[name] = {
            "values": values,
            "differences": differences,
            "mean": mean,
            "interval": interval,
        }
    return found


def verdict(name: str, own: dict[str, Any]) -> str:
    """What the seeds say of one figure, and no more."""
    mean, interval, count = own["mean"], own["interval"], len(own["differences"])
    if interval is None:
        return f"{name}: async - sync = {mean:+.3f} with one seed, which tells nothing of chance."
    if not any(own["differences"]):
        return f"{name}: the same with each of {count} seeds."  # no spread, so no interval that would mean anything
    low, high = interval
    told = f"{name}: async - sync = {mean:+.3f}, 95 % interval {low:+.3f} to {high:+.3f} ({count} seeds, paired)"
    if low > 0:
        return f"{told}: async is better."
    if high < 0:
        return f"{told}: async is worse."
    return f"{told}: no difference is shown; a loss of more than {max(0.0, -low):.3f} is excluded."


def table(runs: dict[str, dict[int, Run]], samples: float) -> str:
    """The comparison in Markdown. `samples`: of each run."""
    found = compare(runs)
    lines = [
        "| figure | arm | mean of the seeds | range | by seed |",
        "| --- | --- | --- | --- | --- |",
    ]
    for name, own in found.items():
        for arm, values in own["values"].items():
            each = [*values.values()]
            by_seed = ", ".join(f"{seed}: {value:.3f}" for seed, value in values.items())
            mean = f"{statistics.fmean(each):.3f} | {min(each):.3f} to {max(each):.3f}"
            lines.append(f"| {name} | {arm} | {mean} | {by_seed} |")
    lines += ["", f"Each run trains on {samples:,.0f} samples.", ""]
    lines += [f"- {verdict(name, own)}" for name, own in found.items()]
    lines += [
        "",
        "One step off, a step's samples are of the version before, so that its reward in training comes a step later;",
    ]
    lines += ["equal versions sets that aside: all steps but async's first and sync's last."]
    return "\n".join(lines) + "\n"


def plot(runs: dict[str, dict[int, Run]], samples_per_step: float, path: Path) -> None:
    """Over the samples: reward in training, and held-out reward; per arm a thin line for each seed and a thick one for
    their mean."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(10, 3.4), sharey=True)
    colours = ("#4878cf", "#ee854a", "#6acc64")
    for (arm, own), colour in zip(runs.items(), colours, strict=False):
        for axes, name in ((left, "reward"), (right, "held out")):
            curves = [run[name] for run in own.values()]
            first = next(iter(own.values()))
            steps = range(1, len(first["reward"]) + 1) if name == "reward" else first["versions"]
            at = [step * samples_per_step for step in steps]
            for curve in curves:
                axes.plot(at, curve, color=colour, alpha=0.3, linewidth=1)
            mean = [statistics.fmean(values) for values in zip(*curves, strict=True)]
            axes.plot(
                at, mean, color=colour, linewidth=2, label=f"{arm}, mean of {len(curves)} seeds"
            )
    left.set(xlabel="samples trained on", title="reward in training, sampled")
    right.set(xlabel="samples trained on", title="reward held out", ylim=(-0.02, 1.02))
    for axes in (left, right):
        axes.grid(alpha=0.3)
    right.legend(frameon=False, loc="lower right")
    figure.savefig(path, dpi=130, bbox_inches="tight")
    pyplot.close(figure)
