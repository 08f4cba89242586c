"""The processes of vLLM's engines, and why one did not start, in one line.

The engine has a process of its own, and its error is in the log alone. What vLLM raises only says
that there is one. An error in the engine's arguments spreads over several lines.
"""

import contextlib
import os
import re
import signal
import traceback
from collections.abc import Iterator
from typing import Any

import psutil

from one_step_off.cluster.errors import ProcessDied
from one_step_off.cluster.process_cleanup import RUN_FOLDER_VARIABLE
from one_step_off.config.errors import first_line

EXIT_S = 5.0
"""Seconds for a process that ends to have its exit code."""

POINTS_ELSEWHERE = "root cause"
"""In the messages that vLLM raises instead of the error itself."""

MEMORY_ERRORS = {
    "No available memory for the cache blocks": (
        "weights and activations take all of the engine's memory; raise "
        "rollout.gpu_memory_utilization, or its pool's share in placement.pools "
        "(on CPUs rollout.kv_cache_mb)"
    ),
    "To serve at least one request with the model's max seq len": (
        "the KV cache does not hold one sequence; raise rollout.gpu_memory_utilization (on CPUs "
        "rollout.kv_cache_mb), or lower data.max_response_length"
    ),
    "on startup is less than desired GPU memory utilization": (
        "other processes use memory of this GPU that the engine counts on; end them, or lower "
        "rollout.gpu_memory_utilization"
    ),
    "Error in memory profiling": (
        "another process has freed memory of this GPU while the engine measured it; start again, "
        "or set engine_kwargs.kv_cache_memory_bytes (of rollout or teacher), with which nothing is "
        "measured"
    ),
    "CUDA out of memory": (
        "the engine does not fit into what is free on this GPU; end other processes, lower "
        "engine_kwargs.max_num_seqs, or raise tensor_parallel_size (of rollout or teacher)"
    ),
}
"""What vLLM says of a lack of memory -> its cause, and the keys to change."""

# (EngineCore pid=7) ERROR 11-25 20:55:08 [core.py:1510] ValueError: no kernel for this
_LOGGED_ERROR = re.compile(r"ERROR .*\] (?:[\w.]+\.)?(\w*(?:Error|Exception): .+)$", re.MULTILINE)
# Value error, Unknown quantization method: x. [type=value_error, input_value=...]
_ARGUMENT_ERROR = re.compile(r"^\s*Value error, (.+?)(?: \[type=.*)?$", re.MULTILINE)


def engine_processes() -> list[psutil.Process]:
    """vLLM's processes below this one."""
    children = psutil.Process().children(recursive=True)
    return [child for child in children if is_engine(child)]


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
        return "VLLM::" in " ".join([process.name(), *process.cmdline()])
    except psutil.Error:  # it has just ended
        return False


@contextlib.contextmanager
def failed_start_names_its_reason(what_failed: str, log: str) -> Iterator[None]:
    """Around the start of an engine.

    Args:
        what_failed: begins the error's message.
        log: the file with the output of this process and of the engine's; "": there is none.

    Raises:
        ProcessDied: a signal has ended a process of the engine.
        RuntimeError: any other failure. Its message is `what_failed` and the reason, in one line.
    """
    start = log_size(log)
    try:
        with killed_engine_raises_process_died():
            yield
    except ProcessDied:
        raise
    except Exception as error:
        raise RuntimeError(f"{what_failed}: {start_failure(error, log, start)}") from error


def log_size(log: str) -> int:
    """The bytes of a log so far; 0: there is none."""
    with contextlib.suppress(OSError):
        return os.path.getsize(log)
    return 0


def start_failure(error: Exception, log: str, start: int) -> str:
    """The reason for which an engine did not start, in one line; for a lack of memory with the keys
    to change.

    Args:
        error: what vLLM raised.
        log: the file with the output of this process and of the engine's; "": there is none.
        start: the size of the log when the engine was started.
    """
    reason = _vllms_reason(error, log, start)
    for said, cause in MEMORY_ERRORS.items():
        if said in reason:
            return f"{cause}; vLLM: {reason}"
    return reason


def _vllms_reason(error: Exception, log: str, start: int) -> str:
    """As `start_failure`, in vLLM's words."""
    argument_error = _ARGUMENT_ERROR.search(str(error))
    if argument_error:
        return argument_error[1].strip()
    if POINTS_ELSEWHERE not in str(error):
        return first_line(error)
    logged = [line for line in _logged_errors(log, start) if POINTS_ELSEWHERE not in line]
    if logged:
        return logged[-1]
    return f"{first_line(error)} ({log})" if log else first_line(error)


def _logged_errors(log: str, start: int) -> list[str]:
    """The errors in a log after this position, the oldest first."""
    try:
        with open(log, errors="replace") as file:
            file.seek(start)
            return _LOGGED_ERROR.findall(file.read())
    except OSError:
        return []


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
