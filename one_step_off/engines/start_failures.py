"""Why vLLM could not start an engine, in one line.

The engine has a process of its own, and its error is in the log alone. What vLLM raises only says
that there is one. An error in the engine's arguments spreads over several lines.
"""

import contextlib
import os
import re
from collections.abc import Iterator

from one_step_off.cluster.errors import ProcessDied
from one_step_off.config.errors import first_line
from one_step_off.engines.engine_processes import killed_engine_raises_process_died

POINTS_ELSEWHERE = "root cause"
"""In the messages that vLLM raises instead of the error itself."""

# (EngineCore pid=7) ERROR 11-25 20:55:08 [core.py:1510] ValueError: no kernel for this
_LOGGED_ERROR = re.compile(r"ERROR .*\] (?:[\w.]+\.)?(\w*(?:Error|Exception): .+)$", re.MULTILINE)
# Value error, Unknown quantization method: x. [type=value_error, input_value=...]
_ARGUMENT_ERROR = re.compile(r"^\s*Value error, (.+?)(?: \[type=.*)?$", re.MULTILINE)


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
    """The reason for which an engine did not start, in one line.

    Args:
        error: what vLLM raised.
        log: the file with the output of this process and of the engine's; "": there is none.
        start: the size of the log when the engine was started.
    """
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
