"""The processes of an engine: whether they run, and the end of those of a dead replica."""

import contextlib
from collections.abc import Sequence

import psutil

ProcessId = tuple[int, float]
"""Number of a process and when it was created: the kernel reuses numbers."""

STOPPED_STATES = (psutil.STATUS_STOPPED, psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)


def kill_processes(processes: Sequence[ProcessId]) -> None:
    """Kill these processes, as far as they still run."""
    for pid, created in processes:
        with contextlib.suppress(psutil.Error):
            process = psutil.Process(pid)
            if process.create_time() == created:
                process.kill()


def not_running(process: psutil.Process) -> str:
    """Why a process does no work: "gone", or the kernel's name for its state; "" if it may run."""
    try:
        state = process.status()
    except psutil.NoSuchProcess:
        return "gone"
    return state if state in STOPPED_STATES else ""
