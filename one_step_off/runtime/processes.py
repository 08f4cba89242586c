"""All processes of a run, created in the pools of their roles and grouped for the pipeline.

`RunProcesses` are those of RL, `SupervisedProcesses` those of supervised steps."""

import asyncio
import contextlib
import os
from typing import Any

import ray
from ray.util.placement_group import remove_placement_group

from one_step_off.checkpoint import TRAINED_ROLES, loaded_roles
from one_step_off.cluster.errors import (
    CanaryFailed,
    PhaseTimeout,
    ProcessDied,
    RoleError,
    SyncError,
)
from one_step_off.cluster.placement import ProcessSlot, create_pools, spawn
from one_step_off.cluster.remote_calls import not_alive, observed
from one_step_off.cluster.run_events import RunEvents
from one_step_off.config.errors import ConfigError
from one_step_off.config.placement import shares_device
from one_step_off.config.roles import load_section_tokenizer, role_settings
from one_step_off.config.schema import Config
from one_step_off.config.teachers import DEFAULT_TEACHER, config_of_teacher, teacher_paths
from one_step_off.data.run_data import RunData
from one_step_off.data.teacher_rows import teacher_lookup
from one_step_off.engines.vllm.teacher_engine import TeacherEngine
from one_step_off.ray_trainer import RunGroups
from one_step_off.rollout.replica_supervisor import NoReplica
from one_step_off.runtime.persistent_actors import PersistentActors, kill_all
from one_step_off.runtime.prepare import RunInputs
from one_step_off.runtime.process_env import engine_env, trainer_env
from one_step_off.supervised_trainer import SupervisedGroups
from one_step_off.training.back_ends import worker_class
from one_step_off.training.reward_models import LocalRewardModel, RemoteRewardModel
from one_step_off.training.teachers import TeacherEngineGroup, TeacherGroup, Teachers
from one_step_off.training.trainer_group import WorkerGroup
from one_step_off.training.worker_interface import INTERFACES
from one_step_off.weight_sync.coordinator import WeightSync


class RunProcesses:
    """The roles of a run, and all Ray actors behind them.

    Attributes:
        engines: the pools, and all processes that are no trainers.
        keeps_engines: whether they come from the attempt before.
        hands_over: whether the next attempt gets them, so that they live on.
        has_started: whether everything is loaded and connected.
        reused_groups: names of frozen groups that have the ranks of the previous attempt.
        roles: what the pipeline works with.
        groups: role -> its group, for every role that holds a model besides the replicas. The
            teachers of a source are "teacher.SOURCE".
    """

    def __init__(
        self,
        prepared: RunInputs,
        attempt: int = 0,
        trainers_only: bool = False,
        kept: PersistentActors | None = None,
        events: RunEvents | None = None,
        replicas: int | None = None,
    ) -> None:
        """Reserve the pools and create the processes; nothing is loaded yet.

        Args:
            attempt: the number of the attempt; engines sample with other seeds in each.
            trainers_only: create only the trainable roles, and no engines.
            kept: the pools and engines of the attempt before; None: they are created.
            events: receives what the groups, the replicas and the weight sync report.
            replicas: see `PersistentActors`.

        Raises:
            ConfigError: the cluster has too little for a pool.
        """
        self.prepared = prepared
        self.cfg = prepared.cfg
        self.device = prepared.device
        self.events = events or RunEvents()
        self.keeps_engines = kept is not None
        self.hands_over = False
        self.has_started = False
        if kept is not None:
            kept.begin_attempt(attempt)
        self.engines = kept or PersistentActors(
            prepared, attempt, trainers_only, self.events, replicas
        )
        self.reused_groups: set[str] = set()
        pool_of_role = self.cfg.placement.roles
        self.groups: dict[str, WorkerGroup] = {}
        for role in TRAINED_ROLES if trainers_only else INTERFACES:
            if role in pool_of_role:
                for name, cfg in config_of_groups(self.cfg, role).items():
                    self.groups[name] = self._create_group(name, role, cfg)
        for group in self.groups.values():
            if pool_of_role[group.role] == pool_of_role["rollout"]:
                group.colocated = self.engines.rollout
        self.roles = self._create_roles()

    @property
    def pools(self) -> dict[str, list[ProcessSlot]]:
        """Pool name -> its process slots, node by node."""
        return self.engines.pools

    @property
    def endpoint(self) -> Any:
        """The gateway of external agents; None: the run has none."""
        return self.engines.endpoint

    @property
    def host(self) -> str:
        """The address at which processes meet; "": each node's address in the network."""
        return self.engines.host

    def _create_group(self, name: str, role: str, cfg: Config) -> WorkerGroup:
        """The processes of a role that holds a model, or of one teacher.

        Args:
            name: of the group.
            cfg: the config as its processes see it.
        """
        former = self.engines.frozen_groups.pop(name, None)
        if former is None:
            return self._group_of(role, cfg, self._spawn_ranks(role, cfg))
        self.reused_groups.add(name)
        group = self._group_of(role, cfg, former.ranks)
        group.shares = former.shares
        group.has_answered = former.has_answered
        return group

    def _spawn_ranks(self, role: str, cfg: Config) -> list[Any]:
        if role_settings(cfg, role).backend == "vllm":
            return self._spawn_teacher_engines(cfg)
        back_end = role_settings(cfg, role).backend
        cls = worker_class(f"{role}.backend", back_end, role)
        pool = self.cfg.placement.roles[role]
        slots = self.pools[pool]
        total_steps = self.prepared.data.stream.total_steps
        share = self.engines.slot_share(pool)
        env = trainer_env(self.device, self.host)
        ranks = []
        for index, slot in enumerate(slots):
            args = (cfg, role, index, len(slots), self.device, total_steps)
            ranks.append(spawn(cls, args, slot, self.device, share, env))
        return ranks

    def _spawn_teacher_engines(self, cfg: Config) -> list[Any]:
        env = engine_env(self.device, self.host)
        engines = []
        for index, slot in enumerate(self.pools[cfg.placement.roles["teacher"]]):
            log = f"{self.engines.log_folder}/teacher_{index}.log"
            args = (cfg, index, self.device, log)
            engines.append(spawn(TeacherEngine, args, slot, self.device, env=env, log=log))
        return engines

    def _group_of(self, role: str, cfg: Config, ranks: list[Any]) -> WorkerGroup:
        lock = self.engines.pool_locks[cfg.placement.roles[role]]
        if role == "teacher":
            has_engines = role_settings(cfg, role).backend == "vllm"
            group_class = TeacherEngineGroup if has_engines else TeacherGroup
            return group_class(role, ranks, cfg, lock, self.host, self.events)
        if role != "reward_model":
            group = WorkerGroup(role, ranks, cfg, lock, self.host, self.events)
            if self.prepared.canary_images:
                group.find_prompt = self.prepared.data.find
            return group
        return LocalRewardModel(
            role,
            ranks,
            self.cfg,
            lock,
            self.host,
            self.events,
            find_prompt=self.prepared.data.find,
            policy_tokenizer=self.prepared.tokenizer,
            reward_tokenizer=load_section_tokenizer(self.cfg, role),
        )

    def _create_roles(self) -> RunGroups:
        actor = self.groups["actor"]
        rollout = self.engines.rollout
        canary = self.prepared.canary
        sync = WeightSync(
            actor,
            rollout.supervisor,
            canary,
            self.host,
            self._replicas_on_device_of_rank(),
            self.events,
            self.prepared.canary_images,
        )
        sync.epoch = self.engines.sync_epoch  # receivers that stay have been in these groups
        models: dict[str, Any] = {}
        for name, group in self.groups.items():
            if group.role not in ("actor", "teacher"):
                models[name] = group
        if "teacher" in self.groups:
            models["teacher"] = teachers_of(self.cfg, self.groups, self.prepared.data)
        if self.cfg.reward_model.url:
            models["reward_model"] = RemoteRewardModel(
                self.cfg, self.prepared.data.find, self.events
            )
        return RunGroups(actor, rollout, sync, **models)

    def _replicas_on_device_of_rank(self) -> list[list[int]]:
        """Per rank of the actor the replicas on its device: in its process slot, or on CPUs
        anywhere on its node."""
        pool_of_role = self.cfg.placement.roles
        rank_slots = self.pools[pool_of_role["actor"]]
        first = min(self.engines.lent_slots, default=0)  # of the replicas in the actor's pool
        if pool_of_role["actor"] != pool_of_role["rollout"] and not self.engines.lent_slots:
            replica_slots = self.pools[pool_of_role["rollout"]]
            # Pools with shares have the same bundle.
            return [
                [i for i, slot in enumerate(replica_slots) if slot.shares_bundle(rank_slot)]
                for rank_slot in rank_slots
            ]
        # In a shared pool each slot holds one rank and one replica.
        replicas_of_ranks = []
        for rank, rank_slot in enumerate(rank_slots):
            if self.device == "cpu":
                slots = enumerate(rank_slots, start=first)
                same_node = [i for i, slot in slots if slot.node == rank_slot.node]
                replicas_of_ranks.append(same_node)
            else:
                replicas_of_ranks.append([first + rank])
        return replicas_of_ranks

    async def setup(self) -> None:
        """Load every model and engine, and connect the weight sync.

        All at once, but not in a pool that roles share, nor with lent replicas: there the engines
        go first, and then sleep.
        On a GPU that pools share the processes take turns where one measures its memory, see
        `device_turns`. Engines that were kept drop what they have of the attempt before."""
        engines = self.engines
        loading = [self._load_groups]
        shares_pool = any(group.colocated for group in self.groups.values())
        if shares_pool and not self.keeps_engines:
            await engines.load()
            await engines.rollout.sleep()
        elif engines.lent_slots:
            await engines.load()
        else:
            loading.append(engines.load)
        if self.endpoint:
            loading.append(self.endpoint.start)
        await asyncio.gather(*(load() for load in loading))
        if shares_device(self.cfg, self.cfg.placement.roles["rollout"]) and not self.keeps_engines:
            await engines.keep_kv_cache_sizes()
        await self.roles.sync.connect()
        self.has_started = True

    async def _load_groups(self) -> None:
        """Load the models of all roles that were not kept."""
        groups = [group for role, group in self.groups.items() if role not in self.reused_groups]
        await asyncio.gather(*(group.setup() for group in groups))

    async def is_process_failure(self, error: Exception, rejoin_failed: bool = False) -> bool:
        """Whether the attempt ended because a process died or hangs, so that another attempt may
        succeed.

        Args:
            rejoin_failed: it ended before its first step, with engines of the attempt before. Then
                a failure of any process counts: it may be one of the state that was kept, and the
                next attempt starts all processes.
        """
        if isinstance(error, CanaryFailed):
            return False
        if isinstance(error, (ProcessDied, PhaseTimeout)):
            return True
        if rejoin_failed and isinstance(error, (RoleError, SyncError)):
            return True
        # ConfigError: ranks whose load of a checkpoint was cut off by another one's death say that
        # it does not fit.
        may_follow = isinstance(error, (RoleError, SyncError, ConfigError))
        if isinstance(error, NoReplica) or not may_follow:
            return False
        # A process that waited for the one that died may have failed first. None waits for one that
        # is still starting, which does not answer yet.
        processes = answering_ranks(self.groups)
        rollout = self.roles.rollout
        if rollout.has_answered:
            for index in rollout.active:
                processes[f"rollout {index}"] = rollout.replicas[index]
        return bool(await not_alive(processes))

    async def hand_over_engines(self) -> PersistentActors | None:
        """The engines, for the next attempt: where everything had started, trainers have failed,
        and engines can be kept. With them go the frozen roles that have not failed.
        From then on `end` ends the others alone."""
        if not self.has_started or not self.engines.can_be_kept:
            return None
        failed = await not_alive(ranks_by_name(self.groups))
        if not failed:
            return None
        failed_roles = {_role_of(name) for name in failed}
        for role in self.groups.keys() - TRAINED_ROLES - failed_roles:
            self.engines.frozen_groups[role] = self.groups.pop(role)
        self.hands_over = True
        self.engines.sync_epoch = self.roles.sync.epoch
        return self.engines

    async def end(self) -> None:
        """End all processes and release their process slots."""
        await asyncio.gather(*(group.stop() for group in self.groups.values()))
        for group in self.groups.values():
            kill_all(group.ranks)
        if not self.hands_over:
            await self.engines.end()

    async def save_state(self, folder: str) -> asyncio.Future:
        """Let every role that learns copy its part of a checkpoint. The part is written when the
        answer is awaited."""
        copies = [
            self.groups[role].save_state(folder) for role in TRAINED_ROLES if role in self.groups
        ]
        writes = await asyncio.gather(*copies)
        return observed(asyncio.gather(*writes))

    async def load_state(self, folder: str) -> None:
        """Load a checkpoint's state into every role that learns, or that of the actor alone to
        evaluate it; after `setup`."""
        loads = [
            self.groups[role].load_state(folder)
            for role in loaded_roles(self.cfg)
            if role in self.groups
        ]
        await asyncio.gather(*loads)


class SupervisedProcesses:
    """As `RunProcesses`, for a run without rollouts.

    Attributes:
        pools: pool name -> its process slots.
        groups: the actor's group.
        roles: what the supervised pipeline works with.
        keeps_engines, engines, endpoint: there are none.
    """

    keeps_engines = False
    engines = None
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
        cls = worker_class("actor.backend", self.cfg.actor.backend, "supervised")
        ranks = []
        for index, slot in enumerate(slots):
            args = (self.cfg, "actor", index, len(slots), prepared.device, total_steps)
            ranks.append(spawn(cls, args, slot, prepared.device, env=env))
        self.actor = WorkerGroup("actor", ranks, self.cfg, host=host, events=events)
        self.groups = {"actor": self.actor}
        self.roles = SupervisedGroups(self.actor)

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


def config_of_groups(cfg: Config, role: str) -> dict[str, Config]:
    """Name -> config, of each group of processes of a role: one, but for teachers."""
    if role != "teacher":
        return {role: cfg}
    return {_group_name(name): config_of_teacher(cfg, name) for name in teacher_paths(cfg)}


def _group_name(teacher: str) -> str:
    return "teacher" if teacher == DEFAULT_TEACHER else f"teacher.{teacher}"


def teachers_of(cfg: Config, groups: dict[str, WorkerGroup], data: RunData) -> Teachers:
    """The teachers for the pipeline, out of all groups of the run."""
    own: dict[str, Any] = {name: groups[_group_name(name)] for name in teacher_paths(cfg)}
    return Teachers(own, teacher_lookup(cfg, data), cfg.teacher.top_k)


def ranks_by_name(groups: dict[str, WorkerGroup]) -> dict[str, Any]:
    """ "ROLE RANK" -> the Ray actor, for the ranks of all roles."""
    named = {}
    for role, group in groups.items():
        for index, rank in enumerate(group.ranks):
            named[f"{role} {index}"] = rank
    return named


def answering_ranks(groups: dict[str, WorkerGroup]) -> dict[str, Any]:
    """As `ranks_by_name`, of the groups whose ranks have all answered once."""
    return ranks_by_name({role: group for role, group in groups.items() if group.has_answered})


def _role_of(name: str) -> str:
    """Of a rank's name."""
    return name.rpartition(" ")[0]
