"""What belongs to a run: its processes, known by a variable in their environment, and the shared
memory and the ports that they hold."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from pathlib import Path

import psutil

from one_step_off.cluster.process_cleanup import mapped_inodes_by_process

MARK = "CHAOS_MARK"
"""The environment variable. SPT_NOENV must be set, too: it keeps setproctitle from writing over the
environment that other processes see."""

SHARED_MEMORY = Path("/dev/shm")

MAPS_INTERVAL_S = 2.0
"""Seconds between two looks at the memory of all processes."""

STAY_S = 10.0
LOOK_AGAIN_S = 0.5


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
    """Shared memory that is new and that no process maps, and ports on which a run has listened.

    Other runs may work on this machine. A segment is theirs if only their processes were seen to
    map it. One that was not seen mapped counts only if it stays: multiprocessing creates semaphores
    before it maps them, and those of a killed process are removed a moment later.
    """

    def __init__(self) -> None:
        self.segments_before = set(os.listdir(SHARED_MEMORY))
        self.ports: dict[int, int] = {}
        """Port -> the last process that listened on it."""
        self.own_inodes: set[int] = set()
        """Of segments that processes of this run have mapped."""
        self.foreign_inodes: set[int] = set()
        """Of segments that other processes have mapped."""
        self.next_look = 0.0

    def look(self, pids: list[int]) -> None:
        """Note the ports of these processes, and the shared memory of all."""
        for pid in pids:
            with contextlib.suppress(psutil.Error):
                for connection in psutil.Process(pid).net_connections("tcp"):
                    if connection.status == psutil.CONN_LISTEN:
                        self.ports[connection.laddr.port] = pid
        if time.monotonic() > self.next_look:
            own_pids = set(pids)
            for pid, inodes in mapped_inodes_by_process().items():
                noted = self.own_inodes if pid in own_pids else self.foreign_inodes
                noted |= inodes
            self.next_look = time.monotonic() + MAPS_INTERVAL_S

    def left(self, stay_s: float = STAY_S) -> list[str]:
        """What is still there of them, after the end of the processes. `stay_s`: seconds for which
        a segment must be there to count."""
        deadline = time.monotonic() + stay_s
        segments = self._segments_left()
        while segments and time.monotonic() < deadline:
            time.sleep(LOOK_AGAIN_S)
            segments &= self._segments_left()
        return sorted(segments) + self._ports_left()

    def _segments_left(self) -> set[str]:
        inodes_by_process = mapped_inodes_by_process()
        used_inodes = set().union(*inodes_by_process.values())
        self.foreign_inodes |= used_inodes
        segments = set()
        for path in SHARED_MEMORY.iterdir():
            with contextlib.suppress(OSError):  # another process has just removed it
                status = path.stat()
                is_new = path.name not in self.segments_before
                is_ours = status.st_uid == os.geteuid()
                only_foreign = status.st_ino in self.foreign_inodes - self.own_inodes
                is_used = status.st_ino in used_inodes
                if is_new and is_ours and not is_used and not only_foreign:
                    segments.add(str(path))
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
