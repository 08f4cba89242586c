"""Add and remove rollout replicas of a running job:
python -m one_step_off.scale RUN_FOLDER rollout=+2 [--timeout SECONDS]

It waits until the replicas serve, or have left. Exit code 0: done; 1: it failed, or was not done in
time; 2: it was refused. How the run does it: `runtime/scaling.py`."""

import argparse
import time
from pathlib import Path

from one_step_off.config.errors import ConfigError
from one_step_off.runtime.scaling import (
    DONE,
    ENDS,
    REFUSED,
    Answer,
    ScaleRequest,
    is_running,
    read_answers,
    withdraw_request,
    write_request,
)

TIMEOUT_S = 1800.0
POLL_S = 0.2


def main(argv: list[str]) -> int:
    """Run the command with these arguments. Returns its exit code. Raises ConfigError: bad input,
    or the run has refused."""
    parser = argparse.ArgumentParser(
        "python -m one_step_off.scale", description=__doc__.split("\n\n")[1]
    )
    add = parser.add_argument
    add("folder", type=Path, help="trainer.output_dir of the run")
    add("change", help="rollout=+2 or rollout=-1: so many more or less; rollout=3: so many")
    add(
        "--timeout",
        type=float,
        default=TIMEOUT_S,
        help=f"seconds to wait for the end; default: {TIMEOUT_S:g}",
    )
    args = parser.parse_args(argv)
    request = ScaleRequest.parse(args.change)
    if not is_running(args.folder):
        raise ConfigError(f"{args.folder}: no run is in progress in this folder")
    write_request(args.folder, request)
    try:
        return _await_end(args.folder, request, args.timeout)
    finally:
        withdraw_request(args.folder, request)


def _await_end(folder: Path, request: ScaleRequest, limit_s: float) -> int:
    """Print what becomes of a request until its end. Returns the exit code. Raises ConfigError: the
    run has refused it."""
    deadline = time.monotonic() + limit_s
    printed = 0
    while True:
        # Asked first: what the run has written before its end is read after it.
        runs = is_running(folder)
        late = time.monotonic() > deadline
        answers = [answer for answer in read_answers(folder) if answer.id == request.id]
        for answer in answers[printed:]:
            if answer.state == REFUSED:
                raise ConfigError(answer.text)
            print(answer.text, flush=True)
        printed = len(answers)
        if answers and answers[-1].state in ENDS:
            return 0 if answers[-1].state == DONE else 1
        if not runs or late:
            print(_why_not(folder, answers, runs, limit_s), flush=True)
            return 1
        time.sleep(POLL_S)


def _why_not(folder: Path, answers: list[Answer], runs: bool, limit_s: float) -> str:
    if not runs:
        return "the run has ended before it was done"
    if not answers:
        return f"the run has not begun it within {limit_s:g} s; it is withdrawn"
    return (
        f"it is not done after {limit_s:g} s; the run continues with it, see {folder}/scale.jsonl"
    )
