"""How a command ends: its exit code, and one line for bad input; one for each unknown key."""

import argparse
import sys
from collections.abc import Callable
from typing import NoReturn

from one_step_off.config.console_streams import ConsoleFailed, console_streams
from one_step_off.config.errors import ConfigError, UnknownKeys
from one_step_off.config.text import mask_secrets

EXIT_NO_OUTPUT = 1
EXIT_BAD_INPUT = 2
EXIT_INTERRUPTED = 130


class CommandParser(argparse.ArgumentParser):
    """argparse's, whose errors are `ConfigError`s: one line."""

    def error(self, message: str) -> NoReturn:
        """Raises ConfigError."""
        raise ConfigError(f"{message}; --help shows the usage")


def exit_code(command: Callable[[list[str]], int], argv: list[str]) -> int:
    """Run a command with these arguments.

    Returns its exit code, or that of bad input (after printing one line), Ctrl-C or a stdout that
    takes no output. A reader that needs no more, as in `--help | head -1`, is no failure: 0.
    """
    with console_streams(ends_process=True):
        try:
            return command(argv)
        except ConfigError as error:
            # The messages of other programs may span lines; the user gets one line in any case.
            lines = error.lines if isinstance(error, UnknownKeys) else [str(error)]
            one_line_each = "\n  ".join(" ".join(line.split()) for line in lines)
            print("error: " + mask_secrets(one_line_each), file=sys.stderr)
            return EXIT_BAD_INPUT
        except KeyboardInterrupt:
            print("interrupted", file=sys.stderr)
            return EXIT_INTERRUPTED
        except ConsoleFailed as failure:
            if failure.reader_is_gone:
                return 0
            print(f"error: {failure}", file=sys.stderr)
            return EXIT_NO_OUTPUT
