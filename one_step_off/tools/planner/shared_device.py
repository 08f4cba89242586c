"""Devices that generation and training share in the simulation: one GPU, or the cores of a CPU."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

from one_step_off.cluster.remote_calls import now

SLOWDOWN = 2.0
"""While both work on one GPU, each takes this many times as long: the driver gives processes equal
slices of the device's time."""

TRAINER_GAIN = 0.8
"""Of the time that perfect division among more cores would save, what training saves. Measured:
docs/concepts/placement.md."""

ROLLOUT_GAIN = 0.5
"""The same of generation, whose work per token is partly Python's, on one core."""

SMALLEST_REST_S = 1e-9


@dataclass(frozen=True)
class Pace:
    """By what the times of one side are multiplied while the other waits, and while both work."""

    alone: float = 1.0
    together: float = SLOWDOWN


ONE_GPU = Pace()
"""Of both sides on one GPU."""


def pace_with_idle_cores(own: int, other: int, gain: float) -> Pace:
    """The pace of a side that may use the other's cores while the other waits.

    Args:
        own: cores of the side; other: of the other side.
        gain: share of the perfect gain in speed that the further cores bring, 0 to 1.
    """
    return Pace(alone=1 / (1 + gain * other / own), together=1.0)


class SharedDevice:
    """The replicas and the ranks, whose speed depends on whether the other side works.

    Attributes:
        training: whether the ranks are at work.
        advance_replicas: let each replica count its progress up to now and plan its next event
            again; they must run before and after the replicas' speed changes.
    """

    def __init__(self, rollout: Pace = ONE_GPU, trainer: Pace = ONE_GPU) -> None:
        self.rollout = rollout
        self.trainer = trainer
        self.training = False
        self.advance_replicas: list[Callable[[], None]] = []
        self._generating: set[object] = set()
        self._generating_changed = asyncio.Event()

    @property
    def replica_slowdown(self) -> float:
        """By what the replicas' times are multiplied now."""
        return self.rollout.together if self.training else self.rollout.alone

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
        """Train for `seconds` of pace 1."""
        self._set_training(True)
        rest = seconds
        while rest > SMALLEST_REST_S:
            slowdown = self.trainer.together if self._generating else self.trainer.alone
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


def divided_cores(replicas: int, ranks: int) -> SharedDevice:
    """The cores of a CPU, equally many for each replica and each rank; a side also works on the
    other's while the other waits."""
    return SharedDevice(
        pace_with_idle_cores(replicas, ranks, ROLLOUT_GAIN),
        pace_with_idle_cores(ranks, replicas, TRAINER_GAIN),
    )
