"""What the user reads after a run failed."""

import contextlib
import errno
import os
import sys
import traceback
from collections.abc import Iterator
from pathlib import Path

from one_step_off.config.errors import ConfigError, first_line
from one_step_off.config.schema import Config
from one_step_off.config.text import mask_secrets
from one_step_off.config.user_code import find_user_line

EXIT_FAILED = 1
"""The exit code of a command whose run failed, which `failure_reported` has printed."""

# Errors of a full or read-only disk. One that comes from writing names no file.
DISK_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS)
# Errors of opening a file, which the user can fix by another folder.
FILE_ERRORS = (*DISK_ERRORS, errno.EACCES, errno.EPERM, errno.ENAMETOOLONG)


@contextlib.contextmanager
def failure_reported(cfg: Config, prints: bool = False) -> Iterator[None]:
    """Write `error.log` in the run folder if the block fails by anything but bad input.

    Args:
        cfg: of the run.
        prints: print what happened and end the block, as a command does. Else the error is raised.

    Raises:
        ConfigError: bad input, and what another trainer.output_dir would help against.
    """
    try:
        yield
    except ConfigError:
        raise
    except Exception as error:
        config_fault = as_config_fault(cfg, error)
        if config_fault is not None:
            raise config_fault from error
        report = report_failure(cfg, error)
        if not prints:
            raise
        print(report, file=sys.stderr)


def as_config_fault(cfg: Config, error: Exception) -> ConfigError | None:
    """The ConfigError to raise for an error that another trainer.output_dir would help against;
    None for any other."""
    output_dir = cfg.trainer.output_dir
    if not isinstance(error, OSError) or not _is_output_fault(error, output_dir):
        return None
    path = error.filename or output_dir
    return ConfigError(f"{path}: {error.strerror}; name another folder")


def _is_output_fault(error: OSError, output_dir: str) -> bool:
    """Whether an error is about the run folder, something in it, or a folder on the way to it."""
    if not error.filename:
        return error.errno in DISK_ERRORS
    path = os.path.realpath(str(error.filename))
    folder = os.path.realpath(output_dir)
    is_inside_or_above = os.path.commonpath([path, folder]) in (path, folder)
    return is_inside_or_above and error.errno in FILE_ERRORS


def report_failure(cfg: Config, error: Exception) -> str:
    """Write the whole traceback to `error.log` in the run folder. The user's own line that raised
    comes first, if there is one.

    Returns:
        What to print: the error in one line, the user's own line that raised it, where the
        traceback is (the traceback itself where the file cannot be written), and the error's notes.
        Without secrets.
    """
    lines = [f"error: the run ended by {type(error).__name__}: {first_line(error)}"]
    whole_traceback = "".join(traceback.format_exception(error))
    user_line = find_user_line(whole_traceback)
    # A message that comes from another process may name the line already.
    if user_line and user_line not in str(error):
        lines.append(f"raised at {user_line}")
    head = ""
    if user_line:  # before hundreds of lines of others
        head = f"{user_line}: {type(error).__name__}: {first_line(error)}\n\n"
    lines.append(_write_traceback(cfg, mask_secrets(head + whole_traceback)))
    lines += getattr(error, "__notes__", [])
    return mask_secrets("\n  ".join(lines))


def _write_traceback(cfg: Config, text: str) -> str:
    """Write `error.log`; returns a line that says where the traceback is."""
    path = Path(cfg.trainer.output_dir) / "error.log"
    try:
        path.parent.mkdir(
            parents=True, exist_ok=True
        )  # missing if nothing was written before the failure
        path.write_text(text, encoding="utf-8", errors="replace")
    except OSError as error:  # perhaps what ended the run: the disk is full
        reason = f"no file could be written ({error.strerror})"
        return f"{reason}, so the traceback is printed here:\n{text}"
    return f"traceback: {path}"
