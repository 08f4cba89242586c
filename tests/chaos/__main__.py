"""Kill what a run consists of, at random, and see that it goes on and ends as if nothing had happened.

    python -m tests.chaos --seed 1 --kills 20                   every kind of process, at every named point
    python -m tests.chaos --kinds driver,engine --points "between buckets,checkpoint: before its seal,anywhere"
    python -m tests.chaos --compare --kills 5                   and the same bits as of a run without kills
    python -m tests.chaos --exact --kills 20                    SIGTERM, Ctrl-C, kill -9: the same bits as a whole run
    python -m tests.chaos --syncs                               broken weight syncs: how soon the run ends or goes on

The run is the real command on a tiny model on CPUs. The end is checked: the ledger holds the prompts of an undisturbed
run in their order, none lost and none twice; every step has one row; nothing is left of processes, shared memory, ports
and temporary files. `--out` gets result.md, result.json, all that the run has said, and its folder. Exit code 0: all as
promised.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import signal
import sys
import time
from pathlib import Path
from typing import Any

from tests.chaos import command as real
from tests.chaos.command import Command
from tests.chaos.kills import ANYWHERE, Chaos, as_rows, describe, table
from tests.chaos.points import KINDS, POINTS
from tests.chaos.syncs import break_syncs

STEPS_LEFT = 5  # after the last kill
EXACT_STEPS = 12


def parsed(argv: list[str]) -> argparse.Namespace:
    """The options. Ends the program with one line if a kind or point does not exist."""
    parser = argparse.ArgumentParser("python -m tests.chaos", description=__doc__.split("\n\n")[0])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--kills", type=int, default=10)
    parser.add_argument("--minutes", type=float, default=1e9, help="begin no kill after so many")
    parser.add_argument("--out", type=Path, default=Path("outputs/chaos"))
    parser.add_argument(
        "--kinds", default="", help=f"of {', '.join(KINDS)}; default: all that the run has"
    )
    parser.add_argument(
        "--each", action="store_true", help="the kinds one after the other, not by chance"
    )
    parser.add_argument("--points", default="", help="names, separated by commas; default: all")
    parser.add_argument("--ranks", type=int, default=1, help="of the trainer")
    parser.add_argument("--critic", action="store_true", help="train one too, in a pool of its own")
    parser.add_argument("--stop", action="store_true", help="also SIGSTOP: processes that hang")
    parser.add_argument("--limit", type=float, default=150.0, help="seconds for one recovery")
    parser.add_argument(
        "--reach", type=float, default=20.0, help="seconds for a point to be reached"
    )
    parser.add_argument(
        "--exact",
        action="store_true",
        help="only the driver; compare bits with a run never stopped",
    )
    parser.add_argument(
        "--compare",
        action="store_true",
        help="in the end with a run that nothing was killed of, too",
    )
    parser.add_argument(
        "--syncs",
        action="store_true",
        help="break weight syncs instead; every pair of properties once",
    )
    parser.add_argument(
        "--all", action="store_true", help="with --syncs: the whole matrix, for hours"
    )
    parser.add_argument(
        "--faults",
        action="append",
        default=[],
        help='with --syncs: only these, "KIND: POINT: ACTION"',
    )
    parser.add_argument(
        "--layouts", action="append", default=[], help="with --syncs: only these, RANKSxREPLICAS"
    )
    parser.add_argument(
        "--versions",
        action="append",
        default=[],
        help="with --syncs: only first, second, middle, last",
    )
    parser.add_argument("keys", nargs="*", help="section.key=value, for the run")
    args = parser.parse_args(argv)
    args.kinds = [kind for kind in args.kinds.split(",") if kind] or [
        k for k in KINDS if args.critic or k != "critic"
    ]
    args.points = [point for point in args.points.split(",") if point]
    unknown = set(args.kinds) - set(KINDS) | set(args.points) - {p.name for p in POINTS} - {
        ANYWHERE
    }
    if unknown:
        parser.error(f"unknown: {', '.join(sorted(unknown))}")
    possible = [
        k
        for k in args.kinds
        if not args.points or {p.name for p in POINTS if p.kind == k} & set(args.points)
    ]
    args.kinds = args.kinds if ANYWHERE in args.points else possible
    return args


def disturb(args: argparse.Namespace, go_on: bool = True) -> dict[str, Any]:
    """Kill until there are enough; then end the run in order, go on once more, and look at everything."""
    arguments = real.settings(args.out / "run", 1_000_000, args.ranks, args.critic, args.keys)
    command = Command(args.out, arguments)
    chaos = Chaos(command, args.seed, args.limit, args.reach, lambda line: print(line, flush=True))
    begin, wrong = time.monotonic(), []
    try:
        command.start()
        if not chaos.wait_for_steps(1, 300):
            return {"wrong": [f"the run did not begin; see {command.log}"], "kills": []}
        begin = time.monotonic()
        while len(chaos.done) < args.kills and time.monotonic() - begin < 60 * args.minutes:
            time.sleep(chaos.random.uniform(0, 2))
            kinds = args.kinds
            if args.each:
                kinds = [args.kinds[len(chaos.done) % len(args.kinds)]]
            chaos.once(chaos.choose(kinds, args.points, args.stop))
        last = command.steps()
        code = command.end(signal.SIGTERM)
        if code != 130:
            wrong.append(f"SIGTERM at the end: exit code {code}, not 130")
        wrong += [
            f"after SIGTERM: still there: {line[:80]}"
            for line in command.wait_until_gone()[1].values()
        ]
        steps = max(command.steps(), last) + 1
        if go_on:
            steps += STEPS_LEFT
            command.arguments = [*arguments, f"trainer.total_steps={steps}"]
            command.start()
            code = command.process.wait(300)
            wrong += [f"the last start ended with exit code {code}"] * (code != 0)
        wrong += real.complaints(command, steps, real.expected_prompts(arguments, steps))
        wrong += real.left_behind(command)
        if args.compare:
            whole, bad = undisturbed(args, steps)
            wrong += bad or [
                f"{name} differs from the whole run's" for name in differing(whole, command.folder)
            ]
    finally:
        command.clear()
    wrong += [describe(kill) for kill in chaos.kills if kill.wrong or kill.left]
    done = {
        "kills": as_rows(chaos.kills),
        "hit": len(chaos.done),
        "steps": steps,
        "starts": command.starts,
    }
    return done | {"wrong": wrong, "seconds": time.monotonic() - begin, "table": table(chaos.kills)}


def exact(args: argparse.Namespace) -> dict[str, Any]:
    """Runs of EXACT_STEPS steps, stopped again and again, against one that was not."""
    chance = random.Random(args.seed)
    whole, wrong = undisturbed(args, EXACT_STEPS)
    if wrong:
        return {"wrong": wrong, "kills": []}
    begin, stops, runs = time.monotonic(), [], 0
    while len(stops) < args.kills and time.monotonic() - begin < 60 * args.minutes:
        runs += 1
        out = args.out / f"stopped_{runs}"
        command = Command(
            out, real.settings(out / "run", EXACT_STEPS, args.ranks, args.critic, args.keys)
        )
        try:
            wrong += _stopped_run(command, chance, args.kills, stops, begin + 60 * args.minutes)
        finally:
            command.clear()
        other = differing(whole, command.folder)
        wrong += [f"run {runs}: {name} differs from the whole run's" for name in other]
        print(
            f"run {runs}, {len(stops)} stops so far: "
            + (f"other {other}" if other else "same bits"),
            flush=True,
        )
    lines = ["| Signal | Stops | Between these steps |", "| --- | --- | --- |"]
    for name in dict.fromkeys(stop["signal"] for stop in stops):
        own = [stop["step"] for stop in stops if stop["signal"] == name]
        lines.append(f"| {name} | {len(own)} | {', '.join(map(str, sorted(own)))} |")
    done = {"stops": stops, "runs": runs, "steps": EXACT_STEPS, "table": "\n".join(lines)}
    return done | {"wrong": wrong, "seconds": time.monotonic() - begin}


def _stopped_run(
    command: Command, chance: random.Random, most: int, stops: list[dict[str, Any]], until: float
) -> list[str]:
    """One run to its end, with stops until a time; what is wrong with it but for its bits."""
    wrong: list[str] = []
    while True:
        command.start()
        first, target = command.steps(), command.steps() + chance.randint(1, 4)
        while command.process.poll() is None and command.steps() < target:
            time.sleep(0.02)
        time.sleep(chance.uniform(0, 0.5))
        if command.process.poll() is not None or len(stops) >= most or time.monotonic() > until:
            code = command.process.wait(300)
            if code != 0:
                return [*wrong, f"exit code {code} after step {first}; see {command.log}"]
            return wrong + real.left_behind(command)
        number = chance.choice((signal.SIGKILL, signal.SIGKILL, signal.SIGTERM, signal.SIGINT))
        step, begin = command.steps(), time.monotonic()
        code = command.end(number)
        if code == 0:  # it had just ended
            return wrong + real.left_behind(command)
        gone, left = command.wait_until_gone()
        stops.append(
            {
                "signal": number.name,
                "step": step,
                "code": code,
                "end_s": time.monotonic() - begin,
                "gone_s": gone,
            }
        )
        wrong += [f"{number.name} after step {step}: left {line[:80]}" for line in left.values()]
        if code != (-9 if number == signal.SIGKILL else 130):
            wrong.append(f"{number.name} after step {step}: exit code {code}")


def differing(one: Path, two: Path) -> list[str]:
    """What is not the same, bit for bit, in the folders of two runs of as many steps."""
    import torch

    from tests.e2e.test_resume import learnt, weights

    if not (two / "hf_model").exists():
        return ["everything: it did not end well"]
    mine, theirs = weights(one), weights(two)
    same = {
        "ledger.jsonl": real.rows(one, "ledger.jsonl") == real.rows(two, "ledger.jsonl"),
        "metrics.jsonl (without what a clock says)": learnt(one) == learnt(two),
        "hf_model": set(mine) == set(theirs)
        and all(torch.equal(mine[name], theirs[name]) for name in mine),
    }
    return [name for name, equal in same.items() if not equal]


def undisturbed(args: argparse.Namespace, steps: int) -> tuple[Path, list[str]]:
    """The same run without kills: its folder, and what is wrong with it."""
    out = args.out / "whole"
    whole = Command(
        out, real.settings(out / "run", steps, args.ranks, args.critic, args.keys), inject=False
    )
    try:
        whole.start()
        code = whole.process.wait(300 + 5 * steps)
    finally:
        whole.clear()
    return whole.folder, [f"the whole run ended with exit code {code}; see {whole.log}"] * (
        code != 0
    )


def main(argv: list[str]) -> int:
    """Run, and write what was found."""
    args = parsed(argv)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that it ends what it has started
    args.out = args.out.resolve()
    shutil.rmtree(args.out, ignore_errors=True)
    args.out.mkdir(parents=True)
    print(f"python -m tests.chaos {' '.join(argv)}", flush=True)
    if args.syncs:
        found = break_syncs(args)
    else:
        found = exact(args) if args.exact else disturb(args)
    found = {"command": f"python -m tests.chaos {' '.join(argv)}"} | found
    (args.out / "result.json").write_text(json.dumps(found, indent=2) + "\n")
    told = [f"`{found['command']}`", "", found.get("table", ""), ""]
    what = "broken syncs" if args.syncs else "kills"
    told += [
        f"{found.get('hit', len(found.get('stops', ())))} {what}, {found.get('seconds', 0):.0f} s."
    ]
    told += (
        ["All as promised."]
        if not found["wrong"]
        else ["Wrong:", *(f"- {line}" for line in found["wrong"])]
    )
    (args.out / "result.md").write_text("\n".join(told) + "\n")
    print("\n".join(told), flush=True)
    return 1 if found["wrong"] else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
