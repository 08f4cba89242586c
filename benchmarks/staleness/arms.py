"""The runs of the benchmark: which settings are compared, and the figures of one run."""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Row = dict[str, Any]

SPEED = "speed"
LEARNING = "learning"
PARTS = (SPEED, LEARNING)
MODES = ("wait", "recompute", "keep")
CORRECTIONS = ("none", "tis", "mis")


@dataclass(frozen=True)
class Arm:
    """A way to run.

    Attributes:
        staleness: see `pipeline.staleness`.
        in_flight: see `weight_sync.in_flight`.
    """

    staleness: int
    in_flight: str

    @property
    def name(self) -> str:
        """As in the table and in result.json."""
        return f"k={self.staleness} {self.in_flight}"

    @property
    def keys(self) -> list[str]:
        """Its config keys."""
        return [
            f"pipeline.staleness={self.staleness}",
            f"weight_sync.in_flight={self.in_flight}",
        ]


def arms_of(ages: Sequence[int], modes: Sequence[str]) -> list[Arm]:
    """The arms of these values. Without staleness nothing is in flight at a sync."""
    return [Arm(age, mode) for age in ages for mode in modes if age > 0 or mode == "wait"]


def correction_keys(correction: str) -> list[str]:
    """The config keys of a rollout correction. It weights by the trainer's own log-probs."""
    if correction == "none":
        return []
    return ["algorithm.old_log_probs=recompute", f"algorithm.rollout_correction={correction}"]


def steady_rows(rows: list[Row], staleness: int) -> list[Row]:
    """The steps between the start, which fills the pipeline, and the end, which drains it: whole
    periods from one sync to the next.

    Raises:
        ValueError: there are too few steps.
    """
    period = max(1, staleness)
    periods = len(rows) // period - 2
    if periods < 1:
        raise ValueError(f"{len(rows)} steps: staleness {staleness} needs {3 * period} at least")
    return rows[period : (1 + periods) * period]


def speed_figures(rows: list[Row], staleness: int) -> dict[str, float]:
    """The figures of a timed run: samples/s, the shares of the time in which the replicas generate
    nothing (receiving weights included) and in which the trainer does not train, and the ages of
    the tokens."""
    steady = steady_rows(rows, staleness)
    seconds = sum(row["time/step_s"] for row in steady)
    paused_s = sum(row.get("time/rollout_paused_s", row.get("time/sync_s", 0.0)) for row in steady)
    waited_s = sum(row.get("time/wait_trainer_s", 0.0) for row in steady)
    return {
        "samples/s": sum(row["samples"] for row in steady) / seconds,
        "rollout idle": (paused_s + waited_s) / seconds,
        "rollout syncs": paused_s / seconds,
        "trainer idle": 1 - sum(row["time/train_s"] for row in steady) / seconds,
        "mean age": statistics.fmean(mean_age(row) for row in steady),
        "oldest": max(row["staleness/max"] for row in steady),
    }


def mean_age(row: Row) -> float:
    """The mean age of a step's trained tokens, in versions."""
    prefix = "staleness/age_"
    ages = {name: share for name, share in row.items() if name.startswith(prefix)}
    return sum(int(name.removeprefix(prefix)) * (share or 0.0) for name, share in ages.items())


def learning_figures(rows: list[Row], folder: Path) -> dict[str, Any]:
    """The figures of a run that learns: rewards, and the ratio of the tokens of each age."""
    reward = [row["reward/mean"] for row in rows]
    found: dict[str, Any] = {
        "reward": reward,
        "reward, all samples": statistics.fmean(reward),
        "reward, last five steps": statistics.fmean(reward[-5:]),
        "mean age": statistics.fmean(mean_age(row) for row in rows),
        "ratio by age": {},
    }
    prefix = "staleness/ratio_age_"
    for name in sorted({name for row in rows for name in row if name.startswith(prefix)}):
        values = [row[name] for row in rows if row.get(name) is not None]
        found["ratio by age"][name.removeprefix(prefix)] = statistics.fmean(values)
    path = folder / "evaluations.jsonl"
    if path.exists():
        evaluations = [json.loads(line) for line in path.read_text().splitlines()]
        found["held out"] = evaluations[-1]["val/reward"]
    return found
