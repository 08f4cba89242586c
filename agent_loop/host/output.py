"""What agents print, and where it goes."""

from __future__ import annotations

import contextlib
import contextvars
import io
import sys
from typing import Any

LOG_HEAD_BYTES = 1 << 17  # of an episode's log: written as they come
LOG_TAIL_BYTES = 1 << 15  # kept in memory, and written at the end
LAST_LINES_BYTES = 2000

CURRENT_LOG: contextvars.ContextVar[Log | None] = contextvars.ContextVar("log", default=None)
"""The log of the episode whose task runs."""


class Log:
    """What one agent prints: the beginning and the end of it. The file is made with its first
    byte."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.bytes = 0
        self.tail = bytearray()

    def write(self, data: bytes) -> None:
        """Append `data`; what is too much is left out."""
        head = data[: max(0, LOG_HEAD_BYTES - self.bytes)]
        if head:
            self._append(head)
        self.bytes += len(data)
        self.tail += data[-LOG_TAIL_BYTES:]
        if len(self.tail) > 2 * LOG_TAIL_BYTES:
            del self.tail[:-LOG_TAIL_BYTES]

    def _append(self, data: bytes) -> None:
        try:
            with open(self.path, "ab") as file:
                file.write(data)
        except OSError as e:  # a full disk must not end the agents
            with contextlib.suppress(OSError):  # the replica's log may be on that disk
                print(f"agent_loop.host: {self.path}: {e}", file=sys.__stderr__, flush=True)

    def close(self) -> str:
        """Write the end, if anything was left out. Returns the last lines."""
        beyond = self.bytes - LOG_HEAD_BYTES
        if beyond > 0:
            end = bytes(self.tail[-min(beyond, LOG_TAIL_BYTES) :])
            omitted = beyond - len(end)
            notice = f"\n[{omitted} bytes are left out]\n" if omitted else ""
            self._append(notice.encode() + end)
        return bytes(self.tail[-LAST_LINES_BYTES:]).decode(errors="replace").strip()


class EpisodeStream(io.TextIOBase):
    """stdout or stderr of all tasks: what an episode prints goes to its log, the rest to that of
    the replica."""

    encoding = "utf-8"

    def __init__(self, stream: Any) -> None:
        self.stream = stream

    @property
    def buffer(self) -> Any:
        """Of the process."""
        return self.stream.buffer

    def fileno(self) -> int:
        """Of the process."""
        return self.stream.fileno()

    def writable(self) -> bool:
        """Yes."""
        return True

    def write(self, text: str) -> int:
        """Write to the log of the current task's episode."""
        log = CURRENT_LOG.get()
        if log is None:
            with contextlib.suppress(OSError):
                self.stream.write(text)
        else:
            log.write(text.encode(errors="backslashreplace"))
        return len(text)

    def flush(self) -> None:
        """Logs are not buffered."""
        if CURRENT_LOG.get() is None:
            with contextlib.suppress(OSError):
                self.stream.flush()
