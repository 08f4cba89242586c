"""Rollout replicas of a running job that come and go, as `python -m one_step_off.scale` asks.

A request is the file `scale.json` in the run folder, as {"id": "4f", "rollout": "+2"}. The run
removes it when it has ended it. What came of it is in `scale.jsonl`, one object per line. After a
trainer's failure the next attempt has the number that was asked for last, and ends an open request.
A run that is started again has the config's number.
"""

import asyncio
import contextlib
import fcntl
import json
import os
import re
import time
import uuid
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from one_step_off.cluster.errors import TrainerDied
from one_step_off.cluster.remote_calls import observed
from one_step_off.cluster.run_events import RunEvents
from one_step_off.config.errors import ConfigError
from one_step_off.config.placement import processes_per_node, why_not_elastic
from one_step_off.config.pool_checks import ROLES
from one_step_off.config.schema import Config
from one_step_off.config.text import did_you_mean
from one_step_off.rollout.health import ReplicaState
from one_step_off.runtime.run_folder import LOCK_FILE

REQUEST_FILE = "scale.json"
ANSWERS_FILE = "scale.jsonl"

POLL_S = 0.5
"""Seconds between two looks for a request."""

LEAVE_S = 30.0
"""Seconds for a replica that is removed to return what it has."""

MAX_REPLICAS = 1024

DONE, FAILED, REFUSED = "done", "failed", "refused"
ENDS = (DONE, FAILED, REFUSED)
"""The states of a request that has ended."""


@dataclass(frozen=True)
class ScaleRequest:
    """A change of the number of rollout replicas.

    Attributes:
        rollout: "+2" and "-1" count from the present number, "3" is the number.
        id: by which the command finds its answer.
    """

    rollout: str
    id: str

    @classmethod
    def parse(cls, text: str) -> "ScaleRequest":
        """From the command line, as "rollout=+2". Raises ConfigError."""
        role, equals, number = text.partition("=")
        if not equals:
            raise ConfigError(f"{text}: must be rollout=+2, rollout=-1 or rollout=3")
        if role != "rollout" and role in ROLES:
            raise ConfigError(
                f"{text}: only rollout replicas come and go; change placement.pools for {role}, "
                "and start the run again"
            )
        if role != "rollout":
            fix = did_you_mean(role, ("rollout",), "use rollout")
            raise ConfigError(f"{text}: unknown role; {fix}")
        request = cls(number, uuid.uuid4().hex)
        request.target(0)
        return request

    @classmethod
    def read(cls, path: Path) -> "ScaleRequest":
        """From the run folder, also where a person has written it. Raises ConfigError."""
        try:
            content = json.loads(path.read_text())
            request = cls(str(content["rollout"]), str(content.get("id", "")))
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            what = f"{type(error).__name__}: {error}"
            raise ConfigError(f'{path}: must be as {{"rollout": "+2"}} ({what})') from error
        request.target(0)
        return request

    def target(self, present: int) -> int:
        """The number of replicas that is asked for, where there are `present` now. Raises
        ConfigError: it is no number."""
        if not re.fullmatch(r"[+-]?[0-9]{1,5}", self.rollout):
            raise ConfigError(f"rollout={self.rollout}: must be as +2, -1 or 3")
        number = int(self.rollout)
        return present + number if self.rollout[0] in "+-" else number


@dataclass(frozen=True)
class Answer:
    """What has become of a request: a line of `scale.jsonl`.

    Attributes:
        time: in seconds since the epoch.
        id, rollout: of the request.
        state: "begun", or one of `ENDS`.
        replicas: how many there are, with those that still start.
        text: for the user.
    """

    time: float
    id: str
    rollout: str
    state: str
    replicas: int
    text: str


def write_request(folder: Path, request: ScaleRequest) -> None:
    """Hand a request to the run in this folder. Raises ConfigError: another one is open, or the
    folder cannot be written."""
    path = folder / REQUEST_FILE
    new_path = folder / f".{REQUEST_FILE}.{request.id}"
    try:
        new_path.write_text(json.dumps(asdict(request)))
        try:
            os.link(new_path, path)  # unlike a rename it replaces nothing
        finally:
            new_path.unlink()
    except FileExistsError:
        raise ConfigError(
            f"rollout={request.rollout}: another change is under way ({path}); wait for its end"
        ) from None
    except OSError as error:
        raise ConfigError(f"{path}: cannot be written: {error.strerror}") from error


def withdraw_request(folder: Path, request: ScaleRequest) -> None:
    """Remove the file of a request, unless it is another one's by now."""
    path = folder / REQUEST_FILE
    try:
        is_own = str(json.loads(path.read_text()).get("id", "")) == request.id
    except (OSError, ValueError, AttributeError):
        is_own = False
    if is_own:
        path.unlink(missing_ok=True)


def read_answers(folder: Path) -> list[Answer]:
    """All answers so far, without a line that is being written or was cut off."""
    path = folder / ANSWERS_FILE
    text = path.read_text(errors="replace") if path.exists() else ""
    answers = []
    for line in text[: text.rfind("\n") + 1].splitlines():
        with contextlib.suppress(ValueError, TypeError):
            answers.append(Answer(**json.loads(line)))
    return answers


def version_of(path: Path) -> tuple[int, int, int] | None:
    """What differs between two files that are at this path one after the other, also with the same
    content; None: there is none."""
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_ino, status.st_mtime_ns, status.st_size


def is_running(folder: Path) -> bool:
    """Whether a run owns this folder."""
    try:
        lock = os.open(folder / LOCK_FILE, os.O_RDONLY)
    except OSError:
        return False
    try:
        fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:  # its file system has no locks
        return True
    finally:
        os.close(lock)
    return False


class ReplicaScaler:
    """Carries out the requests in the run folder, one after another, over all attempts of a run.

    Nothing that goes wrong in it ends the run.

    Attributes:
        target: the number of replicas that was asked for last; None: the config's.
        request: the one that is being carried out.
        joining: the replicas that were added for it.
    """

    _taken: tuple[int, int, int] | None = None
    """The version of the file of the latest request: where it cannot be removed, it is not carried
    out again."""

    _tries = 0
    """In how many attempts the request was begun."""

    def __init__(self, cfg: Config, events: RunEvents, resumed: bool) -> None:
        """Drop what an earlier run in this folder has left. `resumed`: this one continues it."""
        self.cfg = cfg
        self.events = events
        self.folder = Path(cfg.trainer.output_dir)
        self.target: int | None = None
        self.request: ScaleRequest | None = None
        self.joining: set[int] = set()
        self._failures: list[str] = []
        with contextlib.suppress(OSError, ValueError, TypeError):  # what cannot be read, or written
            self._drop_older_request()
            if resumed:
                self._note_former_number()
            else:
                (self.folder / ANSWERS_FILE).unlink(missing_ok=True)

    def _drop_older_request(self) -> None:
        """No command waits for a request to an earlier run. One since the start of this run is
        carried out as soon as it trains."""
        request, lock = self.folder / REQUEST_FILE, self.folder / LOCK_FILE
        if not request.exists():
            return
        if not lock.exists() or request.stat().st_mtime_ns < lock.stat().st_mtime_ns:
            request.unlink(missing_ok=True)

    def _note_former_number(self) -> None:
        answers = read_answers(self.folder)
        if not answers or "rollout" not in self.cfg.placement.roles:
            return
        configured = sum(processes_per_node(self.cfg, self.cfg.placement.roles["rollout"]))
        former = answers[-1].replicas
        if former != configured:
            self.events.log(
                f"the run begins with the {configured} rollout replicas of the config; before it "
                f"had {former}: python -m one_step_off.scale {self.folder} rollout={former}"
            )

    @contextlib.contextmanager
    def watching(self, engines: Any) -> Iterator[None]:
        """Carry out requests while the block runs.

        Args:
            engines: the `PersistentActors` of the attempt; None: the run has none.
        """
        task = observed(self._watch(engines))
        try:
            yield
        finally:
            task.cancel()

    async def _watch(self, engines: Any) -> None:
        while True:
            try:
                version = version_of(self.folder / REQUEST_FILE)
                if self.request is None and version not in (None, self._taken):
                    self._taken = version
                    self._accept(engines)
                if self.request is not None:
                    await self._carry_out(engines)
            except Exception as error:  # a full disk, as well as a mistake of ours
                if self.request is not None:
                    self.target = number_of(engines) or None
                    self._end(engines, FAILED, f"{type(error).__name__}: {error}")
            await asyncio.sleep(POLL_S)

    def _accept(self, engines: Any) -> None:
        """Take the request of the file, or refuse it."""
        path = self.folder / REQUEST_FILE
        try:
            self.request = ScaleRequest.read(path)
            if version_of(path) != self._taken:  # it was withdrawn, or is being written
                self.request = None
                return
            self._set_target(engines)
        except ConfigError as error:
            if self.request is None:
                self.request = ScaleRequest("", "")
            self._end(engines, REFUSED, str(error))

    def _set_target(self, engines: Any) -> None:
        """Raises ConfigError: the number cannot change, or not to this."""
        asked = f"rollout={self.request.rollout}"
        reason = "this run has no engines" if engines is None else why_not_elastic(self.cfg)
        if reason:
            raise ConfigError(f"{asked}: replicas cannot come and go: {reason}")
        present = number_of(engines)
        target = self.request.target(present)
        if not 1 <= target <= MAX_REPLICAS:
            raise ConfigError(
                f"{asked}: would leave {target} rollout replicas of {present}; "
                f"a run has from 1 to {MAX_REPLICAS}"
            )
        self.target = target
        self.joining = set()
        self._failures = []
        self._tries = 0
        self._answer(engines, "begun", f"{asked}: rollout replicas: {present} -> {target}")

    async def _carry_out(self, engines: Any) -> None:
        """Bring the replicas to the number that was asked for. After the failure of a trainer the
        next attempt calls it again for an open request."""
        supervisor = engines.rollout.supervisor
        self._tries += 1
        await self._remove(engines, supervisor.excluded)
        missing = self.target - number_of(engines)
        if missing > 0:
            try:
                await asyncio.to_thread(engines.reserve_replicas, missing)
            except ConfigError as error:
                self.target = number_of(engines)
                # "Refused" says that nothing has changed, which only the first attempt knows.
                state = REFUSED if self._tries == 1 else FAILED
                self._end(engines, state, f"rollout={self.request.rollout}: {error}")
                return
            self.joining.update(engines.join() for _ in range(missing))
        if missing < 0:
            await self._remove(engines, choose_leaving(supervisor, -missing))
        await self._wait_for_joining(supervisor)
        starts = supervisor.restart_tasks
        failed = {i: starts[i].exception() for i in self.joining if i in starts}
        if any(isinstance(error, TrainerDied) for error in failed.values()):
            await asyncio.sleep(self.cfg.trainer.step_timeout_s)  # the attempt's end cancels this
        self._failures += [str(error) for error in failed.values()]
        await self._remove(engines, list(failed))
        present = number_of(engines)
        self.target = present
        if self._failures:
            reasons = "; ".join(self._failures)
            self._end(engines, FAILED, f"rollout replicas: {present}; {reasons}")
        else:
            self._end(engines, DONE, f"rollout replicas: {present}")

    async def _wait_for_joining(self, supervisor: Any) -> None:
        """Wait until those that were added serve, or have failed for good. They serve from the
        next sync on where the senders keep no weights."""
        starts = supervisor.restart_tasks
        while True:
            joining = self.joining & set(supervisor.members)
            starting = [starts[i] for i in joining if i in starts and not starts[i].done()]
            stale = [i for i in joining if supervisor.health[i].state is ReplicaState.STALE]
            if starting:
                await asyncio.wait(starting)
            elif stale:
                await asyncio.sleep(POLL_S)
            else:
                return

    async def _remove(self, engines: Any, numbers: list[int]) -> None:
        removals = {i: observed(engines.leave(i, LEAVE_S)) for i in numbers}
        if removals:
            await asyncio.wait(removals.values())
        for i, removal in removals.items():
            if removal.result():
                self.events.log(f"rollout {i} has left")
            else:
                self._failures.append(f"rollout {i} stays, because no other replica is left")

    def _answer(self, engines: Any, state: str, text: str) -> None:
        """Write what became of the request, for the user and for the command."""
        replicas = number_of(engines)
        answer = Answer(time.time(), self.request.id, self.request.rollout, state, replicas, text)
        self.events.log(text)
        path = self.folder / ANSWERS_FILE
        former = path.read_bytes() if path.exists() else b""
        is_cut_off = former[-1:] not in (b"", b"\n")
        with open(path, "a") as file:
            file.write("\n" * is_cut_off + json.dumps(asdict(answer)) + "\n")

    def _end(self, engines: Any, state: str, text: str) -> None:
        try:
            self._answer(engines, state, text)
        except OSError as error:  # the command ends by its time limit
            self.events.log(f"{self.folder / ANSWERS_FILE}: {error}")
        path = self.folder / REQUEST_FILE
        if version_of(path) == self._taken:  # else it is the next request
            with contextlib.suppress(OSError):
                path.unlink(missing_ok=True)
        self.request = None


def number_of(engines: Any) -> int:
    """Of the rollout replicas that serve, start or are restarted; 0: the run has none."""
    if engines is None:
        return 0
    supervisor = engines.rollout.supervisor
    return len(set(supervisor.staying) - set(supervisor.excluded))


def choose_leaving(supervisor: Any, count: int) -> list[int]:
    """The replicas to remove: those first that do not run, then those with the highest numbers."""
    starting = supervisor.restart_tasks
    order = sorted(supervisor.staying, key=lambda i: (i not in starting, -i))
    return order[:count]
