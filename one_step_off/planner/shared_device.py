"""A device that generation and training share in the simulation."""

import asyncio
from collections.abc import Callable

from one_step_off.cluster.remote_calls import now

SLOWDOWN = 2.0
"""While both work, each takes this many times as long: the driver gives processes equal slices of
the device's time."""

SMALLEST_REST_S = 1e-9


class SharedDevice:
    """Processor sharing of one replica and one trainer rank.

    Either works at full speed while it works alone, and at half speed while both work.

    Attributes:
        training: whether the rank is at work.
        advance_replica: lets the replica count its progress up to now and plan its next event
            again; it must run before and after its speed changes.
    """

    def __init__(self) -> None:
        self.training = False
        self.advance_replica: Callable[[], None] = lambda: None
        self._generating = False
        self._generating_changed = asyncio.Event()

    @property
    def replica_slowdown(self) -> float:
        """By what the replica's times are multiplied now."""
        return SLOWDOWN if self.training else 1.0

    def set_generating(self, generating: bool) -> None:
        """The replica begins or ends its work."""
        if generating != self._generating:
            self._generating = generating
            self._generating_changed.set()

    async def train(self, seconds: float) -> None:
        """Train for `seconds` of the whole device, which take longer while the replica works."""
        self._set_training(True)
        rest = seconds
        while rest > SMALLEST_REST_S:
            slowdown = SLOWDOWN if self._generating else 1.0
            begin = now()
            self._generating_changed.clear()
            await self._wait_for_change(rest * slowdown)
            rest -= (now() - begin) / slowdown
        self._set_training(False)

    async def _wait_for_change(self, limit_s: float) -> None:
        change = asyncio.ensure_future(self._generating_changed.wait())
        await asyncio.wait([change], timeout=limit_s)
        change.cancel()

    def _set_training(self, training: bool) -> None:
        self.advance_replica()
        self.training = training
        self.advance_replica()
