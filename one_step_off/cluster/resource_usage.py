"""Memory and GPU utilisation of the run's processes, looked at every few seconds and never waited for.

`UsageProbe` is mixed into the actors and measures; `watching` asks them beside the pipeline, which knows nothing of it.
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

INTERVAL_S = 5.0
_GPU_INTERVAL_S = 0.5
_LAST_LOOK_S = 10.0


class UsageProbe:
    """A mixin of actors. It needs no constructor, so that it fits any class."""

    _busy: list[tuple[float, int]] | None = None
    _peak = 0

    def usage(self, cuda: bool) -> dict[str, Any]:
        """What this process and its children use. `memory_bytes`: the peak; by the class's own peak_memory_bytes() if it
        has one, else of all the GPUs that it sees, else resident. `device`: the GPU's name, of a class with that method,
        else "". With NVML also `gpu_utilisation`: mean of the GPUs that it sees since the last call, 0 to 1."""
        own = getattr(self, "peak_memory_bytes", None)
        found: dict[str, Any] = {
            "memory_bytes": own() if own else peak_resident_bytes(),
            "device": "",
        }
        if cuda and own:
            from torch.cuda import get_device_name

            found["device"] = get_device_name()
        if cuda and self._busy is None:
            self._busy = []
            threading.Thread(
                target=_watch_gpus, args=(self._busy,), name="gpu-usage", daemon=True
            ).start()
        if self._busy:
            busy, used = zip(*self._busy, strict=True)
            found["gpu_utilisation"], self._peak = fmean(busy), max(self._peak, *used)
            self._busy.clear()
        if self._peak and not own:  # an engine's memory is in its child
            found["memory_bytes"] = self._peak
        return found


def peak_resident_bytes() -> int:
    """Peak resident memory of this process and its living children, summed; pages they share count in each."""
    import psutil

    me, total = psutil.Process(), 0
    for process in (me, *me.children(recursive=True)):
        with contextlib.suppress(OSError, AttributeError):  # it ended meanwhile
            # psutil tells what is resident now, and the peak only in releases newer than those we ask for.
            total += (
                int(
                    re.search(r"VmHWM:\s+(\d+)", Path(f"/proc/{process.pid}/status").read_text())[1]
                )
                * 1024
            )
    return total


def _watch_gpus(busy: list[tuple[float, int]]) -> None:
    """Append, until NVML fails, how busy the GPUs that this process sees are, and the bytes in use: one look at the end of
    a step tells nothing. It begins no work on them: torch asks NVML."""
    import torch

    with contextlib.suppress(Exception):  # any of NVML's: a run goes on without these figures
        while True:
            seen = range(torch.cuda.device_count())
            share = fmean(torch.cuda.utilization(i) / 100 for i in seen)
            busy.append((share, sum(map(torch.cuda.device_memory_used, seen))))
            time.sleep(_GPU_INTERVAL_S)


async def look(
    group: str, actors: list[Any], cuda: bool, report: Callable[[dict[str, float], str], None]
) -> None:
    """Ask every process of a group once, and report the largest peak and the mean utilisation, and the name of its GPUs if
    there are any. One that does not answer is the pipeline's affair."""
    answers = await asyncio.gather(
        *(actor.usage.remote(cuda) for actor in actors), return_exceptions=True
    )
    if good := [a for a in answers if isinstance(a, dict)]:
        found = {f"memory/{group}_peak_bytes": float(max(a["memory_bytes"] for a in good))}
        if busy := [a["gpu_utilisation"] for a in good if "gpu_utilisation" in a]:
            found[f"gpu_utilisation/{group}"] = fmean(busy)
        report(found, max(a["device"] for a in good))


@contextlib.asynccontextmanager
async def watch_usage(
    groups: dict[str, list[Any]], cuda: bool, report: Callable
) -> AsyncIterator[None]:
    """Look at all groups every INTERVAL_S seconds while the block runs, and once more when it has ended well."""

    def all_at_once() -> asyncio.Future:
        return asyncio.gather(*(look(*group, cuda, report) for group in groups.items()))

    async def look_on() -> None:
        while True:
            await all_at_once()
            await asyncio.sleep(INTERVAL_S)

    task = asyncio.create_task(look_on())
    try:
        yield
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(all_at_once(), _LAST_LOOK_S)
    finally:
        task.cancel()
