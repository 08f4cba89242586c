"""The processes of an engine: whether they run, and the end of those of a dead replica."""

import contextlib
import time
from collections.abc import Sequence

import psutil

ProcessId = tuple[int, float]
"""Number of a process and when it was created: the kernel reuses numbers."""

END_S = 10.0
"""Seconds for a killed process to end: until then it has its memory, also that of a GPU."""

END_POLL_S = 0.02

STOPPED_STATES = (psutil.STATUS_STOPPED, psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)


def kill_processes(processes: Sequence[ProcessId]) -> None:
    """Kill these processes, as far as they still run, and wait until they have ended, 10 s at most.

    An engine that starts before that would find their memory taken, or see it become free while it
    measures.
    """
    killed = []
    for pid, created in processes:
        with contextlib.suppress(psutil.Error):
            process = psutil.Process(pid)
            if process.create_time() == created:
                process.kill()
                killed.append(process)
    deadline = time.monotonic() + END_S
    while not all(map(not_running, killed)) and time.monotonic() < deadline:
        time.sleep(END_POLL_S)


def not_running(process: psutil.Process) -> str:
    """Why a process does no work: "gone", or the kernel's name for its state; "" if it may run."""
    try:
        state = process.status()
    except psutil.NoSuchProcess:
        return "gone"
    return state if state in STOPPED_STATES else ""
