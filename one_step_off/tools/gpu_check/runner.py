"""Runs checks one after another, each in a process of its own.

A check that hangs, crashes or leaves processes behind is reported, and what it has left is killed,
so that the next check finds the devices free.
"""

import ctypes
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import psutil

import one_step_off
from one_step_off.config import packages
from one_step_off.config.hardware import RANKS_SHARE_GPU, SHARING_NCCL, nccl_version
from one_step_off.tools.gpu_check.check import NO_TIME, Check, Context, Result, Status

PR_SET_CHILD_SUBREAPER = 36
"""Linux: orphans among our descendants become our children, so that we can find and end them."""

OFFLINE = {"HF_HUB_OFFLINE": "1"}
"""All models are local, so nothing waits for a hub."""

KILL_ROUNDS = 20
KILL_WAIT_S = 0.25
"""Seconds after each round for the killed processes to end: 5 s in all."""

MIN_SECONDS = 1.0
"""Seconds of the whole budget without which no further check begins."""

LOG_LINES = 40
"""Lines of a failed check's output that the report shows."""

REASON_CHARS = 400


@dataclass
class Runner:
    """Runs checks on one device.

    Attributes:
        device: "cpu" or "cuda".
        gpus: how many are visible.
        cores: that this process may use.
        folder: --out; logs and work files go below it.
        model: --model.
        deadline: by `time.monotonic`, for all checks.
    """

    device: str
    gpus: int
    cores: int
    folder: Path
    model: str
    deadline: float

    def run_all(self, checks: Sequence[Check], report: Callable[[Result], None]) -> list[Result]:
        """Run the checks; `report` receives each result at once."""
        _adopt_orphans()
        results = []
        for check in checks:
            result = self.run(check)
            report(result)
            results.append(result)
        return results

    def run(self, check: Check) -> Result:
        """Run one check, unless it cannot run here."""
        reason = self.why_not(check)
        if reason:
            return Result(check.name, Status.SKIP, reason=reason)
        begin = time.monotonic()
        limit_s = min(check.limit_s, self.deadline - begin)
        try:
            result = self._run_process(check, limit_s)
        finally:
            _kill_descendants()
        return replace(result, seconds=time.monotonic() - begin)

    def why_not(self, check: Check) -> str:
        """Why a check is skipped; empty: it runs."""
        if self.device == "cpu" and check.cuda_only:
            return f"needs CUDA: {check.cuda_only}"
        if self.device == "cpu" and self.cores < check.min_cores:
            return f"needs {check.min_cores} CPU cores, {self.cores} found"
        if self.device == "cuda" and self.gpus < check.min_gpus:
            if not check.ranks_may_share:
                return f"needs {check.min_gpus} GPUs, {self.gpus} found"
            nccl = nccl_version()
            if nccl < SHARING_NCCL:
                shown = ".".join(map(str, nccl)) or "none"
                return (
                    f"needs {check.min_gpus} GPUs, {self.gpus} found; or NCCL 2.30, whose ranks "
                    f"may share one: {shown} found"
                )
        needed = check.packages
        if self.device == "cuda":
            needed += check.cuda_packages
        for package in needed:
            if not packages.is_installed(package):
                return f"{package} is not installed"
        if self.deadline - time.monotonic() < MIN_SECONDS:
            return f"{NO_TIME}; run it alone: --only {check.name}"
        return ""

    def _run_process(self, check: Check, limit_s: float) -> Result:
        work = self.folder / "work"
        folder = work / check.name
        folder.mkdir(parents=True, exist_ok=True)
        request = folder / "request.json"
        answer = folder / "answer.json"
        answer.unlink(missing_ok=True)
        context = Context(self.device, self.gpus, folder, work, self.model, limit_s)
        request.write_text(json.dumps(context.to_json()))
        log = self.folder / "logs" / f"{check.name}.log"
        log.parent.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, "-P", "-m", "one_step_off.tools.gpu_check.child"]
        command += [check.function, str(request), str(answer)]
        environment = os.environ | OFFLINE | check.variables | {"PYTHONPATH": _search_path()}
        if self.device == "cuda" and self.gpus < check.min_gpus:
            environment[RANKS_SHARE_GPU] = "1"
        with open(log, "wb") as output:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=environment,
                start_new_session=True,
            )
            try:
                code: int | None = process.wait(limit_s)
            except subprocess.TimeoutExpired:
                code = None
        return self._result(check, code, limit_s, answer, log)

    def _result(
        self, check: Check, code: int | None, limit_s: float, answer: Path, log: Path
    ) -> Result:
        """The result by the process's answer, or by how it ended without one."""
        if answer.exists():
            told = json.loads(answer.read_text())
            status = Status(told["status"])
            reason = told["reason"][:REASON_CHARS]
            figures = told["figures"]
        elif code is None and limit_s < check.limit_s:
            # It had less than it may take, so this says nothing about it.
            status = Status.SKIP
            reason = f"{NO_TIME}: cut off after {limit_s:.0f} s; run it alone: --only {check.name}"
            figures = {}
        else:
            status = Status.FAIL
            reason = _why_no_answer(code, limit_s)
            figures = {}
        shown_log = _tail(log) if status is Status.FAIL else ""
        return Result(check.name, status, 0.0, reason, figures, shown_log)


def _search_path() -> str:
    """Where a check finds this package, and not another that is installed."""
    own = str(Path(one_step_off.__file__).parents[1])
    return os.pathsep.join(filter(None, [own, os.environ.get("PYTHONPATH")]))


def _why_no_answer(code: int | None, limit_s: float) -> str:
    if code is None:
        return f"hung or too slow: no end within {limit_s:.0f} s; killed"
    if code < 0:
        return f"crashed: its process ended by {signal.Signals(-code).name}"
    return f"crashed: its process ended with code {code} and without an answer"


def _tail(log: Path) -> str:
    lines = log.read_text(errors="replace").splitlines()
    return "\n".join(lines[-LOG_LINES:])


def _adopt_orphans() -> None:
    """A process whose parent dies becomes a child of this one, instead of the machine's first."""
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def _kill_descendants() -> None:
    """Kill every process below this one, again and again: one may start another before it ends."""
    for _ in range(KILL_ROUNDS):
        processes = psutil.Process().children(recursive=True)
        for process in processes:
            try:
                process.kill()
            except psutil.NoSuchProcess:
                continue
        _, alive = psutil.wait_procs(processes, KILL_WAIT_S)
        if not processes or not alive:
            break
    _reap()


def _reap() -> None:
    """Collect adopted children that have ended, so that no zombies stay."""
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        return
