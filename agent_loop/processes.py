"""Processes that can be killed and confined, forked in milliseconds off one that has imported what they need."""

import asyncio
import contextlib
import functools
import os
import socket
import subprocess
import sys
import weakref
from collections.abc import AsyncIterator, Coroutine
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from agent_loop.sandbox import LONGEST_LINE

Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]
LONGEST_START = 600.0  # seconds for the first process, after the imports of large libraries
LONGEST_QUEUE = 3600.0  # seconds for a core


@functools.lru_cache(8)  # a semaphore serves one event loop; a replica has only one
def _cores(loop: asyncio.AbstractEventLoop) -> asyncio.Semaphore:
    return asyncio.Semaphore(len(os.sched_getaffinity(0)))


@contextlib.asynccontextmanager
async def core(seconds: float = LONGEST_QUEUE) -> AsyncIterator[None]:
    """A place among as many as this process has cores, for what only computes: a limit on its time is then about its own
    work. Raises TimeoutError: none became free in time."""
    places, seconds = _cores(asyncio.get_running_loop()), min(seconds, LONGEST_QUEUE)
    async with contextlib.AsyncExitStack() as held:
        try:
            async with asyncio.timeout(seconds):  # not wait_for, which may swallow a cancellation
                await held.enter_async_context(places)
        except TimeoutError as e:
            raise TimeoutError(f"no core was free within {seconds:g} s") from e
        yield


class Processes:
    """What sandbox.py forks; that program itself starts with the first of them, and ends with this object."""

    def __init__(self, spec: str = "", confined: bool = True) -> None:
        """`spec`: `module:Class`, of which each process makes one object and answers calls; empty: it runs code."""
        self.spec, self.confined = spec, confined
        self.parent: subprocess.Popen | None = None
        self.beginning = asyncio.Semaphore(
            8
        )  # a socket holds only so many others that nobody has fetched

    def _start(self) -> None:
        if self.parent:
            self.end()
        self.control, theirs = socket.socketpair(
            socket.AF_UNIX, socket.SOCK_SEQPACKET
        )  # whole messages
        command = [sys.executable, "-I", str(Path(__file__).with_name("sandbox.py"))]
        command += (
            [self.spec, str(int(self.confined)), *filter(None, sys.path), os.getcwd()]
            if self.spec
            else []
        )
        env = ({"PATH": os.defpath} if self.confined else dict(os.environ)) | {
            "OMP_NUM_THREADS": "1"
        }
        with theirs:
            self.parent = subprocess.Popen(command, stdin=theirs, env=env, start_new_session=True)
        self.end = weakref.finalize(self, _end, self.parent, self.control)

    @contextlib.asynccontextmanager
    async def one(self) -> AsyncIterator[Streams]:
        """The streams to a new process, which is killed at the end. Raises RuntimeError: none begins."""
        async with contextlib.AsyncExitStack() as end:
            async with self.beginning:
                if self.parent is None or self.parent.poll() is not None:
                    self._start()
                parent, control, name = self.parent, self.control, os.urandom(16)
                ours, theirs = socket.socketpair()
                with theirs:
                    socket.send_fds(control, [name], [theirs.fileno()])
                streams = await asyncio.open_unix_connection(sock=ours, limit=LONGEST_LINE)
                end.push_async_callback(self._kill, control, name, streams)
                try:
                    begun = await asyncio.wait_for(streams[0].readline(), LONGEST_START)
                except TimeoutError as e:
                    raise RuntimeError(
                        f"sandbox.py {self.spec}: no process began within {LONGEST_START:g} s"
                    ) from e
            if not begun:
                raise RuntimeError(
                    f"sandbox.py {self.spec}: ended by {parent.wait(5)}; the log says why"
                )
            yield streams

    async def _kill(self, control: socket.socket, name: bytes, streams: Streams) -> None:
        with contextlib.closing(streams[1]), contextlib.suppress(OSError, TimeoutError):
            control.send(name)  # an error: the parent has ended, and all with it
            async with asyncio.timeout(60):
                while self.confined and await streams[0].read(
                    1 << 16
                ):  # ends when the process has ended
                    pass


def _end(parent: subprocess.Popen, control: socket.socket) -> None:
    control.shutdown(socket.SHUT_RDWR)  # also where a fork of ours holds a copy
    control.close()
    with contextlib.suppress(subprocess.TimeoutExpired):
        parent.wait(2)  # it ends its children
    parent.kill()
    parent.wait()


def completed(work: Coroutine[Any, Any, Any]) -> Any:
    """Its result; the caller may stand in an event loop."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(asyncio.run, work).result()
