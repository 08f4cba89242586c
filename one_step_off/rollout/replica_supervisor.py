"""Replica restart: heartbeats, failed replicas, and new processes in their place.

A replica that dies or hangs is restarted in the background. Meanwhile the others generate what it
had not returned, with the same weights. It serves again when `restore` has brought the last
verified weights to it.
"""

import asyncio
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from one_step_off.cluster.errors import PhaseTimeout, ProcessDied, RoleError, TrainerDied
from one_step_off.cluster.remote_calls import (
    MAX_TRIES,
    name_failures,
    not_alive,
    observed,
    with_time_limit,
)
from one_step_off.cluster.run_events import RunEvents
from one_step_off.config.placement import start_limit_s
from one_step_off.config.schema import Config
from one_step_off.engines.engine_processes import ProcessId
from one_step_off.rollout.health import ReplicaHealth, ReplicaState

PING_S = 10.0  # for a replica to answer a heartbeat
RETRY_S = 0.2  # until the healthy replicas are looked for again


class NoReplica(RoleError):
    """All replicas have failed, and none could be restarted."""


class ReplicaFailed(Exception):
    """A replica was given up while a call to it was pending."""


@dataclass
class ReplicaLoad:
    """Numbers of trajectories of one replica since its start.

    Attributes:
        sent: given to it.
        returned: that have come back.
        idle: that asked nothing of its engine when it last reported
            (`RolloutReplica.wait_for_capacity`).
        capacity: that may ask for its engine at once, by the same report; None: it has not
            reported yet.
    """

    sent: int = 0
    returned: int = 0
    idle: int = 0
    capacity: int | None = None

    @property
    def generating(self) -> int:
        """Trajectories that use its engine or wait for it, as far as is known."""
        return self.sent - max(self.returned, self.idle)


class ReplicaSupervisor:
    """Knows which replicas are healthy, and restarts those that fail.

    Attributes:
        replicas: the current process of each replica, as Ray actors.
        health: the state of each replica.
        child_processes: the processes below each replica; those of a dead one are killed by its
            successor.
        restart_tasks: replica index -> its restart. A task that has failed stays: that replica is
            excluded for good.
        restarts: how many restarts have begun.
        syncing: a weight sync is under way, so prompts wait.
        restore: brings verified weights into one replica, and returns whether it is still there;
            `WeightSync` sets it.
        loads: what was asked of the current process of each replica; the router counts it.
    """

    def __init__(
        self,
        replicas: list[Any],
        cfg: Config,
        respawn: Callable[[int], Any] | None = None,
        shares_pool: bool = False,
        events: RunEvents | None = None,
    ) -> None:
        """
        Args:
            respawn: called with the index of a replica, ends what is left of its process and
                returns a new one. None: a failed replica ends the attempt.
            shares_pool: another role uses the devices too, so nothing can be restarted beside its
                work.
            events: receives what happens to replicas, for the user.
        """
        self.replicas = list(replicas)
        self.cfg = cfg
        self.respawn = respawn
        self.shares_pool = shares_pool
        self.health = [
            ReplicaHealth(cfg.rollout.heartbeat_timeout_s, cfg.rollout.progress_timeout_s)
            for _ in replicas
        ]
        self.child_processes: list[list[ProcessId]] = [[] for _ in replicas]
        self.restart_tasks: dict[int, asyncio.Future] = {}
        self.restarts = 0
        self.syncing = False
        self.restore: Callable[[int], Awaitable[bool]] | None = None
        self.events = events or RunEvents()
        self.loads = [ReplicaLoad() for _ in replicas]
        # Done when that replica has failed, so that its calls end.
        self._failure_events: dict[int, asyncio.Future] = defaultdict(asyncio.Future)
        # Of replicas whose weights are not verified; done when their canary has ended.
        self._canaries: dict[int, asyncio.Future[None]] = {}

    @property
    def active(self) -> list[int]:
        """The replicas that take part in syncs: all that are neither being restarted nor
        excluded."""
        return [i for i in range(len(self.replicas)) if i not in self.restart_tasks]

    # --- heartbeats -------------------------------------------------------------------------------

    async def watch(self) -> None:
        """Ask every replica for a heartbeat again and again, and restart those that failed; runs
        until it is canceled.

        Raises:
            TrainerDied: a trainer was found dead when a restarted replica asked for its weights.
        """
        while True:
            for task in self.restart_tasks.values():
                if task.done() and not task.cancelled():
                    error = task.exception()
                    if isinstance(error, TrainerDied):
                        raise error
            await asyncio.gather(*(self._check_heartbeat(i) for i in self.active))
            await asyncio.sleep(self.cfg.rollout.heartbeat_s)

    async def _check_heartbeat(self, i: int) -> None:
        health = self.health[i]
        if health.state is ReplicaState.STALE:  # a sync is under way, which has limits of its own
            health.reset_timeouts(time.monotonic())
            return
        try:
            finished_requests, running_requests = await self._ping(i)
            health.heartbeat(time.monotonic(), finished_requests, running_requests)
        except PhaseTimeout:
            health.heartbeat_missed()
        except RoleError as e:
            self.mark_failed(i, str(e))
            return
        if health.state is ReplicaState.STALE:
            return
        reason = health.failure_reason(time.monotonic())
        if reason:
            self.mark_failed(i, reason)

    def _ping(self, i: int) -> Awaitable[tuple[int, int]]:
        name = f"rollout {i}"
        return with_time_limit(PING_S, name, name_failures(name, self.replicas[i].ping.remote()))

    async def _is_gone(self, i: int) -> bool:
        """Whether a replica is gone or stopped, or its engine died. A busy one is not."""
        name = f"rollout {i}"
        return name in await not_alive({name: self.replicas[i]})

    # --- states -----------------------------------------------------------------------------------

    def mark_stale(self) -> None:
        """A sync begins: no active replica holds verified weights until its canary has passed.

        What a replica returns until then is held back: with partial rollouts it continues its
        prompts as soon as it has the new weights.
        """
        for i in self.active:
            self.health[i].transition_to(ReplicaState.STALE)
            self.hold_back(i)

    def mark_synced(self, i: int, replica: Any) -> None:
        """The process `replica` holds verified weights and may serve, unless it was replaced or has
        died since."""
        health = self.health[i]
        if replica is not self.replicas[i] or health.state is ReplicaState.DEAD:
            return
        health.transition_to(ReplicaState.HEALTHY)
        health.reset_timeouts(time.monotonic())
        canary = self._canaries.pop(i, None)
        if canary is not None:
            canary.set_result(None)

    def hold_back(self, i: int) -> None:
        """From now on `wait_until_verified` waits for this replica's canary."""
        if i not in self._canaries:
            self._canaries[i] = asyncio.get_running_loop().create_future()

    async def wait_until_verified(self, i: int) -> None:
        """Hold back what replica `i` has returned until its weights are verified; at once if they
        are.

        Raises:
            ReplicaFailed: it was given up before that.
        """
        canary = self._canaries.get(i)
        if canary is not None:
            await asyncio.wait([canary])
            canary.result()

    async def wait_for_healthy(self) -> list[int]:
        """The replicas that may get prompts. Where there are none, waits for one.

        Raises:
            NoReplica: all have failed, and none could be restarted.
        """
        while True:
            states = {i: self.health[i].state for i in self.active}
            healthy = [i for i, state in states.items() if state is ReplicaState.HEALTHY]
            if healthy:
                return healthy
            one_may_recover = ReplicaState.SUSPECT in states.values()
            if not self.syncing and not one_may_recover:
                await self._wait_for_restart()
            await asyncio.sleep(RETRY_S)

    async def wait_for_any_replica(self) -> None:
        """Wait until there is a replica for a sync, whatever weights it has.

        Raises:
            NoReplica: all have failed, and none could be restarted.
        """
        while not self.active:
            await self._wait_for_restart()

    async def _wait_for_restart(self) -> None:
        """Wait until one of the restarts has ended, well or not. Raises NoReplica: all have
        failed."""
        running = [task for task in self.restart_tasks.values() if not task.done()]
        if not running:
            self.syncing = False  # prompts that wait for the end of a sync must learn this too
            reasons = "; ".join(str(task.exception()) for task in self.restart_tasks.values())
            raise NoReplica(
                "no replica is left, and none could be restarted: "
                + (reasons or "they hold no verified weights")
            )
        await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)

    # --- failure and restart ----------------------------------------------------------------------

    async def call(self, i: int, purpose: str, method: str, *args: Any) -> Any:
        """Call a method of a replica. A failure of the call marks the replica as failed if its
        process is gone.

        Raises:
            ReplicaFailed: the replica was given up meanwhile.
            RoleError: the replica raised it, and is still there.
        """
        name = f"{purpose}, rollout {i}"
        failure_event = self._failure_events[i]
        answer = getattr(self.replicas[i], method).remote(*args)
        call = observed(name_failures(name, answer))
        try:
            await asyncio.wait([call, failure_event], return_when=asyncio.FIRST_COMPLETED)
            if failure_event.done():
                raise ReplicaFailed(name)
            error = call.exception()
            if isinstance(error, RoleError) and await self._is_gone(i):
                self.mark_failed(i, str(error))
                raise ReplicaFailed(name) from error
            return call.result()
        finally:
            call.cancel()

    def mark_failed(self, i: int, reason: str) -> None:
        """Give a replica up and restart it in the background.

        Raises:
            ProcessDied: it cannot be restarted beside the work of the other roles in its pool.
        """
        if i in self.restart_tasks:
            return
        self._give_up(i, reason)
        self.events.log(f"rollout {i} failed ({reason}); restarting it")
        self.restarts += 1
        self.restart_tasks[i] = observed(self._restart(i))  # `_wait_for_restart` reports it

    def exclude(self, i: int, reason: str) -> None:
        """Give a replica up for good, because a restart would not help. Raises as `mark_failed`."""
        self._give_up(i, reason)
        if i in self.restart_tasks:
            self.restart_tasks[i].cancel()
        with suppress(ValueError):  # a stand-in in a test is no Ray actor
            import ray

            ray.kill(self.replicas[i])  # it may hang, and hold its device
        self.events.log(f"rollout {i} is excluded from now on: {reason}")
        excluded = asyncio.get_running_loop().create_future()
        excluded.set_exception(RoleError(f"rollout {i}: {reason}"))
        _mark_exception_retrieved(excluded)  # `_wait_for_restart` reports it
        self.restart_tasks[i] = excluded

    def _give_up(self, i: int, reason: str) -> None:
        if self.shares_pool or self.respawn is None:
            raise ProcessDied(f"rollout {i}: {reason}")
        self.health[i].transition_to(ReplicaState.DEAD)
        failure_event = self._failure_events.pop(i, None)
        if failure_event is not None:
            failure_event.set_result(None)
        canary = self._canaries.pop(i, None)
        if canary is not None:
            canary.set_exception(ReplicaFailed(f"rollout {i}: its canary was not scored"))
            _mark_exception_retrieved(canary)
        self.loads[i] = ReplicaLoad()

    async def _restart(self, i: int) -> None:
        """Start a new process in the replica's place and bring it the last weights. Raises the last
        try's error."""
        begin = time.monotonic()
        for number in range(1, MAX_TRIES + 1):
            try:
                await self._try_restart(i)
                del self.restart_tasks[i]
                seconds = time.monotonic() - begin
                self.events.log(f"rollout {i} is back after {seconds:.1f} s")
                return
            except TrainerDied:  # no restart of this replica helps; `watch` raises it
                raise
            except Exception as e:  # whatever it is, the other replicas keep working
                last = number == MAX_TRIES
                consequence = "; it is excluded from now on" if last else ""
                self.events.log(f"restart of rollout {i} failed: {e}{consequence}")
                self.health[i].transition_to(ReplicaState.DEAD)
                if last:
                    raise

    async def _try_restart(self, i: int) -> None:
        """One try of a restart. Raises its failure."""
        name = f"rollout {i}, start"
        self.replicas[i] = self.respawn(i)
        answer = self.replicas[i].start.remote(self.child_processes[i])
        limit_s = start_limit_s(self.cfg, "rollout")
        _, self.child_processes[i] = await with_time_limit(
            limit_s, name, name_failures(name, answer)
        )
        self.health[i].transition_to(ReplicaState.STALE)
        if not await self.restore(i):
            raise ReplicaFailed("it died in its first sync")


def _mark_exception_retrieved(task: asyncio.Future) -> None:
    """asyncio reports the exception of every task that is never asked for it."""
    if not task.cancelled():
        task.exception()
