"""What a training update counts and times on each rank, without a micro-batch ever waiting for the GPU."""

import itertools
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist


class Stats:
    """Sums and maxima, kept on the device in float64 so that no micro-batch waits for the GPU."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._sums: dict[str, torch.Tensor] = {}
        self._maxima: dict[str, torch.Tensor] = {}
        self.norms: list[float] = []  # of each optimiser step, made or not
        self.skipped = 0
        self.broken = torch.zeros(
            (), device=device
        )  # losses of the mini-batch at hand that are not finite

    def add(self, **values: torch.Tensor | float) -> None:
        """Add to sums."""
        if "loss" in values:
            self.broken += ~torch.isfinite(values["loss"])
        self._fold(self._sums, torch.add, values)

    def peak(self, **values: torch.Tensor | float) -> None:
        """Take part in maxima."""
        self._fold(self._maxima, torch.maximum, values)

    def _fold(self, table: dict[str, torch.Tensor], how: Any, values: dict[str, Any]) -> None:
        for name, value in values.items():
            value = torch.as_tensor(value, dtype=torch.float64, device=self._device)
            table[name] = how(table[name], value) if name in table else value

    def reduce(self, tells: bool = True) -> Iterator[dict[str, float]]:
        """Sums, then maxima over all ranks. Where several have the same share of the batch one `tells` its sums."""
        for table, how in ((self._sums if tells else {}, sum), (self._maxima, max)):
            own = (
                dict(zip(table, torch.stack(list(table.values())).tolist(), strict=True))
                if table
                else {}
            )
            of: list[dict[str, float]] = [{} for _ in range(dist.get_world_size())]
            dist.all_gather_object(of, own)
            yield {
                name: how(o[name] for o in of if name in o)
                for name in dict.fromkeys(itertools.chain(*of))
            }


class Clock:
    """Seconds per phase. On GPUs by events: a host clock would time the launches, and waiting would cost speed."""

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self._marks: list[tuple[str, Any, Any]] = []

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
        self._marks.append((phase, start, self._now()))

    def totals(self) -> dict[str, float]:
        """Seconds per phase."""
        if self._cuda:
            torch.cuda.synchronize()
        result = dict.fromkeys((phase for phase, _, _ in self._marks), 0.0)
        for phase, start, end in self._marks:
            result[phase] += start.elapsed_time(end) / 1000 if self._cuda else end - start
        return result
