"""The arms of the weight-sync benchmark, as the driver sees them: `setup` once, then `run(version)` as often as wanted.

All of them work on the same trainer ranks and engines. Every update but the raw broadcast begins with the engine's pause
and ends when it may generate again.
"""

from __future__ import annotations

import asyncio
import copy
import dataclasses
import tempfile
import time
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from benchmarks.weight_sync import trainer as sync_trainer
from benchmarks.weight_sync import vllm_trainer
from benchmarks.weight_sync.replica import slowest
from one_step_off.cluster.errors import SyncError
from one_step_off.cluster.remote_calls import call_all
from one_step_off.config.schema import WeightSyncConfig
from one_step_off.ray_trainer import Roles
from one_step_off.rollout.replica_group import RolloutGroup
from one_step_off.training.trainer_group import TrainGroup
from one_step_off.weight_sync.bucket_plan import BucketPlan
from one_step_off.weight_sync.coordinator import RECEIVING, SENDING, WeightSync

LIMIT_S = 600.0


@dataclass
class Took:
    """One run of an arm: `seconds` until the engines may generate again, `split` of a receiver's time by phase, which follow
    one another (the slowest receiver's of each), `sender` likewise of rank 0's (the product's: the slowest sender's),
    `extra` other figures, as "wire": the product's seconds on the wire, beside the phases."""

    seconds: float
    split: dict[str, float]
    sender: dict[str, float] = field(default_factory=dict)
    extra: dict[str, float] = field(default_factory=dict)


class Team:
    """The processes that all arms share."""

    actor: TrainGroup
    rollout: RolloutGroup
    sync: WeightSync

    def __init__(self, roles: Roles, device: str, canary: list[np.ndarray], host: str) -> None:
        """`device`: cpu or cuda; `canary`: token sequences that engine and trainer score; `host`: where they meet."""
        self.actor = roles.actor
        self.rollout = roles.rollout
        self.sync = roles.sync
        self.device = device
        self.canary = canary
        self.host = host
        self.ranks = self.actor.ranks
        self.replicas = self.rollout.replicas
        self.cfg = self.actor.cfg
        self.sizes: list[int] = []
        self.total_bytes = 0
        self.receivers = len(self.replicas) * self.cfg.rollout.tensor_parallel_size

    async def join(self) -> None:
        """Form the group {trainer rank 0} u engines, which the arms without one of their own use."""
        plans = await self.trainers("weight_plan")
        bucket = self.cfg.weight_sync.bucket_mb << 20
        self.total_bytes = BucketPlan.build([plan for plan in plans if plan], bucket).total_bytes
        left = self.total_bytes % bucket
        self.sizes = [bucket] * (self.total_bytes // bucket) + ([left] if left else [])
        (port,) = await self.first(sync_trainer.listen, self.host)
        await asyncio.gather(
            self.first(sync_trainer.join, self.host, self.receivers, self.sizes, LIMIT_S),
            self.engines("join", self.host, port, self.receivers, self.sizes, LIMIT_S),
        )

    async def trainers(self, what: Any, *args: Any) -> list[Any]:
        """A method of every trainer rank, or a function called on it."""
        name, more = (what, ()) if isinstance(what, str) else ("__ray_call__", (what,))
        return await call_all(LIMIT_S, "trainer rank", self.ranks, name, *more, *args)

    async def first(self, what: Any, *args: Any) -> list[Any]:
        """A function called on rank 0."""
        return await call_all(LIMIT_S, "trainer rank", self.ranks[:1], "__ray_call__", what, *args)

    async def engines(self, method: str, *args: Any) -> list[Any]:
        """A method of every replica."""
        return await call_all(LIMIT_S, "rollout", self.replicas, method, *args)

    async def use(self, arm: str, keys: dict[str, Any] | None = None, vllms: bool = False) -> None:
        """From now on every process has what the arm left in it."""
        await self.trainers(sync_trainer.select, arm, keys or {})
        await self.engines("use", arm, keys or {}, vllms)

    async def forget(self, arm: str) -> None:
        """Every process frees what the arm left in it."""
        await asyncio.gather(
            self.trainers(sync_trainer.forget, arm), self.engines("rpc", "bench_forget", arm)
        )

    async def canary_diff(self, version: int) -> float | None:
        """How far engines and trainer are apart on the canary, nats; None: further than the product's limit."""
        try:
            trainer = await self.sync.score_canary()
            figures = await self.sync._check_canary((0, version), trainer, self.rollout.active)
            return figures["canary/logprob_diff_max"]
        except SyncError:
            return None


class Arm:
    """One way to bring the weights over. `said`: what it does, for the table. `changes`: its first updates, each after
    the sign of one in so many elements has changed."""

    name, said = "", ""
    changes: tuple[int, ...] = (2,)

    def __init__(self, team: Team) -> None:
        self.team = team

    @property
    def why_not(self) -> str:
        """Why it cannot run here; empty: it can."""
        return ""

    async def prepare(self) -> None:
        """What is done once, and whose memory is not the arm's."""

    async def setup(self) -> None:
        """What is done once, and whose memory is."""

    async def run(self, version: int) -> Took:
        """One whole update to the trainer's weights, which are of `version`."""
        raise NotImplementedError

    async def leave(self) -> None:
        """Free all that it holds; it does not run again."""
        await self.team.forget(self.name)

    async def _both(self, trainer: Any, engines: Any) -> Took:
        begin = time.perf_counter()
        sent, received = await asyncio.gather(trainer, engines)
        return Took(time.perf_counter() - begin, slowest(received), sent[0])


class Raw(Arm):
    """The yardstick."""

    name, said = (
        "raw",
        "broadcast of as many bytes by rank 0, bucket after bucket, over touched buffers; nothing else",
    )

    async def run(self, version: int) -> Took:
        """Loads nothing."""
        begin = time.perf_counter()
        sent, _ = await asyncio.gather(
            self.team.first(sync_trainer.raw), self.team.engines("rpc", "bench_raw")
        )  # fmt: skip
        return Took(sent[0], {"wire": sent[0]}, {}, {"with_calls": time.perf_counter() - begin})


class PerTensor(Arm):
    """The common simple way."""

    name = "per-tensor"
    said = "rank 0 gathers and broadcasts one tensor after the other, the engine loads each; one call for all of it"

    async def setup(self) -> None:
        self.tensors = (await self.team.first(sync_trainer.metadata))[0]

    async def run(self, version: int) -> Took:
        team = self.team
        return await self._both(
            team.trainers(sync_trainer.send_each),
            team.engines("updated", "bench_each", self.tensors),
        )


class File(Arm):
    """By way of a file system in memory."""

    name = "file"
    said = "rank 0 gathers all and writes safetensors into /dev/shm, the engine's own `reload_weights` reads them"

    async def setup(self) -> None:
        self.folder = tempfile.TemporaryDirectory(dir="/dev/shm", prefix="weight_sync_")

    async def leave(self) -> None:
        self.folder.cleanup()
        await super().leave()

    async def run(self, version: int) -> Took:
        team, begin = self.team, time.perf_counter()
        sent = (await team.trainers(sync_trainer.write_file, self.folder.name))[0]
        received = slowest(await team.engines("updated", "bench_reload", self.folder.name))
        return Took(time.perf_counter() - begin, sent | received)


class VLLM(Arm):
    """vLLM's own weight transfer."""

    name = "vllm"
    said = "vLLM's own NCCL engine and sender, packed as it packs (1 GiB at a time)"

    def __init__(self, team: Team) -> None:
        super().__init__(team)
        if team.device == "cpu":
            self.said += (
                "; gloo in the place of NCCL, CUDA's streams left out, the tied lm_head packed anew"
            )

    async def prepare(self) -> None:
        await self.team.trainers(vllm_trainer.import_vllm)

    async def setup(self) -> None:
        team = self.team
        await team.use(self.name, vllms=True)
        (port,) = await team.first(sync_trainer.address, team.host)
        host = team.host or (await team.trainers("free_address"))[0][0]
        await team.trainers(vllm_trainer.open_vllm, host, port, team.receivers, team.replicas)

    async def run(self, version: int) -> Took:
        team = self.team
        await team.use(self.name)
        begin = time.perf_counter()
        sent = await team.trainers(vllm_trainer.send_vllm)
        seconds = time.perf_counter() - begin
        return Took(seconds, slowest(await team.engines("report")), sent[0])


class VLLMOnNCCL(Arm):
    """Says in a CPU run that it did not run."""

    name, said = "vllm, NCCL", "vLLM's own engine as it is"
    why_not = "no GPUs here"


class Product(Arm):
    """`WeightSync` with some keys of weight_sync, `keys`; or with all receivers on the senders' device, `near`."""

    keys: dict[str, Any] = {}
    near = False
    expected: Any = None

    @property
    def why_not(self) -> str:
        if self.near and self.team.cfg.rollout.tensor_parallel_size > 1:
            return "needs TP=1"
        missing = self.keys.keys() - {f.name for f in dataclasses.fields(WeightSyncConfig)}
        return f"this version has no weight_sync.{min(missing)}" if missing else ""

    async def prepare(self) -> None:
        # The memory in which the trainer scores the canary is not the sync's.
        self.expected = asyncio.get_running_loop().create_future()
        self.expected.set_result(await self.team.sync.score_canary())

    async def setup(self) -> None:
        team = self.team
        await team.use(self.name, self.keys)
        actor = copy.copy(team.actor)
        actor.cfg = copy.deepcopy(team.cfg)
        sync_trainer.configure(actor.cfg, self.keys)
        near = list(range(len(team.replicas))) if self.near else []
        self.sync = WeightSync(
            actor, team.rollout.supervisor, team.canary, team.host, [near for _ in team.ranks]
        )
        await self.sync.connect()

    async def run(self, version: int) -> Took:
        await self.team.use(self.name, self.keys)
        expected, self.expected = self.expected, None
        found = await self.sync((0, version), expected)
        split, sender = (
            {k: found[f"sync/{k}_s"] for k in names} for names in (RECEIVING, SENDING[:-1])
        )
        others = ("bytes", "full_bytes", "raw_s", "wire_ratio", "in_place")
        extra = {k: found[f"sync/{k}"] for k in others if f"sync/{k}" in found}
        return Took(found["sync/transfer_s"], split, sender, {"wire": found["sync/wire_s"]} | extra)


class Sharded(Product):
    """The product's default."""

    name, said = (
        "sharded",
        "every rank sends the rows that it owns, in buckets; checked by sums and names",
    )
    keys = {}


class Gather(Product):
    """The product with one sender."""

    name, said = "gather", "rank 0 gathers and sends the buckets; checked likewise"
    keys = {"sender": "gather", "overlap": False}


class Delta(Product):
    """The product sending what has changed."""

    name, said = "delta", "every rank sends the elements of its rows that changed; checked likewise"
    keys = {"mode": "delta"}
    changes = (2, 8)  # the first one is dense anyway


class Shared(Product):
    """The product's colocated transport, here beside the others on a processor more."""

    name, said = (
        "shared",
        "as sharded, through memory that both sides map (on GPUs: CUDA IPC), without a network",
    )
    near = True


ARMS: dict[str, type[Arm]] = {
    arm.name: arm
    for arm in (Raw, PerTensor, Gather, Sharded, Delta, Shared, File, VLLM, VLLMOnNCCL)
}
