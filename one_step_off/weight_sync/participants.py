"""The trainers and the replicas as the weight sync sees them."""

from collections.abc import Awaitable, Callable
from typing import Any, Protocol

import numpy as np

from one_step_off.config.schema import Config

LogProbs = list[np.ndarray]
"""float32 [tokens] of each sequence of the canary."""


class Trainers(Protocol):
    """The part of the actor's `WorkerGroup` that a sync uses."""

    ranks: list[Any]
    """Ray actor handles."""
    cfg: Config

    def score(self, sequences: list[np.ndarray]) -> Awaitable[LogProbs]:
        """The trainer's log-probs of the canary's tokens (int32 [tokens + 1] per sequence) at its
        current weights."""
        ...


class Replicas(Protocol):
    """The part of `RolloutGroup` that a sync uses."""

    replicas: list[Any]
    """Ray actor handles, by replica number."""
    cfg: Config
    syncing: bool
    """While it is set, new prompts wait."""
    restore: Callable[[int], Awaitable[bool]] | None
    """Brings verified weights to a restarted replica; set by the sync."""

    @property
    def active(self) -> list[int]:
        """The replicas that take part in syncs."""
        ...

    async def wait_for_any_replica(self) -> None:
        """Wait until there is a replica for a sync. Raises NoReplica."""
        ...

    def mark_stale(self) -> None:
        """No active replica holds verified weights from here on."""
        ...

    def mark_synced(self, number: int, replica: Any) -> None:
        """This process holds verified weights, unless it was replaced or has died since."""
        ...

    def mark_failed(self, i: int, why: str) -> None:
        """Restart a replica in the background."""
        ...

    def exclude(self, i: int, why: str) -> None:
        """Give a replica up for good."""
        ...
