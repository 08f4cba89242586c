"""Memory of real processes, NVML by a stand-in, and the watch beside a pipeline."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import types

import pytest

from one_step_off import usage
from one_step_off.usage import UsageProbe, look, merged, peak_resident_bytes, watching


def test_children_count():
    alone = peak_resident_bytes()
    assert alone > 10 << 20
    code = "x = bytearray(80 << 20); x[::4096] = b'1' * len(x[::4096]); print(1, flush=True); input()"
    child = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    try:
        child.stdout.readline()
        assert peak_resident_bytes() > alone + (75 << 20)
    finally:
        child.communicate(b"\n")


def test_a_trainer_tells_its_own_peak():
    class Worker(UsageProbe):
        def peak_memory_bytes(self):
            return 7

    assert Worker().usage(False) == {"memory_bytes": 7, "device": ""}
    assert UsageProbe().usage(False)["memory_bytes"] > 0


def fake_nvml(monkeypatch, count: int = 2) -> types.SimpleNamespace:
    rates = iter(range(10, 1000, 10))
    fake = types.SimpleNamespace(
        NVMLError=RuntimeError,
        nvmlInit=lambda: None,
        nvmlDeviceGetCount=lambda: count,
        nvmlDeviceGetHandleByIndex=lambda i: i,
        nvmlDeviceGetHandleByUUID=lambda name: name,
        nvmlDeviceGetName=lambda h: f"GPU {h}",
        nvmlDeviceGetUtilizationRates=lambda h: types.SimpleNamespace(gpu=next(rates)),
        nvmlDeviceGetMemoryInfo=lambda h: types.SimpleNamespace(used=100),
    )
    monkeypatch.setitem(sys.modules, "pynvml", fake)
    monkeypatch.setattr(usage, "_GPU_INTERVAL_S", 60.0)
    return fake


def test_gpus_by_nvml(monkeypatch):
    fake_nvml(monkeypatch)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1,GPU-abc")
    probe = UsageProbe()
    found = probe.usage(True)
    assert found["device"] == "GPU 1" and found["gpu_memory_bytes"] == 100
    assert found["gpu_utilisation"] == pytest.approx(0.15), "the mean of the two GPUs' 10 and 20 percent"
    assert "gpu_utilisation" not in probe.usage(True), "no sample since the last call"


def test_without_nvml_there_are_no_such_figures(monkeypatch):
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert set(UsageProbe().usage(True)) == {"memory_bytes", "device"}


def test_groups_are_merged():
    answers = [{"memory_bytes": 1, "gpu_utilisation": 0.5}, {"memory_bytes": 3, "gpu_utilisation": 1.0}]
    assert merged("rollout", answers) == {"memory/rollout_peak_bytes": 3.0, "gpu_utilisation/rollout": 0.75}


class Actor:
    def __init__(self, answer) -> None:
        self.usage, self.answer, self.asked = self, answer, 0

    async def remote(self, cuda):
        self.asked += 1
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer


def test_a_dead_process_does_not_disturb():
    seen = []
    good, dead = Actor({"memory_bytes": 5, "device": "X"}), Actor(RuntimeError("dead"))
    asyncio.run(look({"rollout": [dead], "trainer": [dead, good]}, False, lambda m, name: seen.append((m, name))))
    assert seen == [({"memory/trainer_peak_bytes": 5.0}, "X")]


def test_the_watch_looks_at_the_beginning_and_the_end_and_leaves_errors_alone():
    actor = Actor({"memory_bytes": 5, "device": ""})

    async def run(fail: bool):
        async with watching({"trainer": [actor]}, False, lambda m, name: None):
            await asyncio.sleep(0.01)
            if fail:
                raise ValueError("the pipeline's")
        return len(asyncio.all_tasks())

    asyncio.run(run(False))
    assert actor.asked == 2
    with pytest.raises(ValueError, match="the pipeline's"):
        asyncio.run(run(True))
