"""Metrics of a sync from the reports of its processes."""

from __future__ import annotations

import math
from typing import Any

import pytest

from one_step_off.weight_sync import report
from one_step_off.weight_sync.report import (
    phase_table,
    slowest_processes,
    sync_metrics,
    timeline_spans,
)

FULL_BYTES = 1000


def sent_report(wire: list[float], **more: Any) -> dict[str, Any]:
    """Of a trainer rank; `wire`: seconds of each bucket."""
    bucket_wire = [[index, seconds] for index, seconds in enumerate(wire)]
    plain = {"bytes": 500.0, "changed": math.nan, "bucket_wire": bucket_wire, "spans": []}
    return plain | more


def received_report(wire: list[float], **more: Any) -> dict[str, Any]:
    """Of a vLLM worker."""
    bucket_wire = [[index, seconds] for index, seconds in enumerate(wire)]
    return {"bytes": 1000.0, "bucket_wire": bucket_wire, "bare_wire": 0.2, "spans": []} | more


def test_totals():
    sent = [sent_report([0.1]), sent_report([0.1])]
    metrics = sync_metrics(sent, {0: [received_report([0.1])]}, 2.0, FULL_BYTES)
    assert metrics["sync/transfer_s"] == 2.0
    assert metrics["sync/bytes"] == 1000.0
    assert metrics["sync/gb_per_s"] == 1000.0 / 2.0 / 1e9
    assert metrics["sync/full_bytes"] == 1000.0


def test_a_phase_counts_as_long_as_its_slowest_process():
    sent = [sent_report([0.1], gather=0.3), sent_report([0.1], gather=0.5)]
    received = {0: [received_report([0.1], load=0.7)], 1: [received_report([0.1], load=0.6)]}
    metrics = sync_metrics(sent, received, 2.0, FULL_BYTES)
    assert metrics["sync/gather_s"] == 0.5
    assert metrics["sync/load_s"] == 0.7
    assert metrics["sync/encode_s"] == 0.0


def test_a_bucket_counts_as_long_as_at_the_faster_end():
    """The senders' time of a bucket is that of the slowest sender."""
    sent = [sent_report([0.3, 0.1]), sent_report([0.2, 0.4])]
    received = {0: [received_report([0.5, 0.1])], 1: [received_report([0.1, 0.1])]}
    metrics = sync_metrics(sent, received, 2.0, FULL_BYTES)
    assert metrics["sync/wire_s"] == pytest.approx(0.3 + 0.1)
    assert metrics["sync/raw_s"] == 0.2
    assert metrics["sync/wire_ratio"] == pytest.approx(2.0)


def test_the_pressure_is_that_of_all_replicas_each_once():
    """Every worker of a replica reports the same."""
    one = {"open_requests": 10.0, "kv_usage_max": 0.5, "preemptions": 0.0}
    two = {"open_requests": 30.0, "kv_usage_max": 0.9, "preemptions": 4.0}
    received = {
        0: [received_report([0.1], pressure=one), received_report([0.1], pressure=one)],
        1: [received_report([0.1], pressure=two)],
    }
    metrics = sync_metrics([sent_report([0.1])], received, 2.0, FULL_BYTES)
    assert metrics["rollout/open_requests"] == 40.0
    assert metrics["rollout/kv_usage_max"] == 0.9
    assert metrics["rollout/preemptions"] == 4.0


def test_a_delta_is_not_compared_with_the_bare_link():
    sent = [sent_report([0.1], bytes=10.0, changed=50.0)]
    metrics = sync_metrics(sent, {0: [received_report([0.1])]}, 2.0, FULL_BYTES)
    assert metrics["sync/changed_share"] == 0.1
    assert "sync/wire_ratio" not in metrics


@pytest.mark.parametrize(("flags", "expected"), [([1.0, 1.0], 1.0), ([1.0, 0.0], 0.0)])
def test_in_place_holds_for_all_workers_or_not(flags, expected):
    received = {i: [received_report([0.1], in_place=flag)] for i, flag in enumerate(flags)}
    metrics = sync_metrics([sent_report([0.1])], received, 2.0, FULL_BYTES)
    assert metrics["sync/in_place"] == expected


def test_processes_are_named_and_the_slowest_come_last(monkeypatch):
    monkeypatch.setattr(report, "MAX_PROCESSES", 3)
    sent = [sent_report([0.1], gather=0.1)]
    received = {
        0: [received_report([0.1], load=0.9), received_report([0.1], load=0.5)],
        2: [received_report([0.1], load=0.7)],
    }
    slowest = slowest_processes(sent, received)
    assert list(slowest) == ["rollout 0.1", "rollout 2", "rollout 0"]
    assert phase_table(slowest)["rollout 2"] == {"bytes": 1000.0, "load": 0.7}


def test_spans_carry_process_lane_and_version():
    reports = {"trainer 0": sent_report([0.1], spans=[[" wire", "wire", 1.0, 2.0]])}
    assert timeline_spans(reports, 7) == [("sync trainer 0 wire", "wire", 7, 1.0, 2.0)]


def test_the_memory_of_communicators_is_that_of_the_process_with_the_most_and_absent_on_cpus():
    sent = [sent_report([0.1], communicator_bytes=float(3 << 20)), sent_report([0.1])]
    received = {0: [received_report([0.1], communicator_bytes=float(5 << 20))]}
    assert sync_metrics(sent, received, 1.0, FULL_BYTES)["sync/communicator_mb"] == 5.0
    on_cpus = sync_metrics([sent_report([0.1])], {0: [received_report([0.1])]}, 1.0, FULL_BYTES)
    assert "sync/communicator_mb" not in on_cpus
