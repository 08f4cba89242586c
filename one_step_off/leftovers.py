"""What a run leaves when its driver is killed: ended and removed by this small process, which outlives it.

Ray's processes end when the driver does, but its agents stay for a minute, with their ports; and what was killed removes
neither its shared memory nor its temporary files. All processes of a run have its folder for temporary files in their
environment: by that they are known, whoever their parent is by then.
"""

import contextlib
import re
import select
import shutil
import sys
from pathlib import Path

import psutil

RUN = "ONE_STEP_OFF_RUN"  # environment variable of all processes of a run: its folder for temporary files
SEGMENT = re.compile(r"/dev/shm/\S+$", re.M)


def sweep(folder: str) -> None:
    """Note the shared memory in use until standard input ends, as it does with the driver. Then kill what is left and
    remove what it had, within 20 s or so."""
    segments, rounds = set(), 0
    while rounds < 100:
        rounds += bool(rounds or select.select([0], [], [], 5.0)[0])
        alive = [p for p in psutil.process_iter(["environ"]) if (p.info["environ"] or {}).get(RUN) == folder]
        for process in alive:
            with contextlib.suppress(OSError, psutil.Error):  # it has just ended
                segments |= set(SEGMENT.findall(Path(f"/proc/{process.pid}/maps").read_text()))
                if rounds:
                    process.kill()
        if rounds and not psutil.wait_procs(alive, 0.2)[1]:
            break
    for path in segments:
        Path(path).unlink(missing_ok=True)
    shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    sweep(sys.argv[1])
