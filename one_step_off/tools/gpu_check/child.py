"""One check in a process of its own: gpu_check.child FUNCTION REQUEST ANSWER

REQUEST is a file with the `Context` as JSON. ANSWER is the file for the answer; a process that
dies leaves none.
"""

import faulthandler
import importlib
import json
import os
import sys
import traceback
from pathlib import Path
from typing import Any

from one_step_off.tools.gpu_check.check import CheckFailed, Context, Skip, Status

TRACEBACK_MARGIN_S = 2.0
"""Seconds before the time limit at which all threads' tracebacks go to the log."""


def main(argv: list[str]) -> int:
    """Run the check and write its answer."""
    function_name, request_path, answer_path = argv
    context = Context.from_json(json.loads(Path(request_path).read_text()))
    # The log then says where a check hangs.
    faulthandler.enable()
    faulthandler.dump_traceback_later(max(0.1, context.limit_s - TRACEBACK_MARGIN_S))
    answer = _answer(function_name, context)
    unfinished = Path(f"{answer_path}.part")
    unfinished.write_text(json.dumps(answer))
    unfinished.rename(answer_path)
    sys.stdout.flush()
    sys.stderr.flush()
    # A thread that an aborted group has left behind may block the interpreter's end.
    os._exit(0)


def _answer(function_name: str, context: Context) -> dict[str, Any]:
    module_name, _, attribute = function_name.partition(":")
    try:
        check = getattr(importlib.import_module(module_name), attribute)
        return _outcome(Status.PASS, figures=check(context))
    except Skip as skip:
        return _outcome(Status.SKIP, str(skip))
    except CheckFailed as failure:
        traceback.print_exc()
        return _outcome(Status.FAIL, str(failure), failure.figures)
    except Exception as error:
        traceback.print_exc()
        return _outcome(Status.FAIL, f"{type(error).__name__}: {error}")


def _outcome(status: Status, reason: str = "", figures: Any = None) -> dict[str, Any]:
    one_line = " ".join(reason.split())
    return {"status": status.value, "reason": one_line, "figures": figures or {}}


if __name__ == "__main__":
    main(sys.argv[1:])
