"""The processes of a replica's engine: finding them, checking that they run, telling how they have
ended, and killing those of a dead replica."""

import contextlib
import re
import signal
from collections.abc import Iterator, Sequence

import psutil

from one_step_off.cluster.errors import ProcessDied

ProcessId = tuple[int, float]
"""Number of a process and when it was created: the kernel reuses numbers."""

SIGNALED_PROCESS = re.compile(r"'([^']+)': -(\d+)")
"""In vLLM's error of an engine that did not start: the name of a process that a signal has ended,
and the signal. The exit code of a process that raised an exception is 1."""

STOPPED_STATES = (psutil.STATUS_STOPPED, psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)


def kill_processes(processes: Sequence[ProcessId]) -> None:
    """Kill these processes, as far as they still run."""
    for pid, created in processes:
        with contextlib.suppress(psutil.Error):
            process = psutil.Process(pid)
            if process.create_time() == created:
                process.kill()


def is_engine(process: psutil.Process) -> bool:
    """Whether this is a process of vLLM's, which name themselves "VLLM::..."."""
    try:
        return "VLLM::" in " ".join(process.cmdline())
    except psutil.Error:  # it has just ended
        return False


def not_running(process: psutil.Process) -> str:
    """Why a process does no work: "gone", or the kernel's name for its state; "" if it may run."""
    try:
        state = process.status()
    except psutil.NoSuchProcess:
        return "gone"
    return state if state in STOPPED_STATES else ""


@contextlib.contextmanager
def named_deaths() -> Iterator[None]:
    """Around the start of an engine: vLLM raises the same error whether a process of the engine
    raised an exception, which it would raise again, or was killed.

    Raises:
        ProcessDied: a signal has ended a process of the engine.
        Exception: any other failure, as it is.
    """
    try:
        yield
    except RuntimeError as error:
        signaled = SIGNALED_PROCESS.search(str(error))
        if signaled is None:
            raise
        process, number = signaled.groups()
        raise ProcessDied(
            f"its engine's process {process} died ({_signal_name(number)})"
        ) from error


def _signal_name(number: str) -> str:
    try:
        return signal.Signals(int(number)).name
    except ValueError:  # a real-time signal has no name
        return f"signal {number}"
