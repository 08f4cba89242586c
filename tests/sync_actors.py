"""Trainer ranks and replicas without a model, as real Ray actors with real endpoints of the stream.

They start in seconds, and they fail and block as the real ones do: a rank's update holds its main
thread until its weights may change, a replica's engine does one thing at a time, and neither can be
cancelled from outside.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator, Awaitable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import ray
import torch

from one_step_off.cluster.placement import spawn
from one_step_off.config.schema import Config
from one_step_off.data.prompt_stream import PromptStream
from one_step_off.data.samples import Prompt, Sample
from one_step_off.monitoring.tracker import Tracker
from one_step_off.ray_trainer import Pipeline, RunGroups
from one_step_off.rollout.replica_group import RolloutGroup
from one_step_off.training.trainer_group import WorkerGroup
from one_step_off.weight_sync.bucket_plan import BucketPlan
from one_step_off.weight_sync.coordinator import WeightSync
from one_step_off.weight_sync.receiver import WeightReceiver
from one_step_off.weight_sync.routes import ShardsOfReceivers
from one_step_off.weight_sync.shard_blocks import Block, plain_shards
from one_step_off.weight_sync.trainer_sender import WeightSenderMixin
from one_step_off.weight_sync.versions import VersionTable
from one_step_off.weight_sync.weight_piece import WeightPiece
from tests.unit.stand_ins import RecordedEvents

CPU = torch.device("cpu")
HOST = "127.0.0.1"
ROWS, COLUMNS = 64, 256  # of each of the two tensors "a" and "b"
STEPS = 3
SOON_S = 15.0
"""With liveness checks on a busy machine; the limits that would end a hang are minutes."""


@dataclass
class Fault:
    """Something that happens in an actor, on purpose."""

    place: str
    version: int | None
    """Of the weights; None: any."""
    action: str
    """One of die, hang, raise and corrupt."""
    repeats: bool = False


class FaultInjector:
    """Mixed into an actor: lets one fault happen."""

    fault: Fault | None = None

    def set_fault(self, fault: Fault | None) -> None:
        self.fault = fault

    def pass_place(self, place: str, version: int | None = None) -> None:
        """Let the fault happen if it is meant for this place and version."""
        fault = self.fault
        if fault is None or fault.place != place or fault.version not in (version, None):
            return
        if not fault.repeats:
            self.fault = None
        if fault.action == "die":
            os._exit(1)
        if fault.action == "hang":
            time.sleep(1e6)
        raise RuntimeError(f"broken on purpose in {place}")


def canary_log_probs(weight: float, sequences: list[np.ndarray]) -> list[np.ndarray]:
    """What a model with this weight says about the canary."""
    return [np.full(len(sequence) - 1, -weight, np.float32) for sequence in sequences]


class LightTrainer(FaultInjector, WeightSenderMixin):
    """A rank whose share of the model is a few rows; an update adds 1 to them."""

    def __init__(self, cfg: Config, rank: int, world_size: int) -> None:
        self.cfg = cfg
        self.rank = rank
        self.device = CPU
        self.version = 0
        self.row_count = ROWS // world_size
        self.first_row = rank * self.row_count
        self.rows = {name: torch.zeros(self.row_count, COLUMNS) for name in ("a", "b")}

    @ray.method(concurrency_group="control")
    def alive(self) -> None:
        """As a real rank's."""

    def weight_plan(self) -> list[WeightPiece]:
        last_row = self.first_row + self.row_count
        return [
            WeightPiece(name, "float32", (ROWS, COLUMNS), self.first_row, last_row)
            for name in self.rows
        ]

    def weight_tensors(self):
        for name, rows in self.rows.items():
            self.pass_place(f"pack {name}", self.version)
            yield rows

    def score(self, sequences: list[np.ndarray]) -> list[np.ndarray]:
        return canary_log_probs(float(self.rows["a"][0, 0]), sequences)

    def update(self, batch: Any, learn: bool = True, profile: str = "") -> dict[str, float]:
        time.sleep(0.02)
        self.before_step()
        for rows in self.rows.values():
            rows += 1
        self.version += 1
        return {"ratio/mean": 1.0}

    def reset(self) -> None:
        """As at the beginning."""
        self.version = 0
        self.released = -1
        self.sync_failure = ""
        self.fault = None
        for rows in self.rows.values():
            rows.zero_()


class LightLayout:
    """Where a `LightReplica` keeps its weights: each tensor whole."""

    version = 0

    def __init__(self, replica: LightReplica, shapes: dict[str, Any]) -> None:
        self.replica = replica
        self.kept = {name: (Block.whole(tuple(shape)),) for name, (_, shape) in shapes.items()}

    def addresses(self) -> tuple[int, ...]:
        return tuple(tensor.data_ptr() for tensor in self.replica.weights.values())

    def bind(self, shards: list[tuple[str, Block, torch.Tensor]]) -> LightShards:
        return LightShards(self, shards)


class LightShards:
    """Blocks in a buffer, and the replica's weights."""

    def __init__(self, layout: LightLayout, shards: list[tuple[str, Block, torch.Tensor]]) -> None:
        self.layout = layout
        self.shards = shards

    def write(self) -> None:
        replica = self.layout.replica
        replica.pass_place("load", self.layout.version)
        for name, block, view in self.shards:
            block.slice_of(replica.weights[name]).copy_(view)

    def read(self) -> None:
        for name, block, view in self.shards:
            view.copy_(block.slice_of(self.layout.replica.weights[name]))


class LightReplica(FaultInjector):
    """A replica whose engine is a thread that receives weights and samples nothing real."""

    calls_at_once = 100
    threads = {"control": 1}

    def __init__(self, cfg: Config, index: int) -> None:
        self.cfg = cfg
        self.index = index
        self.stamp: tuple[int, int] | None = None
        self.receiver: WeightReceiver | None = None
        self.layout: LightLayout | None = None
        self.rollout_s = 0.01
        self.score_s = 0.0
        self.engine = ThreadPoolExecutor(1)
        self.weights: dict[str, torch.Tensor] = {}
        self.idle_trajectories = 0

    def set_rollout_s(self, seconds: float) -> None:
        """Let generation take so long."""
        self.rollout_s = seconds

    def set_score_s(self, seconds: float) -> None:
        """Let the canary take so long, beside generation."""
        self.score_s = seconds

    async def _in_engine(self, function: Any, *args: Any) -> Any:
        return await asyncio.get_running_loop().run_in_executor(self.engine, function, *args)

    @ray.method(concurrency_group="control")
    async def alive(self) -> None:
        """As a real replica's."""

    async def start(self, former: Any = ()) -> tuple[int, list]:
        return 8, []

    async def ping(self) -> tuple[int, int]:
        await self._in_engine(lambda: None)  # the engine itself must answer
        return 0, 0

    async def learn_shards(self, shapes: dict[str, Any]) -> list[dict[str, Any]]:
        self.layout = LightLayout(self, shapes)
        return [{"kept": plain_shards(self.layout.kept), "reason": ""}]

    async def connect_sync(self, info: dict[str, Any], first_receiver: int) -> None:
        await self._in_engine(self._connect, info, first_receiver)

    def _connect(self, info: dict[str, Any], index: int) -> None:
        self.pass_place("connect")
        if self.receiver is None:
            pieces = [[WeightPiece(*fields) for fields in sent] for sent in info["pieces"]]
            plan = BucketPlan.build(pieces, info["bucket_bytes"])
            self.receiver = WeightReceiver(plan, index, CPU, HOST, info["timeout_s"])
        self.receiver.index = index
        self.receiver.connect(
            info["epoch"],
            info["addresses"],
            info["receivers"],
            info["same_device"],
            self.layout and ShardsOfReceivers.by_kind([self.layout.kept] * info["receivers"]),
        )

    async def sync(
        self, stamp: tuple[int, int], sharded_only: bool = False
    ) -> list[dict[str, Any]]:
        self.stamp = None
        _, version = stamp
        report = await self._in_engine(self._receive, version, sharded_only)
        self.stamp = stamp
        return [report]

    def _receive(self, version: int, sharded_only: bool) -> dict[str, Any]:
        self.receiver.layout = self.layout
        self.layout.version = version

        def load(tensors: list[tuple[str, torch.Tensor]]) -> None:
            self.pass_place("load", version)
            for name, tensor in tensors:
                self.weights[name] = tensor.clone()

        report = self.receiver.receive(load, version, sharded_only)
        report |= {"layout_proved": 1.0, "in_place": float(sharded_only)}
        self.pass_place("finish", version)
        if self.fault == Fault("canary", version, "corrupt"):
            self.weights["a"] += 1
        return report

    async def score(self, sequences: list[np.ndarray]) -> list[np.ndarray]:
        _, version = self.stamp
        await asyncio.sleep(self.score_s)
        self.pass_place("score", version)
        return canary_log_probs(float(self.weights["a"][0, 0]), sequences)

    async def rollout(self, prompts: list[Prompt], sampling: Any) -> list[Sample]:
        if self.stamp is None:
            raise RuntimeError("no verified weights")
        await asyncio.sleep(self.rollout_s)
        samples = [
            stamped_sample(prompt, index, self.stamp)
            for prompt in prompts
            for index in range(sampling.size)
        ]
        self.idle_trajectories += len(samples)
        for sample in samples:
            sample.extra["pid"] = os.getpid()
        return samples

    async def hand_device_back(self, attempt: int | None = None) -> None:
        self.stamp = None
        self.idle_trajectories = 0

    async def wait_for_capacity(self, sent: int, capacity: int) -> tuple[int, int]:
        while sent - self.idle_trajectories >= capacity:
            await asyncio.sleep(0.01)
        return self.idle_trajectories, capacity

    async def stop(self) -> None:
        """Nothing to end."""


def stamped_sample(prompt: Prompt, index: int, stamp: tuple[int, int]) -> Sample:
    """A sample of three tokens."""
    attempt, version = stamp
    return Sample(
        prompt.id,
        index,
        prompt.ids,
        np.arange(3, dtype=np.int32),
        np.zeros(3, np.float32),
        np.ones(3, bool),
        np.full(3, version, np.int32),
        attempt=attempt,
        reward=float(index),
    )


def light_config(timeout_s: float) -> Config:
    cfg = Config()
    cfg.placement.roles = {"rollout": "rollout", "actor": "actor"}
    cfg.trainer.step_timeout_s = 600.0  # no test waits for it
    cfg.weight_sync.timeout_s = timeout_s
    cfg.weight_sync.bucket_mb = 1
    cfg.data.train_batch_size = 2
    cfg.rollout.n = 2
    cfg.rollout.heartbeat_s = 0.2
    return cfg


class Team:
    """A run's processes, and runs of the real pipeline over them."""

    def __init__(
        self,
        ranks: int,
        replicas: int,
        timeout_s: float = 5.0,
        same_device: bool = True,
        max_senders: int = 8,
        lent: int = 0,
        mode: str = "full",
    ) -> None:
        """`same_device`: everything is in shared memory; else over gloo. `lent`: so many of the
        replicas are on the trainer's devices, the last ones. `mode`: weight_sync.mode."""
        self.cfg = light_config(timeout_s)
        self.cfg.placement.lend = lent > 0
        self.cfg.weight_sync.max_senders = max_senders
        self.cfg.weight_sync.mode = mode
        self.respawned: list[int] = []
        self.events = RecordedEvents()
        self.on_respawn: Any = lambda replica: None
        workers = [spawn(LightTrainer, (self.cfg, i, ranks), None, "cpu") for i in range(ranks)]
        actor = WorkerGroup("actor", workers, self.cfg)
        actors = [self._spawn_replica(i) for i in range(replicas)]
        self.rollout = RolloutGroup(
            actors,
            self.cfg,
            True,
            respawn=self._respawn,
            events=self.events,
            lent=range(replicas - lent, replicas),
        )
        canary = [np.arange(4, dtype=np.int32)]
        replicas_of_rank = [list(range(replicas)) if same_device else [] for _ in workers]
        self.sync = WeightSync(actor, self.rollout.supervisor, canary, HOST, replicas_of_rank)
        self.roles = RunGroups(actor, self.rollout, self.sync)
        self.groups = {"actor": actor}

    def _spawn_replica(self, index: int) -> Any:
        return spawn(LightReplica, (self.cfg, index), None, "cpu")

    def _respawn(self, index: int) -> Any:
        ray.kill(self.rollout.replicas[index])
        self.respawned.append(index)
        replica = self._spawn_replica(index)
        self.on_respawn(replica)
        return replica

    async def connect(self) -> None:
        # The start of the actors must not count toward any limit.
        await asyncio.gather(*(rank.__ray_ready__.remote() for rank in self.roles.actor.ranks))
        self.groups["actor"].has_answered = True
        await self.rollout.setup()
        await self.sync.connect()

    async def reset(self, overlap: bool) -> None:
        """As when the processes had just started, except that the groups between them stay."""
        while any(not task.done() for task in self.rollout.supervisor.restart_tasks.values()):
            await asyncio.sleep(0.05)
        self.cfg.weight_sync.overlap = "true" if overlap else "false"
        ranks = self.roles.actor.ranks
        await asyncio.gather(*(rank.reset.remote() for rank in ranks))
        for replica in self.rollout.replicas:
            await replica.set_fault.remote(None)
        self.sync.versions = VersionTable()
        self.rollout.supervisor.syncing = False
        self.respawned.clear()

    def pipeline(self, folder: Any) -> Pipeline:
        """A run of STEPS steps, with an evaluation of the last version."""
        prompts = [Prompt((0, row), np.arange(3, dtype=np.int32), "q", "1") for row in range(8)]
        stream = PromptStream(prompts, 2, True, 0, STEPS)
        self.events.lines.clear()
        tracker = Tracker(str(folder), STEPS, out=open(os.devnull, "w"))
        return Pipeline(self.cfg, self.roles, stream, prompts[:2], tracker)

    async def is_process_failure(self, error: Exception) -> bool:
        """Whether another attempt would begin after this error."""
        from one_step_off.runtime.processes import RunProcesses

        return await RunProcesses.is_process_failure(
            SimpleNamespace(roles=self.roles, groups=self.groups), error
        )

    def kill(self) -> None:
        for actor in (*self.roles.actor.ranks, *self.rollout.replicas):
            ray.kill(actor)


@asynccontextmanager
async def connected_team(*args: Any, **options: Any) -> AsyncIterator[Team]:
    """A `Team` with these arguments, killed at the end."""
    team = Team(*args, **options)
    try:
        await team.connect()
        yield team
    finally:
        team.kill()


async def soon(work: Awaitable[Any]) -> Any:
    return await asyncio.wait_for(work, SOON_S)
