"""What `benchmarks.throughput` makes of its runs: figures per arm, the headline, tables, plots."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.throughput.cases import AHEAD, APART, COLOCATED, PLAIN

Row = dict[str, Any]
TIMES = {
    "step": "time/step_s",
    "T_gen": "time/generate_s",
    "T_train": "time/train_s",
    "T_sync": "time/sync_s",
}
COLUMNS = (
    *TIMES.values(),
    "time/wait_rollout_s",
    "time/wait_trainer_s",
    "actor/sync_wait_s",
    "samples",
)
COLUMNS += ("tokens/response", "response_length/mean", "response_length/max", "reward/mean")
SECONDS = (*TIMES, "exposed sync")
RATES, SHARES = ("samples/s", "tokens/s"), ("rollout idle", "trainer idle")
AHEADS = (PLAIN, AHEAD)


def slim(row: Row) -> Row:
    """Of a step's metrics what figures are made of."""
    return {name: row.get(name) for name in COLUMNS}


def exposed(row: Row, following: Row, arm: str) -> float:
    """By how much earlier a step would have been over if its sync had taken no time, in seconds.

    Where everything waits for the sync that is all of it. Overlapped, the replicas begin that much later and the trainer
    waits `sync_wait` for the send to end; what counts is which of the two ends last. With the trainer's end as 0 the
    rollouts end at `lead`, which the next step's waits tell: without the sync the ends were at -sync_wait and lead - sync.
    """
    sync = row["time/sync_s"] or 0.0
    if arm != AHEAD:
        return sync
    lead = following["time/wait_rollout_s"] - following["time/wait_trainer_s"]
    return max(0.0, lead) - max(-(row["actor/sync_wait_s"] or 0.0), lead - sync)


def figures(rows: list[Row], arm: str) -> dict[str, list[float]]:
    """Of one run: per name the steps' values; of rates and shares one value over all. `rows`: those after the warm-up;
    the last one is only looked at for how the one before it ended, for beside the last step nothing is generated."""
    steps = rows[:-1]
    found = {name: [row[column] or 0.0 for row in steps] for name, column in TIMES.items()}
    found["exposed sync"] = [exposed(*pair, arm) for pair in zip(steps, rows[1:], strict=False)]
    whole, gen, train = (sum(found[name]) for name in ("step", "T_gen", "T_train"))
    found["samples/s"] = [sum(row["samples"] for row in steps) / whole]
    found["tokens/s"] = [sum(row["tokens/response"] for row in steps) / whole]
    busy = (gen + train, gen + train) if arm == COLOCATED else (gen, train)
    found |= {name: [1 - seconds / whole] for name, seconds in zip(SHARES, busy, strict=True)}
    found["length"] = [row["response_length/mean"] for row in steps]
    return found | {"longest": [max(row["response_length/max"] for row in steps)]}


def summarise(runs: list[list[Row]], arm: str) -> dict[str, Any]:
    """Of one arm: medians over the runs' medians, and their range; of a single run the steps' range. `runs` hold the rows
    after the warm-up, the last one too."""
    each = [figures(rows, arm) for rows in runs]
    found: dict[str, Any] = {}
    for name in each[0]:
        own = [statistics.median(run[name]) for run in each]
        over = own if len(own) > 1 else each[0][name]
        found[name] = {
            "median": statistics.median(own),
            "min": min(over),
            "max": max(over),
            "runs": own,
        }
    return found


def headline(arms: dict[str, dict[str, Any]]) -> dict[str, float]:
    """How much faster, and how close to the limit max(T_gen, T_train) of the disaggregated synchronous arm's own phases.
    Only what the arms that ran can tell."""

    def median(arm: str, name: str = "step") -> float:
        return arms[arm][name]["median"]

    found: dict[str, float] = {}
    if APART in arms:
        gen, train = median(APART, "T_gen"), median(APART, "T_train")
        limit = max(gen, train)
        found |= {
            "gen_over_train": gen / train,
            "limit": limit,
            "speedup_at_the_limit": median(APART) / limit,
        }
        found |= {f"step_over_limit/{arm}": median(arm) / limit for arm in AHEADS if arm in arms}
        found |= {f"speedup/{arm}": median(APART) / median(arm) for arm in AHEADS if arm in arms}
    if COLOCATED in arms:
        found |= {
            f"speedup_over_colocated/{arm}": median(COLOCATED) / median(arm)
            for arm in AHEADS
            if arm in arms
        }
    return found


def _rows(
    case: dict[str, Any], names: tuple[str, ...], text: Callable[[float], str]
) -> dict[str, str]:
    """Per arm its cells in Markdown."""
    found = {}
    for arm, own in case["arms"].items():
        cells = (
            f"{text(own[n]['median'])} ({text(own[n]['min'])} to {text(own[n]['max'])})"
            for n in names
        )
        found[arm] = " | ".join(cells)
    return found


def said(case: dict[str, Any]) -> str:
    """The headline in words."""
    h, parts = case["headline"], []
    if "limit" in h:
        parts.append(
            f"Disaggregated sync: T_gen / T_train = {h['gen_over_train']:.2f}, max(T_gen, T_train) = {h['limit']:.3g} s; a "
            f"step of that length would be {h['speedup_at_the_limit']:.2f} times as fast."
        )
    for arm in AHEADS:
        if f"step_over_limit/{arm}" in h:
            text = f"**{arm}: step / max(T_gen, T_train) = {h[f'step_over_limit/{arm}']:.2f}**"
            parts.append(f"{text}, {h[f'speedup/{arm}']:.2f} times as fast as {APART}.")
        if f"speedup_over_colocated/{arm}" in h:
            parts.append(
                f"{arm}: {h[f'speedup_over_colocated/{arm}']:.2f} times as fast as {COLOCATED}."
            )
    return "\n".join(parts)


def table(result: dict[str, Any]) -> str:
    """The result in Markdown."""
    from benchmarks.common.command_line import machine_line

    lines = [machine_line(result["machine"]), ""]
    for case in result["cases"]:
        lines += [f"## {case['name']}", "", case["what"] + ".", ""]
        for names, text in ((SECONDS, "{:.3g}".format), (RATES + SHARES, None)):
            if text:
                rows = _rows(case, names, text)
            else:
                rates, shares = (
                    _rows(case, RATES, "{:,.4g}".format),
                    _rows(case, SHARES, "{:.0%}".format),
                )
                rows = {arm: f"{rates[arm]} | {shares[arm]}" for arm in rates}
            heads = " | ".join(f"{name}, s" if text else name for name in names)
            lines += [f"| arm | {heads} |", "| --- |" + " --- |" * len(names)]
            lines += [f"| {arm} | {cells} |" for arm, cells in rows.items()] + [""]
        lines += [said(case), ""] if case["headline"] else []
    runs = result["runs"]
    spread = (
        "the runs' medians" if runs > 1 else "the steps (of rates and shares there is one value)"
    )
    lines += [
        f"Medians over {runs} run(s) of each arm, in turns (range of {spread}); the first {result['warmup']} steps of each "
        "run are dropped, and the last, beside which nothing is generated. Exposed sync: by how much the sync made the "
        "step longer. Idle: the share of the time in which a group neither generates nor trains; colocated, that of all."
    ]
    return "\n".join(lines) + "\n"


COLOURS = {"T_gen": "#4878cf", "T_train": "#ee854a", "T_sync": "#8c8c8c"}


def plot_case(case: dict[str, Any], path: Path) -> None:
    """Bars of one case: left the phases of each arm beside its step and the limit, right samples/s."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    arms = case["arms"]
    figure, (left, right) = pyplot.subplots(
        1, 2, figsize=(10, 0.7 * len(arms) + 1.2), width_ratios=(2, 1), sharey=True
    )
    for y, (arm, own) in enumerate(arms.items()):
        sync, gen, train = (own[name]["median"] for name in ("T_sync", "T_gen", "T_train"))
        # In turns a phase begins where the one before ends; one step off both begin together, training beside the sync
        # where that is overlapped.
        begin = 0.0 if arm == AHEAD else sync if arm == PLAIN else sync + gen
        left.barh(y - 0.17, sync, 0.34, color=COLOURS["T_sync"])
        left.barh(y - 0.17, gen, 0.34, left=sync, color=COLOURS["T_gen"])
        if arm != AHEAD:
            left.barh(y + 0.17, sync, 0.34, color=COLOURS["T_sync"])
        left.barh(y + 0.17, train, 0.34, left=begin, color=COLOURS["T_train"])
        step = own["step"]
        left.plot([step["median"]] * 2, [y - 0.42, y + 0.42], color="black", linewidth=2)
        left.plot([step["min"], step["max"]], [y, y], color="black", linewidth=1)
        rate = own["samples/s"]
        around = [[rate["median"] - rate["min"]], [rate["max"] - rate["median"]]]
        right.barh(y, rate["median"], 0.6, xerr=around, color="#6acc64", ecolor="black", capsize=3)
        right.text(rate["median"] / 2, y, f"{rate['median']:.4g}", va="center", ha="center")
    if "limit" in case["headline"]:
        left.axvline(case["headline"]["limit"], color="#c44e52", linestyle="--", linewidth=1)
    left.set_yticks(range(len(arms)), list(arms))
    left.invert_yaxis()
    left.set_xlabel("seconds")
    right.set_xlabel("samples/s")
    marks = [pyplot.Rectangle((0, 0), 1, 1, color=colour) for colour in COLOURS.values()]
    marks += [pyplot.Line2D([], [], color="black", linewidth=2)]
    marks += [pyplot.Line2D([], [], color="#c44e52", linestyle="--", linewidth=1)]
    names = [*COLOURS, "step (and its range)", "max(T_gen, T_train) in turns"]
    figure.legend(
        marks,
        names,
        ncols=5,
        loc="lower center",
        bbox_to_anchor=(0.5, 0.98),
        frameon=False,
        fontsize=9,
    )
    figure.tight_layout()
    # After the layout, which would make room for it.
    figure.suptitle(case["name"], y=0.98 + 0.55 / figure.get_figheight(), fontsize=11)
    figure.savefig(path, dpi=130, bbox_inches="tight")
    pyplot.close(figure)


def plot_headline(cases: list[dict[str, Any]], path: Path) -> None:
    """One step off, all cases: left step / max(T_gen, T_train), right the speedup over the disaggregated synchronous arm
    with what it would be at the limit."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    colours = dict(zip(AHEADS, ("#a1c9f4", "#4878cf"), strict=True))
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(10, 0.6 * len(cases) + 1.4), sharey=True)
    for y, case in enumerate(cases):
        h = case["headline"]
        for place, (arm, colour) in zip((-0.17, 0.17), colours.items(), strict=True):
            for axes, name in ((left, "step_over_limit"), (right, "speedup")):
                if f"{name}/{arm}" in h:
                    value = h[f"{name}/{arm}"]
                    axes.barh(y + place, value, 0.34, color=colour, label=arm if y == 0 else None)
                    axes.text(value, y + place, f" {value:.2f}", va="center", fontsize=8)
        limit = h["speedup_at_the_limit"]
        label = "at the limit" if y == 0 else None
        right.plot([limit] * 2, [y - 0.4, y + 0.4], color="#c44e52", linestyle="--", label=label)
    left.axvline(1.0, color="#c44e52", linestyle="--")
    names = [
        f"{case['name']}\n(T_gen / T_train {case['headline']['gen_over_train']:.2f})"
        for case in cases
    ]
    left.set_yticks(range(len(cases)), names)
    left.invert_yaxis()
    left.set_xlabel("step / max(T_gen, T_train); 1.00 is the limit")
    right.set_xlabel(f"times as fast as {APART}")
    for axes in (left, right):
        axes.margins(x=0.15)
    handles, labels = right.get_legend_handles_labels()
    figure.legend(
        handles,
        labels,
        ncols=3,
        loc="lower center",
        bbox_to_anchor=(0.5, 0.98),
        frameon=False,
        fontsize=9,
    )
    figure.tight_layout()
    figure.savefig(path, dpi=130, bbox_inches="tight")
    pyplot.close(figure)
