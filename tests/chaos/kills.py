"""Kills at named points, one after the other, and the proof that the run goes on after each."""

from __future__ import annotations

import json
import os
import random
import signal
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from tests.chaos.command import Command, rows
from tests.chaos.points import POINTS, RARE

ANYWHERE = "anywhere"  # a point of every kind: whenever it comes, by the process's number
TITLES = {
    "replica": "ray::RolloutReplica",
    "engine": "VLLM::EngineCore",
    "trainer": "ray::ActorWorker",
    "critic": "ray::CriticWorker",
    "scorer": "ray::Scorer",
}
POLL_S = 0.1


@dataclass
class Kill:
    """One kill: what was asked for, and what came of it."""

    number: int
    kind: str
    point: str
    signal: str = "SIGKILL"
    skip: int = 0  # calls to let pass
    time: float = 0.0  # of the clock on the wall, when it was hit; 0: the point was not reached
    pid: int = 0
    step: int = -1  # the last row by then
    recovered_s: float | None = None
    gone_s: float | None = None  # of the driver: until its other processes had ended
    left: tuple[str, ...] = ()  # of the driver: processes that had not
    wrong: str = ""


class Chaos:
    """Arms, waits, and starts the driver again. `limit_s`: for one recovery; `reach_s`: for a point to be reached."""

    def __init__(
        self,
        command: Command,
        seed: int,
        limit_s: float,
        reach_s: float,
        say: Callable[[str], None] = print,
    ) -> None:
        self.command, self.random, self.limit_s, self.reach_s, self.say = (
            command,
            random.Random(seed),
            limit_s,
            reach_s,
            say,
        )
        self.kills: list[Kill] = []
        self.replicas = 2

    @property
    def done(self) -> list[Kill]:
        """Those that hit."""
        return [kill for kill in self.kills if kill.time]

    def choose(self, kinds: list[str], points: list[str], stop: bool) -> Kill:
        """A random kind, and a random point of that kind."""
        kind = self.random.choice(kinds)
        known = [p.name for p in POINTS if p.kind == kind] + [ANYWHERE]
        point = self.random.choice([name for name in known if not points or name in points])
        name = (
            "SIGSTOP"
            if stop and kind in ("replica", "engine", "trainer") and self.random.random() < 0.2
            else "SIGKILL"
        )
        return Kill(len(self.kills), kind, point, name, self.random.randrange(3))

    def wait_for_steps(self, more_than: int, limit_s: float) -> bool:
        """Whether a row beyond this step has come while the driver lived."""
        deadline = time.monotonic() + limit_s
        while time.monotonic() < deadline and self.command.process.poll() is None:
            if self.command.steps() > more_than:
                return True
            time.sleep(POLL_S)
        return False

    def once(self, kill: Kill) -> None:
        """Do it, and wait for the proof; what goes wrong is noted in it. The run lives afterwards, by a new start if need
        be. A rare point is passed only by what comes back: so another one of that kind is killed first."""
        self.kills.append(kill)
        first, rare = None, kill.point in RARE
        if kill.point == ANYWHERE:
            self._directly(kill)
        else:
            self._arm(kill)
            if rare:
                first = Kill(len(self.kills), kill.kind, ANYWHERE)
                self.kills.append(first)
                self._directly(first)
                if kill.kind == "driver":
                    self._start_again(first)
            self._await_hit(kill, self.limit_s if rare else self.reach_s)
        if not kill.time:
            self._disarm()
            self.say(f"{kill.number:3d} {kill.kind}, {kill.point}: not reached")
        elif kill.kind == "driver":
            self._start_again(kill)
        if first and kill.time:
            first.recovered_s = kill.time - first.time  # so far that it could be hit again
        last = kill if kill.time else first
        if last and last.time:
            self._await_recovery(last)
            self.say(describe(last))

    def _path(self, name: str) -> Any:
        return self.command.out / name

    def _arm(self, kill: Kill) -> None:
        if kill.point in RARE:
            kill.skip = 0
        wish = {
            "id": kill.number,
            "kind": kill.kind,
            "point": kill.point,
            "skip": kill.skip,
            "signal": kill.signal,
        }
        new = self._path("armed.new")
        new.write_text(json.dumps(wish))
        os.replace(new, self._path("armed"))

    def _disarm(self) -> None:
        self._path("armed").unlink(missing_ok=True)

    def _directly(self, kill: Kill) -> None:
        found = [
            pid
            for pid, line in self.command.processes().items()
            if line.startswith(TITLES.get(kill.kind, "\0"))
        ]
        pid = (
            self.command.process.pid if kill.kind == "driver" else self.random.choice(found or [0])
        )
        if pid:
            kill.pid, kill.step, kill.time = pid, self.command.steps(), time.time()
            os.kill(pid, getattr(signal, kill.signal))

    def _await_hit(self, kill: Kill, limit_s: float) -> None:
        hit, deadline = self._path(f"hit_{kill.number}"), time.monotonic() + limit_s
        while time.monotonic() < deadline and not hit.exists():
            if self.command.process.poll() is not None and kill.kind != "driver":
                return
            time.sleep(POLL_S)
        if hit.exists():
            found = json.loads(hit.read_text())
            kill.pid, kill.time, kill.step = found["pid"], found["time"], self.command.steps()

    def _start_again(self, kill: Kill) -> None:
        """After the driver's death: its processes must go by themselves, then the same command."""
        try:
            self.command.process.wait(10)
        except Exception:  # a stopped one
            self.command.process.kill()
            self.command.process.wait()
        kill.gone_s, left = self.command.wait_until_gone()
        kill.left = tuple(left.values())
        self.command.start()

    def _recovered(self, kill: Kill) -> bool:
        found = rows(self.command.folder, "metrics.jsonl")
        last = found[-1] if found else {"step": -1}
        if kill.kind not in ("replica", "engine"):
            return last["step"] > kill.step + (kill.kind != "driver")
        # The step that ran then, and its sync, may have been before it: the next sync counts, with all replicas.
        serving = [name for name in last.get("sync/ranks", {}) if name.startswith("rollout")]
        return last["step"] >= kill.step + 2 and len(serving) == self.replicas

    def _await_recovery(self, kill: Kill) -> None:
        deadline, look = kill.time + self.limit_s, 0.0
        while time.time() < deadline:
            if self._recovered(kill):
                kill.recovered_s = time.time() - kill.time
                return
            if (code := self.command.process.poll()) is not None:
                kill.wrong = f"the run ended with exit code {code}: {self._last_words()}"
                break
            if time.time() - look > 2:
                self.command.look()
                look = time.time()
            time.sleep(POLL_S)
        else:
            kill.wrong = f"no recovery within {self.limit_s:g} s"
            self.command.process.kill()
        # Not what is promised, but the other kills are to be seen too.
        step = self.command.steps()
        self._start_again(kill)
        if not self.wait_for_steps(step, self.limit_s):
            kill.wrong += "; nor after another start"

    def _last_words(self) -> str:
        lines = [line for line in self.command.log.read_text().splitlines() if line.strip()]
        errors = [line for line in lines[-30:] if line.startswith("error")]
        return (errors or lines or ["nothing said"])[-1][:300]


def describe(kill: Kill) -> str:
    """One line."""
    how = (
        f"recovered in {kill.recovered_s:.1f} s"
        if kill.recovered_s is not None and not kill.wrong
        else kill.wrong
    )
    gone = "" if kill.gone_s is None else f", processes gone after {kill.gone_s:.1f} s"
    left = f", LEFT: {kill.left}" if kill.left else ""
    return f"{kill.number:3d} {kill.signal} {kill.kind}, {kill.point}, after step {kill.step}: {how}{gone}{left}"


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
    for (kind, point), own in sorted(groups.items()):
        seconds = sorted(k.recovered_s for k in own if k.recovered_s is not None and not k.wrong)
        times = f"{seconds[len(seconds) // 2]:.1f}, {seconds[-1]:.1f}" if seconds else ""
        lines.append(f"| {kind} | {point} | {len(own)} | {len(seconds)} | {times} |")
    return "\n".join(lines)


def as_rows(kills: list[Kill]) -> list[dict[str, Any]]:
    """For result.json."""
    return [asdict(kill) for kill in kills]
