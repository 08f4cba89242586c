"""Waits of the weight sync that always end: at a time limit, or as soon as any process of the sync
has failed.

A sender's store carries one key per epoch, `ABORTED`. A process that fails writes the reason there.
Every process that waits for this sender checks the key a few times per second and raises `Aborted`.
The driver writes the key on behalf of a process that died.
"""

import contextlib
import logging
import os
import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from datetime import timedelta
from typing import Any, TypeVar

import torch.distributed as dist

T = TypeVar("T")

ABORTED = "aborted"
"""The key that aborts one epoch of one sender; its value is the reason."""

POLL_INTERVAL_S = 0.25
"""Seconds between two checks of the key: the longest time in which an abort is noticed."""

STORE_ANSWER_TIMEOUT_S = 2.0
"""Seconds for a sender's store to answer one request of an `AbortSignal`."""

FIRST_STORE_WAIT_S = 1.0
"""Seconds that `wait_for_keys` sleeps in the store before it polls: torch logs each wait that ends
without its key."""

KEY_POLL_S = 0.01
"""Seconds between two polls of a store's keys afterwards."""

STUCK_AFTER_S = 10.0
"""Seconds for a block of `exit_when_stuck` to end by itself after another process has failed in it:
it may be busy. Less than the driver grants a process after an abort."""

logger = logging.getLogger(__name__)


class Aborted(RuntimeError):
    """Another process of this sync failed, so what is waited for will not come."""


def reason_of(error: BaseException) -> str:
    """An error in one line, as the value of `ABORTED`."""
    return " ".join(str(error).split()) or type(error).__name__


class WorkerThread:
    """One thread that executes calls in the order of their submission.

    Unlike an executor's thread it can be abandoned: it is a daemon, so neither its owner nor the
    end of the process waits for a call that never returns.
    """

    def __init__(self, name: str, prepare: Callable[[], None]) -> None:
        """Start the thread. `prepare` runs on it first."""
        self.calls: queue.SimpleQueue = queue.SimpleQueue()
        self.prepare = prepare
        threading.Thread(target=self._work, name=name, daemon=True).start()

    def submit(self, function: Callable[..., T], *args: Any) -> Future[T]:
        """Call `function(*args)` on the thread, after all earlier submissions."""
        future: Future[T] = Future()
        self.calls.put((future, function, args))
        return future

    def stop(self) -> None:
        """Let the thread end after the calls that are already submitted."""
        self.calls.put(None)

    def _work(self) -> None:
        self.prepare()
        while True:
            call = self.calls.get()
            if call is None:
                return
            future, function, args = call
            try:
                future.set_result(function(*args))
            except BaseException as error:
                future.set_exception(error)
            # While the thread waits for its next call, these would hold the group's memory and
            # connections.
            del call, future, function, args


class AbortSignal:
    """The key `ABORTED` of one sender and one epoch, as one process sees it.

    The store is queried on a separate thread, because torch's `Store.check` has no time limit: it
    would wait forever for a sender that is stopped.
    """

    def __init__(self, store: dist.Store) -> None:
        """`store`: the sender's, with the prefix of the epoch. It is not used here: to connect to a
        sender that is stopped has no time limit either."""
        self.store = store
        self.connection: dist.Store | None = None  # of the separate thread
        self.thread: WorkerThread | None = None
        self.unanswered: Future | None = None  # the last request, which may still be pending

    def set(self, reason: str) -> None:
        """Let every wait of this sender's epoch end with `reason`. The first reason stays."""
        self._request(self._write_reason, reason)

    def check(self) -> None:
        """Return if the epoch was not aborted.

        A sender that does not answer may be stopped or very busy; the time limit of the wait itself
        covers that.

        Raises:
            Aborted: the epoch was aborted.
            DistNetworkError: the sender is gone.
        """
        self.contains([])

    def contains(self, keys: list[str]) -> bool:
        """Whether all `keys` are in the store; False without an answer in STORE_ANSWER_TIMEOUT_S.
        Raises as `check`."""
        answer = self._request(self._read, keys)
        if answer is None:
            return False
        complete, reason = answer
        if reason and not complete:
            raise Aborted(reason)
        return complete

    def close(self) -> None:
        """Abandon the thread."""
        if self.thread is not None:
            self.thread.stop()

    def _connected(self) -> dist.Store:
        """A separate connection: while one thread waits in a store, no second thread can use it."""
        if self.connection is None:
            self.connection = self.store.clone()
        return self.connection

    def _write_reason(self, reason: str) -> None:
        store = self._connected()
        if not store.check([ABORTED]):
            store.set(ABORTED, reason.encode())

    def _read(self, keys: list[str]) -> tuple[bool, str]:
        """Whether all `keys` (at least one) are in the store, and the reason of an abort or ""."""
        store = self._connected()
        complete = bool(keys) and store.check(keys)
        reason = ""
        if store.check([ABORTED]):
            reason = store.get(ABORTED).decode(errors="replace")
        return complete, reason

    def _request(self, function: Callable[..., T], *args: Any) -> T | None:
        """The store's answer, or None without one in STORE_ANSWER_TIMEOUT_S. While a request is
        pending, no other is sent: requests to a stopped sender would pile up."""
        if self.thread is None:
            self.thread = WorkerThread("weight-signal", lambda: None)
        if self.unanswered is not None and not self.unanswered.done():
            time.sleep(POLL_INTERVAL_S)
            return None
        self.unanswered = self.thread.submit(function, *args)
        try:
            return self.unanswered.result(STORE_ANSWER_TIMEOUT_S)
        except FutureTimeout:
            if self.unanswered.done():  # the store's own time limit
                return self.unanswered.result()
            return None


@contextlib.contextmanager
def exit_when_stuck(stores: Sequence[dist.Store]) -> Iterator[None]:
    """End this process by exit code 1 if another process leaves the block with an error, and this
    one does not leave it soon after.

    For a block in which several processes wait for each other in a library's collective operation.
    Nothing interrupts that, and it would wait forever for a process that has left the block with an
    error. The end of this process is what its parent notices. An abort of the whole epoch ends no
    process here: while all others are in the block, this one may only be busy.

    Args:
        stores: of all senders, with a prefix that only the processes in this block share. None: the
            processes in the block do not wait for each other.
    """
    ended = threading.Event()

    def watch() -> None:
        signals = [AbortSignal(store) for store in stores]
        while not ended.wait(POLL_INTERVAL_S):
            try:
                for signal in signals:
                    signal.check()
            except Exception as error:  # a sender that is gone can no longer tell of a failure
                if not ended.wait(STUCK_AFTER_S):
                    logger.error(
                        "this process ends, because it waits for one that failed: %s", error
                    )
                    os._exit(1)
                break
        for signal in signals:
            signal.close()

    if stores:
        threading.Thread(target=watch, name="stuck-watch", daemon=True).start()
    try:
        yield
    except BaseException as error:
        ended.set()
        for store in stores:
            signal = AbortSignal(store)
            with contextlib.suppress(RuntimeError):  # the sender is gone, and its store with it
                signal.set(reason_of(error))
            signal.close()
        raise
    ended.set()


def wait_for_keys(
    store: dist.Store, keys: list[str], timeout_s: float, signal: AbortSignal
) -> None:
    """Wait until all `keys` are in the store.

    Raises:
        TimeoutError: they are not there within `timeout_s` seconds.
        Aborted, DistNetworkError: as `AbortSignal.check`.
    """
    begin = time.monotonic()
    try:
        store.wait(keys, timedelta(seconds=min(FIRST_STORE_WAIT_S, timeout_s)))
        return
    except dist.DistStoreError:  # not there yet
        pass
    poll_for_keys(keys, timeout_s, signal, begin)


def poll_for_keys(
    keys: list[str], timeout_s: float, signal: AbortSignal, begin: float | None = None
) -> None:
    """As `wait_for_keys`, for keys that are usually long in coming. `begin`: of the time limit, by
    `time.monotonic`; None: now."""
    deadline = (time.monotonic() if begin is None else begin) + timeout_s
    while not signal.contains(keys):
        if time.monotonic() > deadline:
            raise TimeoutError(f"timed out: no answer in {timeout_s:g} s")
        time.sleep(KEY_POLL_S)


def wait_for_result(future: Future[T], timeout_s: float, check: Callable[[], None]) -> T:
    """The result of a call on another thread.

    Args:
        future: the call.
        timeout_s: the limit, whatever the thread hangs in; the caller abandons the thread
            afterwards.
        check: called a few times per second meanwhile; it may raise.

    Raises:
        TimeoutError: no result within `timeout_s` seconds.
    """
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            return future.result(timeout=POLL_INTERVAL_S)
        except FutureTimeout:
            if future.done():  # the call's own time limit, raised by the call itself
                return future.result()
        check()
        if time.monotonic() > deadline:
            raise TimeoutError(f"timed out: no answer in {timeout_s:g} s")
