"""What belongs to a run: its processes, known by a variable in their environment, and the shared
memory and the ports that they hold."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from pathlib import Path

import psutil

from one_step_off.cluster.process_cleanup import mapped_inodes

MARK = "CHAOS_MARK"
"""The environment variable. SPT_NOENV must be set, too: it keeps setproctitle from writing over the
environment that other processes see."""

SHARED_MEMORY = Path("/dev/shm")


def marked(mark: str) -> dict[int, str]:
    """The living processes whose mark begins with `mark`: process id -> command line."""
    processes = {}
    wanted = f"{MARK}={mark}".encode()
    for name in os.listdir("/proc"):
        if not name.isdigit():
            continue
        with contextlib.suppress(OSError):  # the process has just ended
            variables = Path(f"/proc/{name}/environ").read_bytes().split(b"\0")
            if any(variable.startswith(wanted) for variable in variables):
                arguments = Path(f"/proc/{name}/cmdline").read_bytes().split(b"\0")
                command_line = b" ".join(arguments).decode(errors="replace")
                processes[int(name)] = command_line.strip()
    return processes


class Belongings:
    """Shared memory that is new and that no process maps, and ports on which a run has listened."""

    def __init__(self) -> None:
        self.segments_before = set(os.listdir(SHARED_MEMORY))
        self.ports: dict[int, int] = {}
        """Port -> the last process that listened on it."""

    def look(self, pids: list[int]) -> None:
        """Note the ports of these processes."""
        for pid in pids:
            with contextlib.suppress(psutil.Error):
                for connection in psutil.Process(pid).net_connections("tcp"):
                    if connection.status == psutil.CONN_LISTEN:
                        self.ports[connection.laddr.port] = pid

    def left(self) -> list[str]:
        """What is still there of them, after the end of the processes."""
        return self._segments_left() + self._ports_left()

    def _segments_left(self) -> list[str]:
        used_inodes = mapped_inodes()
        segments = []
        for path in SHARED_MEMORY.iterdir():
            with contextlib.suppress(OSError):  # another process has just removed it
                status = path.stat()
                is_new = path.name not in self.segments_before
                is_ours = status.st_uid == os.geteuid()
                if is_new and is_ours and status.st_ino not in used_inodes:
                    segments.append(str(path))
        return segments

    def _ports_left(self) -> list[str]:
        listening = {}
        for connection in psutil.net_connections("tcp"):
            if connection.status == psutil.CONN_LISTEN:
                listening[connection.laddr.port] = connection.pid
        return [f"port {port}" for port, pid in self.ports.items() if listening.get(port) == pid]


def wait_until_gone(
    mark: str, limit_s: float, belongings: Belongings
) -> tuple[float, dict[int, str]]:
    """Wait until no process of the run lives.

    Returns:
        The seconds that it took, and the processes that still live after `limit_s`.
    """
    begin = time.monotonic()
    left = marked(mark)
    while left and time.monotonic() - begin < limit_s:
        belongings.look(list(left))
        time.sleep(0.1)
        left = marked(mark)
    return time.monotonic() - begin, left


def end_all(mark: str) -> None:
    """Kill all processes of the run."""
    for pid in marked(mark):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
