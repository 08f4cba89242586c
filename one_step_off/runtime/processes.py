"""All processes of a run, created in the pools of their roles and grouped for the pipeline."""

import asyncio
import contextlib
import dataclasses
import functools
import os
from collections import Counter
from typing import Any

import ray
from ray.util.placement_group import remove_placement_group

from agent_loop.tools import MCP_SCHEMAS
from one_step_off.checkpoint import TRAINED_ROLES
from one_step_off.cluster.core_sharing import ROLLOUT, TRAINER, CoreSharing
from one_step_off.cluster.errors import PhaseTimeout, ProcessDied, RoleError, SyncError
from one_step_off.cluster.placement import create_pools, spawn
from one_step_off.cluster.process_cleanup import RUN_FOLDER_VARIABLE
from one_step_off.cluster.remote_calls import call_all, not_alive
from one_step_off.config.device_shares import shares_device
from one_step_off.config.roles import load_section_tokenizer, role_settings
from one_step_off.config.schema import Config
from one_step_off.config.sources import source_rewards
from one_step_off.config.user_code import LOG_FOLDER
from one_step_off.endpoint.usage import uses_endpoint
from one_step_off.ray_trainer import Roles
from one_step_off.rewards.scoring import Scorer
from one_step_off.rollout.replica_group import RolloutGroup
from one_step_off.rollout.replica_supervisor import NoReplica
from one_step_off.rollout.sampling import engine_seed
from one_step_off.rollout.vllm_replica import RolloutReplica
from one_step_off.runtime.prepare import Prepared
from one_step_off.training.fsdp_workers import WORKERS
from one_step_off.training.reward_models import LocalRewardModel, RemoteRewardModel
from one_step_off.training.trainer_group import TrainGroup
from one_step_off.weight_sync.coordinator import WeightSync

# Huge pages (on CPUs): page faults cost as much as copying large tensors does.
COMMON_ENV = {
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "THP_MEM_ALLOC_ENABLE": "1",
    "TOKENIZERS_PARALLELISM": "false",
}
# vLLM's CPU engine: no compilation (it stalls the first request for 16 s), threads on the cores
# that we bind, and the worker inside the engine's process (one process less; a start takes 3 s and
# not 20 s).
CPU_ENGINE_ENV = {
    "TORCH_COMPILE_DISABLE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
}
# On GPUs one thread: more of them would wait in loops on the cores that launch kernels.
GPU_ENGINE_ENV = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
ENGINE_ENV = {"cpu": CPU_ENGINE_ENV, "cuda": GPU_ENGINE_ENV}
# The members of a communicator must agree on these, and NCCL does not compare them: with different
# values it hangs. Trainers and engines share communicators, and Ray's processes on other nodes
# inherit from another shell. So all get the driver's values. (Not here: what differs from node to
# node, as NCCL_SOCKET_IFNAME.) NCCL_CUMEM_ENABLE needs no value of ours: vLLM set it to 0 only for
# NCCL before 2.22.3.
NCCL_AGREED = tuple(
    f"NCCL_{name}"
    for name in (
        "ALGO BUFFSIZE COLLNET_ENABLE CUMEM_ENABLE CUMEM_HOST_ENABLE IB_DISABLE MAX_CTAS "
        "MAX_NCHANNELS MIN_CTAS MIN_NCHANNELS MNNVL_ENABLE NET NTHREADS NVLS_ENABLE P2P_DISABLE "
        "P2P_LEVEL P2P_NET_DISABLE PROTO SHM_DISABLE"
    ).split()
)
# A trainer on CPUs keeps the memory that a pass frees: to fault its pages in again costs more than
# to work on them. It uses a single arena, since autograd's thread would have another one, which
# returns large blocks whatever is set.
CPU_TRAINER_MALLOC = (
    "glibc.malloc.mmap_threshold=4294967296:"
    "glibc.malloc.trim_threshold=8589934592:"
    "glibc.malloc.arena_max=1"
)


class RunProcesses:
    """The roles of a run, and all Ray actors behind them.

    Attributes:
        pools: pool name -> its process slots, node by node.
        roles: what the pipeline works with.
        groups: role -> its group, for every role that holds a model under the training back end.
        actors: every Ray actor, to be ended with the run.
        pool_locks: pool name -> the lock by which the roles of a pool take turns on its devices.
        host: the address at which processes meet; "": each node's address in the network.
        endpoint: the gateway of external agents; None: the run has none.
    """

    def __init__(
        self, prepared: Prepared, incarnation: int = 0, trainers_only: bool = False
    ) -> None:
        """Reserve the pools and create the processes; nothing is loaded yet.

        Args:
            incarnation: the number of the attempt; engines sample with other seeds in each.
            trainers_only: create only the roles that learn, and no engines.

        Raises:
            ConfigError: the cluster has too little for a pool.
        """
        self.prepared = prepared
        self.cfg = prepared.cfg
        self.device = prepared.device
        self.incarnation = incarnation
        self.host = "" if os.environ.get("RAY_ADDRESS") else "127.0.0.1"
        self.pools = create_pools(self.cfg, self.device)
        self.pool_locks = {pool: asyncio.Lock() for pool in self.pools}
        self.env = self._process_env()
        self.log_folder = os.path.abspath(os.path.join(self.cfg.trainer.output_dir, LOG_FOLDER))
        self.replica_starts: Counter[int] = Counter()  # replica index -> how often it was started
        self.kv_cache_bytes: dict[int, int] = {}  # of replicas on a GPU that they share
        pool_of_role = self.cfg.placement.roles
        self.endpoint = None if trainers_only else self._create_endpoint()
        self.scorers = [] if trainers_only else self._create_scorers()
        replicas = [] if trainers_only else self._create_replicas()
        self.groups = {
            role: self._create_group(role)
            for role in (TRAINED_ROLES if trainers_only else WORKERS)
            if role in pool_of_role
        }
        rollout = self._create_rollout_group(replicas)
        for role, group in self.groups.items():
            if pool_of_role[role] == pool_of_role["rollout"]:
                group.colocated = rollout
        self.actors = [*self.scorers, *replicas]
        if self.endpoint:
            self.actors.append(self.endpoint.gateway)
        for group in self.groups.values():
            self.actors += group.ranks
        self.roles = self._create_roles(rollout)

    def _process_env(self) -> dict[str, str]:
        """The environment variables of every process."""
        env = dict(COMMON_ENV)
        if self.device == "cuda":
            env |= {name: os.environ[name] for name in NCCL_AGREED if name in os.environ}
        is_one_machine = bool(self.host)
        if is_one_machine:
            env["VLLM_HOST_IP"] = self.host
            env["GLOO_SOCKET_IFNAME"] = "lo"
            if RUN_FOLDER_VARIABLE in os.environ:
                env["TMPDIR"] = os.environ[RUN_FOLDER_VARIABLE]
        return env

    def _slot_share(self, pool: str) -> float:
        """The part of each process slot that Ray books for every role in the pool."""
        return 1.0 / list(self.cfg.placement.roles.values()).count(pool)

    def _create_scorers(self) -> list[Any]:
        return [
            spawn(
                Scorer,
                (self.cfg.reward, source_rewards(self.cfg)),
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

        replicas = len(self.pools[self.cfg.placement.roles["rollout"]])
        return GatewaySupervisor(self.cfg, replicas, bool(self.host), spawn_beside_driver)

    def _create_replicas(self) -> list[Any]:
        slots = self.pools[self.cfg.placement.roles["rollout"]]
        return [self._create_replica(index) for index in range(len(slots))]

    def _create_replica(self, index: int) -> Any:
        pool = self.cfg.placement.roles["rollout"]
        seed = engine_seed(
            self.cfg.trainer.seed, self.incarnation, index, self.replica_starts[index]
        )
        self.replica_starts[index] += 1
        loop_names = self.prepared.loop_names
        cfg = self._replica_cfg(index)
        endpoint = self.endpoint.access if self.endpoint else None
        args = (cfg, index, self.device, self.scorers, MCP_SCHEMAS, loop_names, seed, endpoint)
        return spawn(
            RolloutReplica,
            args,
            self.pools[pool][index],
            self.device,
            self._slot_share(pool),
            self.env | ENGINE_ENV[self.device],
            f"{self.log_folder}/rollout_{index}.log",
        )

    def _replica_cfg(self, index: int) -> Config:
        """The config of a replica. One that is restarted on a shared GPU gets the KV cache of the
        first start.

        To choose a size, vLLM measures the GPU's memory and fails if another process frees some
        meanwhile. At the first start the trainer is not there yet; later it is at work.
        """
        size = self.kv_cache_bytes.get(index)
        if not size:
            return self.cfg
        engine_kwargs = {"kv_cache_memory_bytes": size} | self.cfg.rollout.engine_kwargs
        rollout = dataclasses.replace(self.cfg.rollout, engine_kwargs=engine_kwargs)
        return dataclasses.replace(self.cfg, rollout=rollout)

    def _create_rollout_group(self, replicas: list[Any]) -> RolloutGroup:
        cfg = self.cfg
        seed_samples = cfg.rollout.seed_samples
        is_seeded = seed_samples == "on" or (seed_samples == "auto" and self.device == "cpu")
        pool = cfg.placement.roles["rollout"]
        shares_pool = self._slot_share(pool) < 1
        lock = self.pool_locks[pool] if shares_pool else None
        return RolloutGroup(replicas, cfg, is_seeded, lock, self._restart_replica)

    def _restart_replica(self, index: int) -> Any:
        """End what is left of a failed replica; returns a new one in its slot."""
        ray.kill(self.roles.rollout.replicas[index])
        replica = self._create_replica(index)
        self.actors.append(replica)
        return replica

    def _create_group(self, role: str) -> TrainGroup:
        """The ranks of a role that holds a model under the training back end."""
        worker_class = self._worker_class(role)
        pool = self.cfg.placement.roles[role]
        slots = self.pools[pool]
        total_steps = self.prepared.data.stream.total_steps
        env = dict(self.env)
        if self.device == "cpu":
            env["GLIBC_TUNABLES"] = os.environ.get("GLIBC_TUNABLES", CPU_TRAINER_MALLOC)
        ranks = []
        for index, slot in enumerate(slots):
            args = (self.cfg, role, index, len(slots), self.device, total_steps)
            rank = spawn(worker_class, args, slot, self.device, self._slot_share(pool), env)
            ranks.append(rank)
        lock = self.pool_locks[pool]
        if role != "reward_model":
            return TrainGroup(role, ranks, self.cfg, lock, self.host)
        return LocalRewardModel(
            role,
            ranks,
            self.cfg,
            lock,
            self.host,
            find_prompt=self.prepared.data.find,
            policy_tokenizer=self.prepared.tokenizer,
            reward_tokenizer=load_section_tokenizer(self.cfg, role),
        )

    def _worker_class(self, role: str) -> type:
        if role_settings(self.cfg, role).backend == "megatron":
            # An extra, and slow to import.
            from one_step_off.training import megatron_workers

            return megatron_workers.WORKERS[role]
        return WORKERS[role]

    def _create_roles(self, rollout: RolloutGroup) -> Roles:
        actor = self.groups["actor"]
        canary = self.prepared.canary
        sync = WeightSync(
            actor, rollout.supervisor, canary, self.host, self._replicas_on_device_of_rank()
        )
        models: dict[str, Any] = {}
        for role, group in self.groups.items():
            if role != "actor":
                models[role] = group
        if self.cfg.reward_model.url:
            models["reward_model"] = RemoteRewardModel(self.cfg, self.prepared.data.find)
        self._share_idle_cores(rollout, sync)
        return Roles(actor, rollout, sync, **models)

    def _share_idle_cores(self, rollout: RolloutGroup, sync: WeightSync) -> None:
        """Let each side tell when it works, if the other then has cores to leave or to take."""
        slots = [slot for slots in self.pools.values() for slot in slots]
        if not any(slot.guest_cores for slot in slots):
            return
        ranks = [rank for group in self.groups.values() for rank in group.ranks]
        sharing = CoreSharing({ROLLOUT: lambda: rollout.replicas, TRAINER: lambda: ranks})
        rollout.at_work = functools.partial(sharing.at_work, ROLLOUT)
        sync.at_work = functools.partial(sharing.at_work, ROLLOUT)
        for group in self.groups.values():
            group.at_work = functools.partial(sharing.at_work, TRAINER)
        self.groups["actor"].core_metrics = sharing.take_metrics

    def _replicas_on_device_of_rank(self) -> list[list[int]]:
        """Per rank of the actor the replicas on its device: in its process slot, or on CPUs
        anywhere on its node."""
        pool_of_role = self.cfg.placement.roles
        rank_slots = self.pools[pool_of_role["actor"]]
        if pool_of_role["actor"] != pool_of_role["rollout"]:
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
                same_node = [i for i, slot in enumerate(rank_slots) if slot.node == rank_slot.node]
                replicas_of_ranks.append(same_node)
            else:
                replicas_of_ranks.append([rank])
        return replicas_of_ranks

    async def setup(self) -> None:
        """Load every model and engine, and connect the weight sync.

        All at once, but not on shared devices: there the engines go first, because vLLM measures
        how much memory it may use while nothing else is loaded."""
        rollout = self.roles.rollout
        loading = [group.setup for group in self.groups.values()]
        shares_pool = any(group.colocated for group in self.groups.values())
        shares_devices = shares_device(self.cfg, self.cfg.placement.roles["rollout"])
        if shares_pool or shares_devices:
            await rollout.setup()
        else:
            loading.append(rollout.setup)
        if shares_devices:
            await self._keep_kv_cache_sizes()
        if shares_pool:
            await rollout.sleep()
        if self.endpoint:
            loading.append(self.endpoint.start)
        await asyncio.gather(*(load() for load in loading))
        await self.roles.sync.connect()

    async def _keep_kv_cache_sizes(self) -> None:
        """Remember the KV cache of each engine, for `_replica_cfg`."""
        limit_s = self.cfg.trainer.start_timeout_s
        replicas = self.roles.rollout.replicas
        sizes = await call_all(limit_s, "rollout", replicas, "kv_cache_bytes")
        self.kv_cache_bytes = dict(enumerate(sizes))

    async def is_process_failure(self, error: Exception) -> bool:
        """Whether the attempt ended because a process died or hangs, so that another attempt may
        succeed."""
        if isinstance(error, (ProcessDied, PhaseTimeout)):
            return True
        if isinstance(error, NoReplica) or not isinstance(error, (RoleError, SyncError)):
            return False
        # A process that waited for the one that died may have failed first.
        processes = {}
        for role, group in self.groups.items():
            for index, rank in enumerate(group.ranks):
                processes[f"{role} {index}"] = rank
        rollout = self.roles.rollout
        for index in rollout.active:
            processes[f"rollout {index}"] = rollout.replicas[index]
        return bool(await not_alive(processes))

    async def end(self) -> None:
        """End all processes and release their process slots."""
        # The engines have child processes, which end in good order only if asked.
        with contextlib.suppress(Exception):
            await self.roles.rollout.stop()
        if self.endpoint:
            await self.endpoint.end()
        for actor in self.actors:
            with contextlib.suppress(Exception):
                ray.kill(actor)
        placement_groups = {}
        for slots in self.pools.values():
            for slot in slots:
                placement_groups[id(slot.group)] = slot.group
        for placement_group in placement_groups.values():
            remove_placement_group(placement_group)

    async def save_state(self, folder: str) -> asyncio.Future:
        """Let every role that learns copy its part of a checkpoint. The part is written when the
        answer is awaited."""
        copies = [
            self.groups[role].save_state(folder) for role in TRAINED_ROLES if role in self.groups
        ]
        writes = await asyncio.gather(*copies)
        return asyncio.gather(*writes)

    async def load_state(self, folder: str) -> None:
        """Load a checkpoint's state into every role that learns; after `setup`."""
        loads = [
            self.groups[role].load_state(folder) for role in TRAINED_ROLES if role in self.groups
        ]
        await asyncio.gather(*loads)
