"""What a trainer's death leaves alive: the pools, the vLLM replicas, the reward workers and the
endpoint's gateway.

`PersistentActors` belongs to one attempt at a time. An attempt that ends since a trainer died hands
it to the next one, which starts trainers and reuses the replicas; every other end of an attempt
ends it too.
"""

import asyncio
import contextlib
import dataclasses
import os
from collections import Counter
from typing import Any

import ray
from ray.util.placement_group import remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from agent_loop.base import uses_endpoint
from agent_loop.tools import MCP_SCHEMAS
from one_step_off.cluster.placement import (
    ProcessSlot,
    are_reserved,
    create_pools,
    reserve_replicas,
    spawn,
)
from one_step_off.cluster.remote_calls import call_all, observed
from one_step_off.cluster.run_events import RunEvents
from one_step_off.config.errors import ConfigError
from one_step_off.config.placement import lent_pool, processes_per_slot
from one_step_off.config.schema import Config
from one_step_off.config.sections.data import source_rewards
from one_step_off.config.sections.rollout import is_seeded
from one_step_off.config.user_code import LOG_FOLDER
from one_step_off.engines.engine_processes import ProcessId, kill_processes
from one_step_off.engines.vllm.processes import kill_engines_of_run
from one_step_off.rewards.scoring import Scorer
from one_step_off.rollout.replica import RolloutReplica
from one_step_off.rollout.replica_group import STOP_S, RolloutGroup, reuse_engines
from one_step_off.rollout.sampling import engine_seed
from one_step_off.runtime.prepare import RunInputs
from one_step_off.runtime.process_env import engine_env, process_env
from one_step_off.training.trainer_group import WorkerGroup


class PersistentActors:
    """The processes of a run that are no trainers, and the pools of all.

    Attributes:
        pools: pool name -> its process slots, node by node.
        pool_locks: pool name -> the lock by which the roles of a pool take turns on its devices.
        host: the address at which processes meet; "": each node's address in the network.
        endpoint: the gateway of external agents; None: the run has none.
        scorers: the reward workers.
        actors: every Ray actor of these, to be ended with them.
        attempt: of the attempt that uses them; engines that start get other seeds in each.
        rollout: the replicas, as the latest attempt sees them.
        sync_epoch: of the latest attempt's weight sync.
        replica_slots: replica index -> its slot.
        lent_slots: the same of the lent replicas, in slots of the actor's pool.
        reserved: slots for replicas that are about to join.
        frozen_groups: those of the frozen roles, which the latest attempt has handed over too.
    """

    def __init__(
        self,
        prepared: RunInputs,
        attempt: int = 0,
        trainers_only: bool = False,
        events: RunEvents | None = None,
        replicas: int | None = None,
    ) -> None:
        """Reserve the pools and create the processes; nothing is loaded yet.

        Args:
            attempt: the number of the attempt.
            trainers_only: create the pools, and no process.
            events: receives what happens to replicas, in all attempts.
            replicas: their number, where it was changed while the run went on; None: the config's.
                Where so many do not fit any more, there are fewer.

        Raises:
            ConfigError: the cluster has too little for a pool.
        """
        self.prepared = prepared
        self.cfg = prepared.cfg
        self.device = prepared.device
        self.attempt = attempt
        self.events = events
        self.sync_epoch = 0
        self.frozen_groups: dict[str, WorkerGroup] = {}
        self.host = "" if os.environ.get("RAY_ADDRESS") else "127.0.0.1"
        self.pools = create_pools(self.cfg, self.device, replicas)
        self.rollout_pool = self.cfg.placement.roles["rollout"]
        self.replica_slots = dict(enumerate(self.pools[self.rollout_pool]))
        self.reserved: list[ProcessSlot] = []
        if replicas is not None and not trainers_only:
            self._reserve_more(replicas - len(self.replica_slots))
        self.lent_slots: dict[int, ProcessSlot] = {}
        if lent_pool(self.cfg) and not trainers_only:
            first = len(self.replica_slots)
            self.lent_slots = dict(enumerate(self.pools[lent_pool(self.cfg)], start=first))
        self.env = process_env(self.device, self.host)
        self.log_folder = os.path.abspath(os.path.join(self.cfg.trainer.output_dir, LOG_FOLDER))
        self.replica_starts: Counter[int] = Counter()  # replica index -> how often it was started
        self.kv_cache_bytes: dict[int, int] = {}  # of replicas on a GPU that they share
        self.actors: list[Any] = []
        self.pool_locks = {pool: asyncio.Lock() for pool in self.pools}
        self.endpoint = None if trainers_only else self._create_endpoint()
        self.scorers = [] if trainers_only else self._create_scorers()
        self.actors += self.scorers
        slots = {} if trainers_only else self.replica_slots | self.lent_slots
        self.rollout = self._create_rollout_group([self._create_replica(i) for i in slots])
        self.former_rollout: RolloutGroup | None = None  # until its replicas are taken over

    @property
    def can_be_kept(self) -> bool:
        """Whether trainers can be started beside these replicas: they have their pool alone, one of
        them runs, and no node of the pools has failed."""
        may_stay = not self.rollout.shares_pool and bool(self.rollout.active)
        return may_stay and are_reserved(self.pools)

    def begin_attempt(self, attempt: int) -> None:
        """Another attempt uses these from now on, with locks and a replica group of its own: those
        of the attempt before belong to an event loop that has ended. Replicas that were being
        removed have left."""
        self.attempt = attempt
        self.pool_locks = {pool: asyncio.Lock() for pool in self.pools}
        former = self.rollout
        self.former_rollout = former
        self._release_reserved()
        gone = set(self.replica_slots) - set(former.supervisor.staying)
        children = former.supervisor.child_processes
        # They may not have been asked to stop yet.
        kills = [self._begin_engine_kill(i, children[i]) for i in gone if children[i]]
        if kills:
            ray.wait(kills, num_returns=len(kills), timeout=STOP_S)
        for index in gone:
            self._release_replica(index)
        self.rollout = self._create_rollout_group(former.replicas)
        for index in set(range(len(former.replicas))) - set(former.supervisor.staying):
            self.rollout.supervisor.mark_left(index)

    async def load(self) -> None:
        """Load all engines; or let those of the attempt before drop its work. Lent ones sleep
        then."""
        if self.former_rollout is None:
            await self.rollout.setup()
            await self._log_start_note()
            return
        former = self.former_rollout
        self.former_rollout = None
        await reuse_engines(self.rollout, former, self.attempt)

    async def _log_start_note(self) -> None:
        """Log what the first engine says of itself; the others are alike."""
        limit_s = self.cfg.trainer.step_timeout_s
        notes = await call_all(limit_s, "rollout", self.rollout.replicas[:1], "start_note")
        for note in filter(None, notes):
            self.rollout.events.log(note)

    def slot_share(self, pool: str) -> float:
        """The part of each process slot that Ray books for every process in it."""
        return 1.0 / processes_per_slot(self.cfg, pool)

    def _create_scorers(self) -> list[Any]:
        return [
            spawn(
                Scorer,
                (self.cfg.reward, source_rewards(self.cfg.data)),
                None,
                self.device,
                log=f"{self.log_folder}/reward_{index}.log",
            )
            for index in range(self.cfg.reward.workers)
        ]

    def _create_endpoint(self) -> Any:
        """The supervisor of the gateway; None: the run has no endpoint."""
        if not uses_endpoint(self.cfg, self.prepared.loop_names):
            return None
        # An HTTP server is slow to import, and most runs need none.
        from one_step_off.endpoint.supervisor import GatewaySupervisor

        def spawn_beside_driver(cls: type, args: tuple) -> Any:
            log = f"{self.log_folder}/endpoint.log"
            return spawn(cls, args, None, self.device, env=self.env, log=log)

        endpoint = GatewaySupervisor(
            self.cfg, len(self.replica_slots), bool(self.host), spawn_beside_driver
        )
        self.actors.append(endpoint.gateway)
        return endpoint

    def _create_replica(self, index: int) -> Any:
        seed = engine_seed(self.cfg.trainer.seed, self.attempt, index, self.replica_starts[index])
        self.replica_starts[index] += 1
        loop_names = self.prepared.loop_names
        cfg = self._replica_cfg(index)
        endpoint = self.endpoint.access if self.endpoint else None
        log = f"{self.log_folder}/rollout_{index}.log"
        args = (
            cfg,
            index,
            self.device,
            self.scorers,
            MCP_SCHEMAS,
            loop_names,
            seed,
            endpoint,
            log,
        )
        is_lent = index in self.lent_slots
        pool = lent_pool(self.cfg) if is_lent else self.rollout_pool
        replica = spawn(
            RolloutReplica,
            args,
            self._slot_of(index),
            self.device,
            self.slot_share(pool),
            engine_env(self.device, self.host),
            log,
        )
        self.actors.append(replica)
        return replica

    def _slot_of(self, index: int) -> ProcessSlot:
        return (self.replica_slots | self.lent_slots)[index]

    def _replica_cfg(self, index: int) -> Config:
        """The config of a replica. A lent one has the pool that it is in. One that is restarted on
        a shared GPU gets the KV cache of the first start.

        To choose a size, vLLM measures the GPU's memory and fails if another process frees some
        meanwhile. At the first start the trainer is not there yet; later it is at work.
        """
        if index in self.lent_slots:  # an engine that shares its pool can sleep
            placement = self.cfg.placement
            roles = placement.roles | {"rollout": lent_pool(self.cfg)}
            placement = dataclasses.replace(placement, roles=roles)
            return dataclasses.replace(self.cfg, placement=placement)
        size = self.kv_cache_bytes.get(index)
        if not size:
            return self.cfg
        # With a given size, vLLM's share of the memory says only how much must be free at the
        # start. The trainer may have some of it by now.
        known = {"kv_cache_memory_bytes": size, "gpu_memory_utilization": 0.01}
        engine_kwargs = known | self.cfg.rollout.engine_kwargs
        rollout = dataclasses.replace(self.cfg.rollout, engine_kwargs=engine_kwargs)
        return dataclasses.replace(self.cfg, rollout=rollout)

    def _create_rollout_group(self, replicas: list[Any]) -> RolloutGroup:
        cfg = self.cfg
        seeded = is_seeded(cfg.rollout, self.device)
        shares_pool = self.slot_share(self.rollout_pool) < 1
        lock = self.pool_locks[self.rollout_pool] if shares_pool else None
        restart, lent = self._restart_replica, self.lent_slots.keys()
        group = RolloutGroup(replicas, cfg, seeded, lock, restart, self.events, lent)
        group.supervisor.end_lent = self._end_lent
        return group

    async def _end_lent(self, index: int) -> None:
        """End the processes of a lent replica, and nothing of the slot, which is the actor's."""
        children = self.rollout.supervisor.child_processes[index]
        kill_all([self.rollout.replicas[index]])
        if children:
            await self._kill_engine(index, children)

    def _restart_replica(self, index: int) -> Any:
        """End what is left of a failed replica; returns a new one in its slot."""
        ray.kill(self.rollout.replicas[index])
        return self._create_replica(index)

    # --- replicas that join and leave -------------------------------------------------------------

    def _reserve_more(self, count: int) -> None:
        """Before any replica is created: up to `count` slots more than the config has, as many as
        fit."""
        target = len(self.replica_slots) + count
        try:
            while len(self.replica_slots) < target:
                (slot,) = self._new_slots(1)
                self.replica_slots[len(self.replica_slots)] = slot
                self._note_slots()
        except ConfigError as error:
            if self.events is not None:
                missing = target - len(self.replica_slots)
                self.events.log(f"{missing} rollout replicas less than before: {error}")

    def _note_slots(self) -> None:
        self.pools[self.rollout_pool] = list(self.replica_slots.values())

    def _new_slots(self, count: int) -> list[ProcessSlot]:
        present = [*self.pools[self.rollout_pool], *self.reserved]
        return reserve_replicas(self.cfg, self.device, count, present)

    def reserve_replicas(self, count: int) -> None:
        """Reserve slots for replicas that `join`. It waits for Ray, in a thread that outlives an
        attempt that ends meanwhile. Raises ConfigError: they do not fit."""
        reserved = self.reserved
        slots = self._new_slots(count)
        reserved += slots
        if reserved is not self.reserved:  # the attempt has ended, and nothing else frees them
            _release_all(reserved)

    def _release_reserved(self) -> None:
        former = self.reserved
        self.reserved = []
        _release_all(former)

    def join(self) -> int:
        """Start a replica more in the background, in a slot that is reserved. Returns its index."""
        slot = self.reserved.pop()

        def create(index: int) -> Any:
            self.replica_slots[index] = slot
            return self._create_replica(index)

        index = self.rollout.supervisor.join(create)
        self._note_slots()
        return index

    async def leave(self, index: int, limit_s: float) -> bool:
        """Remove a replica and free its devices; see `ReplicaSupervisor.leave`."""
        supervisor = self.rollout.supervisor
        if not await supervisor.leave(index, limit_s):
            return False
        children = supervisor.child_processes[index]  # a restart may have replaced them meanwhile
        stopped = observed(self.rollout.replicas[index].stop.remote())
        await asyncio.wait([stopped], timeout=STOP_S)
        if not stopped.done() or stopped.exception() is not None:
            await self._kill_engine(index, children)
        self._release_replica(index)
        return True

    async def _kill_engine(self, index: int, children: list[ProcessId]) -> None:
        # Its node may be gone, and then its processes are.
        await asyncio.wait([observed(self._begin_engine_kill(index, children))], timeout=STOP_S)

    def _begin_engine_kill(self, index: int, children: list[ProcessId]) -> Any:
        """Kill the processes below a replica that did not stop: an engine may outlive it, and would
        keep the device. Returns Ray's answer."""
        slot = self._slot_of(index)
        strategy = PlacementGroupSchedulingStrategy(slot.group, slot.bundle)
        kill = ray.remote(kill_processes).options(num_cpus=0, scheduling_strategy=strategy)
        return kill.remote(children)

    def _release_replica(self, index: int) -> None:
        kill_all([self.rollout.replicas[index]])
        self._release_slot(index)

    def _release_slot(self, index: int) -> None:
        remove_placement_group(self.replica_slots.pop(index).group)
        self._note_slots()

    async def keep_kv_cache_sizes(self) -> None:
        """Remember the KV cache of each engine, for `_replica_cfg`."""
        limit_s = self.cfg.trainer.start_timeout_s
        replicas = self.rollout.replicas
        sizes = await call_all(limit_s, "rollout", replicas, "kv_cache_bytes")
        self.kv_cache_bytes = dict(enumerate(sizes))

    async def end(self) -> None:
        """End all processes and release the pools."""
        # The engines have child processes, which end in good order only if asked.
        with contextlib.suppress(Exception):
            await self.rollout.stop()
        if self.endpoint:
            await self.endpoint.end()
        await asyncio.gather(*(group.stop() for group in self.frozen_groups.values()))
        frozen_ranks = [rank for group in self.frozen_groups.values() for rank in group.ranks]
        kill_all([*self.actors, *frozen_ranks])
        kill_engines_of_run()
        self._release_reserved()
        placement_groups = {}
        for slots in self.pools.values():
            for slot in slots:
                placement_groups[id(slot.group)] = slot.group
        for placement_group in placement_groups.values():
            remove_placement_group(placement_group)


def _release_all(slots: list[ProcessSlot]) -> None:
    """Empty this list of slots with a group each. Two threads may do so at once."""
    with contextlib.suppress(IndexError):
        while True:
            remove_placement_group(slots.pop().group)


def kill_all(actors: list[Any]) -> None:
    """End these Ray actors at once; those that are gone already do not matter."""
    for actor in actors:
        with contextlib.suppress(Exception):
            ray.kill(actor)
