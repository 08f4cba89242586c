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
        device: SharedDevice | None,
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


class SimulatedSync:
    """The weight sync from a trainer to all replicas of a group."""

    def __init__(self, work: Work, trainer: SimulatedTrainer, rollout: RolloutGroup) -> None:
        self.work = work
        self.trainer = trainer
        self.rollout = rollout
        self.versions = VersionTable()

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
            self.rollout.supervisor.mark_synced(i, replica)
            self.rollout.supervisor.hold_back(i)
        for replica in self.rollout.replicas:
            replica.pause()
        await asyncio.sleep(self.work.transfer_s)
        for replica in self.rollout.replicas:
            replica.resume(stamp)
        return {"sync/paused_s": self.work.transfer_s}

    async def _score_at_replicas(self) -> None:
        """The replicas' half of the canary, and its acceptance."""
        await asyncio.sleep(self.work.replica_canary_s)
        for i, replica in enumerate(self.rollout.replicas):
            self.rollout.supervisor.mark_synced(i, replica)
