"""Every process of a run, created in the pool that its role names, and put behind the group that the pipeline knows."""

import asyncio
import contextlib
import os
from collections import Counter
from typing import Any

import ray
from ray.util.placement_group import remove_placement_group

from agent_loop.tools import MCP_SCHEMAS
from one_step_off.checkpoint.checkpoints import TRAINED
from one_step_off.cluster.errors import PhaseTimeout, ProcessDied, RoleError, SyncError
from one_step_off.cluster.placement import create_pools, spawn
from one_step_off.cluster.process_cleanup import RUN_FOLDER_VARIABLE
from one_step_off.cluster.remote_calls import not_alive
from one_step_off.config.schema import load_section_tokenizer, role_settings
from one_step_off.config.user_code import LOG_FOLDER
from one_step_off.ray_trainer import Roles
from one_step_off.rewards.scoring import Scorer
from one_step_off.rollout.replica_group import RolloutGroup
from one_step_off.rollout.replica_supervisor import NoReplica
from one_step_off.rollout.sampling import engine_seed
from one_step_off.rollout.vllm_replica import RolloutReplica
from one_step_off.runtime.launch import Prepared
from one_step_off.training.fsdp_workers import WORKERS
from one_step_off.training.reward_models import LocalRewardModel, RemoteRewardModel
from one_step_off.training.trainer_group import TrainGroup
from one_step_off.weight_sync.coordinator import WeightSync

# On CPUs: huge pages, or page faults cost as much as copying large tensors does.
COMMON_ENV = dict(
    VLLM_NO_USAGE_STATS="1",
    DO_NOT_TRACK="1",
    THP_MEM_ALLOC_ENABLE="1",
    TOKENIZERS_PARALLELISM="false",
)
# vLLM's CPU engine: no compilation (a 16 s stall at the first request), threads as placed by us, and the worker
# inside the engine's process (a process less, and a start of 3 s instead of 20).
_ON_CPUS = {
    "TORCH_COMPILE_DISABLE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
}
ENGINE_ENV = {"cpu": _ON_CPUS, "cuda": {}}
# A trainer on CPUs keeps the memory that a pass gives back: to fault its pages in anew costs more than to work on them. In
# one arena, since autograd's thread would have one of its own, which gives large blocks back whatever is set.
KEEPING = "glibc.malloc.mmap_threshold=4294967296:glibc.malloc.trim_threshold=8589934592:glibc.malloc.arena_max=1"


class RunProcesses:
    """The roles of a run, and all actors behind them.

    Attributes:
        roles: what the pipeline works with.
        groups: role -> its group, of every role that holds a model under the training back end.
        actors: every Ray actor, to be ended with the run.
    """

    def __init__(self, prepared: Prepared, generates: bool = True) -> None:
        """Reserve the pools and create the processes; nothing is loaded yet. Not `generates`: only the roles that learn.
        Raises ConfigError: the cluster has too little for a pool."""
        cfg, device = self.cfg, self.device = prepared.cfg, prepared.device
        self.prepared, self.host = prepared, ("" if os.environ.get("RAY_ADDRESS") else "127.0.0.1")
        self.pools = create_pools(cfg, device)
        self.env = COMMON_ENV | (
            {"VLLM_HOST_IP": self.host, "GLOO_SOCKET_IFNAME": "lo"} if self.host else {}
        )
        self.env |= (
            {"TMPDIR": os.environ[RUN_FOLDER_VARIABLE]}
            if self.host and RUN_FOLDER_VARIABLE in os.environ
            else {}
        )
        where, self.turns = cfg.placement.roles, {pool: asyncio.Lock() for pool in self.pools}
        logs = os.path.abspath(os.path.join(cfg.trainer.output_dir, LOG_FOLDER))
        workers = range(cfg.reward.workers * generates)
        scorers = [
            spawn(Scorer, (cfg.reward,), None, device, log=f"{logs}/reward_{i}.log")
            for i in workers
        ]
        seeded = cfg.rollout.seed_samples == "on" or (
            cfg.rollout.seed_samples == "auto" and device == "cpu"
        )

        starts: Counter[int] = Counter()  # of each replica

        def replica(i: int) -> Any:
            seed = engine_seed(cfg.trainer.seed, prepared.incarnation, i, starts[i])
            starts[i] += 1
            args, pool = (cfg, i, device, scorers, MCP_SCHEMAS, prepared.loops, seed), where["rollout"]
            env, log = self.env | ENGINE_ENV[device], f"{logs}/rollout_{i}.log"
            return spawn(
                RolloutReplica, args, self.pools[pool][i], device, self._share(pool), env, log
            )

        def respawn(i: int) -> Any:
            ray.kill(rollout.replicas[i])
            self.actors.append(replica(i))
            return self.actors[-1]

        replicas = [replica(i) for i in range(len(self.pools[where["rollout"]]) * generates)]
        self.groups = {
            role: self._group(role) for role in (WORKERS if generates else TRAINED) if role in where
        }
        turn = self.turns[where["rollout"]] if self._share(where["rollout"]) < 1 else None
        rollout, actor = RolloutGroup(replicas, cfg, seeded, turn, respawn), self.groups["actor"]
        for role, group in self.groups.items():
            if where[role] == where["rollout"]:
                group.colocated = rollout
        self.actors = [
            *scorers,
            *replicas,
            *(rank for group in self.groups.values() for rank in group.ranks),
        ]
        sync = WeightSync(actor, rollout.supervisor, prepared.canary, self.host, self._near())
        models = {role: group for role, group in self.groups.items() if role != "actor"}
        if cfg.reward_model.url:
            models["reward_model"] = RemoteRewardModel(cfg, prepared.data.find)
        self.roles = Roles(actor, rollout, sync, **models)

    def _share(self, pool: str) -> float:
        """The part of each seat that Ray books for every role in the pool."""
        return 1.0 / list(self.cfg.placement.roles.values()).count(pool)

    def _near(self) -> list[list[int]]:
        """Per rank of the actor the replicas on its device: in its seat, or on CPUs anywhere on its node."""
        where, cpu = self.cfg.placement.roles, self.device == "cpu"
        ranks = list(enumerate(self.pools[where["actor"]]))
        replicas = ranks if where["actor"] == where["rollout"] else []  # a seat has one of each
        return [
            [r for r, seat in replicas if r == i or (cpu and seat.node == mine.node)]
            for i, mine in ranks
        ]

    def _group(self, role: str) -> TrainGroup:
        workers, pool = WORKERS, self.cfg.placement.roles[role]
        if role_settings(self.cfg, role).backend == "megatron":  # an extra, and slow to import
            from one_step_off.training.megatron_workers import WORKERS as workers
        seats, data = self.pools[pool], self.prepared.data
        shared = len(seats), self.device, data.stream.total_steps
        own = (
            {"GLIBC_TUNABLES": os.environ.get("GLIBC_TUNABLES", KEEPING)}
            if self.device == "cpu"
            else {}
        )
        where = self.device, self._share(pool), self.env | own
        ranks = [
            spawn(workers[role], (self.cfg, role, i, *shared), seat, *where)
            for i, seat in enumerate(seats)
        ]
        of_group = (role, ranks, self.cfg, self.turns[pool], self.host)
        if role != "reward_model":
            return TrainGroup(*of_group)
        reading = {
            "find": data.find,
            "ours": self.prepared.tokenizer,
            "theirs": load_section_tokenizer(self.cfg, role),
        }
        return LocalRewardModel(*of_group, **reading)

    async def setup(self) -> None:
        """Load every model and engine, and connect the weight sync. All at once, but in a shared pool: there vLLM finds
        out how much memory is its own while it is alone."""
        rollout, loading = self.roles.rollout, [group.setup() for group in self.groups.values()]
        if any(group.colocated for group in self.groups.values()):
            await rollout.setup()
            await rollout.sleep()
        else:
            loading.append(rollout.setup())
        await asyncio.gather(*loading)
        await self.roles.sync.connect()

    async def is_process_failure(self, error: Exception) -> bool:
        """Whether the run ended because a process is gone or hangs, so that another attempt may do better."""
        if isinstance(error, (ProcessDied, PhaseTimeout)):
            return True
        if isinstance(error, NoReplica) or not isinstance(error, (RoleError, SyncError)):
            return False
        # A process that waited for the one that is gone may have failed first.
        processes = {
            f"{role} {i}": rank
            for role, group in self.groups.items()
            for i, rank in enumerate(group.ranks)
        }
        processes |= {
            f"rollout {i}": self.roles.rollout.replicas[i] for i in self.roles.rollout.active
        }
        return bool(await not_alive(processes))

    async def end(self) -> None:
        """End all processes and give their places back."""
        # The engines have processes of their own, which end in good order only if asked.
        with contextlib.suppress(Exception):
            await self.roles.rollout.stop()
        for actor in self.actors:
            with contextlib.suppress(Exception):
                ray.kill(actor)
        for group in {
            id(seat.group): seat.group for seats in self.pools.values() for seat in seats
        }.values():
            remove_placement_group(group)

    async def save_state(self, folder: str) -> asyncio.Future:
        """Let every role that learns copy its part of a checkpoint; when the answer has been awaited it is written."""
        roles = [self.groups[role].save_state(folder) for role in TRAINED if role in self.groups]
        return asyncio.gather(*await asyncio.gather(*roles))

    async def load_state(self, folder: str) -> None:
        """Bring every role that learns to a checkpoint's state; after `setup`."""
        await asyncio.gather(
            *(self.groups[role].load_state(folder) for role in TRAINED if role in self.groups)
        )
