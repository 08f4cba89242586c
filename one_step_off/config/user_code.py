"""Functions and classes of the user that a config names: whether they exist, which of their lines
failed, and where their output goes."""

import contextlib
import difflib
import functools
import importlib.util
import itertools
import os
import re
import sys
import sysconfig
import traceback
from collections.abc import Iterable
from pathlib import Path

from one_step_off.config.text import did_you_mean, mask_secrets

USER_FUNCTION_FORM = "module:function, where the module is in this folder or on PYTHONPATH"
USER_CLASS_FORM = "module:Class, where the module is in this folder or on PYTHONPATH"
LOG_FOLDER = "logs"  # folder in the run folder with the output of reward workers and replicas
AGENT_LOG_FOLDER = "agents"  # the same of external agents
MAX_QUOTED_RESPONSE_CHARS = 80  # in an error message
MAX_MESSAGE_CHARS = 400  # of an exception of the user's code
MAX_TRACEBACK_CHARS = 20_000
MAX_TRACEBACKS = 100  # per process: a function may fail on every sample of a run of days

_FRAME = re.compile(r'^\s*File "(.+?)", line (\d+)', re.M)
_USER_SPEC = re.compile(r"([^\W\d]\w*)[\w.]*:[^\W\d][\w.]*")
_traceback_numbers = itertools.count()


def is_user_spec(spec: str) -> bool:
    """Whether `module:function` names a module that exists. The function is looked up when the run
    starts.
    """
    if os.getcwd() not in sys.path and "" not in sys.path:
        # `python -m` finds modules beside the user's config; so must the installed program.
        sys.path.append(os.getcwd())
    match = _USER_SPEC.fullmatch(spec)
    if match is None:
        return False
    top_module = match[1]
    return top_module in sys.modules or importlib.util.find_spec(top_module) is not None


def similar_spec(spec: str) -> str:
    """`module:function` with the most similar module of the working directory in place of one that
    does not exist; "" where none is similar, or the spec has another form.
    """
    module, colon, function = spec.partition(":")
    if not colon or not function:
        return ""
    with contextlib.suppress(OSError):
        here = [path.stem for path in Path().glob("*.py")]
        here += [path.parent.name for path in Path().glob("*/__init__.py")]
        top, dot, rest = module.partition(".")
        matches = difflib.get_close_matches(top, here, n=1)
        if matches and matches[0] != top:
            return f"{matches[0]}{dot}{rest}:{function}"
    return ""


def did_you_mean_function(spec: str, names: Iterable[str], otherwise: str) -> str:
    """As `did_you_mean`, for a built-in name or the user's `module:function`."""
    similar = similar_spec(spec)
    return f"did you mean {similar}?" if similar else did_you_mean(spec, names, otherwise)


@functools.cache
def _library_folders() -> tuple[str, ...]:
    """The folders of this program, of Python and of installed libraries, each ending in a
    separator.
    """
    package = Path(__file__).resolve().parents[1]
    names = ("stdlib", "platstdlib", "purelib", "platlib")
    installed = [sysconfig.get_path(name) for name in names]
    folders = [package, package.parent / "agent_loop", *installed]
    return tuple(os.path.join(os.path.realpath(folder), "") for folder in folders)


def _is_user_file(path: str) -> bool:
    """Whether a source file is the user's: not of this program, not of a library, not made at run
    time.
    """
    is_installed = "site-packages" in path or "dist-packages" in path
    is_generated = path.startswith("<")
    if is_installed or is_generated:
        return False
    with contextlib.suppress(OSError):  # the working directory may have been deleted
        path = os.path.realpath(path)
    return not path.startswith(_library_folders())


def find_user_line(text: str, own_file: str = "", deepest_first: bool = False) -> str:
    """The user's deepest frame in the text of a traceback, as `my_rewards.py:12`; empty if there is
    none.

    Files below the working directory are named relative to it.

    Args:
        text: a traceback.
        own_file: a file that is the user's wherever it lies, such as one that they installed.
        deepest_first: the order of frames in the dumps of faulthandler.
    """
    frames = []
    for path, line in _FRAME.findall(text):
        if path == own_file or _is_user_file(path):
            frames.append((path, line))
    if not frames:
        return ""
    path, line = frames[0] if deepest_first else frames[-1]
    with contextlib.suppress(OSError):  # the working directory may have been deleted
        relative = os.path.relpath(path)
        if not relative.startswith(".."):
            path = relative
    return f"{path}:{line}"


def format_traceback(error: BaseException) -> str:
    """The traceback as text; only its end where it is very long."""
    return "".join(traceback.format_exception(error))[-MAX_TRACEBACK_CHARS:]


def describe_error(error: BaseException, own_file: str = "") -> str:
    """The error's type and the user's line that raised it, as `KeyError at my_rewards.py:12`."""
    place = find_user_line("".join(traceback.format_exception(error)), own_file)
    if not place:
        return type(error).__name__
    return f"{type(error).__name__} at {place}"


def quote_response(response: str) -> str:
    """The end of an error message about a response: how the response begins."""
    dots = "..." if len(response) > MAX_QUOTED_RESPONSE_CHARS else ""
    return f"the response begins {response[:MAX_QUOTED_RESPONSE_CHARS]!r}{dots}"


def log_traceback(message: str, traceback_text: str) -> None:
    """Write a failure to stderr, without its secrets. `redirect_output` sends stderr to the run
    folder.
    """
    number = next(_traceback_numbers)
    if number < MAX_TRACEBACKS:
        print(mask_secrets(f"{message}\n{traceback_text}"), file=sys.stderr, flush=True)
    elif number == MAX_TRACEBACKS:
        omitted = f"further tracebacks are left out after {MAX_TRACEBACKS}"
        print(omitted, file=sys.stderr, flush=True)


def redirect_output(path: str) -> None:
    """Append the stdout and stderr of this process, and of its child processes, to a file.

    Missing folders are created: a node that does not share the run folder gets its own of the same
    path. If the file cannot be opened, nothing changes.
    """
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
    # Line-buffered, because the process may be killed at any moment.
    options = {"buffering": 1, "encoding": "utf-8", "errors": "backslashreplace", "closefd": False}
    sys.stdout = open(1, "w", **options)
    sys.stderr = open(2, "w", **options)
