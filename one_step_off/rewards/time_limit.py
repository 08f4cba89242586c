"""The time limit of a reward function: an alarm that interrupts Python code, and a hard end behind
it.

The alarm is SIGALRM of this process. It interrupts Python code that never returns and blocking
system calls. Signals reach only the main thread, so the limit works only there, as in the methods
of a synchronous Ray actor. A function that sets SIGALRM itself replaces the alarm for its own call.
"""

import contextlib
import faulthandler
import signal
from collections.abc import Iterator
from typing import Any

GRACE_S = 3.0
"""Seconds after the limit at which the process ends: the call is inside C code, or swallows every
alarm.
"""

REPEAT_S = 0.25
"""The alarm repeats at this interval: code that swallows one (a bare `except:` in a loop) meets the
next.
"""

_STDERR = 2


class TimeUp(BaseException):
    """Raised by the alarm. Not an Exception, so that `except Exception` in the called code cannot
    swallow it.
    """


def _raise_time_up(signum: int, frame: Any) -> None:
    raise TimeUp


@contextlib.contextmanager
def alarm_handler() -> Iterator[None]:
    """Let SIGALRM raise TimeUp within the block. Raises ValueError: this is not the main thread."""
    signal.signal(signal.SIGALRM, _raise_time_up)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)


def start_time_limit(seconds: float) -> None:
    """Raise TimeUp in the main thread after `seconds`, and end the process `GRACE_S` later.

    Before it ends the process, faulthandler writes a traceback to stderr.
    """
    signal.setitimer(signal.ITIMER_REAL, seconds, REPEAT_S)
    # A thread of its own that does not need the interpreter's lock.
    faulthandler.dump_traceback_later(seconds + GRACE_S, exit=True, file=_STDERR)


def stop_time_limit() -> None:
    """Cancel the alarm and the end of the process."""
    signal.setitimer(signal.ITIMER_REAL, 0)
    faulthandler.cancel_dump_traceback_later()
