"""The processes of a replica's engine: finding them, checking that they run, telling how they have
ended, and killing those of a dead replica."""

import contextlib
import os
import signal
import traceback
from collections.abc import Iterator, Sequence
from typing import Any

import psutil

from one_step_off.cluster.errors import ProcessDied
from one_step_off.cluster.process_cleanup import RUN_FOLDER_VARIABLE

EXIT_S = 5.0
"""Seconds for a process that ends to have its exit code."""

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


def kill_engines_of_run() -> None:
    """Kill all engines of this run on this machine, whatever their parents are by now: a replica
    that is killed while its engine loads leaves it behind, with the memory of its GPU."""
    folder = os.environ.get(RUN_FOLDER_VARIABLE)
    if not folder:
        return
    for process in psutil.process_iter(["environ"]):
        environment = process.info["environ"] or {}
        if environment.get(RUN_FOLDER_VARIABLE) == folder and is_engine(process):
            with contextlib.suppress(psutil.Error):
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
def killed_engine_raises_process_died() -> Iterator[None]:
    """Around the start of an engine: vLLM raises the same error whether a process of the engine
    raised an exception, which it would raise again, or was killed.

    Raises:
        ProcessDied: a signal has ended a process of the engine.
        Exception: any other failure, as it is.
    """
    try:
        yield
    except RuntimeError as error:
        for process in _started_processes(error):
            process.join(EXIT_S)
            exit_code = process.exitcode or 0
            # vLLM itself ends the others by SIGTERM.
            if exit_code < 0 and exit_code != -signal.SIGTERM:
                death = f"process {process.pid} died ({_signal_name(-exit_code)})"
                raise ProcessDied(f"its engine's {death}") from error
        raise


def _started_processes(error: RuntimeError) -> list[Any]:
    """The processes of the engine whose start has failed, of multiprocessing.

    Of vLLM 0.32's frame that raised the error. Its message has the exit codes only of those that
    had one by then: a process closes its files, which vLLM notices, before it has one.
    """
    for frame, _ in traceback.walk_tb(error.__traceback__):
        if frame.f_code.co_name == "wait_for_engine_startup":
            manager = getattr(frame.f_locals.get("launch"), "engine_manager", None)
            return getattr(manager, "processes", [])
    return []


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:  # a real-time signal has no name
        return f"signal {number}"
