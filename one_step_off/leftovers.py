"""What is left of a run whose driver was killed: ended and removed by a small process that outlives it.

Ray's processes end when the driver does, but its agents stay for a minute, with their ports; and what was killed removes
neither its shared memory nor its temporary files. All processes of a run have its folder for temporary files in their
environment: by that they are known, also to whom they were not children of.
"""

import contextlib
import os
import re
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

RUN = "ONE_STEP_OFF_RUN"  # environment variable of all processes of a run: its folder for temporary files


@contextlib.contextmanager
def swept() -> Iterator[None]:
    """At its end, or the driver's by whatever cause, the processes that were started meanwhile are killed, and their
    shared memory and temporary files removed."""
    folder = tempfile.mkdtemp(prefix="one_step_off_")
    # Its standard input ends when this process does. A session of its own: Ctrl-C is not for it.
    sweeper = [sys.executable, "-I", __file__, folder]
    with subprocess.Popen(sweeper, stdin=subprocess.PIPE, start_new_session=True):
        os.environ |= {RUN: folder, "SPT_NOENV": "1"}  # or a process that sets its title would hide its environment
        try:
            yield
        finally:
            del os.environ[RUN]


def family(folder: str) -> list[Path]:
    """The processes of a run, as folders in /proc."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # ended meanwhile, or somebody else's
            if f"{RUN}={folder}\0".encode() in (process / "environ").read_bytes():
                found.append(process)
    return found


def sweep(folder: str) -> None:
    """Wait for the end of standard input, noting the shared memory in use; then clean up, within 10 s or so."""
    segments: set[str] = set()
    rounds = 0  # since the end
    while rounds < 100:
        rounds += bool(rounds or select.select([0], [], [], 5.0)[0])
        alive = family(folder)
        for process in alive:
            with contextlib.suppress(OSError):
                segments |= set(re.findall(r"/dev/shm/[^\s/]+$", (process / "maps").read_text(), re.M))
                if rounds:
                    os.kill(int(process.name), signal.SIGKILL)
        if rounds and not alive:
            break
        time.sleep(0.1)
    for path in segments:
        Path(path).unlink(missing_ok=True)
    shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    sweep(sys.argv[1])
