"""How many trajectories use a replica's engine at once, and how long the code of an agent loop may
take."""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any

from one_step_off.cluster.remote_calls import observed


class ConcurrencyLimiter(asyncio.Semaphore):
    """Lets `agent.max_concurrency` trajectories of a replica use its engine at once.

    Attributes:
        idle_trajectories: trajectories that ask nothing of the engine: their tools run, they are
            being scored, or they have ended. Counted since the replica's start.
        idle_changed: set for a moment whenever that number may have changed.
    """

    def __init__(self, max_concurrency: int) -> None:
        super().__init__(max_concurrency)
        self.idle_trajectories = 0
        self.idle_changed = asyncio.Event()


class TrajectorySlot:
    """One trajectory's slot in a `ConcurrencyLimiter`, and the clock of its agent loop.

    The slot is free while the trajectory is being scored, and is taken again by its next turn. Time
    that the loop waits for the engine or the reward function does not count as its own, and errors
    of those two are not its fault.

    Attributes:
        call_errors: what the engine or the reward function raised.
        calls_in_time: calls of the engine or the reward function that began within the first
            `limit_s` seconds.
        calls_late: such calls that began later.
    """

    def __init__(self, limiter: ConcurrencyLimiter, limit_s: float) -> None:
        """
        Args:
            limit_s: how long the loop's own code may take between two calls.
        """
        self.limiter = limiter
        self.limit_s = limit_s
        self.held = False
        self.ended = False
        self.idle = False
        self.acquiring = asyncio.Lock()  # a loop may ask for several turns at once
        self.started_s = 0.0
        self.last_call_ended_s = 0.0
        self.calls_in_progress = 0
        self.calls_in_time = 0
        self.calls_late = 0
        self.call_errors: list[Exception] = []

    def set_idle(self, idle: bool) -> None:
        """Record whether the trajectory asks nothing of the engine. It keeps its slot meanwhile."""
        self.limiter.idle_trajectories += int(idle) - int(self.idle)
        self.idle = idle
        self.limiter.idle_changed.set()
        self.limiter.idle_changed.clear()  # those that wait have been woken, and will look again

    async def acquire(self) -> None:
        """Wait for the slot, unless the trajectory holds it."""
        self.set_idle(self.ended)
        async with self.acquiring:
            if not self.held and not self.ended:
                await self.limiter.acquire()
                self.held = True
        if self.ended:  # while this waited
            self.release()

    def release(self, ended: bool = False) -> None:
        """Give the slot to another trajectory, if it is held.

        Args:
            ended: the trajectory has ended, and never takes a slot again.
        """
        self.ended = self.ended or ended
        self.set_idle(True)
        if self.held:
            self.held = False
            self.limiter.release()

    @contextlib.asynccontextmanager
    async def call(self, uses_engine: bool) -> AsyncIterator[None]:
        """A call of the engine, or of the reward function, during the block."""
        self._count_call()
        self.calls_in_progress += 1
        try:
            if uses_engine:
                await self.acquire()
            else:
                self.release()  # another trajectory generates while this one is scored
            yield
        except Exception as e:
            self.call_errors.append(e)
            raise
        finally:
            self.set_idle(True)
            self.calls_in_progress -= 1
            self.last_call_ended_s = time.monotonic()

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
        await self.acquire()
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
