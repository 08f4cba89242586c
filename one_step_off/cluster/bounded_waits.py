"""Waits of the weight sync that always end: at a time limit, or as soon as any process of the sync has failed.

A sender's store carries one key per epoch, `ABORTED`. The process that fails writes the reason there; every process that
waits for this sender looks at the key a few times a second and raises `Aborted`. The driver sets it too, on behalf of a
process that died and can say nothing any more.
"""

import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from datetime import timedelta
from typing import Any, TypeVar

import torch.distributed as dist

T = TypeVar("T")

ABORTED = "aborted"
POLL_INTERVAL_S = 0.25  # between two looks at the key: the most that an abort takes to be noticed
ANSWER_S = 2.0  # for a sender's store to answer when it is asked for the key
# So long a wait for a store's key sleeps before it looks: torch logs each wait that ends without its key.
EVENT_S = 1.0


class Aborted(RuntimeError):
    """Another process of this sync failed, so what is waited for will not come."""


class WorkerThread:
    """One thread that works off calls in their order. Unlike an executor's it may be given up: it is a daemon, so neither
    its owner nor the end of the process waits for a call that never returns."""

    def __init__(self, name: str, prepare: Callable[[], None]) -> None:
        """`prepare` runs first, on the thread."""
        self.calls: queue.SimpleQueue = queue.SimpleQueue()
        self.prepare = prepare
        threading.Thread(target=self._work, name=name, daemon=True).start()

    def submit(self, function: Callable[..., T], *args: Any) -> Future[T]:
        """Call `function(*args)` on the thread, after all that was submitted before."""
        future: Future[T] = Future()
        self.calls.put((future, function, args))
        return future

    def stop(self) -> None:
        """Let the thread end once it has nothing left to do."""
        self.calls.put(None)

    def _work(self) -> None:
        self.prepare()
        while call := self.calls.get():
            future, function, args = call
            try:
                future.set_result(function(*args))
            except BaseException as error:
                future.set_exception(error)
            del call, future, function, args  # they may hold the group's memory and connections


class AbortSignal:
    """The key `ABORTED` of one sender and one epoch, as one process sees it. `store`: the sender's, of that epoch.

    The store is asked on a thread of its own, since a `check` of torch's store knows no time limit: it would wait for ever
    for a sender that is stopped.
    """

    def __init__(self, store: dist.Store) -> None:
        # A connection of its own: a store lets no second thread in while one waits in it.
        self.store = store.clone()
        self.thread: WorkerThread | None = None
        self.asked: Future | None = None  # what the store has not answered yet

    def set(self, reason: str) -> None:
        """Let every wait of this sender's epoch end with `reason`. The first reason stays."""
        self._ask(self._set, reason)

    def check(self) -> None:
        """Raises Aborted if the epoch was given up, DistNetworkError if the sender is gone. A sender that does not answer
        may be stopped, or very busy: the limit of the wait itself is for that."""
        self.holds([])

    def holds(self, keys: list[str]) -> bool:
        """Whether all `keys` are in the store, as far as it answers within ANSWER_S seconds. Raises as `check`."""
        found = self._ask(self._look, keys)
        if found is None:
            return False
        there, reason = found
        if reason and not there:
            raise Aborted(reason)
        return there

    def close(self) -> None:
        """Give the thread up."""
        if self.thread is not None:
            self.thread.stop()

    def _set(self, reason: str) -> None:
        if not self.store.check([ABORTED]):
            self.store.set(ABORTED, reason.encode())

    def _look(self, keys: list[str]) -> tuple[bool, str]:
        there = bool(keys) and self.store.check(keys)
        reason = (
            self.store.get(ABORTED).decode(errors="replace") if self.store.check([ABORTED]) else ""
        )
        return there, reason

    def _ask(self, function: Callable[..., T], *args: Any) -> T | None:
        """What the store answers, or None if it does not in ANSWER_S seconds. A question that was never answered is not
        asked again and again."""
        if self.thread is None:
            self.thread = WorkerThread("weight-signal", lambda: None)
        if self.asked is not None and not self.asked.done():
            time.sleep(POLL_INTERVAL_S)
            return None
        self.asked = self.thread.submit(function, *args)
        try:
            return self.asked.result(ANSWER_S)
        except FutureTimeout:
            if self.asked.done():
                return self.asked.result()
            return None


def wait_for_keys(store: dist.Store, keys: list[str], limit_s: float, signal: AbortSignal) -> None:
    """Wait until all `keys` are in the store. Raises TimeoutError after `limit_s` seconds, and what `AbortSignal.check`
    raises."""
    deadline = time.monotonic() + limit_s
    try:
        store.wait(keys, timedelta(seconds=min(EVENT_S, limit_s)))
        return
    except dist.DistStoreError:  # not there yet
        pass
    while not signal.holds(keys):
        if time.monotonic() > deadline:
            raise TimeoutError(f"timed out: no answer in {limit_s:g} s")
        time.sleep(0.01)


def wait_for_result(future: Future[T], limit_s: float, check: Callable[[], None]) -> T:
    """The result of work on another thread. `check` is called while it is awaited, and may raise. Raises TimeoutError after
    `limit_s` seconds, whatever the thread hangs in; the caller gives that thread up then."""
    deadline = time.monotonic() + limit_s
    while True:
        try:
            return future.result(timeout=POLL_INTERVAL_S)
        except FutureTimeout:
            if future.done():  # the work's own time limit
                return future.result()
        check()
        if time.monotonic() > deadline:
            raise TimeoutError(f"timed out: no answer in {limit_s:g} s")
