"""On CPUs: rollout and trainer use each other's idle cores.

Rollout and trainer have cores of their own. While one side waits for the other, the other's
processes may also run on its cores. Only the cores change, never the number of threads: every
process has one thread for each core that it may ever use, from its start. The number of threads
decides in which order floating-point numbers are added; the cores on which the threads run do not.
So no bit of a result depends on when a side waited.

    side                  driver                             processes of the run
    rollout, trainer ->   CoreSharing.at_work("trainer") ->  CoreUser.use_cores(number, True)
"""

import asyncio
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import ray

from one_step_off.cluster.core_binding import guest_cores, own_cores
from one_step_off.cluster.remote_calls import now

ROLLOUT = "rollout"
TRAINER = "trainer"

OTHER_SIDE = {ROLLOUT: TRAINER, TRAINER: ROLLOUT}


class CoreBinding:
    """Moves the threads of some processes between their own cores and all cores that they may use.

    Threads that were bound otherwise, as those of the weight sync are (`core_binding.unpin`), stay
    as they are.
    """

    def __init__(self, pids: Sequence[int], own: Sequence[int], guest: Sequence[int]) -> None:
        """
        Args:
            pids: the processes.
            own: the cores to which they are bound.
            guest: the cores that they use beside those while the other side waits.
        """
        self.pids = pids
        self.own = set(own)
        self.all = self.own | set(guest)
        self.is_wide = False
        self._other_threads: set[int] = set()

    def bind(self, wide: bool) -> None:
        """Bind the threads to all cores, or to the processes' own. A process that has ended is left
        out."""
        if wide == self.is_wide:
            return
        self.is_wide = wide
        if wide:
            self._other_threads = set()
        for pid in self.pids:
            with suppress(FileNotFoundError):  # the process has just ended
                for thread in os.listdir(f"/proc/{pid}/task"):
                    with suppress(ProcessLookupError):  # the thread has just ended
                        self._bind_thread(int(thread), wide)

    def _bind_thread(self, thread: int, wide: bool) -> None:
        if wide and os.sched_getaffinity(thread) != self.own:
            self._other_threads.add(thread)
        elif wide:
            os.sched_setaffinity(thread, self.all)
        elif thread not in self._other_threads:
            # Also threads that were started meanwhile.
            os.sched_setaffinity(thread, self.own)


class CoreUser:
    """Mixed into the actors of both sides. It has no constructor, so that it fits any class."""

    _core_binding: CoreBinding | None = None
    _last_core_change = -1

    def use_own_cores(self) -> None:
        """Forget what the other side did: its processes are gone."""
        if self._core_binding is not None:
            self._core_binding.bind(False)

    def bound_pids(self) -> list[int]:
        """The processes whose cores change together, once the actor has started its work."""
        return [os.getpid()]

    @ray.method(concurrency_group="control")
    def threads_and_cores(self) -> str:
        """For the log: with how many threads this actor's processes compute, and on which cores."""
        threads = os.environ.get("OMP_NUM_THREADS", "not set")
        cores = [sorted(os.sched_getaffinity(pid)) for pid in self.bound_pids()]
        return f"OMP_NUM_THREADS={threads}, its processes are on the cores {cores}"

    @ray.method(concurrency_group="control")
    def use_cores(self, number: int, wide: bool) -> None:
        """Bind this actor's processes to all cores that they may use, or to their own.

        Args:
            number: of the change. Ray keeps no order between calls of a concurrency group; a change
                that arrives after a later one does nothing.
            wide: the other side waits, and its cores are free.
        """
        if number < self._last_core_change:
            return
        self._last_core_change = number
        if not guest_cores():
            return
        pids = self.bound_pids()
        if self._core_binding is None or self._core_binding.pids != pids:
            self._core_binding = CoreBinding(pids, own_cores(), guest_cores())
        self._core_binding.bind(wide)


class CoreSharing:
    """The driver's part: it knows which side works, and tells the processes which cores to use.

    It waits for no answer. A process that is gone or restarts stays on its own cores until the next
    change: it is slower for that time, and nothing else.
    """

    def __init__(self, actors: dict[str, Callable[[], list[Any]]]) -> None:
        """`actors`: of both sides the current processes, as Ray actors of `CoreUser`."""
        self.actors = actors
        self._works = dict.fromkeys(OTHER_SIDE, 0)
        self._wide_since: dict[str, float | None] = dict.fromkeys(OTHER_SIDE)
        self._wide_s = dict.fromkeys(OTHER_SIDE, 0.0)
        # Not from zero: replicas that outlive an attempt have seen the numbers of the one before.
        self._changes = time.monotonic_ns()
        self._pending: set[asyncio.Future] = set()  # asyncio itself does not hold them

    @contextmanager
    def at_work(self, side: str) -> Iterator[None]:
        """A side works while this block runs; blocks may overlap."""
        self._works[side] += 1
        self._update()
        try:
            yield
        finally:
            self._works[side] -= 1
            self._update()

    def _update(self) -> None:
        """A side uses all cores where it works and the other does not."""
        for side, other in OTHER_SIDE.items():
            # Nothing changes while both wait: the gap between two calls is short.
            if not any(self._works.values()):
                return
            self._widen(side, bool(self._works[side]) and not self._works[other])

    def _widen(self, side: str, wide: bool) -> None:
        since = self._wide_since[side]
        if wide == (since is not None):
            return
        if since is None:
            self._wide_since[side] = now()
        else:
            self._wide_since[side] = None
            self._wide_s[side] += now() - since
        self._changes += 1
        answers = [actor.use_cores.remote(self._changes, wide) for actor in self.actors[side]()]
        # A process that is gone answers with an error, which nobody needs.
        pending = asyncio.gather(*answers, return_exceptions=True)
        self._pending.add(pending)
        pending.add_done_callback(self._pending.discard)

    def take_metrics(self) -> dict[str, float]:
        """Seconds since the last call in which each side worked on all cores."""
        metrics = {}
        for side in OTHER_SIDE:
            since = self._wide_since[side]
            if since is not None:
                self._wide_s[side] += now() - since
                self._wide_since[side] = now()
            metrics[f"time/{side}_all_cores_s"] = self._wide_s[side]
            self._wide_s[side] = 0.0
        return metrics
