"""Runs the pipeline on stand-ins and measures the driver's CPU time per step."""

from __future__ import annotations

import asyncio
import contextlib
import cProfile
import functools
import gc
import io
import itertools
import json
import pstats
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

from benchmarks.overhead.cell import WARM_UP_STEPS, Cell
from benchmarks.overhead.pipeline import make_pipeline
from benchmarks.overhead.stand_ins import LoggedCall
from one_step_off import ray_trainer
from one_step_off.monitoring.tracker import Tracker
from one_step_off.ray_trainer import Pipeline
from one_step_off.rollout import batch_sources
from one_step_off.training import trainer_group
from one_step_off.weight_sync.coordinator import WeightSync

PHASES = {
    "check stamps": (batch_sources, "assert_staleness"),
    "advantages": (ray_trainer, "fill_advantages"),
    "record": (Tracker, "step"),
    "report of the sync": (WeightSync, "_collect_metrics"),
}
"""Phase of the driver's work -> the owner and the name of the function that does it."""


@dataclass(frozen=True)
class Mark:
    """The clocks at the end of a step.

    Attributes:
        wall: seconds on the wall clock.
        cpu: CPU seconds of the process.
        calls: calls of stand-ins so far.
        phases: CPU seconds in each phase so far.
    """

    wall: float
    cpu: float
    calls: int
    phases: dict[str, float]


def _timed(function: Callable[..., Any], phase: str, seconds: dict[str, float]) -> Any:
    """The function, adding the CPU seconds of its thread to `seconds[phase]`."""

    @functools.wraps(function)
    def timed(*args: Any, **kwargs: Any) -> Any:
        begin = time.thread_time()
        try:
            return function(*args, **kwargs)
        finally:
            seconds[phase] += time.thread_time() - begin

    return timed


@contextlib.contextmanager
def timed_phases() -> Iterator[dict[str, float]]:
    """Count the CPU seconds within the functions of PHASES while the block runs."""
    seconds = dict.fromkeys(PHASES, 0.0)
    with contextlib.ExitStack() as stack:
        for phase, (owner, name) in PHASES.items():
            replacement = _timed(getattr(owner, name), phase, seconds)
            stack.enter_context(mock.patch.object(owner, name, replacement))
        yield seconds


def run_pipeline(
    pipeline: Pipeline, log: list[LoggedCall], profile: cProfile.Profile | None
) -> list[Mark]:
    """Run all steps. Returns the clocks at the end of each."""
    marks: list[Mark] = []
    # `benchmarks.overhead_ray` measures Ray's object store, which is left out here.
    no_store = mock.patch.object(trainer_group, "put_batch", lambda batch: batch)
    with no_store, timed_phases() as phases:
        record_step = pipeline.tracker.step

        def record_and_mark(*args: Any) -> None:
            record_step(*args)
            mark = Mark(time.perf_counter(), time.process_time(), len(log), dict(phases))
            marks.append(mark)

        pipeline.tracker.step = record_and_mark
        if profile:
            profile.enable()
        asyncio.run(pipeline.fit())
        if profile:
            profile.disable()
    pipeline.tracker.close()
    return marks


def summarize(cell: Cell, marks: list[Mark], rows: list[dict[str, Any]]) -> dict[str, Any]:
    """The figures per step, with what the stand-ins take.

    The first steps warm up, and the last one generates nothing: both are left out.

    Args:
        cell: the measurement.
        marks: the clocks at the end of each step.
        rows: metrics.jsonl of the run.
    """
    measured = marks[WARM_UP_STEPS - 1 : -1]
    first = measured[0]
    last = measured[-1]
    steps = len(measured) - 1
    excess = [
        after.wall - before.wall - cell.fixed_s for before, after in itertools.pairwise(measured)
    ]
    generate_excess = [row["time/generate_s"] - cell.generate_s for row in rows[WARM_UP_STEPS:-1]]
    phases = {name: 1e3 * (last.phases[name] - first.phases[name]) / steps for name in first.phases}
    return {
        "steps": steps,
        "with_stand_ins_ms": 1e3 * (last.cpu - first.cpu) / steps,
        "excess_ms": 1e3 * statistics.median(excess),
        "generate_excess_ms": 1e3 * statistics.median(generate_excess),
        "phases_ms": phases,
    }


async def _repeat(calls: list[LoggedCall]) -> float:
    """CPU seconds of the stand-ins alone, when the same calls are made at once."""
    for call in calls:
        call.method.seconds = 0.0
        call.method.log = None
    begin = time.process_time()
    await asyncio.gather(*(call.method.remote(*call.arguments) for call in calls))
    return time.process_time() - begin


def _profile_text(profile: cProfile.Profile) -> str:
    text = io.StringIO()
    pstats.Stats(profile, stream=text).sort_stats("tottime").print_stats(30)
    return text.getvalue()


def measure(cell: Cell) -> dict[str, Any]:
    """Run the pipeline once.

    Returns:
        Per step: "cpu_ms" of the driver without the stand-ins, "excess_ms" and "generate_excess_ms"
        (medians of how much longer a step and its generation take than the fixed times),
        "phases_ms" (means), "calls"; and with `cell.profile` the text "profile".
    """
    profile = cProfile.Profile() if cell.profile else None
    with tempfile.TemporaryDirectory() as folder:
        pipeline, log = make_pipeline(cell, folder)
        # A real run holds the samples of two steps, here are those of all: without this the garbage
        # collector would spend the driver's time on them.
        gc.collect()
        gc.freeze()
        marks = run_pipeline(pipeline, log, profile)
        lines = (Path(folder) / "metrics.jsonl").read_text().splitlines()
    found = summarize(cell, marks, [json.loads(line) for line in lines])
    calls = log[marks[WARM_UP_STEPS - 1].calls : marks[-2].calls]
    found["stand_in_ms"] = 1e3 * asyncio.run(_repeat(calls)) / found["steps"]
    found["cpu_ms"] = found["with_stand_ins_ms"] - found["stand_in_ms"]
    found["calls"] = len(calls) / found["steps"]
    if profile:
        found["profile"] = _profile_text(profile)
    return found
