"""Cleanup after a run whose driver was killed, by this small process, which outlives the driver.

Ray's processes end with the driver, but its agents stay for a minute, with their ports. A killed
process removes neither its shared memory nor its temporary files. All processes of a run have its
folder for temporary files in their environment, and are recognized by that, whatever their parent
is by then.
"""

import contextlib
import os
import re
import shutil
import signal
import sys
from pathlib import Path

import psutil

RUN_FOLDER_VARIABLE = "ONE_STEP_OFF_RUN"
"""Environment variable of all processes of a run: its folder for temporary files."""

SHARED_MEMORY = Path("/dev/shm")

SEGMENT_NAMES = re.compile(r"psm_[0-9a-f]+|sem\.[\w.-]+|vllm_.+shm_\d+|torch_\d+_\w+|nccl-\w+")
"""The names that Python, vLLM, torch and NCCL give to their segments of shared memory."""

KILL_ROUNDS = 100
KILL_WAIT_S = 0.2
"""Seconds after each round for the killed processes to end: 20 s in all."""


def mapped_inodes_by_process() -> dict[int, set[int]]:
    """Process id -> the inodes of the shared memory that it has mapped.

    The inode and not the name, because a semaphore is mapped before it has its name.
    """
    inodes: dict[int, set[int]] = {}
    for path in Path("/proc").glob("[0-9]*/maps"):
        with contextlib.suppress(OSError):  # the process has just ended, or is another user's
            lines = path.read_text().splitlines()
            mapped = {int(line.split()[4]) for line in lines if " /dev/shm/" in line}
            inodes[int(path.parent.name)] = mapped
    return inodes


def mapped_inodes() -> set[int]:
    """The inodes of all shared memory that a process has mapped."""
    return set().union(*mapped_inodes_by_process().values())


def clean_up(folder: str, start_time: float) -> None:
    """Wait for the end of standard input, which comes with the end of the driver; then clean up
    after the run.

    Kills the run's processes, which takes 20 s at most, and removes their shared memory and
    `folder`. A segment of shared memory is removed if its name is of a kind that runs create, it is
    this user's, no process has it mapped, and it was created since `start_time`.

    Args:
        folder: the run's folder for temporary files, as in RUN_FOLDER_VARIABLE.
        start_time: of the run, as `time.time` has it.
    """
    sys.stdin.read()
    _kill_processes(folder)
    _remove_shared_memory(start_time)
    shutil.rmtree(folder, ignore_errors=True)


def _kill_processes(folder: str) -> None:
    """Kill the run's processes, again and again: one may start another before it ends."""
    for _ in range(KILL_ROUNDS):
        processes = []
        for process in psutil.process_iter(["environ"]):
            environment = process.info["environ"] or {}
            if environment.get(RUN_FOLDER_VARIABLE) == folder:
                processes.append(process)
        for process in processes:
            with contextlib.suppress(psutil.Error):
                process.kill()
        _, alive = psutil.wait_procs(processes, KILL_WAIT_S)
        if not alive:
            return


def _remove_shared_memory(start_time: float) -> None:
    used_inodes = mapped_inodes()
    for path in SHARED_MEMORY.iterdir():
        with contextlib.suppress(OSError):
            status = path.stat()
            is_ours = status.st_uid == os.geteuid() and status.st_mtime >= start_time
            is_used = status.st_ino in used_inodes
            if is_ours and not is_used and SEGMENT_NAMES.fullmatch(path.name):
                path.unlink()


if __name__ == "__main__":
    # Slurm may send them to all processes, and the driver then takes its time for a checkpoint.
    for number in (signal.SIGHUP, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)
    clean_up(sys.argv[1], float(sys.argv[2]))
