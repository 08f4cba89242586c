"""What the user reads after a run failed."""

import traceback
from pathlib import Path

from one_step_off.config.schema import Config, first_line
from one_step_off.config.user_code import find_user_line
from one_step_off.config.validation import mask_secrets


def report_failure(cfg: Config, error: Exception) -> str:
    """Write the whole traceback to `error.log` in the run folder.

    Returns:
        What to print: the error in one line, the user's own line that raised it, where the traceback is (the traceback
        itself where the file cannot be written), and the error's notes. Without secrets.
    """
    lines = [f"error: the run ended by {type(error).__name__}: {first_line(error)}"]
    whole_traceback = "".join(traceback.format_exception(error))
    user_line = find_user_line(whole_traceback)
    # A message that comes from another process may name the line already.
    if user_line and user_line not in str(error):
        lines.append(f"raised at {user_line}")
    lines.append(_write_traceback(cfg, mask_secrets(whole_traceback)))
    lines += getattr(error, "__notes__", [])
    return mask_secrets("\n  ".join(lines))


def _write_traceback(cfg: Config, text: str) -> str:
    """Write `error.log`; returns a line that says where the traceback is."""
    path = Path(cfg.trainer.output_dir) / "error.log"
    try:
        path.parent.mkdir(
            parents=True, exist_ok=True
        )  # missing if nothing was written before the failure
        path.write_text(text)
    except OSError as error:  # perhaps what ended the run: the disk is full
        return f"no file could be written ({error.strerror}), so the traceback is printed here:\n{text}"
    return f"traceback: {path}"
