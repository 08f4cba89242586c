"""Processes bound to cores, and threads that are not."""

import contextlib
import os

ALL_CORES = (
    "ONE_STEP_OFF_CORES"  # environment variable: those that a bound process could use before
)


def unpin() -> None:
    """Let this thread, and those that it starts, run on all cores that the run has. Where processes are bound to cores
    (`placement.pin_process`) the sync's threads are not: while one end of the stream works the other's core is free."""
    if cores := os.environ.get(ALL_CORES):
        os.sched_setaffinity(0, map(int, cores.split(",")))


def pin_process(cores: tuple[int, ...]) -> None:
    """Bind every thread of this process, and all it starts later, to `cores`; what it could use before is kept in the
    environment for the weight sync."""
    if not cores:
        return
    os.environ[ALL_CORES] = ",".join(map(str, sorted(os.sched_getaffinity(0))))
    for thread in os.listdir("/proc/self/task"):
        with contextlib.suppress(ProcessLookupError):  # a thread that ended meanwhile
            os.sched_setaffinity(int(thread), cores)
