"""The weight sync's cost model against what benchmarks.weight_sync measured on CPUs.

On a machine of few cores the stages of a sync do not have processors of their own, as they have on
GPUs: packing, the link's two ends, loading and checksums all take CPU time of the same cores. So
here a sync takes the longest of

    all CPU time / all cores
    the senders' own CPU time / their half of the cores
    the vLLM workers' own CPU time / their half of the cores

besides the fixed part, and the way of the first bucket in and of the last one out. The threads of
the link may run on any core.

The speeds of the machine come from the first files (two: costs per byte and per tensor), each of
one rank and one worker. From them the arms "whole" (each worker gets whole tensors) and "sharded"
of all files are predicted.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

from benchmarks.common.report import markdown_table

WHOLE, SHARDED = "whole", "sharded"

Result = dict[str, Any]
"""result.json of one run."""


@dataclass(frozen=True)
class Point:
    """A measured time of some items with some bytes."""

    items: float
    size: float
    seconds: float


@dataclass(frozen=True)
class Cost:
    """Seconds per item and per byte."""

    per_item: float
    per_byte: float


def fit_cost(points: list[Point]) -> Cost:
    """The costs of seconds = items * per_item + size * per_byte, none negative.

    It goes through the points of the smallest and the largest size.
    """
    ordered = sorted(points, key=lambda point: point.size)
    small = ordered[0]
    large = ordered[-1]
    determinant = small.items * large.size - large.items * small.size
    if not determinant:
        return Cost(0.0, large.seconds / large.size)
    per_item = (small.seconds * large.size - large.seconds * small.size) / determinant
    per_byte = (small.items * large.seconds - large.items * small.seconds) / determinant
    if per_item < 0:
        return Cost(0.0, large.seconds / large.size)
    if per_byte <= 0:
        # So little that its inverse, a speed, counts for nothing.
        return Cost(large.seconds / large.items, 1e-15)
    return Cost(per_item, per_byte)


@dataclass(frozen=True)
class Speeds:
    """CPU seconds on one core of this machine.

    Attributes:
        copy_byte: copying a byte, as each end of the link does.
        pack_byte: casting a byte into a bucket, and its checksum.
        check_byte: a receiver's checksum of a byte.
        load_byte: bringing a received byte into the model.
        load_tensor: bringing a tensor into the model, however small.
        message: a bucket on the link, however small.
        fixed_s: in which nothing travels: calls, pause, preparing the layers.
        finish_byte: the part of finishing that depends on bytes.
    """

    copy_byte: float
    pack_byte: float
    check_byte: float
    load_byte: float
    load_tensor: float
    message: float
    fixed_s: float
    finish_byte: float


@dataclass(frozen=True)
class Run:
    """One run of the benchmark, as far as the model knows it.

    Attributes:
        size: bytes of the weights.
        tensors: their number.
        buckets: into which they are packed.
        ranks: trainer ranks, all of which send.
        workers: vLLM workers.
        tp: tensor-parallel ranks of each engine.
        worker_bytes: that the worker with most receives.
        cores: of the machine. Each side has half of them.
        gets_whole: workers get whole tensors, of which they copy their part.
    """

    size: float
    tensors: int
    buckets: int
    ranks: int
    workers: int
    tp: int
    worker_bytes: float
    cores: int
    gets_whole: bool

    @staticmethod
    def of(result: Result, arm: str) -> Run:
        """One arm of a result."""
        flags = result["arguments"]
        workers = flags["replicas"] * flags["tp"]
        worker_bytes = _worker_bytes(result, arm)
        return Run(
            size=result["bytes"],
            tensors=result["tensors"],
            buckets=_buckets(result),
            ranks=flags["ranks"],
            workers=workers,
            tp=flags["tp"],
            worker_bytes=worker_bytes,
            cores=result.get("cores", 2),
            gets_whole=arm == WHOLE,
        )

    @property
    def sender_cores(self) -> int:
        """On which the trainer ranks work."""
        return min(self.ranks, max(1, self.cores // 2))

    @property
    def worker_cores(self) -> int:
        """On which the vLLM workers work."""
        return min(self.workers, max(1, self.cores // 2))


def _worker_bytes(result: Result, arm: str) -> float:
    """That the worker with most receives."""
    return result["arms"][arm].get("extra", {}).get("worker_bytes", result["bytes"])


def _buckets(result: Result) -> int:
    return math.ceil(result["bytes"] / (result["arguments"]["bucket_mb"] << 20))


def fit_speeds(results: list[Result], name: str = SHARDED) -> Speeds:
    """This machine's speeds, from the arm "raw" and another one of one or two runs, each of one
    rank and one worker."""
    link, load, pack, check, fixed = [], [], [], [], []
    for result in results:
        arm = result["arms"][name]
        run = Run.of(result, name)
        split, sender = arm["split"], arm["sender"]
        fixed_s = split["pause"] + split["prepare"] + split["finish"]
        calls_s = max(0.0, arm["seconds"]["median"] - sum(split.values()))
        # In a raw broadcast each end of the link keeps a core busy, at the same time.
        link.append(Point(run.buckets, run.size, result["arms"]["raw"]["seconds"]["median"]))
        load.append(Point(run.tensors, run.worker_bytes, split["load"]))
        pack.append(Point(1, run.size, sender["gather"] + sender["checksum"]))
        check.append(Point(1, run.worker_bytes, split["verify"]))
        fixed.append(Point(1, run.size, fixed_s + calls_s))
    link_cost = fit_cost(link)
    load_cost = fit_cost(load)
    fixed_cost = fit_cost(fixed)
    speeds = Speeds(
        copy_byte=link_cost.per_byte,
        pack_byte=fit_cost(pack).per_byte,
        check_byte=fit_cost(check).per_byte,
        load_byte=load_cost.per_byte,
        load_tensor=load_cost.per_item,
        message=link_cost.per_item,
        fixed_s=fixed_cost.per_item,
        finish_byte=fixed_cost.per_byte,
    )
    largest = max(results, key=lambda result: result["bytes"])
    return _without_the_links_share(speeds, largest, name)


def _without_the_links_share(speeds: Speeds, result: Result, name: str) -> Speeds:
    """The speeds with the CPU time of packing and loading alone.

    Phases are measured by the clock. Meanwhile threads of the link have used the same cores, so a
    phase's CPU time is less. All phases are shortened alike, so that this run's CPU time is what
    its cores had; they never become longer.
    """
    run = Run.of(result, name)
    measured_s = result["arms"][name]["seconds"]["median"]
    work = cpu_seconds(speeds, run)
    available_s = (measured_s - _fixed_s(speeds, run)) * run.cores
    own_s = work.senders + work.workers
    # The first and the last bucket, in whose time only one side works.
    ends_s = own_s / run.buckets
    share = (available_s - work.link) / (own_s + ends_s * (run.cores - 1))
    share = min(1.0, max(0.0, share))
    return replace(
        speeds,
        pack_byte=speeds.pack_byte * share,
        check_byte=speeds.check_byte * share,
        load_byte=speeds.load_byte * share,
        load_tensor=speeds.load_tensor * share,
    )


@dataclass(frozen=True)
class CpuSeconds:
    """CPU time of one sync: of all senders, all workers, and both ends of the link."""

    senders: float
    workers: float
    link: float


def cpu_seconds(speeds: Speeds, run: Run) -> CpuSeconds:
    """CPU time of one sync."""
    senders_s = run.size * speeds.pack_byte
    delivered_bytes = run.worker_bytes * run.workers
    written_bytes = delivered_bytes / run.tp if run.gets_whole else delivered_bytes
    workers_s = (
        delivered_bytes * speeds.check_byte
        + written_bytes * speeds.load_byte
        + run.tensors * run.workers * speeds.load_tensor
    )
    if run.ranks > 1 and run.gets_whole:  # rows of several senders are put together
        workers_s += delivered_bytes * speeds.copy_byte
    if run.tp > 1 and not run.gets_whole:  # each worker's blocks are cut out of the buckets
        senders_s += run.size * speeds.copy_byte
    link_s = 2 * delivered_bytes * speeds.copy_byte
    link_s += run.buckets * run.ranks * speeds.message
    return CpuSeconds(senders_s, workers_s, link_s)


def predict(speeds: Speeds, run: Run) -> float:
    """Seconds of one sync."""
    work = cpu_seconds(speeds, run)
    own_s = work.senders + work.workers
    busy_s = max(
        (own_s + work.link) / run.cores,
        work.senders / run.sender_cores,
        work.workers / run.worker_cores,
    )
    # One bucket's way through the stages beside the one that is always busy.
    ends_s = own_s / run.buckets * (1 - 1 / run.cores)
    return _fixed_s(speeds, run) + busy_s + ends_s


def _fixed_s(speeds: Speeds, run: Run) -> float:
    return speeds.fixed_s + run.size * speeds.finish_byte


def check_model(results: list[Result], known: int = 2) -> str:
    """The model against measurements, as a table in Markdown.

    Args:
        results: of each run.
        known: how many of them give the speeds.
    """
    rows = []
    for name in (WHOLE, SHARDED):
        if any(name not in result["arms"] for result in results):
            continue
        speeds = fit_speeds(results[:known], name)
        for number, result in enumerate(results):
            flags = result["arguments"]
            measured = result["arms"][name]["seconds"]["median"]
            predicted = predict(speeds, Run.of(result, name))
            run = f"{flags['model']}, {flags['ranks']} + {flags['replicas']} x TP {flags['tp']}"
            run += f", {name}"
            if number < known:
                run += " (fitted)"
            ratio = predicted / measured
            rows.append([run, f"{measured:.4g}", f"{predicted:.4g}", f"{ratio:.2f}"])
    headings = ["run", "measured, s", "model, s", "model / measured"]
    return "\n".join(markdown_table(headings, rows)) + "\n"
