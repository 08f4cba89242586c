"""What belongs to a run: its processes, by a variable in their environment; the shared memory and the ports they hold."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from pathlib import Path

import psutil

from one_step_off.cluster.process_cleanup import mapped_inodes

MARK = "CHAOS_MARK"


def marked(mark: str) -> dict[int, str]:
    """The living processes of a run whose mark begins so: number -> command line. (The variable SPT_NOENV keeps setproctitle from writing over
    the environment that others see.)"""
    found, wanted = {}, f"{MARK}={mark}".encode()
    for pid in map(int, filter(str.isdigit, os.listdir("/proc"))):
        with contextlib.suppress(OSError):
            variables = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
            if any(variable.startswith(wanted) for variable in variables):
                line = (
                    Path(f"/proc/{pid}/cmdline")
                    .read_bytes()
                    .replace(b"\0", b" ")
                    .decode(errors="replace")
                )
                found[pid] = line.strip()
    return found


class Belongings:
    """Shared memory that was not there before and nobody maps, and ports that a run's processes listened on."""

    def __init__(self) -> None:
        self.before = set(os.listdir("/dev/shm"))
        self.ports: dict[int, int] = {}  # of each the last process that had it

    def look(self, pids: list[int]) -> None:
        """Note what these have now."""
        for pid in pids:
            with contextlib.suppress(psutil.Error):
                for link in psutil.Process(pid).net_connections("tcp"):
                    if link.status == psutil.CONN_LISTEN:
                        self.ports[link.laddr.port] = pid

    def left(self) -> list[str]:
        """What of it is still there; the processes should be gone by now."""
        used, segments = mapped_inodes(), []
        for path in Path("/dev/shm").iterdir():
            with contextlib.suppress(OSError):  # somebody else's has just gone
                new = path.name not in self.before and path.stat().st_uid == os.geteuid()
                segments += [str(path)] * (new and path.stat().st_ino not in used)
        listening = {
            link.laddr.port: link.pid
            for link in psutil.net_connections("tcp")
            if link.status == "LISTEN"
        }
        ports = [f"port {port}" for port, pid in self.ports.items() if listening.get(port) == pid]
        return segments + ports


def wait_until_gone(
    mark: str, limit_s: float, belongings: Belongings
) -> tuple[float, dict[int, str]]:
    """Wait until no process of the run lives: how long that took, and after `limit_s` those that still do."""
    begin = time.monotonic()
    while (left := marked(mark)) and time.monotonic() - begin < limit_s:
        belongings.look(list(left))
        time.sleep(0.1)
    return time.monotonic() - begin, left


def end_all(mark: str) -> None:
    """Kill whatever is left of the run."""
    for pid in marked(mark):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
