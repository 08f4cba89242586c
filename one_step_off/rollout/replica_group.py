"""The groups of processes as the pipeline sees them: a few awaitable methods, each with a time limit.

`TrainGroup` is a role with a model on one or more ranks, `RolloutGroup` the vLLM replicas; `weight_sync.py` is the
bridge between the two. The pipeline is tested with stand-ins that have the same methods.
"""

import asyncio
import heapq
import itertools
import time
from collections import defaultdict, deque
from collections.abc import Awaitable, Callable, Iterator
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from typing import Any

from one_step_off.algorithms.advantages import ADVANTAGE_ESTIMATORS
from one_step_off.cluster.errors import PhaseTimeout, ProcessDied, RoleError, TrainerDied
from one_step_off.cluster.remote_calls import (
    MAX_ATTEMPTS,
    call_all,
    name_failures,
    not_alive,
    now,
    with_time_limit,
)
from one_step_off.config.schema import Config
from one_step_off.data.samples import Prompt, Sample
from one_step_off.rollout.health import ReplicaHealth, ReplicaState
from one_step_off.rollout.vllm_replica import Sampling

PING_S = 10.0  # so long a replica may take to say that it is there
STOP_S = 10.0  # for all engines to end in good order
PAUSE_S = 0.2  # before one that may be ill is looked at again


class NoReplica(RoleError):
    """All replicas are lost, and none of them came back."""


class Lost(Exception):
    """A replica was given up while it was asked for something."""


@dataclass
class Load:
    """Trajectories of a replica: `sent` to it, come `back`, and that asked nothing of its engine when it said so last (`away`)."""

    sent: int = 0
    back: int = 0
    away: int = 0

    @property
    def now(self) -> int:
        """Those that generate or are to, as far as is known."""
        return self.sent - max(self.back, self.away)


class RolloutGroup:
    """The vLLM replicas. A prompt's trajectories stay on one of them: its cache knows the prompt and the turns so far.

    Prompts go to them in turn, so that a run's routing depends on nothing but its data; or each to the one on which the
    fewest trajectories generate (`rollout.routing`). Then a replica is sent no more than keep its engine full: the other
    prompts wait for whichever is done first.

    A replica that dies or hangs is started anew in the background (`lose`). Meanwhile the others make what it had not
    returned, with the same weights; it serves again when `restore` has brought it to them.
    """

    def __init__(
        self, replicas: list[Any], cfg: Config, seeded: bool, turn: Any = None, respawn: Any = None
    ) -> None:
        """`turn`: shared with the other roles in the pool, if there are any. `respawn`: called with the number of a replica
        it ends what is left of that and returns a new one in its place; None: to lose one ends the run."""
        self.replicas, self.cfg, self.respawn = list(replicas), cfg, respawn
        self.pool_lock, self.shares_pool = turn or nullcontext(), turn is not None
        self.health = [
            ReplicaHealth(cfg.rollout.heartbeat_timeout_s, cfg.rollout.progress_timeout_s)
            for _ in replicas
        ]
        self.child_processes: list[Any] = [()] * len(replicas)
        self.restart_tasks: dict[
            int, asyncio.Future
        ] = {}  # replicas that are restarted; failed: left out for good
        self.losses = defaultdict(
            asyncio.Future
        )  # of those that were asked for something; done: it was lost
        self.restarts, self.syncing = 0, False
        self.on_message: Callable[[str], None] = lambda line: None
        self.on_trace: Callable[[list[tuple[str, str, Any, float, float]]], None] = lambda spans: (
            None
        )
        self.worked = defaultdict(dict)  # at what, who: (from when, to when)
        self.drawn: dict[tuple[int, str], float] = {}  # to when, in the timeline
        self.restore: Callable[[int], Awaitable[bool]] | None = (
            None  # verified weights into one; see WeightSync
        )
        self.static = cfg.rollout.routing == "static" or (cfg.rollout.routing == "auto" and seeded)
        self.loads, self.replica_capacity = [Load() for _ in replicas], cfg.agent.max_concurrency
        own, seed, longest = cfg.rollout, cfg.trainer.seed, cfg.rollout.val_max_response_length
        greedy = "baselines" in ADVANTAGE_ESTIMATORS.find(cfg.algorithm.adv_estimator).needs
        self.train_sampling = Sampling(
            own.n, own.temperature, seed if seeded else None, greedy=greedy
        )
        # Other seeds for evaluation than for training, whatever the prompts' ids.
        self.val_sampling = Sampling(
            own.val_n, own.val_temperature, seed + 1 if seeded else None, own.val_top_p, longest
        )

    @property
    def active(self) -> list[int]:
        """Those that take part in syncs: all but what is being started anew."""
        return [i for i in range(len(self.replicas)) if i not in self.restart_tasks]

    async def setup(self) -> None:
        """Load all engines."""
        started = await call_all(
            self.cfg.trainer.start_timeout_s, "rollout", self.replicas, "start"
        )
        at_once, self.child_processes = map(list, zip(*started, strict=True))
        self.replica_capacity = min(self.replica_capacity, *at_once)

    async def watch(self) -> None:
        """Ask every replica again and again whether it is there, and give up what is not; runs until it is cancelled. Raises
        TrainerDied: that was noticed when a restarted replica was to get its weights."""
        while True:
            for task in self.restart_tasks.values():
                failed = task.done() and not task.cancelled()
                if failed and isinstance(error := task.exception(), TrainerDied):
                    raise error
            await asyncio.gather(*(self._look(i) for i in self.active))
            await asyncio.sleep(self.cfg.rollout.heartbeat_s)

    async def _look(self, i: int) -> None:
        health = self.health[i]
        if health.state is ReplicaState.STALE:  # in a sync, which has limits of its own
            return health.begin(time.monotonic())
        try:
            health.heartbeat(time.monotonic(), *await self._ping(i))
        except PhaseTimeout:
            health.missed()
        except RoleError as e:
            return self.mark_failed(i, str(e))
        if health.state is not ReplicaState.STALE and (fault := health.fault(time.monotonic())):
            self.mark_failed(i, fault)

    def _ping(self, i: int) -> Awaitable[tuple[int, int]]:
        return with_time_limit(
            PING_S, f"rollout {i}", name_failures(f"rollout {i}", self.replicas[i].ping.remote())
        )

    async def not_alive(self, numbers: list[int]) -> dict[int, str]:
        """Which of these replicas are gone or stopped, or have lost their engine: number -> why. A busy one is not."""
        names = {f"rollout {i}": i for i in numbers}
        reasons = await not_alive({who: self.replicas[i] for who, i in names.items()})
        return {names[who]: why for who, why in reasons.items()}

    def mark_failed(self, i: int, why: str) -> None:
        """Give a replica up and start it anew in the background. Raises ProcessDied where there is no room for that
        beside the work of the others in its pool."""
        if i in self.restart_tasks:
            return
        self._give_up(i, why)
        self.on_message(f"rollout {i} failed ({why}); restarting it")
        self.restarts += 1
        self.restart_tasks[i] = asyncio.create_task(self._revive(i))
        self.restart_tasks[i].add_done_callback(
            lambda task: task.cancelled() or task.exception()
        )  # `serving` raises it

    def exclude(self, i: int, why: str) -> None:
        """Give a replica up for good: a new start would not help. Raises as `lose`."""
        self._give_up(i, why)
        if i in self.restart_tasks:
            self.restart_tasks[i].cancel()
        with suppress(ValueError):  # a stand-in's
            import ray

            ray.kill(self.replicas[i])  # it may hang, and hold its device
        self.on_message(f"rollout {i} is left out from now on: {why}")
        self.restart_tasks[i] = asyncio.get_running_loop().create_future()
        self.restart_tasks[i].set_exception(RoleError(f"rollout {i}: {why}"))
        self.restart_tasks[i].exception()  # noted; `serving` raises it

    def _give_up(self, i: int, why: str) -> None:
        if self.shares_pool or not self.respawn:
            raise ProcessDied(f"rollout {i}: {why}")
        self.health[i].transition_to(ReplicaState.DEAD)
        if loss := self.losses.pop(i, None):
            loss.set_result(None)
        self.loads[i] = Load()

    async def _revive(self, i: int) -> None:
        limit, what, begin = self.cfg.trainer.start_timeout_s, f"rollout {i} anew", time.monotonic()
        for left in reversed(range(MAX_ATTEMPTS)):
            try:
                self.replicas[i] = self.respawn(i)
                ((_, self.child_processes[i]),) = await call_all(
                    limit, what, [self.replicas[i]], "start", self.child_processes[i]
                )
                self.health[i].transition_to(ReplicaState.STALE)
                if not await self.restore(i):
                    raise Lost("it died in its first sync")
                del self.restart_tasks[i]
                return self.on_message(
                    f"rollout {i} is back after {time.monotonic() - begin:.1f} s"
                )
            except TrainerDied:  # no other start of this replica helps; `watch` raises it
                raise
            except Exception as e:  # whatever it is, the others go on
                self.on_message(f"{what}: {e}" + ("" if left else "; it is left out from now on"))
                self.health[i].transition_to(ReplicaState.DEAD)
                if not left:
                    raise

    async def wait_for_healthy(self) -> list[int]:
        """Those that may be given prompts; where all are being started anew, waits for the first. Raises NoReplica."""
        while not (
            ready := [i for i in self.active if self.health[i].state is ReplicaState.HEALTHY]
        ):
            if not self.syncing and not any(
                self.health[i].state is ReplicaState.SUSPECT for i in self.active
            ):
                await self._wait_for_one()
            await asyncio.sleep(PAUSE_S)
        return ready

    def mark_stale(self) -> None:
        """A sync begins: no active replica holds verified weights until its canary has passed."""
        for i in self.active:
            self.health[i].transition_to(ReplicaState.STALE)

    def mark_synced(self, number: int, replica: Any) -> None:
        """The process `replica` holds verified weights and may serve, unless it was replaced or has died since."""
        health = self.health[number]
        if replica is not self.replicas[number] or health.state is ReplicaState.DEAD:
            return
        health.transition_to(ReplicaState.HEALTHY)
        health.begin(time.monotonic())

    async def wait_for_any_replica(self) -> None:
        """Wait until there is a replica for a sync, whatever weights it has. Raises NoReplica."""
        while not self.active:
            await self._wait_for_one()

    async def _wait_for_one(self) -> None:
        """Until one that is being started anew is there, or given up. Raises NoReplica: all are."""
        alive = [task for task in self.restart_tasks.values() if not task.done()]
        if not alive:
            self.syncing = False  # who waits for a sync to end is to learn it too
            why = (
                "; ".join(str(x.exception()) for x in self.restart_tasks.values())
                or "they hold no verified weights"
            )
            raise NoReplica(f"no replica is left, and none could be started anew: {why}")
        await asyncio.wait(alive, return_when=asyncio.FIRST_COMPLETED)

    async def _ask(self, i: int, what: str, method: str, *args: Any) -> Any:
        """Call a method of a replica. Raises Lost: it was given up meanwhile."""
        name, lost, begin = f"{what}, rollout {i}", self.losses[i], time.time()
        call = asyncio.ensure_future(
            name_failures(name, getattr(self.replicas[i], method).remote(*args))
        )
        try:
            await asyncio.wait([call, lost], return_when=asyncio.FIRST_COMPLETED)
            if lost.done():
                raise Lost(name)
            if isinstance(error := call.exception(), RoleError) and await self.not_alive([i]):
                self.mark_failed(i, str(error))
                raise Lost(name) from error
            if method == "rollout" and not error:
                first, _ = self.worked[what].get(i, (begin, None))
                self.worked[what][i] = min(begin, first), time.time()
            return call.result()
        finally:
            call.cancel()

    async def generate(
        self,
        prompts: list[Prompt],
        what: str,
        sampling: Sampling,
        land: Callable[[list[Sample]], None] | None = None,
    ) -> tuple[list[Sample], float]:
        """All samples in the order of `prompts`, and the seconds that they took. `land` is told of each prompt's samples as
        they come. Raises NoReplica, and what a replica raised that is there."""
        async with self.pool_lock:
            begin, work = now(), self._shared_out(prompts, what, sampling, land)
            steps = (
                2 + self.cfg.pipeline.max_carry if land else 1
            )  # in which these may be under way
            samples = await with_time_limit(
                steps * self.cfg.trainer.step_timeout_s, f"{what}, rollout", work
            )
            seconds = now() - begin
        kind, lane = (
            ("evaluate", " evaluation") if sampling is self.val_sampling else ("generate", "")
        )
        step, worked = what.partition(",")[0].split()[-1].strip("v"), self.worked.pop(what, {})
        # Of several at once each is drawn from where the one before ended.
        begins = {i: max(start, self.drawn.get((i, kind), 0.0)) for i, (start, _) in worked.items()}
        ends = {i: end for i, (_, end) in worked.items() if begins[i] < end}
        self.drawn |= {(i, kind): end for i, end in ends.items()}
        self.on_trace(
            [(f"rollout {i}{lane}", kind, step, begins[i], end) for i, end in ends.items()]
        )
        position = {p.id: i for i, p in enumerate(prompts)}
        return sorted(samples, key=lambda s: (position[s.prompt_id], s.index)), seconds

    async def _shared_out(
        self,
        prompts: list[Prompt],
        what: str,
        sampling: Sampling,
        land: Callable | None,
        losses: int = 0,
    ) -> list[Sample]:
        """All samples, in any order; the first failure is raised at once. `losses`: how often a replica was lost that had
        these prompts."""
        calls, asked, left = [], {}, deque(prompts)

        async def share(i: int, load: Load, own: list[Prompt]) -> list[Sample]:
            if (
                self.health[i].state is not ReplicaState.HEALTHY
            ):  # a sync began since they were given out; its call went first
                load.sent -= len(own) * sampling.size
                return await self._shared_out(own, what, sampling, land, losses)
            try:
                samples = await self._ask(i, what, "rollout", own, sampling)
            except Lost as e:
                if losses + 1 >= MAX_ATTEMPTS:  # they may be what replicas die of
                    raise ProcessDied(
                        f"{e}: {MAX_ATTEMPTS} replicas in a row were lost with the same prompts"
                    ) from e
                return await self._shared_out(own, what, sampling, land, losses + 1)
            load.back += len(samples)
            if land:
                land(samples)
            return samples

        try:
            async with asyncio.TaskGroup() as group:
                while left:
                    ready, shares = await self.wait_for_healthy(), defaultdict(list)
                    for i, prompt in self._give(ready, left, sampling.size, in_turn=not land):
                        # What a replica gets at a time is one call, for calls cost more than samples, if nobody waits for each.
                        shares[i, prompt.id if land else None].append(prompt)
                        self.loads[
                            i
                        ].sent += (
                            sampling.size
                        )  # now, for others may share out before the call is made
                    for (i, _), own in shares.items():
                        calls.append(group.create_task(share(i, self.loads[i], own)))
                    if left:
                        asked = {i: task for i, task in asked.items() if not task.done()}
                        asked |= {
                            i: group.create_task(self._room(i, what))
                            for i in ready
                            if i not in asked
                        }
                        await asyncio.wait(asked.values(), return_when=asyncio.FIRST_COMPLETED)
                for task in asked.values():
                    task.cancel()
        except ExceptionGroup as e:  # as it is without a group
            raise e.exceptions[0] from e.exceptions[0].__cause__
        return [sample for call in calls for sample in call.result()]

    def _give(
        self, ready: list[int], left: deque[Prompt], size: int, in_turn: bool
    ) -> Iterator[tuple[int, Prompt]]:
        """Take what replicas are to be given now out of `left`, prompts of `size` trajectories: with `in_turn` all, if so
        they are shared out; else to the one that has least to do, as long as it has room."""
        if in_turn and (self.static or len(self.replicas) == 1):
            yield from zip(itertools.cycle(ready), list(left))
            left.clear()
        heap = sorted((self.loads[i].now, i) for i in ready)
        while left and heap[0][0] < self.replica_capacity:
            load, i = heap[0]
            heapq.heapreplace(heap, (load + size, i))
            yield i, left.popleft()

    async def _room(self, i: int, what: str) -> None:
        """Wait until replica `i` has room, whatever is at its tools or still to be scored; or is lost."""
        load = self.loads[i]
        with suppress(Lost):
            load.away = await self._ask(
                i, what, "wait_for_capacity", load.sent, self.replica_capacity
            )

    async def sleep(self) -> None:
        """Free the devices for another role's turn; the next sync wakes the replicas."""
        await call_all(self.cfg.trainer.step_timeout_s, "rollout", self.replicas, "sleep")

    async def stop(self) -> None:
        """End all engines; what does not answer is left to be killed."""
        for task in self.restart_tasks.values():
            task.cancel()
        ends = asyncio.gather(
            *(replica.stop.remote() for replica in self.replicas), return_exceptions=True
        )
        await with_time_limit(STOP_S, "rollout, stop", ends)
