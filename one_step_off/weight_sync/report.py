"""Metrics of one weight sync, from the reports of its trainer ranks and vLLM workers.

A report is a dict, as `WeightSender.send` and `SyncWorkerExtension.sync_weights` return it.
"""

import math
import time
from dataclasses import dataclass, field
from typing import Any

from one_step_off.cluster.run_events import Span
from one_step_off.weight_sync.gpu_queue import GpuQueue, Mark

Report = dict[str, Any]

GATHERING_PHASES = ("gather", "cut", "checksum", "encode", "keep")
DEVICE_PHASES = (*GATHERING_PHASES, "apply", "verify", "load")
"""Work of the device. On a GPU it is timed by marks, which are read at the end of the sync."""
SENDER_PHASES = (*GATHERING_PHASES, "wire")
RECEIVER_PHASES = ("pause", "prepare", "wait", "apply", "verify", "load", "finish")

MAX_PROCESSES = 64
"""Processes of one sync in sync/ranks and in the timeline: those that took longest."""

MAX_SPANS = 1000
"""Spans of one sync in the timeline, of all processes together."""


def sync_metrics(
    sent: list[Report], received: dict[int, list[Report]], seconds: float, total_bytes: int
) -> dict[str, Any]:
    """All metrics of one transfer but sync/ranks.

    Args:
        sent: one report per trainer rank.
        received: replica -> one report per worker of its engine.
        seconds: of the whole transfer.
        total_bytes: of a full sync.
    """
    workers = [worker for workers_of_replica in received.values() for worker in workers_of_replica]
    wire_bytes = sum(report["bytes"] for report in sent)
    changed_words = sum(report["changed"] for report in sent)
    metrics: dict[str, Any] = {
        "sync/transfer_s": seconds,
        "sync/bytes": wire_bytes,
        "sync/worker_bytes": max(worker["bytes"] for worker in workers),
        "sync/gb_per_s": wire_bytes / seconds / 1e9,
        "sync/full_bytes": float(total_bytes),
        "sync/changed_share": 2 * changed_words / total_bytes,  # a word has two bytes
    }
    metrics |= _slowest_of_each_phase(GATHERING_PHASES, sent)
    metrics |= _slowest_of_each_phase(RECEIVER_PHASES, workers)
    is_full = math.isnan(changed_words)
    metrics |= _wire_metrics(sent, workers, is_full)
    metrics |= _pressure_metrics(received)
    paused = [worker["paused"] for worker in workers if "paused" in worker]
    if paused:
        metrics["sync/paused_s"] = max(paused)
    communicators = [
        report["communicator_bytes"]
        for report in (*sent, *workers)
        if "communicator_bytes" in report
    ]
    if communicators:
        metrics["sync/communicator_mb"] = max(communicators) / (1 << 20)
    # 1: every worker received what it keeps, straight into its parameters; 0: whole tensors
    # travelled, and vLLM loaded them.
    in_place = [worker["in_place"] for worker in workers if "in_place" in worker]
    if in_place:
        metrics["sync/in_place"] = min(in_place)
    return metrics


def slowest_processes(sent: list[Report], received: dict[int, list[Report]]) -> dict[str, Report]:
    """Name -> report of the MAX_PROCESSES processes that took longest, the slowest last.

    The names are "trainer 0", "rollout 0" for a replica's first worker, and "rollout 0.1" for its
    second.
    """
    reports: dict[str, Report] = {}
    for rank, report in enumerate(sent):
        reports[f"trainer {rank}"] = report
    for replica, workers in received.items():
        for worker, report in enumerate(workers):
            suffix = f".{worker}" if worker > 0 else ""
            reports[f"rollout {replica}{suffix}"] = report
    by_seconds = sorted(reports, key=lambda name: _total_seconds(reports[name]))
    return {name: reports[name] for name in by_seconds[-MAX_PROCESSES:]}


def phase_table(reports: dict[str, Report]) -> dict[str, dict[str, float]]:
    """The metric sync/ranks: name of a process -> its bytes and its seconds per phase."""
    table = {}
    for name, report in reports.items():
        table[name] = {
            key: value
            for key, value in report.items()
            if key == "bytes" or key in SENDER_PHASES or key in RECEIVER_PHASES
        }
    return table


def timeline_spans(reports: dict[str, Report], version: int) -> list[Span]:
    """The spans of these processes, at most MAX_SPANS."""
    spans_per_process = MAX_SPANS // len(reports)
    spans = []
    for name, report in reports.items():
        for lane, phase, begin, end in report["spans"][:spans_per_process]:
            spans.append((f"sync {name}{lane}", phase, version, begin, end))
    return spans


def _total_seconds(report: Report) -> float:
    return sum(report.get(phase, 0.0) for phase in (*SENDER_PHASES, *RECEIVER_PHASES))


def _slowest_of_each_phase(phases: tuple[str, ...], reports: list[Report]) -> dict[str, float]:
    """sync/PHASE_s: the seconds of the process that took longest."""
    metrics = {}
    for phase in phases:
        metrics[f"sync/{phase}_s"] = max(report.get(phase, 0.0) for report in reports)
    return metrics


def _pressure_metrics(received: dict[int, list[Report]]) -> dict[str, float]:
    """What the replicas have seen of their engines since the last sync: rollout/open_requests and
    rollout/preemptions of all together, rollout/kv_usage_max of the fullest."""
    # All workers of a replica report the same.
    seen = [workers[0]["pressure"] for workers in received.values() if "pressure" in workers[0]]
    if not seen:
        return {}
    return {
        "rollout/open_requests": sum(one["open_requests"] for one in seen),
        "rollout/kv_usage_max": max(one["kv_usage_max"] for one in seen),
        "rollout/preemptions": sum(one["preemptions"] for one in seen),
    }


def _wire_metrics(sent: list[Report], workers: list[Report], is_full: bool) -> dict[str, float]:
    """sync/wire_s of the worker that took longest, and what the bare link would have taken.

    The time of a bucket at one end includes the wait for the other end, so the shorter of both
    counts.
    """
    slowest_sender: dict[int, float] = {}  # bucket -> seconds
    for report in sent:
        for bucket, seconds in report["bucket_wire"]:
            slowest_sender[bucket] = max(seconds, slowest_sender.get(bucket, 0.0))
    wire_times = []
    for worker in workers:
        wire_s = sum(
            min(seconds, slowest_sender[bucket]) for bucket, seconds in worker["bucket_wire"]
        )
        wire_times.append((wire_s, worker["bare_wire"]))
    wire_s, bare_wire_s = max(wire_times)
    metrics = {"sync/wire_s": wire_s}
    if bare_wire_s and is_full:  # for the few bytes of a delta both are mere latency
        metrics["sync/raw_s"] = bare_wire_s
        metrics["sync/wire_ratio"] = wire_s / bare_wire_s
    return metrics


MAX_SPANS_OF_PEER = 200
"""Spans of one peer in one sync; a timeline with more shows nothing."""

WIRE_LANE = " wire"
"""Suffix of the timeline's lane for what happens on the wire's thread."""


@dataclass
class TransferRecord:
    """What one peer of the weight stream measures during one sync: seconds per phase, bytes on the
    wire, and spans for the timeline."""

    phase_seconds: dict[str, float] = field(default_factory=dict)
    bucket_wire: list[list[float]] = field(default_factory=list)
    """[index of the bucket, seconds on the wire] of each bucket."""
    spans: list[list[Any]] = field(default_factory=list)
    """[lane, phase, begin, end], by `time.time`."""
    marked: list[tuple[str, Mark, Mark, float]] = field(default_factory=list)
    """Phase, begin, end, and when the host had launched it, by `time.time`."""
    wire_bytes: int = 0
    changed_words: int = 0
    """16-bit words that differ from the last sync (deltas)."""

    def add_phase(self, name: str, seconds: float, end: float | None = None) -> None:
        """Note a phase that ended at `end`, by `time.time`; None: now."""
        self.phase_seconds[name] = self.phase_seconds.get(name, 0.0) + seconds
        self._add_span("", name, seconds, end)

    def mark_phase(self, name: str, begin: Mark, end: Mark) -> None:
        """Note a phase of a GPU between two marks."""
        self.marked.append((name, begin, end, time.time()))

    def read_marks(self, queue: GpuQueue) -> None:
        """Add the phases between marks; the GPU has reached all of them."""
        for name, begin, end, host_end in self.marked:
            self.add_phase(name, queue.seconds(begin, end), host_end)
        self.marked = []

    def add_wire_span(self, seconds: float) -> None:
        """Note a message that has just left the wire's thread."""
        self._add_span(WIRE_LANE, "wire", seconds)

    def report(self) -> dict[str, Any]:
        """Seconds per phase, "bytes", "bucket_wire" and "spans"."""
        return {
            **self.phase_seconds,
            "bytes": float(self.wire_bytes),
            "bucket_wire": self.bucket_wire,
            "spans": self.spans,
        }

    def _add_span(self, lane: str, name: str, seconds: float, end: float | None = None) -> None:
        if len(self.spans) < MAX_SPANS_OF_PEER:
            end = end or time.time()
            self.spans.append([lane, name, end - seconds, end])
