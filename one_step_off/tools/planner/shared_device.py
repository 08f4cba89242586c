"""A GPU that generation and training share in the simulation."""

import asyncio
from collections.abc import Callable

from one_step_off.cluster.remote_calls import now

SLOWDOWN = 2.0
"""While both work on one GPU, each takes this many times as long: the driver gives processes equal
slices of the device's time."""

SMALLEST_REST_S = 1e-9


class SharedDevice:
    """The replicas and the ranks, whose speed depends on whether the other side works.

    Attributes:
        training: whether the ranks are at work.
        advance_replicas: let each replica count its progress up to now and plan its next event
            again; they must run before and after the replicas' speed changes.
    """

    def __init__(self) -> None:
        self.training = False
        self.advance_replicas: list[Callable[[], None]] = []
        self._generating: set[object] = set()
        self._generating_changed = asyncio.Event()

    @property
    def replica_slowdown(self) -> float:
        """By what the replicas' times are multiplied now."""
        return SLOWDOWN if self.training else 1.0

    def set_generating(self, replica: object, generating: bool) -> None:
        """A replica begins or ends its work."""
        generated_before = bool(self._generating)
        if generating:
            self._generating.add(replica)
        else:
            self._generating.discard(replica)
        if generated_before != bool(self._generating):
            self._generating_changed.set()

    async def train(self, seconds: float) -> None:
        """Train for as long as takes `seconds` alone."""
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
        self._advance()
        self.training = training
        self._advance()

    def _advance(self) -> None:
        for advance in self.advance_replicas:
            advance()
