"""What follows from a sync that failed: which processes it failed by, and the restart of replicas
among them."""

from typing import Any

from one_step_off.cluster.errors import TrainerDied
from one_step_off.cluster.remote_calls import MAX_ATTEMPTS
from one_step_off.data.samples import PolicyVersion
from one_step_off.weight_sync.participants import Replicas, Trainers
from one_step_off.weight_sync.sync_calls import BrokenSync, find_failed


class FailedSyncs:
    """Restarts replicas that failed in a sync, but not for ever.

    Attributes:
        in_a_row: replica -> syncs of all replicas that it failed in a row.
    """

    def __init__(self, actor: Trainers, rollout: Replicas) -> None:
        """`actor`, `rollout`: those that sync."""
        self.actor = actor
        self.rollout = rollout
        self.in_a_row: dict[int, int] = {}

    def passed(self, number: int) -> None:
        """A replica has passed a sync of all replicas."""
        self.in_a_row.pop(number, None)

    async def handle(
        self, broken: BrokenSync, stamp: PolicyVersion, replicas: dict[int, Any], is_restore: bool
    ) -> None:
        """Find the processes that a broken sync failed by, and restart the replicas among them.

        Args:
            broken: the failure.
            stamp: of the sync.
            replicas: number -> actor handle, of those in the sync.
            is_restore: the sync was for one restarted replica alone.

        Raises:
            TrainerDied: a trainer is gone or hangs.
            The failure itself: all processes are alive.
        """
        _, version = stamp
        what = f"weight sync of version {version}"
        ranks = {f"trainer rank {i}": rank for i, rank in enumerate(self.actor.ranks)}
        dead_ranks, dead_replicas = await find_failed(broken, ranks, replicas)
        if dead_ranks:
            raise TrainerDied(f"{what}: {'; '.join(dead_ranks.values())}") from broken.error
        if not dead_replicas:
            raise broken.error
        for number, reason in dead_replicas.items():
            self.restart_replica(number, reason, what, is_restore)

    def restart_replica(
        self, number: int, reason: str, what: str, is_restore: bool = False
    ) -> None:
        """Restart a failed replica, or give it up after MAX_ATTEMPTS syncs of all replicas in a
        row."""
        failures = self.in_a_row.get(number, 0)
        if not is_restore:
            failures += 1
        self.in_a_row[number] = failures
        if failures >= MAX_ATTEMPTS:
            self.rollout.exclude(
                number,
                f"it failed in {MAX_ATTEMPTS} weight syncs in a row; the last time: {reason}",
            )
        else:
            self.rollout.mark_failed(number, f"in the {what}: {reason}")
