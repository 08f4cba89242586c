"""What a run leaves when its driver is killed: ended and removed by this small process, which outlives it.

Ray's processes end when the driver does, but its agents stay for a minute, with their ports; and what was killed removes
neither its shared memory nor its temporary files. All processes of a run have its folder for temporary files in their
environment: by that they are known, whoever their parent is by then.
"""

import contextlib
import os
import re
import shutil
import sys
from pathlib import Path

import psutil

RUN_FOLDER_VARIABLE = "ONE_STEP_OFF_RUN"  # environment variable of all processes of a run: its folder for temporary files
SHARED = Path("/dev/shm")
# What Python, vLLM, torch and NCCL call their segments.
KINDS = re.compile(r"psm_[0-9a-f]+|sem\.[\w.-]+|vllm_.+shm_\d+|torch_\d+_\w+|nccl-\w+")


def in_use() -> set[int]:
    """The inodes of all shared memory that a process has mapped. A semaphore is mapped before it has its name."""
    found: set[int] = set()
    for path in Path("/proc").glob("[0-9]*/maps"):
        with contextlib.suppress(OSError):  # it has just ended, or is another user's
            found |= {
                int(line.split()[4])
                for line in path.read_text().splitlines()
                if " /dev/shm/" in line
            }
    return found


def sweep(folder: str, begun: float) -> None:
    """Wait until standard input ends, as it does with the driver. Then kill what is left and remove what it had, within
    20 s or so: of the shared memory what is of a kind that runs make, this user's, mapped by nobody, and made since
    `begun`, a time of the clock on the wall."""
    sys.stdin.read()
    for _ in range(100):
        alive = [
            p
            for p in psutil.process_iter(["environ"])
            if (p.info["environ"] or {}).get(RUN_FOLDER_VARIABLE) == folder
        ]
        for process in alive:
            with contextlib.suppress(psutil.Error):
                process.kill()
        if not psutil.wait_procs(alive, 0.2)[1]:
            break
    used = in_use()
    for path in SHARED.iterdir():
        with contextlib.suppress(OSError):
            file = path.stat()
            mine = (
                file.st_uid == os.geteuid() and file.st_mtime >= begun and file.st_ino not in used
            )
            if mine and KINDS.fullmatch(path.name):
                path.unlink()
    shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    sweep(sys.argv[1], float(sys.argv[2]))
