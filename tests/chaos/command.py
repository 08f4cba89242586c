"""The real command in a process of its own, what it writes, and its restart after a kill."""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil

from tests.chaos.watch import MARK, Belongings, end_all, marked, wait_until_gone

ROOT = Path(__file__).parents[2]
PR_SET_PDEATHSIG = 1
GONE_S = 15.0
"""Seconds that processes may outlive their driver."""

# Tiny, and every process has a partner that may die while it lives. There are two buckets at least,
# so that a kill can come between them.
TINY = {
    "data.val_files": "",
    "data.train_batch_size": 8,
    "rollout.n": 4,
    "rollout.kv_cache_mb": 64,
    "rollout.routing": "static",
    "actor.ppo_mini_batch_size": 8,
    "weight_sync.bucket_mb": 1,
    "weight_sync.timeout_s": 10,
    "weight_sync.overlap": "true",  # the harder setting: a failed sync meets an update
    "trainer.step_timeout_s": 60,
    "trainer.start_timeout_s": 180,
    "trainer.save_freq": 5,
    "trainer.keep_checkpoints": 2,
    "trainer.overwrite": "true",  # a kill may come before the first checkpoint
    "reward.workers": 2,
    "rollout.heartbeat_s": 1,  # short limits for what hangs: nothing here takes seconds
    "rollout.heartbeat_timeout_s": 15,
    "rollout.progress_timeout_s": 30,
}


def settings(
    folder: Path, steps: int, ranks: int = 1, critic: bool = False, more: Sequence[str] = ()
) -> list[str]:
    """The arguments of a run: `ranks` of the actor, two replicas, and a critic in its own pool if
    asked for. `more`: further keys."""
    critic_pool = ", critic: [1]" if critic else ""
    pools = f"placement.pools={{rollout: [2], actor: [{ranks}]{critic_pool}}}"
    keys = [f"{key}={value}" for key, value in TINY.items()]
    keys += [f"trainer.total_steps={steps}", f"trainer.output_dir={folder}", pools]
    if critic:
        roles = "placement.roles={rollout: rollout, actor: actor, critic: critic}"
        keys += [roles, "algorithm.adv_estimator=gae", "critic.lr=1.0e-3"]
    return ["config=config/gsm8k_tiny_cpu.yaml", *keys, *more]


def rows(folder: Path, name: str) -> list[dict[str, Any]]:
    """The complete lines of a file that the run may still be writing."""
    path = folder / name
    text = path.read_text() if path.exists() else ""
    return [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]


def _end_with_parent() -> None:
    """In the new process: it is killed when its parent is."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


class Command:
    """One run: its command, started as often as needed. `mark` identifies its processes."""

    def __init__(
        self,
        out: Path,
        arguments: list[str],
        inject: bool = True,
        module: str = "one_step_off.main_ppo",
    ) -> None:
        """Nothing is started yet.

        Args:
            out: the folder for everything that the chaos run writes.
            arguments: of the command.
            inject: whether its processes can be hit at points.
            module: the command.
        """
        self.module = module
        self.out = out
        self.folder = out / "run"
        self.arguments = arguments
        self.inject = inject
        self.mark = f"{os.getpid()}-{time.time_ns()}"
        self.starts = 0
        self.process: subprocess.Popen | None = None
        self.belongings = Belongings()
        # A short path, because sockets need one.
        self.temporary = Path(tempfile.mkdtemp(prefix="chaos_", dir="/tmp"))
        self.out.mkdir(parents=True, exist_ok=True)

    @property
    def log(self) -> Path:
        """The output of the command, of all its starts."""
        return self.out / "said.log"

    def start(self) -> None:
        """Start it, or start it again."""
        self.starts += 1
        paths = [str(ROOT)]
        if self.inject:
            paths.insert(0, str(ROOT / "tests/chaos/inject"))
        env = os.environ | {
            MARK: f"{self.mark}.{self.starts}.",
            "SPT_NOENV": "1",
            "PYTHONPATH": os.pathsep.join(paths),
            "CHAOS_FOLDER": str(self.out),
            "HF_HUB_OFFLINE": "1",
            "OMP_NUM_THREADS": "1",
            "RES_OPTIONS": "timeout:1 attempts:1",
            "RAY_TMPDIR": "/tmp",
            "TMPDIR": str(self.temporary),
        }
        env.pop("RAY_ADDRESS", None)
        with open(self.log, "a") as log:
            log.write(f"--- start {self.starts}, {time.strftime('%H:%M:%S')}\n")
            log.flush()
            command = [sys.executable, "-m", self.module, *self.arguments]
            self.process = subprocess.Popen(
                command,
                preexec_fn=_end_with_parent,
                env=env,
                cwd=ROOT,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def steps(self) -> int:
        """The last step that has a row; -1: there is none."""
        metrics = rows(self.folder, "metrics.jsonl")
        return metrics[-1]["step"] if metrics else -1

    def processes(self) -> dict[int, str]:
        """Of the latest start: process id -> command line."""
        return marked(f"{self.mark}.{self.starts}.")

    def look(self) -> None:
        """Note the ports that its processes hold."""
        self.belongings.look(list(self.processes()))

    def end(self, number: signal.Signals, limit_s: float = 60.0) -> int | None:
        """Send a signal to the driver and wait for its end; kill it after `limit_s` seconds.

        Returns its exit code; None: it had to be killed.
        """
        self.process.send_signal(number)
        try:
            return self.process.wait(limit_s)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
            return None

    def wait_until_gone(self) -> tuple[float, dict[int, str]]:
        """After the driver's end: the seconds until no process was left, and the processes that are
        left after GONE_S."""
        return wait_until_gone(f"{self.mark}.{self.starts}.", GONE_S, self.belongings)

    def clear(self) -> None:
        """Kill what is left of all starts."""
        if self.process and self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        end_all(self.mark)
        shutil.rmtree(self.temporary, ignore_errors=True)


def wait_for_step(command: Command, step: int, limit_s: float = 180.0) -> None:
    """Wait until this step has its row. Fails if the run ends before, or the time is over."""
    deadline = time.monotonic() + limit_s
    while command.steps() < step:
        assert command.process.poll() is None, command.log.read_text()[-3000:]
        assert time.monotonic() < deadline, f"no step {step}: {command.log.read_text()[-3000:]}"
        time.sleep(0.05)


def finished(command: Command, steps: int, limit_s: float = 300.0) -> list[dict[str, Any]]:
    """Wait until the run has ended well: every prompt was trained on once, in the order of the
    data, and nothing is left. Returns its metrics."""
    assert command.process.wait(limit_s) == 0, command.log.read_text()[-3000:]
    assert complaints(command, steps, expected_prompts(command.arguments, steps)) == []
    assert left_behind(command) == []
    return rows(command.folder, "metrics.jsonl")


def processes_titled(command: Command, title: str) -> list[psutil.Process]:
    """The run's processes whose command line begins with this, the oldest first."""
    found = []
    for pid, line in command.processes().items():
        with contextlib.suppress(psutil.NoSuchProcess):  # it has just ended
            if line.startswith(title):
                found.append(psutil.Process(pid))
    return sorted(found, key=lambda process: process.create_time())


def complaints(command: Command, steps: int, expected: list[list], oldest: int = 1) -> list[str]:
    """What is wrong with the files of a finished run.

    Args:
        command: of the run.
        steps: that it should have.
        expected: the prompts of each step, as ledger.jsonl should have them.
        oldest: `pipeline.staleness`.
    """
    found = []
    ledger = rows(command.folder, "ledger.jsonl")
    metrics = rows(command.folder, "metrics.jsonl")
    for name, file_rows in (("ledger.jsonl", ledger), ("metrics.jsonl", metrics)):
        file_steps = [row["step"] for row in file_rows]
        if file_steps != list(range(steps)):
            ranges = _ranges(file_steps)
            found.append(f"{name}: steps are {ranges}, not 0 to {steps - 1} once each")
    prompts = [row["prompts"] for row in ledger]
    other_steps = []
    for step, (found_prompts, wanted_prompts) in enumerate(zip(prompts, expected, strict=False)):
        if found_prompts != wanted_prompts:
            other_steps.append(step)
    if other_steps:
        found.append(
            "ledger.jsonl: other prompts, or in another order, "
            f"in steps {other_steps[:5]} ({len(other_steps)} in all)"
        )
    all_prompts = [tuple(prompt) for prompts_of_step in prompts for prompt in prompts_of_step]
    repeated = len(all_prompts) - len(set(all_prompts))
    if repeated:
        found.append(f"ledger.jsonl: {repeated} prompts stand there twice")
    stale_steps = [row["step"] for row in metrics if row["staleness/max"] > oldest]
    if stale_steps:
        found.append(f"metrics.jsonl: staleness above {oldest} in steps {stale_steps[:5]}")
    return found


def _ranges(steps: list[int]) -> str:
    """Steps as ranges of consecutive ones, as "0-4, 6-7"."""
    breaks = [i for i in range(1, len(steps)) if steps[i] != steps[i - 1] + 1]
    starts = [0, *breaks]
    stops = [*breaks, len(steps)]
    ranges = []
    for start, stop in zip(starts, stops, strict=True):
        if stop > start:
            ranges.append(f"{steps[start]}-{steps[stop - 1]}")
    return ", ".join(ranges) or "none"


CACHES = ("torchinductor_",)
"""Beginnings of the names of temporary folders that are meant to stay."""


def left_behind(command: Command) -> list[str]:
    """Processes, shared memory, ports and temporary files that are left after the end."""
    _, processes = wait_until_gone(command.mark, GONE_S, command.belongings)
    found = [f"process {pid} {line[:80]}" for pid, line in processes.items()]
    found += command.belongings.left()
    for path in sorted(command.temporary.iterdir()):
        if not path.name.startswith(CACHES):
            found.append(str(path))
    return found


def expected_prompts(arguments: list[str], steps: int) -> list[list]:
    """The prompts of each step of an undisturbed run, from its data alone, without any engine."""
    from one_step_off.config.loading import load_config
    from one_step_off.runtime.launch import prepare

    cfg = load_config([*arguments, "trainer.resume=never"])
    stream = prepare(cfg, lambda line: None).data.stream
    return [[list(prompt.id) for prompt in stream.next_batch()] for _ in range(steps)]
