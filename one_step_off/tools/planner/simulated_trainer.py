"""The trainer's side of the simulation, and the devices that both sides share."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

from one_step_off.cluster.remote_calls import now
from one_step_off.data.samples import Batch, PolicyVersion
from one_step_off.rollout.replica_group import RolloutGroup
from one_step_off.tools.planner.work import Work
from one_step_off.weight_sync.versions import VersionTable

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
