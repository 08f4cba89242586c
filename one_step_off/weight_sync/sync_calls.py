"""The trainers and the replicas as the weight sync sees them, and the calls of one phase to all.

As soon as one call fails, the sync is aborted for all. `FailedSyncs` restarts the replicas that
failed.
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from one_step_off.cluster.errors import GIVEN_UP, PhaseTimeout, TrainerDied
from one_step_off.cluster.remote_calls import MAX_TRIES, name_failures, not_alive, observed
from one_step_off.config.schema import Config
from one_step_off.data.images import Images
from one_step_off.data.samples import PolicyVersion

LogProbs = list[np.ndarray]
"""float32 [tokens] of each sequence of the canary."""


class Trainers(Protocol):
    """The part of the actor's `WorkerGroup` that a sync uses."""

    ranks: list[Any]
    """Ray actor handles."""
    cfg: Config

    def score(
        self, sequences: list[np.ndarray], images: Sequence[Images] = ()
    ) -> Awaitable[LogProbs]:
        """The trainer's log-probs of the canary's tokens (int32 [tokens + 1] per sequence, with
        their images) at its current weights."""
        ...


class Replicas(Protocol):
    """The part of `ReplicaSupervisor` that a sync uses."""

    replicas: list[Any]
    """Ray actor handles, by replica number."""
    health: list[Any]
    """The `ReplicaHealth` of each replica; one that takes the place of another has its own."""
    cfg: Config
    syncing: bool
    """While it is set, new prompts wait."""
    lent: frozenset[int]
    """The numbers of those on the trainer's devices."""
    restore: Callable[..., Awaitable[bool]] | None
    """Brings verified weights to replicas, by their numbers; set by the sync."""

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


ABORT_TIMEOUT_S = 5.0
"""Seconds for the trainers to accept an abort."""

ABORT_NOTICE_S = 2.0
"""Seconds after an abort until the processes that have not ended their call are asked whether they
are alive."""

BUSY_GRACE_S = 12.0
"""Seconds after that, for the living ones to end what cannot be interrupted; a process that takes
longer hangs."""

SLOWEST_LINK = 50e6
"""Bytes per second: a sync slower than this counts as stuck."""

Abort = Callable[[Exception], Awaitable[None]]
"""Ends every wait of the sync's groups, because of an error."""


def transfer_limits(timeout_s: float, total_bytes: int) -> tuple[float, float]:
    """Seconds for the first process of a transfer to end, and for all others after that.

    Each wait inside has the limit `timeout_s`; these limits are for what hangs outside of those.
    All processes walk the buckets side by side, so when one has ended, the others soon will.

    Args:
        timeout_s: weight_sync.timeout_s.
        total_bytes: of a full sync.
    """
    slowest_s = total_bytes / SLOWEST_LINK
    return 3 * timeout_s + slowest_s, timeout_s + slowest_s


@dataclass
class SyncCall:
    """The call of one process."""

    who: str
    actor: Any
    answer: Awaitable[Any]
    replica: int | None = None
    """Its number; None: the process is a trainer."""


def begin_on_replicas(replicas: dict[int, Any], method: str, *args: Any) -> list[SyncCall]:
    """Call a method of each of these replicas, number -> Ray actor."""
    calls = []
    for number, replica in replicas.items():
        answer = getattr(replica, method).remote(*args)
        calls.append(SyncCall(f"rollout {number}", replica, answer, number))
    return calls


class BrokenSync(Exception):
    """A part of a sync failed, and the sync was aborted."""

    def __init__(self, error: Exception, hanging: list[SyncCall]) -> None:
        """`error`: the first failure. `hanging`: the calls that did not end after the abort."""
        super().__init__(str(error))
        self.error = error
        self.hanging = hanging


async def run_or_abort(
    what: str, calls: list[SyncCall], first_limit_s: float, rest_limit_s: float, abort: Abort
) -> list[Any]:
    """The answers of all calls, in their order.

    The sync is aborted as soon as one fails, if none has ended after `first_limit_s` seconds, or if
    some have not ended `rest_limit_s` seconds after the first one.

    Args:
        what: names the phase in errors.
        calls: already started.
        first_limit_s: see above.
        rest_limit_s: see above.
        abort: ends the other calls.

    Raises:
        BrokenSync: the sync was aborted.
    """
    tasks: dict[asyncio.Future, SyncCall] = {}
    for call in calls:
        task = observed(name_failures(f"{what}, {call.who}", call.answer))
        tasks[task] = call
    try:
        limit_s = await _wait_for_all(list(tasks), first_limit_s, rest_limit_s)
        pending = {task: call for task, call in tasks.items() if not task.done()}
        errors = _errors_of(task for task in tasks if task.done())
        if not errors and not pending:
            return [task.result() for task in tasks]
        if not errors:
            late = ", ".join(call.who for call in pending.values())
            errors = [PhaseTimeout(f"{what}, {late}: no answer in {limit_s:g} s")]
        await abort(errors[0])
        await _wait_after_abort(pending)
        errors += _errors_of(task for task in pending if task.done())
        hanging = [call for task, call in pending.items() if not task.done()]
        raise BrokenSync(_root_cause(errors), hanging)
    finally:
        for task in tasks:
            task.cancel()


async def find_failed(
    broken: BrokenSync, ranks: dict[str, Any], replicas: dict[int, Any]
) -> tuple[dict[str, str], dict[int, str]]:
    """The processes that are gone or hang after a broken sync.

    Args:
        broken: the failure.
        ranks: name -> Ray actor, of the trainers.
        replicas: number -> Ray actor, of those in the sync.

    Returns:
        Name -> reason of trainers, and number -> reason of replicas.
    """
    number_of = {f"rollout {number}": number for number in replicas}
    actors = {who: replicas[number] for who, number in number_of.items()}
    dead_ranks, dead_by_name = await asyncio.gather(not_alive(ranks), not_alive(actors))
    dead_replicas = {number_of[who]: reason for who, reason in dead_by_name.items()}
    limit_s = ABORT_NOTICE_S + BUSY_GRACE_S
    for call in broken.hanging:
        reason = f"{call.who}: it hangs, and did not end {limit_s:g} s after an abort"
        if call.replica is not None:
            dead_replicas.setdefault(call.replica, reason)
        else:
            dead_ranks.setdefault(call.who, reason)
    return dead_ranks, dead_replicas


async def await_quietly(calls: list[Awaitable[Any]]) -> None:
    """Await these calls for ABORT_TIMEOUT_S seconds at most, and ignore their failures: `not_alive`
    finds a process that fails or hangs."""
    with suppress(TimeoutError):
        async with asyncio.timeout(ABORT_TIMEOUT_S):
            await asyncio.gather(*calls, return_exceptions=True)


async def _wait_for_all(
    tasks: list[asyncio.Future], first_limit_s: float, rest_limit_s: float
) -> float:
    """Wait until all tasks have ended, one has failed, or a limit is reached. Returns the limit
    that was used last."""
    done, pending = await asyncio.wait(
        tasks, timeout=first_limit_s, return_when=asyncio.FIRST_COMPLETED
    )
    if not done or not pending or _errors_of(done):
        return first_limit_s
    await asyncio.wait(pending, timeout=rest_limit_s, return_when=asyncio.FIRST_EXCEPTION)
    return rest_limit_s


async def _wait_after_abort(pending: dict[asyncio.Future, SyncCall]) -> None:
    """Wait until the aborted calls have ended, but not for processes that are gone or stopped."""
    if not pending:
        return
    _, left = await asyncio.wait(pending, timeout=ABORT_NOTICE_S)
    dead = await not_alive({pending[task].who: pending[task].actor for task in left})
    busy = [task for task in left if pending[task].who not in dead]
    if busy:
        await asyncio.wait(busy, timeout=BUSY_GRACE_S)


def _errors_of(tasks: Any) -> list[Exception]:
    """The exceptions of these tasks, which have ended."""
    errors = [task.exception() for task in tasks]
    return [error for error in errors if error is not None]


def _root_cause(errors: list[Exception]) -> Exception:
    """The first error of a process that failed by itself, and not because another one gave up the
    sync."""
    for error in errors:
        if GIVEN_UP not in str(error):
            return error
    return errors[0]


class FailedSyncs:
    """Restarts replicas that failed in a sync, but not for ever."""

    def __init__(self, actor: Trainers, rollout: Replicas) -> None:
        """`actor`, `rollout`: those that sync."""
        self.actor = actor
        self.rollout = rollout

    def passed(self, number: int) -> None:
        """A replica has passed a sync of all replicas."""
        self.rollout.health[number].failed_syncs = 0

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
        """Restart a failed replica, or give it up after MAX_TRIES syncs of all replicas in a
        row."""
        health = self.rollout.health[number]
        if not is_restore:
            health.failed_syncs += 1
        if health.failed_syncs >= MAX_TRIES:
            self.rollout.exclude(
                number,
                f"it failed in {MAX_TRIES} weight syncs in a row; the last time: {reason}",
            )
        else:
            self.rollout.mark_failed(number, f"in the {what}: {reason}")
