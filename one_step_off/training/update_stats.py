"""What a training update counts and times on each rank, without a micro-batch ever waiting for the
GPU."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

Table = dict[str, torch.Tensor | float]
"""Name -> float64 scalar on the worker's device, or a number that the host knows: to copy it to the
device, the host would wait."""

Figures = dict[str, float]


class UpdateStats:
    """Sums and maxima over the micro-batches of an update, kept on the device in float64.

    Attributes:
        grad_norms: the global gradient norm of each optimizer step, made or skipped.
        skipped_updates: optimizer steps that were skipped.
        non_finite_losses: scalar on the device; micro-batches of the current mini-batch whose loss
            is NaN or infinite.
    """

    def __init__(self, device: torch.device) -> None:
        self.grad_norms: list[float] = []
        self.skipped_updates = 0
        self.non_finite_losses = torch.zeros((), device=device)
        self._sums: Table = {}
        self._maxima: Table = {}

    def add(self, **values: torch.Tensor | float) -> None:
        """Add to the sums. A value named "loss" is also checked for being finite."""
        if "loss" in values:
            self.non_finite_losses += ~torch.isfinite(values["loss"])
        for name, value in values.items():
            scalar = _scalar(value)
            self._sums[name] = self._sums[name] + scalar if name in self._sums else scalar

    def maximum(self, **values: torch.Tensor | float) -> None:
        """Raise the maxima to these values where they are larger. A name has tensors only, or
        numbers only."""
        for name, value in values.items():
            scalar = _scalar(value)
            if name in self._maxima:
                scalar = _larger(self._maxima[name], scalar)
            self._maxima[name] = scalar

    def reduce(self, reports: bool) -> tuple[Figures, Figures]:
        """Sums and maxima over all ranks (collective); the same on every rank.

        Args:
            reports: whether this rank's sums count. Of the ranks that compute the same share of the
                batch, one reports.
        """
        sums = _over_ranks(self._sums if reports else {}, sum)
        maxima = _over_ranks(self._maxima, max)
        return sums, maxima


def _scalar(value: torch.Tensor | float) -> torch.Tensor | float:
    return value.double() if isinstance(value, torch.Tensor) else float(value)


def _larger(first: torch.Tensor | float, second: torch.Tensor | float) -> torch.Tensor | float:
    if isinstance(first, torch.Tensor) and isinstance(second, torch.Tensor):
        return torch.maximum(first, second)
    return max(first, second)


def _over_ranks(table: Table, combine: Callable[[list[float]], float]) -> Figures:
    """Combine the ranks' values of each name (collective). A rank may lack names that others
    have."""
    on_device = {n: value for n, value in table.items() if isinstance(value, torch.Tensor)}
    figures: Figures = {n: value for n, value in table.items() if n not in on_device}
    if on_device:
        values = torch.stack(list(on_device.values())).tolist()  # one copy from the device
        figures |= dict(zip(on_device, values, strict=True))
    of_ranks: list[Figures] = [{} for _ in range(dist.get_world_size())]
    dist.all_gather_object(of_ranks, figures)
    values_of: dict[str, list[float]] = {}
    for rank_figures in of_ranks:
        for name, value in rank_figures.items():
            values_of.setdefault(name, []).append(value)
    return {name: combine(values) for name, values in values_of.items()}


@dataclass(frozen=True)
class _Interval:
    """A timed phase. `start` and `end` are CUDA events on GPUs, else seconds of the host's
    clock."""

    phase: str
    start: Any
    end: Any


class PhaseTimer:
    """Seconds per phase: `with timer("forward"): ...`.

    GPUs are timed by events: a host clock would time the launches, and waiting for the GPU would
    cost speed.
    """

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self._intervals: list[_Interval] = []

    def _now(self) -> Any:
        if not self._cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    @contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        start = self._now()
        yield
        self._intervals.append(_Interval(phase, start, self._now()))

    def totals(self) -> dict[str, float]:
        """Seconds per phase."""
        if self._cuda:
            torch.cuda.synchronize()
        totals: dict[str, float] = {}
        for interval in self._intervals:
            if self._cuda:
                seconds = interval.start.elapsed_time(interval.end) / 1000
            else:
                seconds = interval.end - interval.start
            totals[interval.phase] = totals.get(interval.phase, 0.0) + seconds
        return totals
