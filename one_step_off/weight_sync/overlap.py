"""Whether a step's training runs beside its weight sync: `weight_sync.overlap`.

A replica does not generate while it receives weights, so a step takes

    without overlap   sync + max(generate, train)
    with overlap      max(generate + sync, train)

The difference is the part of the sync that training outlasts generation by. Where generation is the
longer phase nothing is hidden, and on CPUs the threads of the sync take cores from training.

On a device that both groups share, the phases are as long as the other one makes them. There a
step takes the sum of the work, and a sync that nothing runs beside adds to it.
"""

import statistics
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Self

from one_step_off.config.placement import shared_devices
from one_step_off.config.schema import Config
from one_step_off.config.sync_schedule import sync_period

DECIDING_STEPS = 3
"""Steps that a decision needs since the last change: the time between two changes, at least."""
REMEMBERED_STEPS = 5
SHARE_TO_BEGIN = 0.25
"""Overlap begins where it would hide this share of a sync."""
SHARE_TO_END = 0.1
"""Overlap ends where it hides less than this share of a sync."""


@dataclass(frozen=True)
class StepPhases:
    """Seconds of a step's phases."""

    generate_s: float
    train_s: float
    sync_s: float

    @classmethod
    def of_metrics(cls, metrics: Mapping[str, float]) -> Self:
        """The phases in the metrics of a step; sync_s is 0 where it had no sync."""
        return cls(
            metrics["time/generate_s"], metrics["time/train_s"], metrics.get("time/sync_s", 0.0)
        )


def sum_of_phases(steps: Sequence[StepPhases]) -> StepPhases:
    """The phases of several steps as if they were one."""
    return StepPhases(
        sum(step.generate_s for step in steps),
        sum(step.train_s for step in steps),
        sum(step.sync_s for step in steps),
    )


def hidden_share(steps: Sequence[StepPhases]) -> float:
    """The share of a sync that training hides where they overlap, 0 to 1, by the medians of these
    steps. 0 without a sync."""
    generate_s = statistics.median(step.generate_s for step in steps)
    train_s = statistics.median(step.train_s for step in steps)
    sync_s = statistics.median(step.sync_s for step in steps)
    if sync_s <= 0:
        return 0.0
    return min(max((train_s - generate_s) / sync_s, 0.0), 1.0)


def should_overlap(steps: Sequence[StepPhases], overlapped: bool) -> bool:
    """Whether the next sync should overlap with training.

    Args:
        steps: the last ones, all with the present setting.
        overlapped: the present setting. It stays until there are DECIDING_STEPS, and while the
            hidden share is between SHARE_TO_END and SHARE_TO_BEGIN.
    """
    if len(steps) < DECIDING_STEPS:
        return overlapped
    least_share = SHARE_TO_END if overlapped else SHARE_TO_BEGIN
    return hidden_share(steps) >= least_share


def can_overlap(cfg: Config) -> bool:
    """Whether a run can train beside a sync. With `pipeline.staleness=0`, or where another role
    shares the replicas' pool, they take turns."""
    pools = list(cfg.placement.roles.values())
    has_own_pool = pools.count(cfg.placement.roles["rollout"]) == 1
    return bool(cfg.pipeline.staleness) and has_own_pool


class SyncOverlap:
    """Chooses for each step, by `weight_sync.overlap`, between training beside the sync and after
    it.

    With `auto` a run begins without overlap, so that the phases of its first steps are those of
    undisturbed cores. On a shared device `auto` is `true`.

    Attributes:
        possible: whether the run can train beside a sync.
        overlapped: the setting of the present step.
    """

    def __init__(self, cfg: Config) -> None:
        """The setting of the first step."""
        setting = cfg.weight_sync.overlap
        if setting == "auto" and shared_devices(cfg):
            setting = "true"
        self.possible = can_overlap(cfg)
        self.is_auto = self.possible and setting == "auto"
        self.overlapped = self.possible and setting == "true"
        self.steps: deque[StepPhases] = deque(maxlen=REMEMBERED_STEPS)
        self.steps_per_sync = sync_period(cfg)
        self.since_sync: list[StepPhases] = []

    def begin_step(self) -> bool:
        """Choose for the step that begins now; returns `overlapped`."""
        if not self.is_auto:
            return self.overlapped
        before = self.overlapped
        self.overlapped = should_overlap(self.steps, before)
        if self.overlapped != before:
            self.steps.clear()  # the other setting has phases of its own
            self.since_sync = []
        return self.overlapped

    def end_step(self, metrics: Mapping[str, float]) -> dict[str, float]:
        """Take the metrics of the step that has ended; returns the metric of this choice. Steps
        between two syncs count together, because what is generated then may overlap with all of
        them. A step without a sync before it tells nothing about syncs."""
        phases = StepPhases.of_metrics(metrics)
        if phases.sync_s > 0:
            self.since_sync = [phases]
        elif self.since_sync:
            self.since_sync.append(phases)
        if len(self.since_sync) == self.steps_per_sync:
            self.steps.append(sum_of_phases(self.since_sync))
            self.since_sync = []
        return {"sync/overlapped": float(self.overlapped)}
