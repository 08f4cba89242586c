"""The real command as a process of its own, what it writes, and how it is started again after it was killed."""

from __future__ import annotations

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

from tests.chaos.watch import MARK, Belongings, end_all, marked, wait_until_gone

ROOT = Path(__file__).parents[2]
GONE_S = 15.0  # so long processes may outlive their driver

# Tiny, and every process has a partner that may die while it lives. With two buckets at least there is a "between".
TINY = {
    "data.val_files": "",
    "data.train_batch_size": 8,
    "rollout.n": 4,
    "rollout.kv_cache_mb": 64,
    "rollout.routing": "static",
    "actor.ppo_mini_batch_size": 8,
    "weight_sync.bucket_mb": 1,
    "weight_sync.timeout_s": 10,
    "trainer.step_timeout_s": 60,
    "trainer.start_timeout_s": 180,
    "trainer.save_freq": 5,
    "trainer.keep_checkpoints": 2,
    "trainer.overwrite": "true",  # a kill may come before the first checkpoint
    "reward.workers": 2,
    "rollout.heartbeat_s": 1,  # the limits of what hangs: short, for nothing here takes seconds
    "rollout.heartbeat_timeout_s": 15,
    "rollout.progress_timeout_s": 30,
}


def settings(
    folder: Path, steps: int, ranks: int = 1, critic: bool = False, more: Sequence[str] = ()
) -> list[str]:
    """The arguments of a run: `ranks` of the actor, two replicas, perhaps a critic in a pool of its own."""
    pools = f"placement.pools={{rollout: [2], actor: [{ranks}]{', critic: [1]' if critic else ''}}}"
    keys = [f"{key}={value}" for key, value in TINY.items()]
    keys += [f"trainer.total_steps={steps}", f"trainer.output_dir={folder}", pools]
    if critic:
        roles = "placement.roles={rollout: rollout, actor: actor, critic: critic}"
        keys += [roles, "algorithm.adv_estimator=gae", "critic.lr=1.0e-3"]
    return ["config=config/gsm8k_tiny_cpu.yaml", *keys, *more]


def rows(folder: Path, name: str) -> list[dict[str, Any]]:
    """The whole lines of a file that may be being written."""
    path = folder / name
    text = path.read_text() if path.exists() else ""
    return [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]


def _end_with_parent() -> None:
    """In the new process: if whoever started it is killed, so is this."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


class Command:
    """One run: its command, started as often as needed. `marks` tells its processes from all others."""

    def __init__(
        self,
        out: Path,
        arguments: list[str],
        inject: bool = True,
        module: str = "one_step_off.main_ppo",
    ) -> None:
        self.module = module
        self.out, self.folder, self.arguments, self.inject = out, out / "run", arguments, inject
        self.mark, self.starts = f"{os.getpid()}-{time.time_ns()}", 0
        self.process: subprocess.Popen | None = None
        self.belongings = Belongings()
        self.temporary = Path(
            tempfile.mkdtemp(prefix="chaos_", dir="/tmp")
        )  # short, as sockets need it
        self.out.mkdir(parents=True, exist_ok=True)

    @property
    def log(self) -> Path:
        """What the command has said, all its starts one after the other."""
        return self.out / "said.log"

    def start(self) -> None:
        """Start it, or start it again."""
        self.starts += 1
        paths = [str(ROOT / "tests/chaos/inject")] * self.inject + [str(ROOT)]
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
            how = {
                "env": env,
                "cwd": ROOT,
                "stdout": log,
                "stderr": subprocess.STDOUT,
                "start_new_session": True,
            }
            self.process = subprocess.Popen(command, preexec_fn=_end_with_parent, **how)

    def steps(self) -> int:
        """The last step that has a row; -1 without one."""
        found = rows(self.folder, "metrics.jsonl")
        return found[-1]["step"] if found else -1

    def processes(self) -> dict[int, str]:
        """Those of the present start."""
        return marked(f"{self.mark}.{self.starts}.")

    def look(self) -> None:
        """Note which memory and ports they hold."""
        self.belongings.look(list(self.processes()))

    def end(self, number: signal.Signals, limit_s: float = 60.0) -> int | None:
        """Send a signal to the driver and wait for its end; kill it after `limit_s`. Returns its exit code."""
        self.process.send_signal(number)
        try:
            return self.process.wait(limit_s)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
            return None

    def wait_until_gone(self) -> tuple[float, dict[int, str]]:
        """After the driver's end: seconds until no process is left, and those that are left after GONE_S."""
        return wait_until_gone(f"{self.mark}.{self.starts}.", GONE_S, self.belongings)

    def clear(self) -> None:
        """Kill all that is left of all starts."""
        if self.process and self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        end_all(self.mark)
        shutil.rmtree(self.temporary, ignore_errors=True)


def complaints(command: Command, steps: int, expected: list[list]) -> list[str]:
    """What is wrong with the files of a finished run of `steps` steps, whose ledger should say `expected`."""
    found = []
    ledger, metrics = rows(command.folder, "ledger.jsonl"), rows(command.folder, "metrics.jsonl")
    for name, have in (("ledger.jsonl", ledger), ("metrics.jsonl", metrics)):
        if [row["step"] for row in have] != list(range(steps)):
            found.append(
                f"{name}: steps are {_ranges([row['step'] for row in have])}, not 0 to {steps - 1} once each"
            )
    prompts = [row["prompts"] for row in ledger]
    wrong = [
        i for i, (mine, theirs) in enumerate(zip(prompts, expected, strict=False)) if mine != theirs
    ]
    if wrong:
        found.append(
            f"ledger.jsonl: other prompts, or in another order, in steps {wrong[:5]} ({len(wrong)} in all)"
        )
    seen = [tuple(prompt) for step in prompts for prompt in step]
    if len(seen) != len(set(seen)):
        found.append(f"ledger.jsonl: {len(seen) - len(set(seen))} prompts stand there twice")
    stale = [row["step"] for row in metrics if row["staleness/max"] > 1]
    if stale:
        found.append(f"metrics.jsonl: staleness above 1 in steps {stale[:5]}")
    return found


def _ranges(steps: list[int]) -> str:
    breaks = [i for i in range(1, len(steps)) if steps[i] != steps[i - 1] + 1]
    parts = [steps[a:b] for a, b in zip([0, *breaks], [*breaks, len(steps)], strict=True)]
    return ", ".join(f"{part[0]}-{part[-1]}" for part in parts if part) or "none"


def left_behind(command: Command) -> list[str]:
    """Processes, shared memory, ports and temporary files that are left after the end."""
    _, processes = wait_until_gone(command.mark, GONE_S, command.belongings)
    found = [f"process {pid} {line[:80]}" for pid, line in processes.items()]
    found += command.belongings.left()
    known = ("torchinductor_",)  # a cache, meant to stay
    return found + [
        f"{path}" for path in sorted(command.temporary.iterdir()) if not path.name.startswith(known)
    ]


def expected_prompts(arguments: list[str], steps: int) -> list[list]:
    """The prompts of each step of a run that nothing disturbs, by its own data and order, without any engine."""
    from one_step_off.config.loading import load_config
    from one_step_off.runtime.launch import prepare

    cfg = load_config([*arguments, "trainer.resume=never"])
    stream = prepare(cfg, lambda line: None).data.stream
    return [[list(prompt.id) for prompt in stream.next_batch()] for _ in range(steps)]
