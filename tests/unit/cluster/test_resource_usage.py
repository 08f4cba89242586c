"""Memory of real processes, NVML by a stand-in, and the watch beside a pipeline."""

from __future__ import annotations

import asyncio
import itertools
import subprocess
import sys
import threading
import time

import pytest
import torch

from one_step_off.cluster import resource_usage as usage
from one_step_off.cluster.resource_usage import (
    UsageProbe,
    peak_resident_bytes,
    report_usage,
    watch_usage,
)


def test_children_count():
    alone = peak_resident_bytes()
    assert alone > 10 << 20
    code = (
        "x = bytearray(80 << 20); x[::4096] = b'1' * len(x[::4096]); print(1, flush=True); input()"
    )
    child = subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    try:
        child.stdout.readline()
        assert peak_resident_bytes() > alone + (75 << 20)
    finally:
        child.communicate(b"\n")


def test_a_trainer_tells_its_own_peak():
    class Worker(UsageProbe):
        def peak_memory_bytes(self):
            return 7

        def peak_memory_parts(self):
            return {"reserved": 8}

    assert Worker().usage(False) == {
        "memory_bytes": 7,
        "memory_parts": {"reserved": 8},
        "device": "",
    }
    assert UsageProbe().usage(False)["memory_bytes"] > 0


def test_how_busy_the_gpus_are(monkeypatch):
    rates = itertools.count(10, 10)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "utilization", lambda i: next(rates) if i in (0, 1) else None)
    monkeypatch.setattr(torch.cuda, "device_memory_used", lambda i: (5 + i) << 30)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA H100")
    monkeypatch.setattr(usage, "_GPU_INTERVAL_S", 60.0)

    class Worker(UsageProbe):
        def peak_memory_bytes(self):
            return 7

    probe = Worker()
    found = probe.usage(True)
    while "gpu_utilisation" not in found:
        time.sleep(0.01)
        found = probe.usage(True)
    assert found["device"] == "NVIDIA H100" and UsageProbe().usage(False)["device"] == ""
    assert found["gpu_utilisation"] == pytest.approx(0.15), (
        "the mean of the two GPUs' 10 and 20 percent"
    )
    assert "gpu_utilisation" not in probe.usage(True), "no sample since the last call"
    assert found["memory_bytes"] == 7, "a trainer knows its own"
    engine = UsageProbe()
    while "gpu_utilisation" not in engine.usage(True):
        time.sleep(0.01)
    assert engine.usage(True)["memory_bytes"] == 11 << 30, (
        "of the whole GPUs, also between two looks"
    )


def test_without_nvml_there_are_no_such_figures(monkeypatch):
    monkeypatch.setattr(
        torch.cuda, "device_count", lambda: 1
    )  # utilization() raises: there is no GPU
    others = set(threading.enumerate())  # those of another test sleep for a minute
    probe = UsageProbe()
    assert set(probe.usage(True)) == {"memory_bytes", "device"}
    for thread in set(threading.enumerate()) - others:
        thread.join(5.0)  # it has ended, or does so at once
        assert not thread.is_alive()
    assert set(probe.usage(True)) == {"memory_bytes", "device"}


class Actor:
    def __init__(self, answer) -> None:
        self.usage, self.answer, self.asked = self, answer, 0

    async def remote(self, cuda):
        self.asked += 1
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer


def test_groups_are_merged():
    answers = [
        {"memory_bytes": 1, "gpu_utilisation": 0.5, "memory_parts": {"reserved": 9}},
        {"memory_bytes": 3, "gpu_utilisation": 1.0, "memory_parts": {"reserved": 4}},
    ]
    actors, seen = [Actor(answer | {"device": "X"}) for answer in answers], []
    asyncio.run(report_usage("rollout", actors, True, lambda m, name: seen.append((m, name))))
    peaks = {"memory/rollout_peak_bytes": 3.0, "memory/rollout_peak_reserved_bytes": 9.0}
    assert seen == [(peaks | {"gpu_utilisation/rollout": 0.75}, "X")]


def test_a_dead_process_does_not_disturb():
    seen = []
    good, dead = Actor({"memory_bytes": 5, "device": "X"}), Actor(RuntimeError("dead"))
    for group, actors in {"rollout": [dead], "trainer": [dead, good]}.items():
        asyncio.run(report_usage(group, actors, False, lambda m, name: seen.append((m, name))))
    assert seen == [({"memory/trainer_peak_bytes": 5.0}, "X")]


def test_the_watch_looks_at_the_beginning_and_the_end_and_leaves_errors_alone():
    actor = Actor({"memory_bytes": 5, "device": ""})

    async def run(fail: bool):
        async with watch_usage({"trainer": [actor]}, False, lambda m, name: None):
            await asyncio.sleep(0.01)
            if fail:
                raise ValueError("the pipeline's")
        return len(asyncio.all_tasks())

    asyncio.run(run(False))
    assert actor.asked == 2
    with pytest.raises(ValueError, match="the pipeline's"):
        asyncio.run(run(True))
