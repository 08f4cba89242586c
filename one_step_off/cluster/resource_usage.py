"""Memory and GPU utilization of the run's processes, sampled every few seconds; the pipeline never
waits for it.

`UsageProbe` is mixed into the actors and measures. `watch_usage` asks them beside the pipeline,
which knows nothing of it.
"""

import asyncio
import contextlib
import re
import threading
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from statistics import fmean
from typing import Any

from one_step_off.cluster.remote_calls import observed

INTERVAL_S = 5.0
"""Seconds between two reports of a group."""

_GPU_INTERVAL_S = 0.5
"""Seconds between two samples of the GPUs in a process."""

_LAST_REPORT_TIMEOUT_S = 10.0
"""Seconds for the report at the end of a run."""

Report = Callable[[dict[str, float], str], None]
"""Receives metrics, and the name of the GPUs ("" without)."""


class UsageProbe:
    """A mixin of actors. It has no constructor, so that it fits any class."""

    _gpu_samples: list[tuple[float, int]] | None = None
    """Of each sample since the last call: mean utilization (0 to 1) and bytes in use, of the GPUs
    that it sees."""

    _peak_gpu_bytes = 0

    def usage(self, cuda: bool) -> dict[str, Any]:
        """The resources of this process and its children. `cuda`: whether the run uses GPUs.

        Returns:
            memory_parts: peaks by kind, in bytes, from the class's own `peak_memory_parts()` if it
                has this method.
            memory_bytes: the peak; from the class's own `peak_memory_bytes()` if it has this
                method, otherwise of all GPUs that the process sees, otherwise resident memory.
            device: the GPU's name for a class with `peak_memory_bytes()`, otherwise "".
            gpu_utilisation: with NVML, the mean since the last call over the GPUs that it sees, 0
                to 1.
        """
        own_peak = getattr(self, "peak_memory_bytes", None)
        memory_bytes = own_peak() if own_peak else peak_resident_bytes()
        usage: dict[str, Any] = {"memory_bytes": memory_bytes, "device": ""}
        own_parts = getattr(self, "peak_memory_parts", None)
        if own_parts:
            usage["memory_parts"] = own_parts()
        if cuda and own_peak:
            from torch.cuda import get_device_name

            usage["device"] = get_device_name()
        if cuda and self._gpu_samples is None:
            self._start_gpu_sampling()
        if self._gpu_samples:
            shares, used_bytes = zip(*self._gpu_samples, strict=True)
            self._gpu_samples.clear()
            self._peak_gpu_bytes = max(self._peak_gpu_bytes, *used_bytes)
            usage["gpu_utilisation"] = fmean(shares)
        if self._peak_gpu_bytes and not own_peak:  # an engine's memory is in its child process
            usage["memory_bytes"] = self._peak_gpu_bytes
        return usage

    def _start_gpu_sampling(self) -> None:
        self._gpu_samples = []
        sampler = threading.Thread(
            target=_sample_gpus, args=(self._gpu_samples,), name="gpu-usage", daemon=True
        )
        sampler.start()


def peak_resident_bytes() -> int:
    """Sum of the peak resident memory of this process and its living children; shared pages count
    in each."""
    import psutil

    this_process = psutil.Process()
    total = 0
    for process in (this_process, *this_process.children(recursive=True)):
        with contextlib.suppress(OSError, AttributeError):  # the process has just ended
            # From /proc: the required releases of psutil report what is resident now, but not the
            # peak.
            status = Path(f"/proc/{process.pid}/status").read_text()
            peak_kib = re.search(r"VmHWM:\s+(\d+)", status).group(1)
            total += int(peak_kib) * 1024
    return total


def release_cached_memory(device: Any) -> None:
    """Return the memory that torch keeps for later allocations to the GPU `device`, for other
    processes. On CPUs nothing is kept."""
    if device.type == "cuda":
        import torch

        with torch.cuda.device(device):
            torch.cuda.empty_cache()


def _sample_gpus(samples: list[tuple[float, int]]) -> None:
    """Append to `samples` until NVML fails. One sample at the end of a step would say nothing about
    the step.

    It starts no work on the GPUs: torch asks NVML.
    """
    import torch

    with contextlib.suppress(
        Exception
    ):  # any error of NVML: the run continues without these metrics
        while True:
            gpus = range(torch.cuda.device_count())
            share = fmean(torch.cuda.utilization(gpu) / 100 for gpu in gpus)
            used_bytes = sum(torch.cuda.device_memory_used(gpu) for gpu in gpus)
            samples.append((share, used_bytes))
            time.sleep(_GPU_INTERVAL_S)


async def report_usage(group: str, actors: list[Any], cuda: bool, report: Report) -> None:
    """Ask every process of a group once. Reports the largest memory peak and the mean utilization,
    and the name of the GPUs if there are any.

    A process that does not answer is left out: the pipeline deals with its failure.
    """
    answers = await asyncio.gather(
        *(actor.usage.remote(cuda) for actor in actors), return_exceptions=True
    )
    usages = [answer for answer in answers if isinstance(answer, dict)]
    if not usages:
        return
    peak_bytes = max(usage["memory_bytes"] for usage in usages)
    metrics = {f"memory/{group}_peak_bytes": float(peak_bytes)}
    for usage in usages:
        for kind, part_bytes in usage.get("memory_parts", {}).items():
            name = f"memory/{group}_peak_{kind}_bytes"
            metrics[name] = max(metrics.get(name, 0.0), float(part_bytes))
    shares = [usage["gpu_utilisation"] for usage in usages if "gpu_utilisation" in usage]
    if shares:
        metrics[f"gpu_utilisation/{group}"] = fmean(shares)
    device = max(usage["device"] for usage in usages)
    report(metrics, device)


@contextlib.asynccontextmanager
async def watch_usage(
    groups: dict[str, list[Any]], cuda: bool, report: Report
) -> AsyncIterator[None]:
    """Report the usage of all groups (name -> actors) every INTERVAL_S seconds while the block
    runs, and once more when it has ended without an exception."""

    async def report_all() -> None:
        await asyncio.gather(*(report_usage(*group, cuda, report) for group in groups.items()))

    async def report_periodically() -> None:
        while True:
            await report_all()
            await asyncio.sleep(INTERVAL_S)

    task = observed(report_periodically())
    try:
        yield
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(report_all(), _LAST_REPORT_TIMEOUT_S)
    finally:
        task.cancel()
