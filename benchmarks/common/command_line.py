"""The command line of the benchmarks: an error is one line with exit code 2; config keys may be
mixed with flags.
"""

from __future__ import annotations

import argparse
import re
import sys
from pathlib import Path
from typing import NoReturn

CONFIG_KEY = re.compile(r"(config|[a-z_]+\.[^=/]+)=")


def command_name() -> str:
    """The name of the running benchmark: its folder if a folder was started, else its file."""
    script = Path(sys.argv[0])
    return script.parent.name if script.stem == "__main__" else script.stem


class Parser(argparse.ArgumentParser):
    """Like argparse's parser, but an error is one line without the usage, and config keys are
    allowed.
    """

    def __init__(self, description: str | None) -> None:
        super().__init__(
            f"python -m benchmarks.{command_name()}",
            description=description,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )

    def error(self, message: str) -> NoReturn:
        """Print the message in one line and exit with code 2."""
        line = " ".join(message.split())
        self.exit(2, f"error: {line} (--help lists the flags)\n")

    def parse(self, argv: list[str] | None = None) -> tuple[argparse.Namespace, list[str]]:
        """Parse flags and config keys.

        Args:
            argv: the words of the command line. Default: those of this process.

        Returns:
            The flags, and the config keys (`section.key=value`), which may stand anywhere between
            the flags.
        """
        words = sys.argv[1:] if argv is None else argv
        keys = [word for word in words if CONFIG_KEY.match(word)]
        flags = [word for word in words if not CONFIG_KEY.match(word)]
        args, unknown = self.parse_known_args(flags)
        if unknown:
            self.error(
                f"unrecognized argument {unknown[0]}; "
                "keys of the config are written section.key=value"
            )
        return args, keys


def add_run_flags(parser: Parser, steps_help: str) -> None:
    """Add --runs, --warmup and --steps, for benchmarks that repeat whole runs."""
    parser.add_argument("--runs", type=int, default=3, help="runs of each arm")
    parser.add_argument("--warmup", type=int, default=3, help="steps dropped from each run")
    parser.add_argument("--steps", type=int, help=steps_help)


def check_run_flags(parser: Parser, args: argparse.Namespace) -> None:
    """Exit with an error if --runs or --warmup is too small."""
    if args.runs < 1 or args.warmup < 0:
        parser.error(
            f"--runs {args.runs} --warmup {args.warmup}: "
            "at least 1 run, and 0 or more steps of warm-up"
        )


def step_keys(steps: int | None) -> list[str]:
    """The config keys for the flag --steps; none if it is not given."""
    return [] if steps is None else [f"trainer.total_steps={steps}"]
