"""Processes that can be killed and confined, forked in milliseconds off one that has imported what they need."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys
import weakref
from collections.abc import AsyncIterator, Coroutine
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]
LONGEST_LINE = 1 << 20  # bytes


class Processes:
    """What sandbox.py forks; that program itself starts with the first of them, and ends with this object."""

    def __init__(self, spec: str = "", confined: bool = True) -> None:
        """`spec`: `module:Class`, of which each process makes one object and answers calls; empty: it runs code."""
        self.spec, self.confined = spec, confined
        self.parent: subprocess.Popen | None = None
        self.beginning = asyncio.Semaphore(8)  # a socket holds only so many others that nobody has fetched

    def _start(self) -> None:
        if self.parent:
            self.end()
        self.control, theirs = socket.socketpair()
        command = [sys.executable, "-I", str(Path(__file__).with_name("sandbox.py"))]
        command += [self.spec, str(int(self.confined)), *filter(None, sys.path), os.getcwd()] if self.spec else []
        env = {"PATH": os.defpath} if self.confined else dict(os.environ)
        with theirs:
            self.parent = subprocess.Popen(
                command, stdin=theirs, env=env | {"OMP_NUM_THREADS": "1"}, start_new_session=True
            )
        self.end = weakref.finalize(self, _end, self.parent, self.control)

    @contextlib.asynccontextmanager
    async def one(self) -> AsyncIterator[Streams]:
        """The streams to a new process, which is killed at the end. Raises RuntimeError: none begins."""
        async with self.beginning:
            if self.parent is None or self.parent.poll() is not None:
                self._start()
            ours, theirs = socket.socketpair()
            with theirs:
                socket.send_fds(self.control, [b"+"], [theirs.fileno()])
            reader, writer = await asyncio.open_unix_connection(sock=ours, limit=LONGEST_LINE)
            try:
                pid = int(await reader.readline() or 0)
            except BaseException:
                writer.close()
                raise
        try:
            if not pid:
                raise RuntimeError(f"sandbox.py {self.spec}: ended by {self.parent.wait(5)}; the log says why")
            yield reader, writer
        finally:
            if pid:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(pid, signal.SIGKILL)
            with contextlib.suppress(ConnectionError):
                while self.confined and await reader.read(1 << 16):  # ends when the process has ended
                    pass
            writer.close()


def _end(parent: subprocess.Popen, control: socket.socket) -> None:
    parent.kill()
    parent.wait()
    control.close()


def completed(work: Coroutine[Any, Any, Any]) -> Any:
    """Its result; the caller may stand in an event loop."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(asyncio.run, work).result()
