"""The processes of a supervised run: the ranks of the actor in their pool, and nothing else."""

import asyncio
import contextlib
import os

import ray
from ray.util.placement_group import remove_placement_group

from one_step_off.cluster.errors import PhaseTimeout, ProcessDied, RoleError
from one_step_off.cluster.placement import create_pools, spawn
from one_step_off.cluster.remote_calls import not_alive, observed
from one_step_off.cluster.run_events import RunEvents
from one_step_off.config.errors import ConfigError
from one_step_off.config.roles import role_settings
from one_step_off.runtime.prepare import RunInputs
from one_step_off.runtime.process_env import trainer_env
from one_step_off.runtime.processes import answering_ranks
from one_step_off.supervised_trainer import SupervisedRoles
from one_step_off.training.fsdp.fsdp_workers import SupervisedWorker
from one_step_off.training.trainer_group import WorkerGroup


class SupervisedProcesses:
    """As `RunProcesses`, for a run without rollouts.

    Attributes:
        pools: pool name -> its process slots.
        groups: the actor's group.
        roles: what the supervised pipeline works with.
        keeps_engines, endpoint: there are none.
    """

    keeps_engines = False
    endpoint = None

    def __init__(self, prepared: RunInputs, events: RunEvents | None = None) -> None:
        """Reserve the pool and create the ranks, which report to `events`; nothing is loaded yet.
        Raises ConfigError: the cluster has too little for the pool."""
        self.cfg = prepared.cfg
        host = "" if os.environ.get("RAY_ADDRESS") else "127.0.0.1"
        self.pools = create_pools(self.cfg, prepared.device)
        slots = self.pools[self.cfg.placement.roles["actor"]]
        total_steps = prepared.data.stream.total_steps
        env = trainer_env(prepared.device, host)
        ranks = []
        for index, slot in enumerate(slots):
            args = (self.cfg, "actor", index, len(slots), prepared.device, total_steps)
            ranks.append(spawn(self._worker_class(), args, slot, prepared.device, env=env))
        self.actor = WorkerGroup("actor", ranks, self.cfg, host=host, events=events)
        self.groups = {"actor": self.actor}
        self.roles = SupervisedRoles(self.actor)

    def _worker_class(self) -> type:
        if role_settings(self.cfg, "actor").backend == "megatron":
            # An extra, and slow to import.
            from one_step_off.training.megatron.megatron_workers import MegatronSupervisedWorker

            return MegatronSupervisedWorker
        return SupervisedWorker

    async def setup(self) -> None:
        """Load the model on all ranks."""
        await self.actor.setup()

    async def is_process_failure(self, error: Exception, rejoin_failed: bool = False) -> bool:
        """Whether the attempt ended because a process died or hangs; see `RunProcesses`."""
        if isinstance(error, (ProcessDied, PhaseTimeout)):
            return True
        # A process that waited for the one that died may have failed first.
        may_follow = isinstance(error, (RoleError, ConfigError))
        return may_follow and bool(await not_alive(answering_ranks(self.groups)))

    async def hand_over_engines(self) -> None:
        """None: there are no engines that the next attempt could keep."""

    async def end(self) -> None:
        """End all processes and release the pool."""
        for rank in self.actor.ranks:
            with contextlib.suppress(Exception):
                ray.kill(rank)
        groups = {id(slot.group): slot.group for slots in self.pools.values() for slot in slots}
        for placement_group in groups.values():
            remove_placement_group(placement_group)

    async def save_state(self, folder: str) -> asyncio.Future:
        """Let the actor copy its part of a checkpoint. The part is written when the answer is
        awaited."""
        return observed(asyncio.gather(await self.actor.save_state(folder)))

    async def load_state(self, folder: str) -> None:
        """Load a checkpoint's state into the actor; after `setup`."""
        await self.actor.load_state(folder)
