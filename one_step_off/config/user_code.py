"""Functions and classes of the user's own, named in a config: which of their lines failed, and where their output goes."""

import contextlib
import functools
import itertools
import os
import re
import sys
import sysconfig
import traceback
from pathlib import Path

LOG_FOLDER = "logs"  # the folder in the run folder that holds what scorers and replicas print
SHOWN_LETTERS = 80  # of a response, in an error message
MAX_MESSAGE_CHARS = 400  # letters of what the user's exception says
LONGEST_TRACEBACK = 20_000  # letters
MOST_TRACEBACKS = 100  # in one process's log: a function may fail on every sample of a run of days

_FRAME = re.compile(r'^\s*File "(.+?)", line (\d+)', re.M)
_numbers = itertools.count()


@functools.cache
def _other_folders() -> tuple[str, ...]:
    """The folders of this program, of Python and of installed libraries, each with a separator at its end."""
    here = Path(__file__).resolve().parents[1]
    names = "stdlib", "platstdlib", "purelib", "platlib"
    folders = [here, here.parent / "agent_loop", *(sysconfig.get_path(name) for name in names)]
    return tuple(os.path.join(os.path.realpath(folder), "") for folder in folders)


def _is_users(path: str) -> bool:
    """Whether a source file is the user's: not this program's, not a library's, not made at run time."""
    installed = "site-packages" in path or "dist-packages" in path
    made = path.startswith("<")
    if installed or made:
        return False
    with contextlib.suppress(OSError):  # the working directory may be gone
        path = os.path.realpath(path)
    return not path.startswith(_other_folders())


def find_user_line(text: str, own_file: str = "", deepest_first: bool = False) -> str:
    """The user's deepest frame in the text of a traceback, as `my_rewards.py:12`; empty where there is none.

    `own_file` is the user's wherever it lies, as where their function is installed. `deepest_first`: the order of
    faulthandler. Files under the working directory are named from there."""
    frames = [
        (path, line) for path, line in _FRAME.findall(text) if path == own_file or _is_users(path)
    ]
    if not frames:
        return ""
    path, line = frames[0 if deepest_first else -1]
    with contextlib.suppress(OSError):  # the working directory may be gone
        near = os.path.relpath(path)
        if not near.startswith(".."):
            path = near
    return f"{path}:{line}"


def format_traceback(error: BaseException) -> str:
    """The whole traceback as text, its end where it is very long."""
    return "".join(traceback.format_exception(error))[-LONGEST_TRACEBACK:]


def describe_error(error: BaseException, own_file: str = "") -> str:
    """The error's type and the user's line that raised it, as `KeyError at my_rewards.py:12`."""
    place = find_user_line("".join(traceback.format_exception(error)), own_file)
    return f"{type(error).__name__} at {place}" if place else type(error).__name__


def quote_response(response: str) -> str:
    """The end of an error message: the first letters of the response that it is about."""
    more = "..." if len(response) > SHOWN_LETTERS else ""
    return f"the response begins {response[:SHOWN_LETTERS]!r}{more}"


def log_traceback(what: str, text: str) -> None:
    """Write a failure to stderr, which `redirect_output` leads into the run folder, without its secrets."""
    from one_step_off.config.validation import mask_secrets

    number = next(_numbers)
    if number < MOST_TRACEBACKS:
        print(mask_secrets(f"{what}\n{text}"), file=sys.stderr, flush=True)
    elif number == MOST_TRACEBACKS:
        print(
            f"further tracebacks are left out after {MOST_TRACEBACKS}", file=sys.stderr, flush=True
        )


def redirect_output(path: str) -> None:
    """Lead stdout and stderr of this process, and of those that it starts, to the end of a file. Its folders are made
    where they are missing: a node that does not share the run folder gets its own of the same path. Nothing changes
    where the file cannot be opened."""
    try:
        os.makedirs(os.path.dirname(path), exist_ok=True)
        log = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    except OSError:
        return
    sys.stdout.flush()
    sys.stderr.flush()
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(log)
    # Line by line: the process may be killed at any moment.
    how = {"buffering": 1, "encoding": "utf-8", "errors": "backslashreplace", "closefd": False}
    sys.stdout = open(1, "w", **how)
    sys.stderr = open(2, "w", **how)
