"""Kill processes of a run at random, and check that it recovers and ends as if undisturbed.

Every kind of process, at every named point:

    python -m tests.chaos --seed 1 --kills 20

Only some of them:

    python -m tests.chaos --kinds driver,engine --points "between buckets,anywhere"

Compare the bits with those of a run without kills:

    python -m tests.chaos --compare --kills 5

End the driver only (SIGTERM, Ctrl-C, kill -9), and compare the bits:

    python -m tests.chaos --exact --kills 20

Kill in pairs: at one moment, or the second while the run recovers from the first:

    python -m tests.chaos --double --kills 20

Change the number of replicas between the kills; or, with light replicas, hundreds of times:

    python -m tests.chaos --kills 5 --scale 10 rollout.engine=transformers
    python -m tests.chaos --scale 200 --light

Break weight syncs, and time the reaction:

    python -m tests.chaos --syncs

The run is the real command on a tiny model on CPUs. At the end these are checked: the ledger holds
the prompts of an undisturbed run in their order, none missing and none repeated; every step has one
row; no process, shared memory, port or temporary file is left. `--out` gets result.md, result.json,
the run's output and its folder. Exit code 0: all as promised.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import signal
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.chaos import command as real
from tests.chaos.command import Command
from tests.chaos.doubles import DoubleChaos
from tests.chaos.kills import ANYWHERE, Chaos, as_rows, describe, table
from tests.chaos.points import KINDS, POINTS
from tests.chaos.scaling import ScaleChanges, scale_light
from tests.chaos.syncs import break_syncs

STEPS_LEFT = 5
"""Steps of the run after the last kill."""

EXACT_STEPS = 12
ENDLESS_STEPS = 1_000_000
START_TIMEOUT_S = 300.0
LIMIT_S = 150.0
DOUBLE_LIMIT_S = 300.0
END_TIMEOUT_S = 300.0
INTERRUPTED = 130
"""The exit code after SIGTERM and Ctrl-C."""


def parse_arguments(argv: list[str]) -> argparse.Namespace:
    """The options. Ends the program with one line if a kind or point does not exist."""
    parser = argparse.ArgumentParser("python -m tests.chaos", description=__doc__.split("\n\n")[0])
    add = parser.add_argument
    add("--seed", type=int, default=0, help="of the choice of kills and cases")
    add("--kills", type=int, default=10, help="number of kills")
    add("--minutes", type=float, default=1e9, help="start no kill or change after so many minutes")
    add("--out", type=Path, default=Path("outputs/chaos"), help="the folder for all results")
    add("--kinds", default="", help=f"of {', '.join(KINDS)}; default: all that the run has")
    add("--each", action="store_true", help="the kinds one after another, not at random")
    add("--points", default="", help="names of points, separated by commas; default: all")
    add("--ranks", type=int, default=1, help="ranks of the trainer")
    add("--critic", action="store_true", help="also train a critic, in a pool of its own")
    add("--stop", action="store_true", help="also SIGSTOP: processes that hang")
    add("--double", action="store_true", help="kills in pairs, at one moment or in the recovery")
    add("--limit", type=float, help="seconds for one recovery; default: 150, for a pair 300")
    add("--reach", type=float, default=20.0, help="seconds for a point to be reached")
    add(
        "--exact",
        action="store_true",
        help="end the driver only; compare the bits with those of a run that was never stopped",
    )
    add(
        "--compare",
        action="store_true",
        help="also compare the bits with those of a run without kills",
    )
    add("--scale", type=int, default=0, help="also change the number of replicas so often")
    add("--light", action="store_true", help="with --scale: actors without a model, and no --kills")
    _add_sync_options(parser)
    add("keys", nargs="*", help="section.key=value, for the run")
    args = parser.parse_args(argv)
    args.kinds = [kind for kind in args.kinds.split(",") if kind]
    if not args.kinds:
        args.kinds = [kind for kind in KINDS if args.critic or kind != "critic"]
    args.points = [point for point in args.points.split(",") if point]
    known_points = {point.name for point in POINTS} | {ANYWHERE}
    unknown = (set(args.kinds) - set(KINDS)) | (set(args.points) - known_points)
    if unknown:
        parser.error(f"unknown: {', '.join(sorted(unknown))}")
    args.kinds = [kind for kind in args.kinds if _has_point(kind, args.points)]
    if args.limit is None:
        args.limit = DOUBLE_LIMIT_S if args.double else LIMIT_S
    return args


def _add_sync_options(parser: argparse.ArgumentParser) -> None:
    """The options of `--syncs`."""
    add = parser.add_argument
    add(
        "--syncs",
        action="store_true",
        help="break weight syncs instead; every pair of properties once",
    )
    add("--all", action="store_true", help="with --syncs: the whole matrix, which takes hours")
    add(
        "--faults",
        action="append",
        default=[],
        help='with --syncs: only these, "KIND: POINT: ACTION"',
    )
    add("--layouts", action="append", default=[], help="with --syncs: only these, RANKSxREPLICAS")
    add(
        "--versions",
        action="append",
        default=[],
        help="with --syncs: only these, of first, second, middle, last",
    )


def _has_point(kind: str, names: list[str]) -> bool:
    """Whether a kind of process can be hit at any of these points (empty: at all)."""
    if not names or ANYWHERE in names:
        return True
    return any(point.kind == kind and point.name in names for point in POINTS)


def run_with_kills(args: argparse.Namespace, resume_after: bool = True) -> dict[str, Any]:
    """Kill until there are enough kills; then end the run in order, resume it once more, and check
    everything.

    Args:
        args: the options.
        resume_after: whether to resume the run at the end, for STEPS_LEFT steps.

    Returns:
        The content of result.json.
    """
    arguments = real.settings(args.out / "run", ENDLESS_STEPS, args.ranks, args.critic, args.keys)
    command = Command(args.out, arguments)
    start_chaos = DoubleChaos if args.double else Chaos
    chaos = start_chaos(command, args.seed, args.limit, args.reach, _print_now)
    chaos.trainer_ranks = args.ranks
    changes = ScaleChanges(command, args.seed, args.scale)
    if args.scale:
        chaos.replicas = 0
    wrong: list[str] = []
    try:
        command.start()
        if not chaos.wait_for_steps(1, START_TIMEOUT_S):
            return {"wrong": [f"the run did not begin; see {command.log}"], "kills": []}
        begin = time.monotonic()
        changes.start()
        _kill_at_random(args, chaos, begin)
        end = begin + 60 * args.minutes
        while not changes.are_done and not changes.wrong and time.monotonic() < end:
            time.sleep(1)
        changes.stop()
        wrong += changes.wrong
        last_step = command.steps()
        wrong += _end_in_order(command)
        steps = max(command.steps(), last_step) + 1
        if resume_after:
            steps += STEPS_LEFT
            command.arguments = [*arguments, f"trainer.total_steps={steps}"]
            command.start()
            code = command.process.wait(END_TIMEOUT_S)
            if code != 0:
                wrong.append(f"the last start ended with exit code {code}")
        wrong += real.complaints(command, steps, real.expected_prompts(arguments, steps))
        wrong += real.left_behind(command)
        if args.compare:
            wrong += _compare_with_undisturbed(args, command, steps)
    finally:
        command.clear()
    wrong += [describe(kill) for kill in chaos.kills if kill.wrong or kill.left]
    return {
        "kills": as_rows(chaos.kills),
        "hit": len(chaos.done),
        "steps": steps,
        "starts": command.starts,
        "wrong": wrong,
        "seconds": time.monotonic() - begin,
        "table": table(chaos.kills),
    } | (chaos.more_results() | changes.more_results())


def _print_now(line: str) -> None:
    print(line, flush=True)


def _kill_at_random(args: argparse.Namespace, chaos: Chaos, begin: float) -> None:
    """Kill until there are enough kills or the time is over."""
    end = begin + 60 * args.minutes
    while len(chaos.done) < args.kills and time.monotonic() < end:
        time.sleep(chaos.random.uniform(0, 2))
        kinds = args.kinds
        if args.each:
            kinds = [args.kinds[len(chaos.done) % len(args.kinds)]]
        chaos.strike(kinds, args.points, args.stop)


def _end_in_order(command: Command) -> list[str]:
    """End the run by SIGTERM. Returns what is wrong with its end."""
    wrong = []
    code = command.end(signal.SIGTERM)
    if code != INTERRUPTED:
        wrong.append(f"SIGTERM at the end: exit code {code}, not {INTERRUPTED}")
    _, processes_left = command.wait_until_gone()
    for command_line in processes_left.values():
        wrong.append(f"after SIGTERM: still there: {command_line[:80]}")
    return wrong


def _compare_with_undisturbed(args: argparse.Namespace, command: Command, steps: int) -> list[str]:
    """What differs from a run of as many steps without kills."""
    undisturbed_folder, wrong = run_undisturbed(args, steps)
    if wrong:
        return wrong
    names = differing(undisturbed_folder, command.folder)
    return [f"{name} differs from the undisturbed run's" for name in names]


@dataclass
class Stop:
    """One end of the driver."""

    signal: str
    step: int
    """The last step that had a row by then."""
    code: int | None
    end_s: float
    gone_s: float


def compare_stopped_runs(args: argparse.Namespace) -> dict[str, Any]:
    """Stop runs of EXACT_STEPS steps again and again, and compare each with one that was not
    stopped. Returns the content of result.json."""
    rng = random.Random(args.seed)
    undisturbed_folder, wrong = run_undisturbed(args, EXACT_STEPS)
    if wrong:
        return {"wrong": wrong, "kills": []}
    begin = time.monotonic()
    end = begin + 60 * args.minutes
    stops: list[Stop] = []
    runs = 0
    while len(stops) < args.kills and time.monotonic() < end:
        runs += 1
        out = args.out / f"stopped_{runs}"
        arguments = real.settings(out / "run", EXACT_STEPS, args.ranks, args.critic, args.keys)
        command = Command(out, arguments)
        try:
            wrong += _run_with_stops(command, rng, args.kills, stops, end)
        finally:
            command.clear()
        names = differing(undisturbed_folder, command.folder)
        wrong += [f"run {runs}: {name} differs from the undisturbed run's" for name in names]
        comparison = f"other {names}" if names else "same bits"
        _print_now(f"run {runs}, {len(stops)} stops so far: {comparison}")
    return {
        "stops": [vars(stop) for stop in stops],
        "runs": runs,
        "steps": EXACT_STEPS,
        "table": stop_table(stops),
        "wrong": wrong,
        "seconds": time.monotonic() - begin,
    }


def stop_table(stops: list[Stop]) -> str:
    """Markdown: stops per signal."""
    lines = ["| Signal | Stops | Between these steps |", "| --- | --- | --- |"]
    for name in dict.fromkeys(stop.signal for stop in stops):
        steps = sorted(stop.step for stop in stops if stop.signal == name)
        lines.append(f"| {name} | {len(steps)} | {', '.join(map(str, steps))} |")
    return "\n".join(lines)


def _run_with_stops(
    command: Command, rng: random.Random, most_stops: int, stops: list[Stop], end: float
) -> list[str]:
    """One run to its end, stopped after random steps.

    Args:
        command: the run.
        rng: chooses steps and signals.
        most_stops: of all runs.
        stops: of all runs so far; this one's are appended.
        end: by `time.monotonic`; no stop begins after it.

    Returns:
        What is wrong with it, except for its bits.
    """
    wrong: list[str] = []
    while True:
        command.start()
        first_step = command.steps()
        target_step = first_step + rng.randint(1, 4)
        while command.process.poll() is None and command.steps() < target_step:
            time.sleep(0.02)
        time.sleep(rng.uniform(0, 0.5))
        has_ended = command.process.poll() is not None
        if has_ended or len(stops) >= most_stops or time.monotonic() > end:
            code = command.process.wait(END_TIMEOUT_S)
            if code != 0:
                wrong.append(f"exit code {code} after step {first_step}; see {command.log}")
                return wrong
            return wrong + real.left_behind(command)
        signals = (signal.SIGKILL, signal.SIGKILL, signal.SIGTERM, signal.SIGINT)
        stop, complaints = _stop(command, rng.choice(signals))
        if stop.code == 0:  # it had just ended
            return wrong + real.left_behind(command)
        stops.append(stop)
        wrong += complaints


def _stop(command: Command, number: signal.Signals) -> tuple[Stop, list[str]]:
    """End the driver by a signal. Returns what is wrong with its end, too."""
    step = command.steps()
    begin = time.monotonic()
    code = command.end(number)
    if code == 0:
        return Stop(number.name, step, code, 0.0, 0.0), []
    gone_s, processes_left = command.wait_until_gone()
    stop = Stop(number.name, step, code, time.monotonic() - begin, gone_s)
    wrong = []
    for command_line in processes_left.values():
        wrong.append(f"{number.name} after step {step}: left {command_line[:80]}")
    expected_code = -signal.SIGKILL if number == signal.SIGKILL else INTERRUPTED
    if code != expected_code:
        wrong.append(f"{number.name} after step {step}: exit code {code}")
    return stop, wrong


def differing(one: Path, two: Path) -> list[str]:
    """What is not the same, bit for bit, in the folders of two runs with equally many steps."""
    import torch

    from tests.e2e.run_folder import learned_metrics, model_weights

    if not (two / "hf_model").exists():
        return ["everything: it did not end well"]
    names = []
    if real.rows(one, "ledger.jsonl") != real.rows(two, "ledger.jsonl"):
        names.append("ledger.jsonl")
    if learned_metrics(one) != learned_metrics(two):
        names.append("metrics.jsonl (without clock times)")
    weights_one = model_weights(one)
    weights_two = model_weights(two)
    same_names = set(weights_one) == set(weights_two)
    if not same_names or any(
        not torch.equal(weights_one[name], weights_two[name]) for name in weights_one
    ):
        names.append("hf_model")
    return names


def run_undisturbed(args: argparse.Namespace, steps: int) -> tuple[Path, list[str]]:
    """The same run without kills. Returns its folder, and what is wrong with it."""
    out = args.out / "whole"
    arguments = real.settings(out / "run", steps, args.ranks, args.critic, args.keys)
    command = Command(out, arguments, inject=False)
    try:
        command.start()
        code = command.process.wait(END_TIMEOUT_S + 5 * steps)
    finally:
        command.clear()
    wrong = []
    if code != 0:
        wrong.append(f"the undisturbed run ended with exit code {code}; see {command.log}")
    return command.folder, wrong


def summary_lines(args: argparse.Namespace, result: dict[str, Any]) -> list[str]:
    """The content of result.md."""
    count = result.get("hit", len(result.get("stops", ())))
    what = "kills"
    if args.syncs:
        what = "broken syncs"
    if args.light:
        what = "joins and leaves"
    lines = [f"`{result['command']}`", "", result.get("table", ""), ""]
    lines.append(f"{count} {what}, {result.get('seconds', 0):.0f} s.")
    if result["wrong"]:
        lines.append("Wrong:")
        lines += [f"- {line}" for line in result["wrong"]]
    else:
        lines.append("All as promised.")
    return lines


def main(argv: list[str]) -> int:
    """Run, and write the results. Returns the exit code."""
    args = parse_arguments(argv)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that it ends what it has started
    args.out = args.out.resolve()
    shutil.rmtree(args.out, ignore_errors=True)
    args.out.mkdir(parents=True)
    command_line = f"python -m tests.chaos {' '.join(argv)}"
    _print_now(command_line)
    if args.light:
        result = scale_light(args, _print_now)
    elif args.syncs:
        result = break_syncs(args)
    elif args.exact:
        result = compare_stopped_runs(args)
    else:
        result = run_with_kills(args)
    result = {"command": command_line} | result
    (args.out / "result.json").write_text(json.dumps(result, indent=2) + "\n")
    lines = summary_lines(args, result)
    (args.out / "result.md").write_text("\n".join(lines) + "\n")
    _print_now("\n".join(lines))
    return 1 if result["wrong"] else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
