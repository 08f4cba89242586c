"""An asyncio event loop in simulated time: instead of waiting, its clock jumps to the next
timer."""

import asyncio
import selectors


class SimulatedClock(selectors.DefaultSelector):
    """Adds to `seconds` what an event loop would have waited for."""

    seconds = 0.0

    def select(self, timeout: float | None = None) -> list:
        """Return at once; nothing outside of the simulation calls.

        Raises:
            RuntimeError: there is no timer, so nothing would ever happen again.
        """
        if timeout is None:
            raise RuntimeError("the simulation waits for an event that no task will cause")
        self.seconds += max(0.0, timeout)
        return super().select(0)


def simulated_loop() -> asyncio.AbstractEventLoop:
    """An event loop whose time, from 0, jumps to the next timer when no task is ready."""
    clock = SimulatedClock()
    loop = asyncio.SelectorEventLoop(clock)
    loop.time = lambda: clock.seconds
    return loop
