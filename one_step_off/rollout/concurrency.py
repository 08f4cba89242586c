"""How many requests are in a replica's engine at once, and how long the code of an agent loop may
take."""

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any

from one_step_off.cluster.remote_calls import observed

QUEUE = 1 / 8
"""Requests beside those that an engine has room for, as a share of these: it finds the next one in
its queue when one ends."""

FULL = 0.95
"""Share of the KV cache from which on requests that wait in the engine wait for room in it."""

ROOM = 0.85
"""Share of the KV cache below which more requests may run. Between the two the limit stays, or it
would swing."""

START = 4
"""Requests at the start, as a multiple of those of the greatest length that the cache has room for:
the first answers grow together, and most end long before that length."""

GROWTH = 2
"""By how much the limit grows for each request that ends while less than half of the cache is used;
from there on by 1: those that have just begun will use more."""

GAIN = 1 / 8
"""By how much of the way the limit follows what an engine under pressure has room for: that changes
with the lengths of the answers that happen to be there."""


class ConcurrencyLimiter:
    """Lets as many requests of a replica's trajectories into its engine as the KV cache has room
    for and a few more, and lets at most `agent.max_concurrency` trajectories begin.

    An engine begins a request where its context has room. When answers grow beyond the cache, it
    preempts the newest ones: what they had is computed again. So `limit` follows what the engine
    reports. Where requests were preempted, or wait for a cache that is full, it goes to as many as
    have room, and QUEUE more; a full cache with a short queue generates most. While there is room,
    and others wait here, it grows with each request that ends. It begins with START, so that the
    first answers are not preempted by the dozen; it is never more than what the engine works on at
    once and QUEUE more, and never falls below 1.

    Requests of trajectories that have begun go first. A trajectory that waits for a tool is in no
    engine, and counts for nothing; its prefix stays in the cache while there is room.

    Attributes:
        limit: requests at once.
        open: requests in the engine; that of a trajectory that begins counts from its beginning.
        begun: trajectories that have begun, and are neither being scored nor ended.
        idle_trajectories: trajectories that ask nothing of the engine: their tools run, they are
            being scored, or they have ended. Counted since the replica's start.
        idle_changed: set for a moment whenever that number may have changed.
    """

    def __init__(self, max_trajectories: int, engine: Any = None) -> None:
        """`engine`: an `Engine`, whose `load` decides; None: `max_trajectories` alone does."""
        self.max_trajectories = max_trajectories
        self.engine = engine
        self.limit = float("inf")
        self.open = 0
        self.begun = 0
        self.idle_trajectories = 0
        self.idle_changed = asyncio.Event()
        self._returning: deque[asyncio.Future[None]] = deque()
        self._beginning: deque[asyncio.Future[None]] = deque()
        self._capacity_questions = 0
        self._seen_preemptions: int | None = None  # an engine has no load before its start
        self._window = self._new_window()

    def successor(self) -> "ConcurrencyLimiter":
        """One for the work that comes next in the same engine, when this one's is dropped: it
        counts from zero, with the limit found so far."""
        successor = ConcurrencyLimiter(self.max_trajectories, self.engine)
        successor.limit = self.limit
        successor._seen_preemptions = self._seen_preemptions
        successor._window = self._window
        return successor

    # --- requests ---------------------------------------------------------------------------------

    async def enter(self, begins: bool) -> None:
        """Wait until a request may go to the engine. `begins`: its trajectory begins, or has been
        scored, and must wait for its place among those that have begun."""
        self._look()
        admitted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        queue = self._beginning if begins else self._returning
        queue.append(admitted)
        self._admit()
        try:
            await admitted
        except asyncio.CancelledError:
            if not admitted.cancelled():  # it was admitted at the same moment
                self.begun -= begins
                self.leave()
            raise

    def leave(self) -> None:
        """A request has left the engine."""
        self.open -= 1
        self._look(has_ended=True)
        self._admit()

    def end(self) -> None:
        """A trajectory has ended, or is being scored."""
        self.begun -= 1
        self._admit()

    def _admit(self) -> None:
        """Let in those that wait, as far as there is room."""
        for queue, places in ((self._returning, 0), (self._beginning, 1)):
            while queue and self.open + 1 <= self.limit:
                if self.begun + places > self.max_trajectories:
                    break
                admitted = queue.popleft()
                if not admitted.done():  # else its caller was cancelled
                    self.open += 1
                    self.begun += places
                    admitted.set_result(None)
        self._window["open_requests"] = max(self._window["open_requests"], self.open)

    # --- pressure ---------------------------------------------------------------------------------

    def _look(self, has_ended: bool = False) -> None:
        """Let `limit` follow the engine's load. `has_ended`: a request has just ended."""
        if self.engine is None or not self.engine.max_sequences:
            return
        load = self.engine.load
        if self._seen_preemptions is None:
            self._seen_preemptions = load.preemptions
            self.limit = START * getattr(self.engine, "longest_sequences", self.limit)
        preempted = load.preemptions - self._seen_preemptions
        self._seen_preemptions = load.preemptions
        self._window["preemptions"] += preempted
        self._window["kv_usage_max"] = max(self._window["kv_usage_max"], load.kv_usage)
        most = self.engine.max_sequences * (1 + QUEUE)
        limit = min(self.limit, most)
        waits_for_room = load.waiting > 0 and load.kv_usage >= FULL
        has_room = load.waiting == 0 and load.kv_usage < ROOM
        is_wanted = self._returning or self._beginning or self._capacity_questions
        if preempted or (waits_for_room and has_ended):
            limit += GAIN * (load.running * (1 + QUEUE) - limit)
        elif has_room and has_ended and is_wanted:
            limit += GROWTH if load.kv_usage < 0.5 else 1
        self.limit = max(1.0, min(limit, most))

    def report(self) -> dict[str, float]:
        """Since the last report: the most requests that were open at once ("open_requests"), the
        largest share of the KV cache in use ("kv_usage_max"), and "preemptions"."""
        window = self._window
        self._window = self._new_window()
        return window

    def _new_window(self) -> dict[str, float]:
        return {"open_requests": float(self.open), "kv_usage_max": 0.0, "preemptions": 0.0}

    # --- capacity ---------------------------------------------------------------------------------

    async def wait_for_capacity(self, sent: int, most: int) -> tuple[int, int]:
        """Wait until fewer of the `sent` trajectories ask for the engine than `most` and `limit`
        allow. Returns how many ask nothing of it, and how many may."""
        self._look()  # there may have been no request yet
        self._capacity_questions += 1
        try:
            while sent - self.idle_trajectories >= self._capacity(most):
                await self.idle_changed.wait()
        finally:
            self._capacity_questions -= 1
        return self.idle_trajectories, self._capacity(most)

    def _capacity(self, most: int) -> int:
        # A whole number: with a part of a place the router would ask again and again for it.
        return int(min(most, self.limit))

    def count_idle(self, change: int) -> None:
        """So many trajectories more ask nothing of the engine."""
        self.idle_trajectories += change
        self.idle_changed.set()
        self.idle_changed.clear()  # those that wait have been woken, and will look again


class TrajectorySlot:
    """One trajectory's place in a `ConcurrencyLimiter`, and the clock of its agent loop.

    The place is free while the trajectory is being scored, and is taken again by its next turn.
    Time that the loop waits for the engine or the reward function does not count as its own, and
    errors of those two are not its fault.

    Attributes:
        call_errors: what the engine or the reward function raised.
        calls_in_time: calls of the engine or the reward function that began within the first
            `limit_s` seconds.
        calls_late: such calls that began later.
        queue_s: how long it has waited for the limiter.
    """

    def __init__(self, limiter: ConcurrencyLimiter, limit_s: float) -> None:
        """
        Args:
            limit_s: how long the loop's own code may take between two calls.
        """
        self.limiter = limiter
        self.limit_s = limit_s
        self.has_begun = False
        self.has_entered = False  # for its first request, which it has not made yet
        self.ended = False
        self.idle = False
        self.engine_calls = 0  # that wait for the limiter, or are in the engine
        self.entering = asyncio.Lock()  # a loop may ask for several turns at once
        self.started_s = 0.0
        self.last_call_ended_s = 0.0
        self.calls_in_progress = 0
        self.calls_in_time = 0
        self.calls_late = 0
        self.call_errors: list[Exception] = []
        self.queue_s = 0.0

    def _note_idle(self) -> None:
        """Report whether the trajectory asks nothing of the engine."""
        idle = self.ended or not (self.engine_calls or self.has_entered)
        self.limiter.count_idle(int(idle) - int(self.idle))
        self.idle = idle

    async def _enter(self) -> bool:
        """Wait for the limiter, with a place among the trajectories that have begun. Returns
        whether it let the request in: one of a trajectory that has ended it does not know."""
        begin = time.monotonic()
        async with self.entering:
            if self.ended:
                return False
            if self.has_entered:
                self.has_entered = False
                return True
            begins = not self.has_begun
            await self.limiter.enter(begins)
            self.has_begun = self.has_begun or begins
        self.queue_s += time.monotonic() - begin
        if self.ended:  # while this waited
            self.limiter.leave()
            self.release()
        return not self.ended

    def release(self, ended: bool = False) -> None:
        """Give the place to another trajectory, if it has one.

        Args:
            ended: the trajectory has ended, and never takes a place again.
        """
        self.ended = self.ended or ended
        if self.has_entered:
            self.has_entered = False
            self.limiter.leave()
        if self.has_begun:
            self.has_begun = False
            self.limiter.end()
        self._note_idle()

    @contextlib.asynccontextmanager
    async def call(self, uses_engine: bool) -> AsyncIterator[None]:
        """A call of the engine, or of the reward function, during the block."""
        self._count_call()
        self.calls_in_progress += 1
        try:
            if uses_engine:
                async with self._engine_call():
                    yield
            else:
                self.release()  # another trajectory generates while this one is scored
                yield
        except Exception as e:
            self.call_errors.append(e)
            raise
        finally:
            self.calls_in_progress -= 1
            self.last_call_ended_s = time.monotonic()

    @contextlib.asynccontextmanager
    async def _engine_call(self) -> AsyncIterator[None]:
        self.engine_calls += 1
        self._note_idle()
        entered = False
        try:
            entered = await self._enter()
            yield
        finally:
            self.engine_calls -= 1
            if entered:
                self.limiter.leave()
            self._note_idle()

    def _count_call(self) -> None:
        if time.monotonic() > self.started_s + self.limit_s:
            self.calls_late += 1
        else:
            self.calls_in_time += 1

    def _within_limits(self) -> bool:
        """Whether the loop may continue."""
        busy_elsewhere = self.calls_in_progress > 0
        own_time_left = time.monotonic() < self.last_call_ended_s + self.limit_s
        endless = self.calls_late > self.calls_in_time
        return (busy_elsewhere or own_time_left) and not endless

    async def run(self, loop: Callable[[], Coroutine[Any, Any, Any]]) -> Any:
        """Run an agent loop in this slot.

        The loop is canceled, and not awaited, when its own code takes longer than `limit_s`
        seconds in one go, or when it makes more calls after that time than within it.

        Returns:
            What the loop returned, or the exception that ended it; TimeoutError if it was
            cancelled.
        """
        self.has_entered = await self._enter()
        task = observed(loop())
        self.started_s = time.monotonic()
        self.last_call_ended_s = self.started_s
        try:
            while self._within_limits():
                done, _ = await asyncio.wait([task], timeout=self.limit_s)
                if done:
                    break
        finally:
            task.cancel()
            self.release(ended=True)
        if not task.done():
            return TimeoutError(
                f"it did not end in {self.limit_s:g} s, "
                "twice agent.timeout_s and agent.tool_timeout_s"
            )
        results = await asyncio.gather(task, return_exceptions=True)
        return results[0]
