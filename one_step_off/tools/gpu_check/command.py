"""python -m one_step_off.gpu_check [--device cpu|cuda] [--out DIR] [--only NAME ...] [--list]

Checks what a run needs of this machine: each check in a process of its own, with a time limit. A
check that cannot run here is skipped, with the reason. Prints a line per check, and writes
gpu_report.md and gpu_report.json into DIR. The exit code is 1 if a check failed.
"""

import argparse
import os
import time
from collections.abc import Sequence
from pathlib import Path

from one_step_off.config.command_line import CommandParser, exit_code
from one_step_off.config.console_streams import never_wait
from one_step_off.config.errors import ConfigError
from one_step_off.config.hardware import count_gpus
from one_step_off.config.text import did_you_mean
from one_step_off.tools.gpu_check import report
from one_step_off.tools.gpu_check.check import Check, Status
from one_step_off.tools.gpu_check.runner import Runner
from one_step_off.tools.gpu_check.table import CHECKS

DEFAULT_OUT = "outputs/gpu_check"
DEFAULT_BUDGET_S = 900.0


def main(argv: list[str], checks: Sequence[Check] = CHECKS) -> int:
    """Run the command with these arguments; returns its exit code."""
    return exit_code(lambda arguments: _main(arguments, checks), argv)


def _parser() -> argparse.ArgumentParser:
    parser = CommandParser(
        prog="python -m one_step_off.gpu_check",
        description="Checks what a run needs of this machine; writes gpu_report.md.",
    )
    parser.add_argument(
        "--device", choices=("cpu", "cuda"), help="default: cuda if there are GPUs, else cpu"
    )
    parser.add_argument("--out", default=DEFAULT_OUT, help=f"default: {DEFAULT_OUT}")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="these checks alone")
    parser.add_argument("--list", action="store_true", help="print the checks and end")
    parser.add_argument("--model", default="", help="a Hugging Face model directory for the engine")
    parser.add_argument(
        "--budget-s",
        type=float,
        default=DEFAULT_BUDGET_S,
        help="seconds for all checks; what is left then is skipped (default: %(default).0f)",
    )
    return parser


def _main(argv: list[str], checks: Sequence[Check]) -> int:
    arguments = _parser().parse_args(argv)
    if arguments.list:
        for check in checks:
            print(f"{check.name:26}{_needs(check):16}{check.title}")
        return 0
    never_wait()
    chosen = _choose(checks, arguments.only)
    folder = _out_folder(arguments.out)
    model = _model_folder(arguments.model)
    gpus = count_gpus()
    device = arguments.device or ("cuda" if gpus else "cpu")
    if device == "cuda" and not gpus:
        raise ConfigError("--device=cuda: this machine has no visible GPU; use --device cpu")
    chosen = [check.on(device) for check in chosen]
    begin = time.monotonic()
    runner = Runner(
        device,
        gpus if device == "cuda" else 0,
        len(os.sched_getaffinity(0)),
        folder,
        model,
        begin + arguments.budget_s,
    )
    facts = report.machine_facts(device)
    print(f"{len(chosen)} checks on {device}, {runner.gpus} GPUs; report in {folder}", flush=True)
    results = runner.run_all(chosen, lambda result: print(report.line(result), flush=True))
    seconds = time.monotonic() - begin
    path = report.write(folder, facts, chosen, results, seconds)
    print(f"{report.summary(results)} in {seconds:.0f} s; {path}", flush=True)
    return int(any(result.status is Status.FAIL for result in results))


def _needs(check: Check) -> str:
    if check.cuda_only:
        return f"{check.min_gpus} GPU"
    return f"cpu, {check.min_gpus} GPU"


def _choose(checks: Sequence[Check], names: list[str] | None) -> list[Check]:
    known = {check.name: check for check in checks}
    for name in names or ():
        if name not in known:
            fix = did_you_mean(name, known, f"use one of {', '.join(known)}")
            raise ConfigError(f"--only={name}: no such check; {fix}")
    if names is None:
        return list(checks)
    return [check for check in checks if check.name in names]


def _out_folder(name: str) -> Path:
    folder = Path(name).absolute()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / report.REPORT).touch()
    except OSError as error:
        raise ConfigError(f"--out={name}: {error.strerror}; use another folder") from error
    return folder


def _model_folder(name: str) -> str:
    if not name:
        return ""
    folder = Path(name).absolute()
    if not (folder / "config.json").is_file():
        raise ConfigError(
            f"--model={name}: has no config.json; name a Hugging Face model directory"
        )
    return str(folder)
