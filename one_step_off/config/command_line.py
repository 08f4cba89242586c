"""How a command ends: its exit code, and one line for bad input."""

import sys
from collections.abc import Callable

from one_step_off.config.schema import ConfigError
from one_step_off.config.validation import mask_secrets


def exit_code(command: Callable[[list[str]], int], argv: list[str]) -> int:
    """Run a command with these arguments; returns its exit code, or that of bad input, Ctrl-C or a closed pipe."""
    try:
        return command(argv)
    except ConfigError as e:
        # Wherever it comes from, the user gets one line: other programs' messages may hold more.
        print("error: " + mask_secrets(" ".join(str(e).split())), file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:  # as in: --help | head
        sys.stderr.close()
        return 1
