"""What `benchmarks.throughput` reports of its runs: figures per arm, the headline, tables."""

from __future__ import annotations

import itertools
import statistics
from typing import Any

from benchmarks.common.machine import machine_line
from benchmarks.common.report import markdown_table, with_range
from benchmarks.throughput.cases import (
    AUTO,
    COLOCATED,
    DISAGGREGATED,
    FP8,
    ONE_STEP_OFF,
    OVERLAPPED,
    SHARED,
    SPECULATION,
)

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
    "time/canary_s",
    "actor/sync_wait_s",
    "sync/overlapped",
    "samples",
    "tokens/response",
    "response_length/mean",
    "response_length/max",
    "reward/mean",
)
SECONDS = (*TIMES, "exposed sync")
RATES = ("samples/s", "tokens/s")
IDLE_SHARES = ("rollout idle", "trainer idle")
ONE_STEP_OFF_ARMS = (ONE_STEP_OFF, OVERLAPPED, AUTO, SHARED, SPECULATION, FP8)


def needed_columns(row: Row) -> Row:
    """The metrics of a step that the figures are made of."""
    return {name: row.get(name) for name in COLUMNS}


def exposed_sync(row: Row, following_row: Row, arm: str) -> float:
    """By how many seconds a step would have ended earlier if its weight sync had taken no time.

    In a step without overlap everything waits for the sync.

    In an overlapped step the sync delays the start of generation, and the optimizer waits
    `sync_wait` for the end of the send. The step ends when the later of both ends. Take the end of
    training as 0. Then generation ends at `generation_lag`, which the waits of the next step tell.
    Without the waits training would have ended at -sync_wait. Without the sync generation would
    have ended at generation_lag - sync.
    """
    sync = row["time/sync_s"] or 0.0
    overlapped = row.get("sync/overlapped")
    if overlapped is None:  # rows of an earlier version
        overlapped = arm in (OVERLAPPED, SHARED)
    sync_wait = row["actor/sync_wait_s"] or 0.0
    generation_lag = following_row["time/wait_rollout_s"] - following_row["time/wait_trainer_s"]
    end = max(0.0, generation_lag)
    if not overlapped:
        return sync + end - max(-sync_wait, generation_lag)
    end_without_sync = max(-sync_wait, generation_lag - sync)
    return end - end_without_sync


def figures(rows: list[Row], arm: str) -> dict[str, list[float]]:
    """The figures of one run.

    Args:
        rows: the steps after the warm-up. The last one only tells how the step before it ended:
            nothing is generated during the last step, so its own times are not measured.
        arm: name of the arm.

    Returns:
        For times and lengths one value per step, for rates and idle shares one value over all
        steps.
    """
    steps = rows[:-1]
    found = {name: [row[column] or 0.0 for row in steps] for name, column in TIMES.items()}
    found["exposed sync"] = [
        exposed_sync(row, following_row, arm) for row, following_row in itertools.pairwise(rows)
    ]
    total = sum(found["step"])
    generating = sum(found["T_gen"])
    training = sum(found["T_train"])
    if arm == COLOCATED:
        # The same devices do both.
        generating = training = generating + training
    found["samples/s"] = [sum(row["samples"] for row in steps) / total]
    found["tokens/s"] = [sum(row["tokens/response"] for row in steps) / total]
    found["rollout idle"] = [1 - generating / total]
    found["trainer idle"] = [1 - training / total]
    found["length"] = [row["response_length/mean"] for row in steps]
    found["longest"] = [max(row["response_length/max"] for row in steps)]
    return found


def summarize(runs: list[list[Row]], arm: str) -> dict[str, Any]:
    """Medians over the runs' medians, and their range; of a single run the range of its steps.

    Args:
        runs: per run the rows after the warm-up, with the last one.
        arm: name of the arm.
    """
    figures_of_runs = [figures(rows, arm) for rows in runs]
    found: dict[str, Any] = {}
    for name in figures_of_runs[0]:
        medians = [statistics.median(run[name]) for run in figures_of_runs]
        ranged = medians if len(medians) > 1 else figures_of_runs[0][name]
        found[name] = {
            "median": statistics.median(medians),
            "min": min(ranged),
            "max": max(ranged),
            "runs": medians,
        }
    return found


def headline(arms: dict[str, dict[str, Any]]) -> dict[str, float]:
    """How much faster one step off is, and how close to its limit.

    The limit is max(T_gen, T_train), taken from the disaggregated synchronous arm. What needs an
    arm that did not run is left out.
    """

    def median(arm: str, name: str = "step") -> float:
        return arms[arm][name]["median"]

    compared = [arm for arm in ONE_STEP_OFF_ARMS if arm in arms]
    found: dict[str, float] = {}
    if DISAGGREGATED in arms:
        generate = median(DISAGGREGATED, "T_gen")
        train = median(DISAGGREGATED, "T_train")
        limit = max(generate, train)
        found["gen_over_train"] = generate / train
        found["limit"] = limit
        found["speedup_at_the_limit"] = median(DISAGGREGATED) / limit
        # The limit is that of separate devices.
        apart = [arm for arm in compared if arm != SHARED]
        found |= {f"step_over_limit/{arm}": median(arm) / limit for arm in apart}
        found |= {f"speedup/{arm}": median(DISAGGREGATED) / median(arm) for arm in apart}
    if COLOCATED in arms:
        found |= {
            f"speedup_over_colocated/{arm}": median(COLOCATED) / median(arm) for arm in compared
        }
    return found


def headline_in_words(case: dict[str, Any]) -> str:
    """The headline of a case, a sentence per line."""
    found = case["headline"]
    lines = []
    if "limit" in found:
        lines.append(
            f"Disaggregated sync: T_gen / T_train = {found['gen_over_train']:.2f}, "
            f"max(T_gen, T_train) = {found['limit']:.3g} s; a step of that length would be "
            f"{found['speedup_at_the_limit']:.2f} times as fast."
        )
    for arm in ONE_STEP_OFF_ARMS:
        if f"step_over_limit/{arm}" in found:
            over_limit = found[f"step_over_limit/{arm}"]
            lines.append(
                f"**{arm}: step / max(T_gen, T_train) = {over_limit:.2f}**, "
                f"{found[f'speedup/{arm}']:.2f} times as fast as {DISAGGREGATED}."
            )
        if f"speedup_over_colocated/{arm}" in found:
            speedup = found[f"speedup_over_colocated/{arm}"]
            lines.append(f"{arm}: {speedup:.2f} times as fast as {COLOCATED}.")
    return "\n".join(lines)


def _cells(arm: dict[str, Any], names: tuple[str, ...], form: str) -> list[str]:
    return [with_range(arm[name], form) for name in names]


def _case_lines(case: dict[str, Any]) -> list[str]:
    """Heading, both tables and the headline of one case."""
    times = []
    rates = []
    for name, arm in case["arms"].items():
        times.append([name, *_cells(arm, SECONDS, "{:.3g}")])
        rates.append([name, *_cells(arm, RATES, "{:,.4g}"), *_cells(arm, IDLE_SHARES, "{:.0%}")])
    lines = [f"## {case['name']}", "", case["what"] + ".", ""]
    lines += [*markdown_table(["arm", *(f"{name}, s" for name in SECONDS)], times), ""]
    lines += [*markdown_table(["arm", *RATES, *IDLE_SHARES], rates), ""]
    if case["headline"]:
        lines += [headline_in_words(case), ""]
    return lines


def table(result: dict[str, Any]) -> str:
    """The result in Markdown."""
    lines = [machine_line(result["machine"]), ""]
    for case in result["cases"]:
        lines += _case_lines(case)
    runs = result["runs"]
    if runs > 1:
        ranged = "the runs' medians"
    else:
        ranged = "the steps (of rates and shares there is one value)"
    lines.append(
        f"Medians over {runs} run(s) of each arm, the arms alternating (range of {ranged}). "
        f"Dropped: the first {result['warmup']} steps of each run, and the last one, during which "
        "nothing is generated. Exposed sync: how much longer the sync made the step. Idle: the "
        "share of the time in which a group neither generates nor trains; in the colocated arm, "
        "the share of all devices."
    )
    return "\n".join(lines) + "\n"
