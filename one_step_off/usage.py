"""Memory and GPU utilisation of the run's processes, looked at every few seconds and never waited for.

`UsageProbe` is mixed into the actors and measures; `watching` asks them beside the pipeline, which knows nothing of it.
"""

import asyncio
import contextlib
import os
import re
import threading
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from statistics import fmean
from typing import Any

INTERVAL_S = 5.0
_GPU_INTERVAL_S = 0.5
_LAST_LOOK_S = 10.0

Report = Callable[[dict[str, float], str], None]
"""Told the metrics of a group, and the name of its GPUs if there are any."""


class UsageProbe:
    """A mixin of actors. It needs no constructor, so that it fits any class."""

    _gpus: "_Gpus | None" = None

    def usage(self, cuda: bool) -> dict[str, Any]:
        """What this process and its children use. `memory_bytes`: the peak; of the GPU where the class has
        peak_memory_bytes() and runs on one, else resident. `device`: the GPU's name or "". With NVML also
        `gpu_memory_bytes` (peak of whole GPUs, other processes included) and `gpu_utilisation` (mean since the last
        call, 0 to 1)."""
        own = getattr(self, "peak_memory_bytes", None)
        found: dict[str, Any] = {"memory_bytes": own() if own else peak_resident_bytes(), "device": ""}
        if cuda:
            with contextlib.suppress(Exception):  # any of NVML's: a run goes on without these figures
                self._gpus = self._gpus or _Gpus()
                found |= self._gpus.take()
        return found


def peak_resident_bytes() -> int:
    """Peak resident memory of this process and its living children, summed; pages they share count in each."""
    import psutil

    me, total = psutil.Process(), 0
    for process in (me, *me.children(recursive=True)):
        with contextlib.suppress(OSError, AttributeError):  # it ended meanwhile
            # psutil tells what is resident now, and the peak only in releases newer than those we ask for.
            status = Path(f"/proc/{process.pid}/status").read_text()
            total += int(re.search(r"VmHWM:\s+(\d+)", status)[1]) * 1024
    return total


class _Gpus:
    """The GPUs that this process sees, by NVML, sampled from a thread: one look at the end of a step tells nothing."""

    def __init__(self) -> None:
        """Raises what NVML raises, and ImportError without the package nvidia-ml-py."""
        import pynvml as nvml

        nvml.nvmlInit()
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        names = range(nvml.nvmlDeviceGetCount()) if visible is None else [v for v in visible.split(",") if v]
        by_uuid, by_index = nvml.nvmlDeviceGetHandleByUUID, nvml.nvmlDeviceGetHandleByIndex
        self.handles = [by_index(int(n)) if str(n).isdecimal() else by_uuid(n) for n in names]
        self.nvml, self.busy, self.memory = nvml, [], 0
        self.name = nvml.nvmlDeviceGetName(self.handles[0])
        self._look()
        threading.Thread(target=self._sample, name="gpu-usage", daemon=True).start()

    def _sample(self) -> None:
        with contextlib.suppress(self.nvml.NVMLError):
            while True:
                time.sleep(_GPU_INTERVAL_S)
                self._look()

    def _look(self) -> None:
        self.busy.append(fmean(self.nvml.nvmlDeviceGetUtilizationRates(h).gpu / 100 for h in self.handles))
        self.memory = max(self.memory, *(self.nvml.nvmlDeviceGetMemoryInfo(h).used for h in self.handles))

    def take(self) -> dict[str, Any]:
        """The figures since the last call."""
        busy, self.busy = self.busy, []
        rate = {"gpu_utilisation": fmean(busy)} if busy else {}
        return {"device": self.name, "gpu_memory_bytes": self.memory} | rate


def merged(group: str, answers: list[dict[str, Any]]) -> dict[str, float]:
    """Metrics of one group: the largest peaks of its processes, the mean utilisation."""
    names = {"memory_bytes": f"memory/{group}_peak_bytes", "gpu_memory_bytes": f"memory/{group}_gpu_peak_bytes"}
    values = {key: [a[key] for a in answers if key in a] for key in (*names, "gpu_utilisation")}
    found = {name: float(max(values[key])) for key, name in names.items() if values[key]}
    busy = values["gpu_utilisation"]
    return found | ({f"gpu_utilisation/{group}": fmean(busy)} if busy else {})


async def look(groups: dict[str, list[Any]], cuda: bool, report: Report) -> None:
    """Ask every process once and report. One that does not answer is the pipeline's affair."""

    async def one(group: str, actors: list[Any]) -> None:
        answers = await asyncio.gather(*(actor.usage.remote(cuda) for actor in actors), return_exceptions=True)
        if good := [a for a in answers if isinstance(a, dict)]:
            report(merged(group, good), next((a["device"] for a in good if a.get("device")), ""))

    await asyncio.gather(*(one(group, actors) for group, actors in groups.items()))


@contextlib.asynccontextmanager
async def watching(groups: dict[str, list[Any]], cuda: bool, report: Report) -> AsyncIterator[None]:
    """Look every INTERVAL_S seconds while the block runs, and once more when it has ended well."""

    async def look_on() -> None:
        while True:
            await look(groups, cuda, report)
            await asyncio.sleep(INTERVAL_S)

    task = asyncio.create_task(look_on())
    try:
        yield
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(look(groups, cuda, report), _LAST_LOOK_S)
    finally:
        task.cancel()
