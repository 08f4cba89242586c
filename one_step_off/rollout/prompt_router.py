"""Assigns each prompt to a replica."""

import asyncio
import heapq
import itertools
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass

from one_step_off.cluster.errors import ProcessDied
from one_step_off.cluster.remote_calls import MAX_TRIES
from one_step_off.data.samples import Prompt, PromptId, Sample
from one_step_off.rollout.health import ReplicaState
from one_step_off.rollout.replica_supervisor import (
    ReplicaFailed,
    ReplicaLeft,
    ReplicaLoad,
    ReplicaSupervisor,
)
from one_step_off.rollout.sampling import Sampling
from one_step_off.rollout.timeline import ReplicaTimeline

OnGroup = Callable[[list[Sample]], None]
"""Receives all samples of one prompt, as soon as they are complete."""


@dataclass(frozen=True)
class GenerationCall:
    """What is common to all prompts of one generation call.

    Attributes:
        purpose: for messages, as "step 3" or "evaluation of v2".
        on_group: receives each prompt's samples as they come; None: the caller waits for all of
            them.
        on_begin: receives each prompt when it goes to a replica; with `on_group`.
    """

    purpose: str
    sampling: Sampling
    on_group: OnGroup | None = None
    on_begin: Callable[[Prompt], None] | None = None


class PromptRouter:
    """Gives prompts to replicas. All trajectories of a prompt stay on one replica, whose cache
    knows the prompt.

    Static routing gives prompts to the replicas round-robin, so that a run's routing depends on
    nothing but its data. Otherwise each prompt goes to the replica on which the fewest trajectories
    generate. A replica gets no more than keep its engine full, and than its KV cache has room for,
    and nothing before it has said how much that is; the other prompts wait for the replica that has
    capacity first.
    """

    def __init__(
        self,
        supervisor: ReplicaSupervisor,
        timeline: ReplicaTimeline,
        static: bool,
        replica_capacity: int,
    ) -> None:
        """
        Args:
            static: see `rollout.routing`.
            replica_capacity: trajectories that keep one replica's engine full.
        """
        self._queues: list[deque[Prompt]] = []  # of each call, what no replica has got yet
        self.supervisor = supervisor
        self.timeline = timeline
        self.static = static
        self.replica_capacity = replica_capacity

    @property
    def loads(self) -> list[ReplicaLoad]:
        """Of each replica; a restarted one begins with none."""
        return self.supervisor.loads

    @property
    def waiting(self) -> int:
        """How many prompts wait for a replica that has room for them. 0 while one that may serve
        has not said how much it has."""
        if self._silent:
            return 0
        return sum(len(queue) for queue in self._queues)

    @property
    def _silent(self) -> list[int]:
        """The replicas that may get prompts, and have not said how many."""
        return [i for i in self.supervisor.healthy if self.loads[i].capacity is None]

    async def generate(
        self, prompts: list[Prompt], request: GenerationCall, failures: int = 0
    ) -> list[Sample]:
        """All samples of these prompts, in any order.

        Args:
            failures: how many replicas have failed that had these prompts.

        Raises:
            NoReplica: all replicas have failed.
            ProcessDied: the prompts were with so many failed replicas that they may be the cause.
            Exception: the first failure that a replica reported, at once.
        """
        waiting = deque(prompts)
        self._queues.append(waiting)
        calls: list[asyncio.Task] = []
        capacity_waits: dict[int, asyncio.Task] = {}
        try:
            async with asyncio.TaskGroup() as tasks:
                while waiting:
                    # One that may serve from now on, as one that joins, gets prompts at once.
                    next_verified = self.supervisor.next_verified()
                    healthy = await self._wait_for_replicas(request)
                    for i, share in self._assign(healthy, waiting, request):
                        call = self._generate_share(i, self.loads[i], share, request, failures)
                        calls.append(tasks.create_task(call))
                    if not waiting:
                        break
                    capacity_waits = {i: t for i, t in capacity_waits.items() if not t.done()}
                    for i in healthy:
                        if i not in capacity_waits:
                            wait = self._wait_for_capacity(i, request.purpose)
                            capacity_waits[i] = tasks.create_task(wait)
                    events = [*capacity_waits.values(), next_verified]
                    await asyncio.wait(events, return_when=asyncio.FIRST_COMPLETED)
                for wait in capacity_waits.values():
                    wait.cancel()
        except ExceptionGroup as e:  # the caller gets the failure as it was raised
            raise e.exceptions[0] from e.exceptions[0].__cause__
        finally:
            self._queues = [queue for queue in self._queues if queue is not waiting]
        return [sample for call in calls for sample in call.result()]

    def _gives_all(self, request: GenerationCall) -> bool:
        """Whether all prompts are given out at once: routing is static, or there is never a second
        replica. Not where the caller wants each prompt's samples as they come."""
        return request.on_group is None and (self.static or self.supervisor.is_only_one)

    async def _wait_for_replicas(self, request: GenerationCall) -> list[int]:
        """The replicas that may get prompts, and whose capacity is known where it matters."""
        while True:
            healthy = await self.supervisor.wait_for_healthy()
            if not self._silent or self._gives_all(request):
                return healthy
            # All of them: the first one to answer would get the prompts of the others.
            questions = [self._wait_for_capacity(i, request.purpose) for i in self._silent]
            await asyncio.gather(*questions)

    def _assign(
        self, healthy: list[int], waiting: deque[Prompt], request: GenerationCall
    ) -> list[tuple[int, list[Prompt]]]:
        """Take prompts out of `waiting`; returns the calls to make, as (replica, its prompts).

        A call costs more than a sample, so a replica gets all its prompts in one, unless the caller
        wants each prompt's samples as they come.
        """
        wants_each = request.on_group is not None
        shares: dict[tuple[int, PromptId | None], list[Prompt]] = defaultdict(list)
        routed = self.route(healthy, waiting, request.sampling.size, self._gives_all(request))
        for i, prompt in routed:
            shares[i, prompt.id if wants_each else None].append(prompt)
            if request.on_begin is not None:
                request.on_begin(prompt)
            # Counted before the call is made: another generation call may choose replicas in
            # between.
            self.loads[i].sent += request.sampling.size
        return [(i, share) for (i, _), share in shares.items()]

    def route(
        self, healthy: list[int], waiting: deque[Prompt], group_size: int, round_robin: bool
    ) -> Iterator[tuple[int, Prompt]]:
        """Take out of `waiting` the prompts that replicas get now, as (replica, prompt).

        Args:
            group_size: trajectories per prompt.
            round_robin: give out all prompts at once.
        """
        if round_robin:
            yield from zip(itertools.cycle(healthy), list(waiting))
            waiting.clear()
        heap = sorted((self.loads[i].generating, i) for i in healthy)
        while waiting and heap:
            generating, i = heap[0]
            capacity = self.loads[i].capacity
            if capacity is None or generating >= capacity:
                heapq.heappop(heap)
                continue
            heapq.heapreplace(heap, (generating + group_size, i))
            yield i, waiting.popleft()

    async def _generate_share(
        self,
        i: int,
        load: ReplicaLoad,
        prompts: list[Prompt],
        request: GenerationCall,
        failures: int,
    ) -> list[Sample]:
        """The samples of these prompts from replica `i`, or from others if it fails."""
        if self.supervisor.health[i].state is not ReplicaState.HEALTHY:
            # A sync began since the prompts were routed, and its call reached the replica first.
            load.sent -= len(prompts) * request.sampling.size
            return await self.generate(prompts, request, failures)
        begin = time.time()
        try:
            samples = await self.supervisor.call(
                i, request.purpose, "rollout", prompts, request.sampling
            )
            self.timeline.record(request.purpose, i, begin)
            # Samples of weights that are not verified must not leave this class.
            await self.supervisor.wait_until_verified(i)
        except ReplicaLeft:
            return await self.generate(prompts, request, failures)
        except ReplicaFailed as e:
            if failures + 1 >= MAX_TRIES:
                raise ProcessDied(
                    f"{e}: {MAX_TRIES} replicas in a row failed with the same prompts"
                ) from e
            return await self.generate(prompts, request, failures + 1)
        load.returned += len(prompts) * request.sampling.size
        if request.on_group is not None:
            request.on_group(samples)
        return samples

    async def _wait_for_capacity(self, i: int, purpose: str) -> None:
        """Wait until replica `i` can take more, or has failed; the first time, until it has said
        how much it can take."""
        load = self.loads[i]
        sent = 0 if load.capacity is None else load.sent
        with suppress(ReplicaFailed):
            load.idle, load.capacity = await self.supervisor.call(
                i, purpose, "wait_for_capacity", sent, self.replica_capacity
            )
