"""Kills in pairs: two processes at one moment, or the second while the run recovers from the
first."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tests.chaos.command import rows
from tests.chaos.kills import (
    ANYWHERE,
    MAX_SKIPPED_CALLS,
    POLL_S,
    STOPPABLE,
    Chaos,
    Kill,
    as_rows,
    place_of,
)
from tests.chaos.points import RARE

AT_ONCE = "at once"
AFTER_A_DELAY = "after a delay"
IN_THE_RECOVERY = "in the recovery"
RELATIONS = (AT_ONCE, AFTER_A_DELAY, IN_THE_RECOVERY)

MAX_DELAY_S = 25.0
"""A recovery takes 5 to 70 s."""

STOPPED_SHARE = 0.25
"""The share of kills that stop a process instead, where its kind can be stopped."""

NEW_ENGINES = ("starting", "joining the sync")
RESTART_POINTS = {
    "driver": ("starting", "resuming"),
    "replica": NEW_ENGINES,
    "engine": ("joining the sync",),
    "trainer": RARE,
}
"""Kind -> the points that it may pass while a trainer or the driver comes back."""

REPLICA_POINTS = {
    "replica": NEW_ENGINES,
    "engine": ("joining the sync",),
    "trainer": ("joining the sync",),
}
"""Kind -> the points that it passes while a replica comes back."""

RECOVERY_POINTS = {
    "driver": RESTART_POINTS,
    "trainer": RESTART_POINTS,
    "critic": RESTART_POINTS,
    "replica": REPLICA_POINTS,
    "engine": REPLICA_POINTS,
    "scorer": {},
}
"""First kind -> second kind -> points of the second that the recovery from the first passes."""

Combination = tuple[str, str, str]
"""First kind, second kind, relation."""


def combinations(kinds: Sequence[str], trainer_ranks: int) -> list[Combination]:
    """All pairs of kinds, in both orders and with each relation that they can have.

    Args:
        kinds: to choose from.
        trainer_ranks: with one, the trainer has no second process that could die at the same
            moment.
    """
    single = {"driver", "critic"}
    if trainer_ranks == 1:
        single.add("trainer")
    found = []
    for first in kinds:
        for second in kinds:
            for relation in RELATIONS:
                if relation == AT_ONCE and first == second and first in single:
                    continue
                if relation == IN_THE_RECOVERY and second not in RECOVERY_POINTS[first]:
                    continue
                found.append((first, second, relation))
    return found


@dataclass
class Double:
    """Two kills, and what came of them."""

    first: Kill
    second: Kill
    relation: str
    delay_s: float = 0.0
    """Between the two, where the relation is AFTER_A_DELAY."""
    recovered_s: float | None = None
    """Seconds from the second kill, or from the first if the second did not happen."""
    ended: str = ""
    """The error with which the run ended, though its driver lived; the same command resumed it."""
    wrong: str = ""

    @property
    def kills(self) -> list[Kill]:
        """Those that hit, the last one at the end."""
        return [kill for kill in (self.first, self.second) if kill.time]

    @property
    def is_pair(self) -> bool:
        """Whether both hit."""
        return len(self.kills) == 2


class DoubleChaos(Chaos):
    """Kills in pairs. Every combination comes once before one comes twice."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.doubles: list[Double] = []
        self._undrawn: list[Combination] = []

    def strike(self, kinds: list[str], points: list[str], stop: bool) -> None:
        """Kill two processes, and wait for the recovery from both."""
        double = self.draw(kinds, points)
        self.doubles.append(double)
        self.kills += [double.first, double.second]
        act = {
            AT_ONCE: self._at_once,
            AFTER_A_DELAY: self._after_a_delay,
            IN_THE_RECOVERY: self._in_the_recovery,
        }
        act[double.relation](double)
        self._disarm()
        if not double.kills:
            self.say(f"{double.first.number:3d} {double.first.kind}: not reached")
            if self.command.process.poll() is not None:
                self._restart_driver(double.first)
            return
        self._await_both(double)
        self.say(describe_double(double))

    def draw(self, kinds: list[str], points: list[str]) -> Double:
        """The next pair.

        Args:
            kinds: to choose from.
            points: of the first kill; empty: all.
        """
        if not self._undrawn:
            self._undrawn = combinations(kinds, self.trainer_ranks)
            self.random.shuffle(self._undrawn)
        first_kind, second_kind, relation = self._undrawn.pop()
        number = len(self.kills)
        first = Kill(number, first_kind, ANYWHERE, self._signal(first_kind))
        second = Kill(number + 1, second_kind, ANYWHERE, self._signal(second_kind))
        if relation == IN_THE_RECOVERY:
            names = RECOVERY_POINTS[first_kind][second_kind]
            second.point = self.random.choice(names)
        else:
            first.point = self._point(first_kind, points)
            first.skip = self.random.randrange(MAX_SKIPPED_CALLS)
        double = Double(first, second, relation)
        if relation == AFTER_A_DELAY:
            double.delay_s = self.random.uniform(0, MAX_DELAY_S)
        return double

    def _point(self, kind: str, points: list[str]) -> str:
        """A point that a kind passes in every step, or any moment."""
        names = [name for name in self._points_of(kind) if name not in RARE]
        names = [name for name in names if not points or name in points]
        return self.random.choice([*names, ANYWHERE])

    def _signal(self, kind: str) -> str:
        if kind in STOPPABLE and self.random.random() < STOPPED_SHARE:
            return "SIGSTOP"
        return "SIGKILL"

    def _at_once(self, double: Double) -> None:
        """Both in the same moment. At a point the process that passes it signals the other one
        first."""
        first, second = double.first, double.second
        if first.point == ANYWHERE:
            # The driver last: nothing may notice its end before the other one has its signal.
            order = sorted((first, second), key=lambda kill: kill.kind == "driver")
            self._kill_directly(order[0])
            self._kill_directly(order[1], other_than=order[0].pid)
        else:
            self._kill_both_at_the_point(first, second)
        if "driver" in (first.kind, second.kind) and double.kills:
            self._restart_driver(double.kills[-1])

    def _kill_both_at_the_point(self, first: Kill, second: Kill) -> None:
        second.pid = self._process_of(second.kind)
        self._arm(first, [(second.pid, second.signal)] if second.pid else ())
        hit = self._await_hit(first, self.reach_s)
        if [second.pid, second.signal] in hit.get("also", ()) and second.pid != first.pid:
            second.time = first.time
            second.step = first.step

    def _after_a_delay(self, double: Double) -> None:
        """The second some seconds later, whatever the run does then."""
        first, second = double.first, double.second
        if not self._hit_first(first):
            return
        time.sleep(double.delay_s)
        deadline = time.monotonic() + self.limit_s
        while time.monotonic() < deadline and self.command.process.poll() is None:
            self._kill_directly(second, other_than=first.pid)
            if second.time:
                break
            time.sleep(POLL_S)
        if second.kind == "driver" and second.time:
            self._restart_driver(second)

    def _hit_first(self, first: Kill) -> bool:
        """Kill the first one; start the driver again if it was that."""
        if first.point == ANYWHERE:
            self._kill_directly(first)
        else:
            self._arm(first)
            self._await_hit(first, self.reach_s)
        if first.kind == "driver" and first.time:
            self._restart_driver(first)
        return bool(first.time)

    def _in_the_recovery(self, double: Double) -> None:
        """The second at a point that only the recovery from the first passes."""
        first, second = double.first, double.second
        self._arm(second)
        if not self._hit_first(first):
            return
        deadline = time.monotonic() + self.limit_s
        while time.monotonic() < deadline and not second.time:
            # Some recoveries do not pass the point: as of engines that a trainer's death keeps.
            if self._have_recovered(double):
                return
            if self.command.process.poll() is not None and second.kind != "driver":
                return
            self._await_hit(second, POLL_S)
        if second.kind == "driver" and second.time:
            self._restart_driver(second)

    def _have_recovered(self, double: Double) -> bool:
        """Whether three steps have been made since, the last with all replicas."""
        metrics = rows(self.command.folder, "metrics.jsonl")
        last_row = metrics[-1] if metrics else {"step": -1}
        return self.has_synced_all(last_row, max(kill.step for kill in double.kills))

    def _await_both(self, double: Double) -> None:
        """Wait for the recovery. A run that has ended is resumed by the same command."""
        begin = double.kills[-1].time
        double.wrong = self._wait_for(double, begin)
        if double.wrong.startswith("the run ended"):
            double.ended = double.wrong
            self._restart_driver(double.kills[-1])
            double.wrong = self._wait_for(double, time.time())
        if not double.wrong:
            double.recovered_s = time.time() - begin
            return
        double.kills[-1].wrong = double.wrong
        step = self.command.steps()
        self._restart_driver(double.kills[-1])
        if not self.wait_for_steps(step, self.limit_s):
            double.kills[-1].wrong += "; nor after another start"

    def _wait_for(self, double: Double, begin: float) -> str:
        """Why the run did not recover within the limit; "" if it did."""
        return self._wait_until(lambda: self._have_recovered(double), begin)

    def more_results(self) -> dict[str, Any]:
        """The pairs, for result.json and result.md."""
        return {"doubles": as_rows(self.doubles), "table": double_table(self.doubles)}


def describe_double(double: Double) -> str:
    """One line."""
    first, second = double.first, double.second
    relation = double.relation
    if double.delay_s:
        relation = f"{double.delay_s:.1f} s later"
    line = f"{first.number:3d} {place_of(first)} | {relation}: {place_of(second)}"
    if not double.is_pair:
        line += " (only one of them was hit)"
    if double.ended:
        line += f" | {double.ended}; started again"
    outcome = double.wrong or f"recovered in {double.recovered_s:.1f} s"
    return f"{line} | {outcome}"


def double_table(doubles: list[Double]) -> str:
    """Markdown: pairs and seconds to recovery per combination of kinds and relation."""
    lines = [
        "| First | Second | Relation | Pairs | Recovered | By itself | Seconds: median, longest |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    groups: dict[Combination, list[Double]] = {}
    for double in doubles:
        if double.is_pair:
            names = [
                kill.kind + (", stopped" if kill.signal == "SIGSTOP" else "")
                for kill in double.kills
            ]
            groups.setdefault((names[0], names[1], double.relation), []).append(double)
    for key, group in sorted(groups.items()):
        seconds = sorted(d.recovered_s for d in group if d.recovered_s is not None)
        alone = [d for d in group if d.recovered_s is not None and not d.ended]
        times = f"{seconds[len(seconds) // 2]:.0f}, {seconds[-1]:.0f}" if seconds else ""
        counts = f"{len(group)} | {len(seconds)} | {len(alone)}"
        lines.append(f"| {' | '.join(key)} | {counts} | {times} |")
    return "\n".join(lines)
