"""What vLLM's engine tells of its work: how full it is, and how long a request waited.

vLLM's own statistics are off: its client would do work for each token. The scheduler of a replica
notes the few moments that are asked for. How full it is goes to the client in vLLM's own
`SchedulerStats`, at most every LOOK_S seconds; the times of a request go with its last output.
"""

from __future__ import annotations

import time
from typing import Any

from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.metrics.stats import SchedulerStats

from one_step_off.engines.engine import EngineLoad

LOOK_S = 0.1
"""Seconds between two reports of a scheduler."""

WAITS = "waits"
"""The key under which the last output of a request has `waits_of`, in kv_transfer_params."""


class ReportingScheduler(Scheduler):
    """Notes when requests begin, and reports how full the engine is.

    Attributes:
        preempted: requests that were preempted since the last report, because the KV cache was
            full. A pause that clears the cache preempts all requests; it says nothing of the room.
        had_room: requests that went on after the last of these preemptions.
        reported_s: when it last reported, by `time.monotonic`.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.preempted = 0
        self.had_room = 0
        self.reported_s = 0.0
        super().__init__(*args, **kwargs)

    def add_request(self, request: Any) -> None:
        """Take a request."""
        request.queued_s = request.begun_s = request.first_token_s = time.monotonic()
        super().add_request(request)

    def schedule(self, throttle_prefills: bool = False) -> SchedulerOutput:
        """What vLLM's own method returns."""
        step = super().schedule(throttle_prefills)
        if step.scheduled_new_reqs:
            now = time.monotonic()
            requests: dict[str, Any] = self.requests
            for new in step.scheduled_new_reqs:
                request = requests[new.req_id]
                if not request.num_preemptions:
                    request.begun_s = now
        return step

    def _preempt_request(self, request: Any, *args: Any, **kwargs: Any) -> None:
        super()._preempt_request(request, *args, **kwargs)
        self.preempted += 1
        self.had_room = len(self.running)

    def reset_prefix_cache(self, *args: Any, **kwargs: Any) -> bool:
        """See vLLM's own method."""
        counts = self.preempted, self.had_room
        was_reset = super().reset_prefix_cache(*args, **kwargs)
        self.preempted, self.had_room = counts
        return was_reset

    def make_stats(self, *args: Any, **kwargs: Any) -> SchedulerStats | None:
        """What the client receives after a step: vLLM's own, where these are on."""
        stats = super().make_stats(*args, **kwargs)
        if stats is None:
            now = time.monotonic()
            if now < self.reported_s + LOOK_S:
                return None
            self.reported_s = now
            running, waiting = self.get_request_counts()
            stats = SchedulerStats(
                num_running_reqs=running,
                num_waiting_reqs=waiting,
                kv_cache_usage=self.kv_cache_manager.usage,
            )
        if self.preempted:
            stats.num_running_reqs = self.had_room
        # vLLM counts the requests that a pause has preempted, too.
        stats.prefix_cache_stats.preempted_requests = self.preempted
        self.preempted = 0
        return stats


def waits_of(request: Any) -> list[float]:
    """Seconds that a request of the scheduler waited in the queue, and from then until its first
    token."""
    return [request.begun_s - request.queued_s, request.first_token_s - request.begun_s]


class LoadReports:
    """What the scheduler has reported, in the client's process.

    Attributes:
        load: the newest report.
    """

    def __init__(self, llm: Any) -> None:
        """`llm`: the `AsyncLLM`, which gives each report to its output processor."""
        self.load = EngineLoad()
        processor = llm.output_processor
        self._receive_too = processor.update_scheduler_stats
        processor.update_scheduler_stats = self.receive

    def receive(self, stats: SchedulerStats | None) -> None:
        """Take a report; None: this step has none."""
        self._receive_too(stats)
        if stats is None:
            return
        self.load = EngineLoad(
            running=stats.num_running_reqs,
            waiting=stats.num_waiting_reqs,
            kv_usage=stats.kv_cache_usage,
            preemptions=self.load.preemptions + stats.prefix_cache_stats.preempted_requests,
        )
