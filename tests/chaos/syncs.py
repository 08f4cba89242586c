"""Break weight syncs on purpose, in every phase and at every version, and time the reaction.

Real Ray, vLLM, FSDP2 and gloo. The processes of one layout (ranks of the trainer x replicas) are
started once. Each case is a run of the real pipeline over them, in which one fault is injected.
`python -m tests.chaos --syncs` starts this module once per layout, with the folder `inject` on its
path.
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
VERSIONS = {"first": 0, "second": 1, "middle": 2, "last": STEPS}
"""The last one is for the final evaluation."""
LIMIT_S = 10.0
"""weight_sync.timeout_s: what a hang costs before any process can notice it."""
BOUND_S = 30.0
"""Seconds for the reaction from then on."""
CASE_S = 150.0
"""More than any case may take."""

# Kind of process, point, what happens there. Groups are created before version 0, so the faults of
# JOINING happen at no other version.
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
    """One fault, and what came of it."""

    kind: str
    point: str
    action: str
    version: str
    overlap: bool
    ranks: int
    replicas: int
    hit: bool = False
    outcome: str = ""
    reaction_s: float | None = None
    """From the earliest detection to the error, or to the restart of the failed process."""
    wrong: str = ""

    @property
    def expected(self) -> str:
        """What must come of it.

        "error": the run ends with a named error; "replica": it continues without the replica;
        "attempt": another attempt begins.
        """
        if self.action in ("raise", "corrupt"):
            return "error"
        return "attempt" if self.kind == "trainer" else "replica"

    @property
    def detected_s(self) -> float:
        """Seconds after the fault until any process can know of it: a stopped or hanging process is
        noticed when a wait for it reaches its limit."""
        return LIMIT_S if self.action in ("hang", "SIGSTOP") else 0.0


def all_cases() -> list[Case]:
    """The whole matrix."""
    layouts = list(itertools.product((1, 2), (1, 2)))
    overlaps = (False, True)
    cases = []
    for fault, overlap, layout in itertools.product(JOINING, overlaps, layouts):
        cases.append(Case(*fault, "first", overlap, *layout))
    for fault, version, overlap, layout in itertools.product(
        IN_A_SYNC, VERSIONS, overlaps, layouts
    ):
        cases.append(Case(*fault, version, overlap, *layout))
    return cases


def covering(cases: list[Case], seed: int) -> list[Case]:
    """A few cases in which every possible pair of values of two properties occurs (greedy pairwise
    covering)."""

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


@dataclass
class Reaction:
    """How a run reacted to a fault."""

    outcome: str
    ended: float
    """By `time.time`."""
    restarted: float | None
    """When the first replica was restarted; None: none was."""
    restarts: int
    begins_another_attempt: bool


class Layout:
    """The processes of one layout, and the cases run over them."""

    def __init__(self, out: Path, ranks: int, replicas: int) -> None:
        from one_step_off.config.loading import load_config
        from one_step_off.runtime import launch

        self.out = out
        keys = [
            "data.val_files=generator:word_problems",
            "data.val_size=4",
            f"weight_sync.timeout_s={LIMIT_S}",
            f"placement.pools={{rollout: [{replicas}], actor: [{ranks}]}}",
            "trainer.test_freq=-1",
            "trainer.val_before_train=false",
        ]
        self.cfg = load_config(real.settings(out / "run", STEPS, more=keys))
        self.prepared = launch.prepare(self.cfg, lambda line: None)
        self.stream_at_start = self.prepared.data.stream.state_dict()
        self.team: Any = None
        self.restart_times: list[float] = []  # of replicas, in the case that runs

    async def start(self) -> None:
        """New processes. They wait for the first sync to be connected, so that a case may break
        that."""
        from one_step_off.cluster.run_events import RunEvents
        from one_step_off.runtime.processes import RunProcesses

        restart_times = self.restart_times

        class Restarts(RunEvents):
            def log(self, line: str) -> None:
                if "; restarting it" in line:
                    restart_times.append(time.time())

        if self.team is not None:
            await self.team.end()
        self.team = RunProcesses(self.prepared, events=Restarts())
        await self.team.setup()

    async def reset(self, overlap: bool, joins: bool) -> None:
        """As at the beginning of a run. `joins`: the groups are created again."""
        from one_step_off.weight_sync.versions import VersionTable

        roles = self.team.roles

        def fresh(worker: Any) -> None:
            worker.version = 0
            worker.released = -1
            worker.sync_failure = ""
            if hasattr(worker, "sender"):
                # Kept in an earlier case, whose versions had the same numbers.
                worker.sender.kept_version = None

        for rank in roles.actor.ranks:
            await rank.__ray_call__.remote(fresh)
        while any(not task.done() for task in roles.rollout.supervisor.restart_tasks.values()):
            await asyncio.sleep(0.1)
        for health in roles.rollout.supervisor.health:
            health.failed_syncs = 0
        roles.sync.versions = VersionTable()
        if joins:
            roles.sync.groups.replicas = []
        roles.rollout.supervisor.syncing = False
        self.cfg.weight_sync.overlap = "true" if overlap else "false"
        self.prepared.data.stream.load_state_dict(self.stream_at_start)

    async def run(self, number: int, case: Case) -> None:
        """Run one case, and note in it what came of it."""
        if self.team is None:
            await self.start()
        await self.reset(case.overlap, case.point == "joining the sync")
        self.arm(number, case)
        reaction = await self.run_pipeline(number)
        case.outcome = reaction.outcome
        hit_path = self.out / f"hit_{number}"
        case.hit = hit_path.exists()
        (self.out / "armed").unlink(missing_ok=True)
        if not case.hit:
            case.wrong = "the point was not reached"
            return
        if reaction.begins_another_attempt:
            await self.team.end()
            self.team = None
            reaction.ended = time.time()
        reacted = reaction.ended
        if case.expected == "replica" and reaction.restarted is not None:
            reacted = reaction.restarted
        hit_time = json.loads(hit_path.read_text())["time"]
        case.reaction_s = reacted - hit_time - case.detected_s
        case.wrong = complaint(case, reaction)

    async def run_pipeline(self, number: int) -> Reaction:
        """Run the real pipeline to its end or failure."""
        from one_step_off.monitoring.tracker import Tracker
        from one_step_off.ray_trainer import Pipeline

        team = self.team
        data = self.prepared.data
        tracker = Tracker(str(self.out / f"case_{number}"), STEPS, out=open(os.devnull, "w"))
        tracker.start(0)
        self.restart_times.clear()
        restarts_before = team.roles.rollout.restarts
        pipeline = Pipeline(self.cfg, team.roles, data.stream, data.val, tracker)
        outcome = "ended well"
        begins_another_attempt = False
        try:
            async with asyncio.timeout(CASE_S):
                await pipeline.fit()
        except Exception as error:
            outcome = f"{type(error).__name__}: {error}"
            begins_another_attempt = await team.is_process_failure(error)
        return Reaction(
            outcome,
            time.time(),
            self.restart_times[0] if self.restart_times else None,
            team.roles.rollout.restarts - restarts_before,
            begins_another_attempt,
        )

    def arm(self, number: int, case: Case) -> None:
        """Let the fault happen once, from now on."""
        order = {
            "id": number,
            "kind": case.kind,
            "point": case.point,
            "skip": 0,
            "signal": case.action,
        }
        if case.point != "joining the sync":
            order["version"] = VERSIONS[case.version]
        (self.out / "armed.new").write_text(json.dumps(order))
        os.replace(self.out / "armed.new", self.out / "armed")


def complaint(case: Case, reaction: Reaction) -> str:
    """What is not as promised; "" if all is."""
    if case.reaction_s > BOUND_S:
        return f"{case.reaction_s:.1f} s from the detection"
    if case.expected == "replica":
        if case.outcome != "ended well" or reaction.restarts != 1:
            return f"the run did not continue with one restart ({reaction.restarts})"
    if case.expected == "attempt":
        names_death = case.outcome.startswith(("ProcessDied", "TrainerDied"))
        if not reaction.begins_another_attempt or not names_death:
            return "no other attempt would begin"
    if case.expected == "error":
        is_named = case.outcome.startswith(("SyncError", "RoleError"))
        if reaction.begins_another_attempt or not is_named:
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
        changed_plan = case.point == "in the header"  # the engine keeps the other plan
        if (case.wrong or changed_plan) and layout.team is not None:
            await layout.team.end()  # the next case gets new processes
            layout.team = None
    if layout.team is not None:
        await layout.team.end()


def describe(case: Case) -> str:
    """One line."""
    layout = f"{case.ranks} ranks, {case.replicas} replicas"
    details = f"{layout}, overlap {case.overlap}, {case.version} version"
    seconds = "" if case.reaction_s is None else f" in {case.reaction_s:.1f} s"
    wrong = f"  WRONG: {case.wrong}" if case.wrong else ""
    fault = f"{case.kind}, {case.point}, {case.action}"
    return f"{fault} ({details}): {case.outcome[:160]}{seconds}{wrong}"


def table(cases: list[Case]) -> str:
    """Markdown: cases and seconds per fault."""
    lines = [
        "| Process | Phase | Fault | Cases | As promised | Seconds: median, longest |",
        "| --- " * 6 + "|",
    ]
    groups: dict[tuple, list[Case]] = {}
    for case in cases:
        groups.setdefault((case.kind, case.point, case.action), []).append(case)
    for (kind, point, action), group in sorted(groups.items()):
        seconds = sorted(case.reaction_s for case in group if case.reaction_s is not None)
        times = f"{seconds[len(seconds) // 2]:.1f}, {seconds[-1]:.1f}" if seconds else ""
        good = sum(not case.wrong for case in group)
        lines.append(f"| {kind} | {point} | {action} | {len(group)} | {good} | {times} |")
    return "\n".join(lines)


def read(out: Path) -> Iterator[Case]:
    """The cases of one layout that have ended."""
    path = out / "cases.jsonl"
    for line in path.read_text().splitlines() if path.exists() else ():
        yield Case(**json.loads(line))


def chosen_cases(args: argparse.Namespace) -> list[Case]:
    """The cases that the options ask for."""
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
    return cases


def run_layout(out: Path, cases: list[Case]) -> list[str]:
    """Run the cases of one layout in a process of their own. Returns what is wrong with it."""
    out.mkdir(parents=True)
    (out / "wanted.json").write_text(json.dumps([asdict(case) for case in cases]))
    command = real.Command(out, [str(out)], module="tests.chaos.syncs")
    wrong = []
    try:
        command.start()
        code = command.process.wait(60 + CASE_S * len(cases))
        if code != 0:
            wrong.append(f"layout {out.name}: exit code {code}; see {command.log}")
        wrong += real.left_behind(command)
    finally:
        command.clear()
    return wrong


def break_syncs(args: argparse.Namespace) -> dict[str, Any]:
    """Start one layout after another. Returns what `tests.chaos` writes as result.json."""
    begin = time.monotonic()
    cases = chosen_cases(args)
    cases_of_layout: dict[tuple[int, int], list[Case]] = {}
    for case in cases:
        cases_of_layout.setdefault((case.ranks, case.replicas), []).append(case)
    ended: list[Case] = []
    wrong: list[str] = []
    for (ranks, replicas), layout_cases in cases_of_layout.items():
        out = args.out / f"{ranks}x{replicas}"
        wrong += run_layout(out, layout_cases)
        ended += read(out)
        print(f"layout {out.name}: {len(layout_cases)} cases", flush=True)
    wrong += [describe(case) for case in ended if case.wrong]
    if len(ended) != len(cases):
        wrong.append(f"{len(cases) - len(ended)} cases did not end")
    return {
        "cases": [asdict(case) for case in ended],
        "hit": len(ended),
        "wrong": wrong,
        "table": table(ended),
        "seconds": time.monotonic() - begin,
    }


def main(argv: list[str]) -> int:
    """Run one layout. `argv`: its folder, which has the list of its cases."""
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
