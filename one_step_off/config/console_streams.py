"""stdout and stderr, whatever their reader, their terminal or their disk does.

    with console_streams():   # sys.stdout and sys.stderr are `ConsoleStream`s in it
        print(help_text)      # waits for its reader; raises ConsoleFailed when it has gone
        never_wait()
        train()               # its lines neither wait nor fail

A command whose product is its output waits for its reader, as `view | less` needs. A run does not:
a thread writes for it, so that a terminal that was stopped with Ctrl-S, or a pipe that is not
read, never holds up the loop of training.
"""

import codecs
import contextlib
import contextvars
import errno
import io
import os
import queue
import select
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

STALL_S = 10.0
"""A console that takes no text for so long is not waited for: what comes next is left out."""

CLOSE_TIMEOUT_S = 10.0
"""Seconds at the end of a command for the text that is still to be written."""

MAX_PENDING_TEXTS = 100_000
PIECE_BYTES = 4096
NOT_READ = "its reader does not read it"
READER_GONE = (errno.EPIPE, errno.EIO, errno.EBADF)
LOSSY_ERRORS = ("replace", "backslashreplace", "ignore", "xmlcharrefreplace", "namereplace")
"""Ways of `str.encode` to write characters that an encoding does not have."""

OnFailure = Callable[[str, str, str], None]
"""Receives the name of a stream, the reason, and the text that it did not take. Any thread calls
it."""


class ConsoleFailed(Exception):
    """stdout did not take the output of a command.

    Attributes:
        reader_is_gone: whether its reader has gone, as in `--help | head -1`.
    """

    def __init__(self, name: str, error: Exception) -> None:
        super().__init__(f"{name}: {reason_of(error)}")
        is_closed_file = not isinstance(error, OSError)
        self.reader_is_gone = is_closed_file or error.errno in READER_GONE


def reason_of(error: Exception) -> str:
    """Why a write failed, as "No space left on device"."""
    return getattr(error, "strerror", None) or str(error)


class UnfailingStream:
    """A text stream that drops what it cannot write. Everything but writing is the stream's."""

    def __init__(self, stream: Any) -> None:
        self.stream = stream

    def write(self, text: str) -> int:
        """Write what can be written."""
        with contextlib.suppress(OSError, ValueError):
            self.stream.write(text)
        return len(text)

    def writelines(self, lines: Iterable[str]) -> None:
        """Write each."""
        for line in lines:
            self.write(line)

    def flush(self) -> None:
        """Flush what can be flushed."""
        with contextlib.suppress(OSError, ValueError):
            self.stream.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)


def never_fail() -> None:
    """In a process of a run, whose output goes to a file: a full disk must not end the run by what
    its processes print."""
    sys.stdout = UnfailingStream(sys.stdout)
    sys.stderr = UnfailingStream(sys.stderr)


class ConsoleStream(UnfailingStream):
    """stdout or stderr of a command.

    Attributes:
        descriptor: that of the process, which gets bytes: a buffer of Python's could fail when the
            process ends. None: a stand-in of a notebook or test, which gets text.
        writer: writes for a run; None: each write waits.
        failure: why a run's text was not taken for the first time; "": all was.
        on_failure: see `OnFailure`; None: nothing receives it.
        is_redrawn: whether a bar is shown, so that a text that is not taken is worth nothing later.
    """

    def __init__(self, name: str, stream: Any) -> None:
        super().__init__(stream)
        self.name = name
        self.descriptor = _descriptor(stream)
        self.writer: ConsoleWriter | None = None
        self.failure = ""
        self.on_failure: OnFailure | None = None
        self.is_redrawn = False
        encoding = getattr(stream, "encoding", None) or "utf-8"
        errors = getattr(stream, "errors", None)
        lossy = errors if errors in LOSSY_ERRORS else "replace"
        self.encoder = codecs.getincrementalencoder(encoding)(lossy)
        self.flush_stream()

    def write(self, text: str) -> int:
        """Write, with "?" for characters that the encoding does not have.

        Raises:
            ConsoleFailed: the text could not be written, it is the output of a command, and no run
                has begun.
        """
        writer = self.writer
        # A forked process has no such thread.
        if writer is not None and writer.process == os.getpid():
            writer.put(self, text)
            return len(text)
        try:
            self.write_now(text, lambda: None)
        except (OSError, ValueError) as error:
            if writer is None and self.name == "stdout":
                raise ConsoleFailed(self.name, error) from None
        return len(text)

    def leave_out(self, reason: str, text: str) -> None:
        """Note that a run's text was not taken."""
        self.failure = self.failure or reason
        if self.on_failure is not None:
            self.on_failure(self.name, reason, text)

    def flush(self) -> None:
        """Nothing: no text is buffered."""

    def flush_stream(self) -> None:
        """Write what the stream has buffered, where that is possible."""
        super().flush()

    def write_now(self, text: str, on_progress: Callable[[], None]) -> None:
        """Write, and wait for the reader. `on_progress` is called after each piece. Raises OSError,
        ValueError."""
        if self.descriptor is None:
            self._write_text(text)
            return
        data = memoryview(self.encoder.encode(text))
        while data:
            try:
                data = data[os.write(self.descriptor, data[:PIECE_BYTES]) :]
            except BlockingIOError:  # another program has made the terminal non-blocking
                _is_writable(self.descriptor, None)
            on_progress()

    def _write_text(self, text: str) -> None:
        try:
            self.stream.write(text)
        except UnicodeError:
            self.stream.write(text.encode("ascii", "replace").decode())
        self.stream.flush()


def _descriptor(stream: Any) -> int | None:
    if type(stream) is not io.TextIOWrapper:
        return None
    try:
        return stream.fileno()
    except (OSError, ValueError):
        return None


def _is_writable(descriptor: int, limit_ms: int | None) -> bool:
    """Wait until it takes text, or fails, at most `limit_ms` milliseconds. Whether it does."""
    poll = select.poll()
    poll.register(descriptor, select.POLLOUT)
    return bool(poll.poll(limit_ms))


class ConsoleWriter:
    """Writes to one file, on a thread of its own: to both streams in order, where they lead to one.

    Attributes:
        process: whose thread it is.
    """

    def __init__(self, streams: list[ConsoleStream]) -> None:
        self.streams = streams
        self.process = os.getpid()
        # A finalizer may print in the middle of a print; this queue allows that.
        self.texts: queue.SimpleQueue[tuple[ConsoleStream, str, str] | None] = queue.SimpleQueue()
        self.waiting_since: float | None = None
        # A notebook knows by the context to which cell printed lines belong.
        context = contextvars.copy_context()
        self.thread = threading.Thread(
            target=context.run, args=(self._work,), name="console", daemon=True
        )
        self.thread.start()

    @property
    def is_stalled(self) -> bool:
        """Whether the console takes no text."""
        since = self.waiting_since
        if since is None or time.monotonic() - since <= STALL_S:
            return False
        # Else only this process was busy: a call in C may keep all its threads waiting.
        descriptor = self.streams[0].descriptor
        return descriptor is None or not _is_writable(descriptor, 0)

    def put(self, stream: ConsoleStream, text: str) -> None:
        """Write a text soon; returns at once."""
        # Decided here: the bar may end before the thread comes to this text.
        lasting_text = "" if stream.is_redrawn else text
        if self.is_stalled or self.texts.qsize() >= MAX_PENDING_TEXTS:
            stream.leave_out(NOT_READ, lasting_text)
            return
        self.texts.put((stream, text, lasting_text))

    def close(self) -> None:
        """Wait until all is written, as long as the reader reads, and CLOSE_TIMEOUT_S at most."""
        self.texts.put(None)
        deadline = time.monotonic() + CLOSE_TIMEOUT_S
        while self.thread.is_alive() and not self.is_stalled and time.monotonic() < deadline:
            self.thread.join(0.1)
        if self.thread.is_alive():
            for stream in self.streams:
                stream.leave_out(NOT_READ, "")

    def _work(self) -> None:
        for stream, text, lasting_text in iter(self.texts.get, None):
            self._begin_piece()
            try:
                stream.write_now(text, self._begin_piece)
            except Exception as error:
                stream.leave_out(reason_of(error), lasting_text)
            self.waiting_since = None

    def _begin_piece(self) -> None:
        self.waiting_since = time.monotonic()


_replaced: list[ConsoleStream] = []
"""stdout and stderr of the block of `console_streams` that runs."""


@contextlib.contextmanager
def console_streams(ends_process: bool = False) -> Iterator[None]:
    """Put a `ConsoleStream` in the place of sys.stdout and of sys.stderr while the block runs.
    Inside another such block it is that one's.

    `ends_process`: whether the process ends after the block. Then a stream that failed leads
    nowhere: what libraries print at the end could change the exit code, or hang."""
    if _replaced:
        yield
        return
    _open_missing_descriptors()
    before = (sys.stdout, sys.stderr)
    # None: the command was started without it.
    sys.stdout = ConsoleStream("stdout", sys.stdout or open(os.devnull, "w"))
    sys.stderr = ConsoleStream("stderr", sys.stderr or open(os.devnull, "w"))
    _replaced[:] = [sys.stdout, sys.stderr]
    try:
        yield
    finally:
        sys.stdout, sys.stderr = before
        ended = list(_replaced)
        _replaced.clear()
        for stream in ended:
            if stream.writer is not None and stream is stream.writer.streams[0]:
                stream.writer.close()
        for stream in ended:
            stream.writer = None  # libraries that keep one write to it as before
            if ends_process and stream.failure:
                _lead_nowhere(stream.descriptor)


def never_wait() -> list[ConsoleStream]:
    """From now on, to the end of the block of `console_streams`, no write waits or raises. Returns
    stdout and stderr."""
    out, err = _replaced
    if out.writer is None:
        out.writer = err.writer = ConsoleWriter([out, err])
        if not _lead_to_one_file(out, err):  # one that is not read must not hold up the other
            out.writer.streams.remove(err)
            err.writer = ConsoleWriter([err])
    return [out, err]


def _lead_to_one_file(out: ConsoleStream, err: ConsoleStream) -> bool:
    if out.descriptor is None or err.descriptor is None:
        return True
    return os.path.sameopenfile(out.descriptor, err.descriptor)


def _open_missing_descriptors() -> None:
    """Lead descriptors that the command was started without to /dev/null. The next file that is
    opened would get the number, and what libraries and other processes print."""
    for descriptor in (0, 1, 2):
        try:
            os.fstat(descriptor)
        except OSError:
            _lead_nowhere(descriptor)


def _lead_nowhere(descriptor: int | None) -> None:
    if descriptor is None:
        return
    null = os.open(os.devnull, os.O_RDWR)
    if null != descriptor:  # it is the lowest free number
        os.dup2(null, descriptor)
        os.close(null)
    os.set_inheritable(descriptor, True)
