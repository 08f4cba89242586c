"""Kills at named points, one after another, and the proof that the run recovers after each."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from tests.chaos.command import Command, rows
from tests.chaos.points import RARE, names_of

ANYWHERE = "anywhere"
"""A point of every kind: at any moment, by the process id."""

TITLES = {
    "replica": "ray::RolloutReplica",
    "engine": "VLLM::EngineCore",
    "trainer": ("ray::ActorWorker", "ray::MegatronActorWorker"),
    "critic": ("ray::CriticWorker", "ray::MegatronCriticWorker"),
    "scorer": "ray::Scorer",
}
"""Kind -> the beginnings of its processes' command lines."""

STOPPABLE = ("replica", "engine", "trainer")
STOP_SHARE = 0.2
"""The share of kills that stop a process instead."""

MAX_SKIPPED_CALLS = 3
POLL_S = 0.1
LOOK_INTERVAL_S = 2.0
"""Seconds between two looks at the ports of the run."""


@dataclass
class Kill:
    """One kill: what was asked for, and what came of it."""

    number: int
    kind: str
    point: str
    signal: str = "SIGKILL"
    skip: int = 0
    """Calls that pass the point before."""
    time: float = 0.0
    """By `time.time`; 0: the point was not reached."""
    pid: int = 0
    step: int = -1
    """The last step that had a row by then."""
    recovered_s: float | None = None
    gone_s: float | None = None
    """Of the driver: seconds until its other processes had ended."""
    left: tuple[str, ...] = ()
    """Of the driver: the processes that had not."""
    wrong: str = ""


class Chaos:
    """Kills processes of one run, waits for its recovery, and starts the driver again."""

    def __init__(
        self,
        command: Command,
        seed: int,
        limit_s: float,
        reach_s: float,
        say: Callable[[str], None] = print,
    ) -> None:
        """`limit_s`: for one recovery. `reach_s`: for a point to be reached. `say`: prints a
        line."""
        self.command = command
        self.random = random.Random(seed)
        self.limit_s = limit_s
        self.reach_s = reach_s
        self.say = say
        self.kills: list[Kill] = []
        self.replicas = 2  # 0: they come and go
        self.trainer_ranks = 1

    def more_results(self) -> dict[str, Any]:
        """For result.json, beside the kills."""
        return {}

    @property
    def done(self) -> list[Kill]:
        """The kills that hit."""
        return [kill for kill in self.kills if kill.time]

    def strike(self, kinds: list[str], points: list[str], stop: bool) -> None:
        """Kill once at random, see `choose`, and wait for the recovery."""
        self.once(self.choose(kinds, points, stop))

    def choose(self, kinds: list[str], points: list[str], stop: bool) -> Kill:
        """A random kind, and a random point of that kind.

        Args:
            kinds: to choose from.
            points: to choose from; empty: all.
            stop: whether some processes are stopped instead.
        """
        kind = self.random.choice(kinds)
        names = [*self._points_of(kind), ANYWHERE]
        point = self.random.choice([name for name in names if not points or name in points])
        signal_name = "SIGKILL"
        if stop and kind in STOPPABLE and self.random.random() < STOP_SHARE:
            signal_name = "SIGSTOP"
        skip = self.random.randrange(MAX_SKIPPED_CALLS)
        return Kill(len(self.kills), kind, point, signal_name, skip)

    def _points_of(self, kind: str) -> list[str]:
        """The names of the points that this run's processes of a kind pass."""
        return names_of(kind)

    def wait_for_steps(self, more_than: int, limit_s: float) -> bool:
        """Whether a row beyond this step comes while the driver lives."""
        deadline = time.monotonic() + limit_s
        while time.monotonic() < deadline and self.command.process.poll() is None:
            if self.command.steps() > more_than:
                return True
            time.sleep(POLL_S)
        return False

    def once(self, kill: Kill) -> None:
        """Kill, and wait for the recovery; what goes wrong is noted in `kill`.

        The run lives afterwards, if necessary by a restart. A rare point is passed only by a
        process that comes back, so another process of that kind is killed first.
        """
        self.kills.append(kill)
        preparing_kill = None
        if kill.point == ANYWHERE:
            self._kill_directly(kill)
        else:
            self._arm(kill)
            reach_s = self.reach_s
            if kill.point in RARE:
                preparing_kill = self._kill_first(kill.kind)
                reach_s = self.limit_s
            self._await_hit(kill, reach_s)
        if not kill.time:
            self._disarm()
            self.say(f"{kill.number:3d} {kill.kind}, {kill.point}: not reached")
        elif kill.kind == "driver":
            self._restart_driver(kill)
        if preparing_kill and kill.time:
            # It had recovered so far that its successor could be hit.
            preparing_kill.recovered_s = kill.time - preparing_kill.time
        last_hit = kill if kill.time else preparing_kill
        if last_hit and last_hit.time:
            self._await_recovery(last_hit)
            self.say(describe(last_hit))

    def _kill_first(self, kind: str) -> Kill:
        """Kill any process of a kind, so that a rare point is passed."""
        kill = Kill(len(self.kills), kind, ANYWHERE)
        self.kills.append(kill)
        self._kill_directly(kill)
        if kind == "driver":
            self._restart_driver(kill)
        return kill

    def _path(self, name: str) -> Any:
        return self.command.out / name

    def _arm(self, kill: Kill, also: Sequence[tuple[int, str]] = ()) -> None:
        """Write the order that `inject/sitecustomize.py` executes, in one step. `also`: processes
        that get a signal in the same moment."""
        if kill.point in RARE:
            kill.skip = 0
        order = {
            "id": kill.number,
            "kind": kill.kind,
            "point": kill.point,
            "skip": kill.skip,
            "signal": kill.signal,
            "also": also,
        }
        new_path = self._path("armed.new")
        new_path.write_text(json.dumps(order))
        os.replace(new_path, self._path("armed"))

    def _disarm(self) -> None:
        self._path("armed").unlink(missing_ok=True)

    def _process_of(self, kind: str, other_than: int = 0) -> int:
        """The id of any process of a kind, but not `other_than`; 0: there is none."""
        if kind == "driver":
            return self.command.process.pid
        processes = self.command.processes().items()
        pids = [pid for pid, line in processes if line.startswith(TITLES[kind])]
        others = [pid for pid in pids if pid != other_than]
        return self.random.choice(others) if others else 0

    def _kill_directly(self, kill: Kill, other_than: int = 0) -> None:
        """Kill any process of the kind now, if there is one. `other_than`: not this one."""
        pid = self._process_of(kill.kind, other_than)
        if not pid:
            return
        kill.pid = pid
        with contextlib.suppress(ProcessLookupError):  # it has just ended
            os.kill(pid, getattr(signal, kill.signal))
            kill.time = time.time()
        kill.step = self.command.steps()  # of all rows that were written before the kill

    def _await_hit(self, kill: Kill, limit_s: float) -> dict[str, Any]:
        """Wait until the point is reached, and note it. Returns the order that was executed; {}:
        none was."""
        hit_path = self._path(f"hit_{kill.number}")
        deadline = time.monotonic() + limit_s
        while time.monotonic() < deadline and not hit_path.exists():
            if self.command.process.poll() is not None and kill.kind != "driver":
                time.sleep(POLL_S)  # the process that ended the driver too may just report it
                break
            time.sleep(POLL_S)
        if not hit_path.exists():
            return {}
        hit = json.loads(hit_path.read_text())
        kill.pid = hit["pid"]
        kill.time = hit["time"]
        kill.step = self.command.steps()
        return hit

    def _restart_driver(self, kill: Kill) -> None:
        """After the driver's death: its processes must end by themselves, then the same command."""
        try:
            self.command.process.wait(10)
        except subprocess.TimeoutExpired:  # it was stopped
            self.command.process.kill()
            self.command.process.wait()
        kill.gone_s, left = self.command.wait_until_gone()
        kill.left = tuple(left.values())
        self.command.start()

    def _has_recovered(self, kill: Kill) -> bool:
        metrics = rows(self.command.folder, "metrics.jsonl")
        last_row = metrics[-1] if metrics else {"step": -1}
        if kill.kind == "driver":
            return last_row["step"] > kill.step
        if kill.kind not in ("replica", "engine"):
            return last_row["step"] > kill.step + 1
        return self.has_synced_all(last_row, kill.step)

    def has_synced_all(self, last_row: dict[str, Any], step: int) -> bool:
        """Whether all replicas took part in a sync after a kill.

        Args:
            last_row: of the metrics.
            step: the last one that had a row when the process was killed. The syncs of the next
                two may have been before the kill: one step trains while the next one's samples
                are generated.
        """
        replicas = [name for name in last_row.get("sync/ranks", {}) if name.startswith("rollout")]
        all_synced = not self.replicas or len(replicas) == self.replicas
        return last_row["step"] >= step + 3 and all_synced

    def _await_recovery(self, kill: Kill) -> None:
        """Wait for the recovery. Without one the driver is started again, so that the other kills
        are seen, too."""
        kill.wrong = self._wait_until_recovered(kill)
        if not kill.wrong:
            kill.recovered_s = time.time() - kill.time
            return
        step = self.command.steps()
        self._restart_driver(kill)
        if not self.wait_for_steps(step, self.limit_s):
            kill.wrong += "; nor after another start"

    def _wait_until_recovered(self, kill: Kill) -> str:
        """Why the run did not recover; "" if it did."""
        return self._wait_until(lambda: self._has_recovered(kill), kill.time)

    def _wait_until(self, has_recovered: Callable[[], bool], begin: float) -> str:
        """Why the run did not recover within the limit after `begin`, by `time.time`; "" if it
        did."""
        deadline = begin + self.limit_s
        next_look = 0.0
        while time.time() < deadline:
            if has_recovered():
                return ""
            code = self.command.process.poll()
            if code is not None:
                return f"the run ended with exit code {code}: {self._last_error()}"
            if time.time() > next_look:
                self.command.look()
                next_look = time.time() + LOOK_INTERVAL_S
            time.sleep(POLL_S)
        self.command.process.kill()
        return f"no recovery within {self.limit_s:g} s"

    def _last_error(self) -> str:
        """The last line of the run's output that is an error, or the last line."""
        lines = [line for line in self.command.log.read_text().splitlines() if line.strip()]
        if not lines:
            return "no output"
        errors = [line for line in lines[-30:] if line.startswith("error")]
        last_line = errors[-1] if errors else lines[-1]
        return last_line[:300]


def describe(kill: Kill) -> str:
    """One line."""
    outcome = kill.wrong
    if kill.recovered_s is not None and not kill.wrong:
        outcome = f"recovered in {kill.recovered_s:.1f} s"
    gone = "" if kill.gone_s is None else f", processes gone after {kill.gone_s:.1f} s"
    left = f", LEFT: {kill.left}" if kill.left else ""
    return f"{kill.number:3d} {place_of(kill)}: {outcome}{gone}{left}"


def place_of(kill: Kill) -> str:
    """What was hit, where and when."""
    return f"{kill.signal} {kill.kind}, {kill.point}, after step {kill.step}"


def table(kills: list[Kill]) -> str:
    """Markdown: kills and seconds to recovery per kind and point."""
    lines = [
        "| Process | Point | Kills | Recovered | Seconds to recovery: median, longest |",
        "| --- | --- | --- | --- | --- |",
    ]
    groups: dict[tuple[str, str], list[Kill]] = {}
    for kill in kills:
        if kill.time:
            name = kill.point + (" (stopped)" if kill.signal == "SIGSTOP" else "")
            groups.setdefault((kill.kind, name), []).append(kill)
    for (kind, point), group in sorted(groups.items()):
        recovered = [kill for kill in group if kill.recovered_s is not None and not kill.wrong]
        seconds = sorted(kill.recovered_s for kill in recovered)
        times = f"{seconds[len(seconds) // 2]:.1f}, {seconds[-1]:.1f}" if seconds else ""
        lines.append(f"| {kind} | {point} | {len(group)} | {len(seconds)} | {times} |")
    return "\n".join(lines)


def as_rows(kills: list[Any]) -> list[dict[str, Any]]:
    """For result.json."""
    return [asdict(kill) for kill in kills]
