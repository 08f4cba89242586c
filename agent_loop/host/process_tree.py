"""Processes and what descends from them."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import time
from collections.abc import Callable

LIBC = ctypes.CDLL(None)
SET_DEATH_SIGNAL = 1  # of prctl
SET_SUBREAPER = 36
KILL_S = 5.0  # for killed processes to end


def adopt_orphans() -> None:
    """Make orphans among the processes below this one its children."""
    LIBC.prctl(SET_SUBREAPER, 1, 0, 0, 0)


def die_with_parent(parent: int, send: int = signal.SIGKILL) -> None:
    """Have this process killed when the thread that started it ends."""
    LIBC.prctl(SET_DEATH_SIGNAL, send, 0, 0, 0)
    if os.getppid() != parent:  # it died before
        os._exit(1)


def children(pid: int) -> list[int]:
    """The children of a process, of all its threads."""
    found: list[int] = []
    try:
        for task in os.listdir(f"/proc/{pid}/task"):
            with open(f"/proc/{pid}/task/{task}/children") as file:
                found += map(int, file.read().split())
    except OSError:  # it has ended
        pass
    return found


def descendants(pid: int) -> list[int]:
    """All processes below a process that run."""
    found: list[int] = []
    for child in children(pid):
        found += [child, *descendants(child)]
    return [process for process in found if is_running(process)]


def is_running(pid: int) -> bool:
    """Whether a process exists and has not ended."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] not in ("Z", "X")
    except OSError:
        return False


def kill_all(find: Callable[[], list[int]]) -> None:
    """Kill the processes that `find` returns, until it returns none twice in a row. A process may
    start another before it ends. One that changes its parent during a search is found by the
    next."""
    deadline = time.monotonic() + KILL_S
    times_none = 0
    while times_none < 2 and time.monotonic() < deadline:
        processes = find()
        times_none = 0 if processes else times_none + 1
        for pid in processes:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.001)
