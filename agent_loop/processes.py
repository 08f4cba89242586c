"""Processes that can be killed and confined, forked in milliseconds from one that has imported what
they need."""

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

from agent_loop.sandbox import MAX_LINE
from one_step_off.cluster.core_binding import own_cores

Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]

MAX_START_S = 600.0  # for the first process, after the imports of large libraries
MAX_QUEUE_S = 3600.0  # for a core
MAX_KILL_S = 60.0  # for a killed process to end
END_S = 2.0  # for the fork server to end its children and itself
MAX_STARTING = 8  # a socket holds only so many other sockets that were not received yet


@functools.lru_cache(8)  # a semaphore serves one event loop; a replica has only one
def _free_cores(loop: asyncio.AbstractEventLoop) -> asyncio.Semaphore:
    # Not the cores of this moment: those of the trainer may be among them until its next step.
    return asyncio.Semaphore(len(own_cores() or os.sched_getaffinity(0)))


@contextlib.asynccontextmanager
async def reserve_core(seconds: float = MAX_QUEUE_S) -> AsyncIterator[None]:
    """Hold one of this process's cores, for work that only computes: its time limit is then about
    its own work.

    Raises:
        TimeoutError: no core became free within `seconds`.
    """
    cores = _free_cores(asyncio.get_running_loop())
    seconds = min(seconds, MAX_QUEUE_S)
    async with contextlib.AsyncExitStack() as held:
        try:
            async with asyncio.timeout(seconds):  # not wait_for, which may swallow a cancellation
                await held.enter_async_context(cores)
        except TimeoutError as e:
            raise TimeoutError(f"no core was free within {seconds:g} s") from e
        yield


class ForkServer:
    """Forks processes by the program sandbox.py, which starts with the first of them and ends with
    this object."""

    def __init__(self, spec: str = "", confined: bool = True) -> None:
        """
        Args:
            spec: `module:Class`, of which each process makes one object and answers calls; "": each
                process runs the code that it receives.
            confined: whether the processes have the limits of sandbox.py.
        """
        self.spec = spec
        self.confined = confined
        self.server: subprocess.Popen | None = None
        self.starting = asyncio.Semaphore(MAX_STARTING)

    def _start(self) -> None:
        if self.server is not None:
            self.end()
        # SOCK_SEQPACKET keeps messages whole.
        self.control, server_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        command = [sys.executable, "-I", str(Path(__file__).with_name("sandbox.py"))]
        if self.spec:
            folders = [folder for folder in sys.path if folder]
            command += [self.spec, str(int(self.confined)), *folders, os.getcwd()]
        environment = {"PATH": os.defpath} if self.confined else dict(os.environ)
        environment["OMP_NUM_THREADS"] = "1"
        with server_end:
            self.server = subprocess.Popen(
                command, stdin=server_end, env=environment, start_new_session=True
            )
        self.end = weakref.finalize(self, _end_server, self.server, self.control)

    @contextlib.asynccontextmanager
    async def process(self) -> AsyncIterator[Streams]:
        """Fork a process; it is killed at the end of the block.

        Returns:
            The streams to and from it.

        Raises:
            RuntimeError: no process began.
        """
        async with contextlib.AsyncExitStack() as cleanup:
            async with self.starting:
                if self.server is None or self.server.poll() is not None:
                    self._start()
                server = self.server
                control = self.control
                name = os.urandom(16)
                our_end, process_end = socket.socketpair()
                with process_end:
                    socket.send_fds(control, [name], [process_end.fileno()])
                streams = await asyncio.open_unix_connection(sock=our_end, limit=MAX_LINE)
                cleanup.push_async_callback(self._kill, control, name, streams)
                try:
                    greeting = await asyncio.wait_for(streams[0].readline(), MAX_START_S)
                except TimeoutError as e:
                    raise RuntimeError(
                        f"sandbox.py {self.spec}: no process began within {MAX_START_S:g} s"
                    ) from e
            if not greeting:
                exit_code = server.wait(5)
                raise RuntimeError(
                    f"sandbox.py {self.spec}: ended by {exit_code}; the log says why"
                )
            yield streams

    async def _kill(self, control: socket.socket, name: bytes, streams: Streams) -> None:
        reader, writer = streams
        with contextlib.closing(writer), contextlib.suppress(OSError, TimeoutError):
            control.send(name)  # raises if the server has ended, and all processes with it
            if not self.confined:
                return
            async with asyncio.timeout(MAX_KILL_S):
                while await reader.read(1 << 16):  # returns b"" when the process has ended
                    pass


def _end_server(server: subprocess.Popen, control: socket.socket) -> None:
    control.shutdown(socket.SHUT_RDWR)  # also where a fork of this process holds a copy
    control.close()
    with contextlib.suppress(subprocess.TimeoutExpired):
        server.wait(END_S)  # it ends its children
    server.kill()
    server.wait()


def run_to_completion(work: Coroutine[Any, Any, Any]) -> Any:
    """The result of a coroutine. The caller may be inside of an event loop."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(asyncio.run, work).result()
