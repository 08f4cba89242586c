"""Processes bound to cores, and threads that are not."""

import contextlib
import os

ALL_CORES = "ONE_STEP_OFF_CORES"
"""Environment variable of a bound process: the cores that it could use before, separated by
commas."""


def pin_process(cores: tuple[int, ...]) -> None:
    """Bind every thread of this process, and all that it starts later, to `cores` (none: leave it
    unbound).

    The cores that it could use before are kept in the environment, for `unpin`.
    """
    if not cores:
        return
    os.environ[ALL_CORES] = ",".join(map(str, usable_cores()))
    for thread_id in os.listdir("/proc/self/task"):
        with contextlib.suppress(ProcessLookupError):  # the thread has just ended
            os.sched_setaffinity(int(thread_id), cores)


def unpin() -> None:
    """Let this thread, and those that it starts, run on all cores of the run.

    The threads of the weight sync do this: while one endpoint of the stream works, the other's
    cores are idle.
    """
    os.sched_setaffinity(0, usable_cores())


def usable_cores() -> list[int]:
    """The cores of the run on this machine, also of those that this process is not bound to."""
    cores = os.environ.get(ALL_CORES)
    return list(map(int, cores.split(","))) if cores else sorted(os.sched_getaffinity(0))
