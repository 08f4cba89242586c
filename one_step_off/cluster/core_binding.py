"""Processes bound to cores, and threads that are not."""

import contextlib
import os
from collections.abc import Iterable

ALL_CORES = "ONE_STEP_OFF_CORES"
"""Environment variable of a bound process: the cores that it could use before, separated by
commas."""

OWN_CORES = "ONE_STEP_OFF_OWN_CORES"
"""Environment variable of a bound process: the cores that it is bound to."""


def pin_process(cores: tuple[int, ...]) -> None:
    """Bind every thread of this process, and all that it starts later, to `cores` (none: leave it
    unbound).

    The cores that it could use before are kept in the environment, for `unpin`, and so are `cores`,
    for `own_cores`.
    """
    if not cores:
        return
    os.environ[ALL_CORES] = _joined(usable_cores())
    os.environ[OWN_CORES] = _joined(cores)
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
    return _cores_in(ALL_CORES) or sorted(os.sched_getaffinity(0))


def own_cores() -> list[int]:
    """The cores that this process is bound to; none: it is not bound."""
    return _cores_in(OWN_CORES)


def _joined(cores: Iterable[int]) -> str:
    return ",".join(map(str, cores))


def _cores_in(variable: str) -> list[int]:
    return [int(core) for core in os.environ.get(variable, "").split(",") if core]
