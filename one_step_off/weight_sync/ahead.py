"""Early transfer of new weights: replicas receive them while they still generate with the previous
version. This module is what the driver does for it.

Where generation is the longer phase, the trainer has new weights before the replicas pause. The
senders then send immediately, and each worker receives into spare memory. At the pause the worker
copies this memory into its model. The weights are not used earlier: checksums and canary are
checked at the pause, as in every sync.

There is no early transfer unless every worker has a proved layout. If the groups are created again,
all weights are sent at the pause.
"""

import asyncio
import math
from contextlib import suppress
from typing import Any, Protocol

from one_step_off.cluster.errors import SyncError
from one_step_off.cluster.remote_calls import observed
from one_step_off.config.schema import WeightSyncConfig
from one_step_off.weight_sync.canary_beside import CanaryBeside
from one_step_off.weight_sync.participants import Replicas
from one_step_off.weight_sync.sync_calls import (
    MethodCall,
    SyncCall,
    run_or_abort,
    transfer_limits,
)

MIB = 1 << 20


class ConnectedSync(Protocol):
    """The part of `WeightSync` that an early transfer uses."""

    cfg: WeightSyncConfig
    lock: asyncio.Lock
    """Held by a sync."""
    canary_beside: CanaryBeside | None
    """The canary of the sync before, while it is scored."""
    rollout: Replicas
    connected_replicas: list[Any]
    """The actor handles that the groups were created for."""
    members: list[tuple[Any, int]]
    """The ranks that give their pieces to a sender."""
    total_bytes: int
    """Of a full sync; known once `connect` has ended."""

    def sends_sharded_only(self, replicas: list[Any]) -> bool:
        """Whether the layouts of these replicas are proved."""
        ...

    def begin_transfer(
        self, replicas: dict[int, Any], send: MethodCall, receive: MethodCall
    ) -> list[SyncCall]:
        """Call a method of every sending rank, and one of these replicas."""
        ...

    async def abort(self, error: Exception) -> None:
        """End every wait of the groups."""
        ...


class AheadTransfer:
    """The first part of one sync, at most one at a time."""

    def __init__(self, sync: ConnectedSync) -> None:
        """`sync`: whose groups and processes are used."""
        self.sync = sync
        self.version: int | None = None
        self.task: asyncio.Task | None = None

    def begin(self, version: int) -> None:
        """Begin to send `version` while the replicas still generate. The next sync must be of the
        same version, and the trainer's weights must not change before it has ended. Returns at
        once; does nothing where it is not possible."""
        sync = self.sync
        limit_bytes = self._limit_bytes()
        replicas = {number: sync.rollout.replicas[number] for number in sync.rollout.active}
        if not self._is_possible(list(replicas.values()), limit_bytes):
            return
        calls = sync.begin_transfer(
            replicas,
            ("send_ahead", version, limit_bytes),
            ("receive_ahead", version, limit_bytes),
        )
        what = f"weight sync of version {version}, ahead"
        limits = transfer_limits(sync.cfg.timeout_s, sync.total_bytes)
        self.version = version
        # `finish` may come much later or never.
        self.task = observed(run_or_abort(what, calls, *limits, sync.abort))

    def _is_possible(self, replicas: list[Any], limit_bytes: int) -> bool:
        """Whether nothing else uses the groups, and their workers' layouts are proved."""
        sync = self.sync
        is_idle = self.task is None and sync.canary_beside is None and not sync.lock.locked()
        has_groups = bool(replicas) and replicas == sync.connected_replicas
        is_allowed = not self._is_off_by_bound(limit_bytes)
        return is_idle and has_groups and is_allowed and sync.sends_sharded_only(replicas)

    def _limit_bytes(self) -> int:
        """The spare memory that a worker may use."""
        return (self.sync.cfg.receive_ahead_mb << 20) or self.sync.total_bytes

    def _is_off_by_bound(self, limit_bytes: int) -> bool:
        """Whether sender groups and the bound of the spare memory exclude each other: a rank that
        gives its pieces to another one gives all of them at once."""
        return bool(self.sync.members) and limit_bytes < self.sync.total_bytes

    def warning(self) -> str | None:
        """For a run that asks for early transfers and can have none: a line that says why, and
        which values would do. None: there may be some. After `connect`."""
        cfg = self.sync.cfg
        if not cfg.receive_ahead or not self._is_off_by_bound(self._limit_bytes()):
            return None
        model_mb = math.ceil(self.sync.total_bytes / MIB)
        return (
            f"warning: weight_sync.receive_ahead_mb={cfg.receive_ahead_mb}: nothing is received "
            f"ahead in this run, because its trainer ranks form sender groups, which send all "
            f"{model_mb} MiB of the model at once; set it to 0 or to at least {model_mb}, or set "
            "weight_sync.max_senders=0"
        )

    async def finish(self, version: int) -> None:
        """Wait for what was begun, before the rest of `version` is sent.

        Raises:
            BrokenSync: it failed.
            SyncError: another version was begun.
        """
        if self.task is None:
            return
        task, begun = self.task, self.version
        self.task = None
        await task
        if begun != version:
            raise SyncError(f"version {begun} was sent ahead, and {version} is to be sent")

    async def discard(self) -> None:
        """End what was begun: its groups are about to be closed."""
        if self.task is None:
            return
        task = self.task
        self.task = None
        if not task.done():
            await self.sync.abort(SyncError(f"version {self.version} is sent in other groups"))
        with suppress(Exception):
            await task
