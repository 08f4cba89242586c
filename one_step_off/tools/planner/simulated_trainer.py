"""Stand-ins for the trainer and the weight sync, whose calls sleep for modeled times.

`SimulatedSync` does what `WeightSync` does at the calls of the pipeline, in the same order: the
trainer's half of the canary, the transfer, the replicas' half. Samples are held back by the
program's own `ReplicaSupervisor`.
"""

import asyncio

from one_step_off.cluster.remote_calls import now
from one_step_off.data.samples import Batch, PolicyVersion
from one_step_off.rollout.replica_group import RolloutGroup
from one_step_off.tools.planner.shared_device import SharedDevice
from one_step_off.tools.planner.work import Work
from one_step_off.weight_sync.versions import VersionTable


class SimulatedTrainer:
    """All ranks of a trainer that trains by `Work`.

    Attributes:
        weights_are_sent: then the optimizer may change them.
    """

    def __init__(
        self,
        work: Work,
        ranks: int,
        rollout: RolloutGroup,
        device: SharedDevice | None = None,
    ) -> None:
        """`device`: shared with the replicas; None: the ranks have their own alone."""
        self.device = device
        self.work = work
        self.ranks = ranks
        self.weights_are_sent = asyncio.Event()
        self._device_lock = rollout.pool_lock if rollout.shares_pool else asyncio.Lock()

    async def use_devices(self, seconds: float) -> None:
        """Work for `seconds`, when the devices are free."""
        async with self._device_lock:
            if self.device:
                await self.device.train(seconds)
            else:
                await asyncio.sleep(seconds)

    async def update(self, batch: Batch, learn: bool = True) -> dict[str, float]:
        """One step. Its optimizer waits until the replicas have the weights."""
        work = self.work
        tokens = sum(sample.extra["tokens"] + work.prompt_tokens for sample in batch.samples)
        seconds = work.train_fixed_s + work.train_token_s * tokens / self.ranks
        await self.use_devices(seconds * work.before_step)
        begin = now()
        await self.weights_are_sent.wait()
        waited = now() - begin
        await self.use_devices(seconds * (1 - work.before_step))
        self.weights_are_sent.clear()
        return {"actor/sync_wait_s": waited}


class SimulatedAhead:
    """The part of a transfer that the replicas receive while they still generate, as
    `AheadTransfer`. All layouts are taken as proved."""

    def __init__(self, seconds: float) -> None:
        """`seconds`: of this part."""
        self.seconds = seconds
        self._task: asyncio.Task | None = None

    def begin(self, version: int) -> None:
        """The replicas begin to receive `version`."""
        self._task = asyncio.ensure_future(asyncio.sleep(self.seconds))

    async def finish(self) -> float:
        """Wait for what was begun. Returns the seconds by which the transfer at the pause is
        shorter."""
        if self._task is None:
            return 0.0
        await self._task
        self._task = None
        return self.seconds


class SimulatedSync:
    """The weight sync from a trainer to all replicas of a group.

    Attributes:
        ahead: called by the pipeline with weight_sync.receive_ahead.
    """

    def __init__(self, work: Work, trainer: SimulatedTrainer, rollout: RolloutGroup) -> None:
        self.work = work
        self.trainer = trainer
        self.rollout = rollout
        self.versions = VersionTable()
        self.ahead = SimulatedAhead(work.ahead_s)
        self._canary_beside: asyncio.Task | None = None  # the replicas' half, under way

    def score_canary(self) -> asyncio.Task:
        """The trainer's half of the canary, before anything that is called later."""
        return asyncio.ensure_future(self.trainer.use_devices(self.work.canary_s))

    async def fail(self, error: BaseException) -> None:
        """No process waits here."""

    async def release(self, version: int) -> None:
        """No replica needs these weights: they may change."""
        self.trainer.weights_are_sent.set()

    async def __call__(
        self, stamp: PolicyVersion, expected: asyncio.Task | None = None
    ) -> dict[str, float]:
        """A weight sync. `expected`: the canary, where it has been started already."""
        begin = now()
        metrics = await self._transfer(expected, stamp)
        await self._score_at_replicas()
        _, version = stamp
        await self.release(version)
        return metrics | {"time/sync_s": now() - begin}

    async def deliver(
        self, stamp: PolicyVersion, expected: asyncio.Task | None = None
    ) -> dict[str, float]:
        """A weight sync until the replicas have the weights; `verified` must be awaited next.
        Arguments: as a call."""
        begin = now()
        metrics = await self._transfer(expected, stamp)
        self._canary_beside = asyncio.ensure_future(self._score_beside_prompts())
        return metrics | {"time/sync_s": now() - begin}

    async def verified(self) -> dict[str, float]:
        """Wait until the canary of the last `deliver` was accepted."""
        if self._canary_beside is None:
            return {}
        await self._canary_beside
        self._canary_beside = None
        await self.release(0)
        return {}

    async def _transfer(
        self, expected: asyncio.Task | None, stamp: PolicyVersion
    ) -> dict[str, float]:
        """The trainer's half of the canary, and the transfer. What the replicas return from then on
        is held back."""
        await (expected or self.score_canary())
        self.versions.send(stamp, [])
        for i, replica in enumerate(self.rollout.replicas):
            # Not `mark_stale`: prompts that come now wait in the paused replica. With it they would
            # ask for a healthy one every RETRY_S, which are many steps of a long simulated sync.
            self.rollout.supervisor.mark_unverified(i, replica)
        received_s = await self.ahead.finish()
        for replica in self.rollout.replicas:
            replica.pause()
        paused_s = self.work.transfer_s - received_s
        await asyncio.sleep(paused_s)
        for replica in self.rollout.replicas:
            replica.resume(stamp)
        return {"sync/paused_s": paused_s}

    async def _score_beside_prompts(self) -> None:
        """The same, where the replicas divide their time between canary and prompts."""
        slowdown = self.work.canary_slowdown
        for replica in self.rollout.replicas:
            replica.set_slowdown(slowdown)
        await asyncio.sleep(self.work.replica_canary_s * (slowdown - 1))
        await self._score_at_replicas()
        for replica in self.rollout.replicas:
            replica.set_slowdown(1.0)

    async def _score_at_replicas(self) -> None:
        """The replicas' half of the canary, and its acceptance."""
        await asyncio.sleep(self.work.replica_canary_s)
        for i, replica in enumerate(self.rollout.replicas):
            self.rollout.supervisor.mark_synced(i, replica)
