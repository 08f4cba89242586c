"""The planner against the clock and against published tables.

    python -m benchmarks.planner --out DIR [--config FILE] [--rounds 1] [--arms "one step off" ...]
        [section.key=value ...]
    python -m benchmarks.planner --published
        what the simulation makes of published phase times

The first form calibrates by two synchronous runs, of a whole batch and of a quarter of it. It
predicts other runs and then makes them: one step off, half a batch,
short responses, colocated.
Every round calibrates again and runs the arms in the opposite order, so that other work on the
machine meets all of them. Writes result.json and result.md into DIR. A round takes about six
minutes with the default config on two cores.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from benchmarks.common.command_line import Parser
from benchmarks.common.paths import config_path
from benchmarks.common.runs import RunFailed
from benchmarks.planner.published import published
from benchmarks.planner.validation import CALIBRATING, arms_of, validation
from one_step_off.config.errors import ConfigError


def arguments(argv: list[str] | None = None) -> tuple[Parser, argparse.Namespace, list[str]]:
    """Parse the command line. Returns the parser, the flags and the config keys."""
    parser = Parser(__doc__)
    form = parser.add_mutually_exclusive_group(required=True)
    form.add_argument("--out", type=Path, help="folder for the results")
    form.add_argument("--published", action="store_true")
    parser.add_argument("--config", default=config_path("gsm8k_tiny_cpu.yaml"))
    parser.add_argument(
        "--batch", type=int, default=16, help="prompts of a whole batch, at least 4"
    )
    parser.add_argument("--rounds", type=int, default=1)
    predicted = [arm for arm in arms_of(4) if arm not in CALIBRATING]
    parser.add_argument(
        "--arms",
        nargs="*",
        choices=predicted,
        default=predicted,
        help="the runs to predict, in addition to the two that calibrate",
    )
    args, overrides = parser.parse(argv)
    if args.rounds < 1 or args.batch < 4:
        parser.error(
            f"--rounds {args.rounds} --batch {args.batch}: at least 1 round, and 4 prompts"
        )
    return parser, args, overrides


def main(argv: list[str] | None = None) -> int:
    """Run the chosen form and print its result. Returns the exit code."""
    parser, args, overrides = arguments(argv)
    if args.published:
        print(published())
        return 0
    try:
        print(validation(args, overrides))
    except ConfigError as e:
        parser.error(str(e))
    except RunFailed as e:
        print(e, file=sys.stderr)
        return e.code
    return 0


if __name__ == "__main__":
    sys.exit(main())
