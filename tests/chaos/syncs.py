"""Break weight syncs on purpose, in every phase and at every version, and time how soon the run ends or goes on.

Real Ray, vLLM, FSDP2 and gloo. The processes of one layout (ranks of the trainer x replicas) are started once; each case
is a run of the real pipeline over them, in which one fault is injected. `python -m tests.chaos --syncs` starts this module
once per layout, with the folder `inject` on its path.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import os
import random
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tests.chaos import command as real

STEPS = 4
VERSIONS = {
    "first": 0,
    "second": 1,
    "middle": 2,
    "last": STEPS,
}  # the last one is for the final evaluation
LIMIT_S = 10.0  # weight_sync.timeout_s: what a hang costs before any process can notice it
BOUND_S = 30.0  # from then on
CASE_S = 150.0  # more than any case may take

# kind of process, point, what happens there. Groups are created before version 0, so faults in it come at no other.
JOINING = [
    ("engine", "joining the sync", "raise"),
    ("engine", "joining the sync", "hang"),
    ("engine", "joining the sync", "SIGKILL"),
    ("engine", "joining the sync", "SIGSTOP"),
    ("replica", "joining the sync", "SIGKILL"),
    ("trainer", "joining the sync", "raise"),
    ("trainer", "joining the sync", "hang"),
    ("trainer", "joining the sync", "SIGKILL"),
    ("trainer", "joining the sync", "SIGSTOP"),
]
IN_A_SYNC = [
    ("driver", "in the canary", "corrupt"),
    ("engine", "in the header", "corrupt"),
    ("engine", "after the last bucket", "corrupt"),
    ("engine", "before the first bucket", "raise"),
    ("engine", "loading", "raise"),
    ("engine", "packing layers", "raise"),
    ("engine", "loading", "hang"),
    ("engine", "packing layers", "hang"),
    ("engine", "between buckets", "SIGKILL"),
    ("engine", "between buckets", "SIGSTOP"),
    ("engine", "in the canary", "SIGKILL"),
    ("replica", "before the sync", "raise"),
    ("replica", "before the sync", "SIGKILL"),
    ("replica", "in the canary", "raise"),
    ("replica", "in the canary", "hang"),
    ("trainer", "before the first bucket", "raise"),
    ("trainer", "between buckets", "raise"),
    ("trainer", "after the last bucket", "raise"),
    ("trainer", "before the first bucket", "hang"),
    ("trainer", "between buckets", "hang"),
    ("trainer", "between buckets", "SIGKILL"),
    ("trainer", "between buckets", "SIGSTOP"),
]


@dataclass
class Case:
    """One fault, and what came of it. `detected_s`: after the fault, when a process can know of it at the earliest."""

    kind: str
    point: str
    action: str
    version: str
    overlap: bool
    ranks: int
    replicas: int
    hit: bool = False
    outcome: str = ""
    reaction_s: float | None = (
        None  # from the detection to the error, or to the restart of what failed
    )
    wrong: str = ""

    @property
    def expected(self) -> str:
        """ "error": the run ends by name; "replica": it goes on without the replica; "attempt": it begins another attempt."""
        if self.action in ("raise", "corrupt"):
            return "error"
        return "attempt" if self.kind == "trainer" else "replica"

    @property
    def detected_s(self) -> float:
        """A stopped or hanging process is noticed when a wait for it reaches its limit."""
        return LIMIT_S if self.action in ("hang", "SIGSTOP") else 0.0


def all_cases() -> list[Case]:
    """The whole matrix."""
    layouts = list(itertools.product((1, 2), (1, 2)))
    cases = [
        Case(*fault, "first", o, *at) for fault in JOINING for o in (False, True) for at in layouts
    ]
    both = itertools.product(IN_A_SYNC, VERSIONS, (False, True), layouts)
    return cases + [Case(*fault, version, overlap, *at) for fault, version, overlap, at in both]


def covering(cases: list[Case], seed: int) -> list[Case]:
    """So few of them that every pair of two properties' values that occurs at all occurs in one (greedy)."""

    def pairs(case: Case) -> set[tuple]:
        values = [
            (case.kind, case.point, case.action),
            case.version,
            case.overlap,
            case.ranks,
            case.replicas,
        ]
        return set(itertools.combinations(enumerate(values), 2))

    shuffled = random.Random(seed).sample(cases, len(cases))
    missing: set[tuple] = set().union(*map(pairs, cases))
    chosen = []
    while missing:
        best = max(shuffled, key=lambda case: len(pairs(case) & missing))
        chosen.append(best)
        missing -= pairs(best)
    return chosen


class Layout:
    """The processes of one layout, and the cases run over them."""

    def __init__(self, out: Path, ranks: int, replicas: int) -> None:
        from one_step_off.config.loading import load_config
        from one_step_off.runtime import launch

        self.out, self.lines = out, []
        pools = f"placement.pools={{rollout: [{replicas}], actor: [{ranks}]}}"
        more = [
            "data.val_files=generator:word_problems",
            "data.val_size=4",
            f"weight_sync.timeout_s={LIMIT_S}",
        ]
        more += [pools, "trainer.test_freq=-1", "trainer.val_before_train=false"]
        self.cfg = load_config(real.settings(out / "run", STEPS, more=more))
        self.prepared = launch.prepare(self.cfg, lambda line: None)
        self.beginning = self.prepared.data.stream.state_dict()
        self.team: Any = None

    async def start(self) -> None:
        """New processes. They wait for the first sync to be connected, so that a case may break that."""
        from one_step_off.runtime.processes import RunProcesses

        if self.team is not None:
            await self.team.end()
        self.team = RunProcesses(self.prepared)
        await self.team.setup()

    async def reset(self, overlap: bool, joins: bool) -> None:
        """As at a run's beginning. `joins`: the groups are to be created again."""
        roles = self.team.roles

        def fresh(worker: Any) -> None:
            worker.version, worker.released, worker.sync_failure = 0, -1, ""
            worker.cfg.weight_sync.overlap = overlap
            if hasattr(worker, "sender"):
                worker.sender.kept_version = (
                    None  # of an earlier case, whose versions had the same numbers
                )

        for rank in roles.actor.ranks:
            await rank.__ray_call__.remote(fresh)
        while any(not task.done() for task in roles.rollout.restart_tasks.values()):
            await asyncio.sleep(0.1)
        roles.sync.failed_syncs.clear()
        roles.sync.last_sent = None
        if joins:
            roles.sync.connected_replicas = []
        roles.rollout.syncing = False
        self.cfg.weight_sync.overlap = overlap
        self.prepared.data.stream.load_state_dict(self.beginning)

    async def run(self, number: int, case: Case) -> None:
        """One case; what came of it is noted in it."""
        from one_step_off.monitoring.tracker import Tracker
        from one_step_off.ray_trainer import Pipeline

        if self.team is None:
            await self.start()
        await self.reset(case.overlap, case.point == "joining the sync")
        team, data = self.team, self.prepared.data
        tracker = Tracker(str(self.out / f"case_{number}"), STEPS, out=open(os.devnull, "w"))
        tracker.start(0)
        said: list[tuple[float, str]] = []
        tracker.log = lambda line: said.append((time.time(), line))
        before = team.roles.rollout.restarts
        pipeline = Pipeline(self.cfg, team.roles, data.stream, data.val, tracker)
        self.arm(number, case)
        another = False
        try:
            async with asyncio.timeout(CASE_S):
                await pipeline.fit()
            case.outcome = "ended well"
        except Exception as error:
            case.outcome = f"{type(error).__name__}: {error}"
            another = await team.is_process_failure(error)
        ended = time.time()
        hit = self.out / f"hit_{number}"
        case.hit = hit.exists()
        (self.out / "armed").unlink(missing_ok=True)
        if not case.hit:
            case.wrong = "the point was not reached"
            return
        if another:
            await team.end()
            self.team = None
            ended = time.time()
        restarted = [at for at, line in said if "; restarting it" in line]
        reacted = restarted[0] if case.expected == "replica" and restarted else ended
        case.reaction_s = reacted - json.loads(hit.read_text())["time"] - case.detected_s
        restarts = team.roles.rollout.restarts - before
        case.wrong = self.complaint(case, another, restarts)

    def arm(self, number: int, case: Case) -> None:
        """Let the fault happen once, from now on."""
        wish = {
            "id": number,
            "kind": case.kind,
            "point": case.point,
            "skip": 0,
            "signal": case.action,
        }
        if case.point != "joining the sync":
            wish["version"] = VERSIONS[case.version]
        (self.out / "armed.new").write_text(json.dumps(wish))
        os.replace(self.out / "armed.new", self.out / "armed")

    def complaint(self, case: Case, another: bool, restarts: int) -> str:
        """What is not as promised; "" if all is."""
        if case.reaction_s > BOUND_S:
            return f"{case.reaction_s:.1f} s from the detection"
        if case.expected == "replica" and (case.outcome != "ended well" or restarts != 1):
            return f"the run did not go on with one restart ({restarts})"
        if case.expected == "attempt" and not (
            another and case.outcome.startswith(("ProcessDied", "TrainerDied"))
        ):
            return "no other attempt would begin"
        if case.expected == "error" and (
            another or not case.outcome.startswith(("SyncError", "RoleError"))
        ):
            return "no named error"
        return ""


async def run_all(out: Path, cases: list[Case]) -> None:
    """All cases of one layout, a line of JSON each in `cases.jsonl`."""
    layout = Layout(out, cases[0].ranks, cases[0].replicas)
    for number, case in enumerate(cases):
        await layout.run(number, case)
        print(describe(case), flush=True)
        with open(out / "cases.jsonl", "a") as file:
            file.write(json.dumps(asdict(case)) + "\n")
        changed = case.point == "in the header"  # the engine's plan is another one from then on
        if (case.wrong or changed) and layout.team is not None:  # the next case gets new processes
            await layout.team.end()
            layout.team = None
    if layout.team is not None:
        await layout.team.end()


def describe(case: Case) -> str:
    """One line."""
    where = f"{case.ranks} ranks, {case.replicas} replicas, overlap {case.overlap}, {case.version} version"
    took = "" if case.reaction_s is None else f" in {case.reaction_s:.1f} s"
    wrong = f"  WRONG: {case.wrong}" if case.wrong else ""
    return f"{case.kind}, {case.point}, {case.action} ({where}): {case.outcome[:160]}{took}{wrong}"


def table(cases: list[Case]) -> str:
    """Markdown: cases and seconds per fault."""
    lines = [
        "| Process | Phase | Fault | Cases | As promised | Seconds: median, longest |",
        "| --- " * 6 + "|",
    ]
    groups: dict[tuple, list[Case]] = {}
    for case in cases:
        groups.setdefault((case.kind, case.point, case.action), []).append(case)
    for (kind, point, action), own in sorted(groups.items()):
        seconds = sorted(case.reaction_s for case in own if case.reaction_s is not None)
        times = f"{seconds[len(seconds) // 2]:.1f}, {seconds[-1]:.1f}" if seconds else ""
        good = sum(not case.wrong for case in own)
        lines.append(f"| {kind} | {point} | {action} | {len(own)} | {good} | {times} |")
    return "\n".join(lines)


def read(out: Path) -> Iterator[Case]:
    """The cases of one layout that have ended."""
    path = out / "cases.jsonl"
    for line in path.read_text().splitlines() if path.exists() else ():
        yield Case(**json.loads(line))


def break_syncs(args: argparse.Namespace) -> dict[str, Any]:
    """Start every layout after the other; returns what `tests.chaos` writes down."""
    cases = all_cases() if args.all else covering(all_cases(), args.seed)
    if args.faults:
        cases = [
            case for case in cases if f"{case.kind}: {case.point}: {case.action}" in args.faults
        ]
    if args.versions:
        cases = [
            case
            for case in cases
            if case.version in args.versions or case.point == "joining the sync"
        ]
    if args.layouts:
        cases = [case for case in cases if f"{case.ranks}x{case.replicas}" in args.layouts]
    begin, ended, wrong = time.monotonic(), [], []
    for layout in dict.fromkeys((case.ranks, case.replicas) for case in cases):
        own = [case for case in cases if (case.ranks, case.replicas) == layout]
        out = args.out / "x".join(map(str, layout))
        out.mkdir(parents=True)
        (out / "wanted.json").write_text(json.dumps([asdict(case) for case in own]))
        command = real.Command(out, [str(out)], module="tests.chaos.syncs")
        try:
            command.start()
            code = command.process.wait(60 + CASE_S * len(own))
            wrong += [f"layout {layout}: exit code {code}; see {command.log}"] * (code != 0)
            wrong += real.left_behind(command)
        finally:
            command.clear()
        ended += read(out)
        print(f"layout {layout}: {len(own)} cases", flush=True)
    wrong += [describe(case) for case in ended if case.wrong]
    if len(ended) != len(cases):
        wrong.append(f"{len(cases) - len(ended)} cases did not end")
    rows = [asdict(case) for case in ended]
    return {
        "cases": rows,
        "hit": len(ended),
        "wrong": wrong,
        "table": table(ended),
        "seconds": time.monotonic() - begin,
    }


def main(argv: list[str]) -> int:
    """One layout, whose cases the folder names."""
    import ray

    from one_step_off.monitoring.console import quiet_libraries
    from one_step_off.runtime import launch

    quiet_libraries()
    out = Path(argv[0])
    cases = [Case(**row) for row in json.loads((out / "wanted.json").read_text())]
    with launch.cleanup_after_run():
        launch.start_ray(Layout(out, cases[0].ranks, cases[0].replicas).cfg)
        try:
            asyncio.run(run_all(out, cases))
        finally:
            ray.shutdown()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
