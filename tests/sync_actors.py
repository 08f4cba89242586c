"""Trainer ranks and replicas without a model, as real Ray actors with both real ends of the weight stream.

They start in seconds, and they fail and block as the real ones do: a rank's update holds its main thread until its weights
may change, a replica's engine does one thing at a time, and neither can be cancelled from outside.
"""

from __future__ import annotations

import asyncio
import os
import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import numpy as np
import ray
import torch

from one_step_off.cluster.errors import SyncError
from one_step_off.cluster.placement import spawn
from one_step_off.config.schema import Config
from one_step_off.data.prompt_stream import PromptStream
from one_step_off.data.samples import Prompt, Sample
from one_step_off.monitoring.tracker import Tracker
from one_step_off.ray_trainer import Pipeline, Roles
from one_step_off.rollout.replica_group import RolloutGroup
from one_step_off.training.trainer_group import TrainGroup
from one_step_off.weight_sync.bucket_plan import BucketPlan
from one_step_off.weight_sync.coordinator import WeightSync
from one_step_off.weight_sync.receiver import WeightReceiver
from one_step_off.weight_sync.trainer_sender import WeightSenderMixin
from one_step_off.weight_sync.weight_piece import WeightPiece

CPU = torch.device("cpu")
ROWS, WIDTH = 64, 256  # of each of two tensors: several buckets of BUCKET_BYTES
STEPS = 3


class Faults:
    """Mixed into an actor: `fault` is (place, version or None, what happens there)."""

    fault: tuple[str, int | None, str] | None = None
    kept = False  # a fault that comes again and again

    def set_fault(self, place: str, version: int | None, action: str, kept: bool = False) -> None:
        self.fault, self.kept = (place, version, action), kept

    def reach(self, place: str, version: int | None = None) -> None:
        if self.fault is None or self.fault[:2] not in ((place, version), (place, None)):
            return
        action = self.fault[2]
        if not self.kept:
            self.fault = None
        if action == "die":
            os._exit(1)
        if action == "hang":
            time.sleep(1e6)
        raise RuntimeError(f"broken on purpose in {place}")


class LightTrainer(Faults, WeightSenderMixin):
    """A rank whose half of the model is a few rows; an update adds 1 to them."""

    def __init__(self, cfg: Config, rank: int, world: int) -> None:
        self.cfg, self.rank, self.world, self.device = cfg, rank, world, CPU
        self.version = 0
        share = ROWS // world
        self.rows = {name: (rank * share, torch.zeros(share, WIDTH)) for name in ("a", "b")}

    @ray.method(concurrency_group="control")
    def alive(self) -> None:
        """As a real rank's."""

    def weight_plan(self) -> list[WeightPiece]:
        shape = (ROWS, WIDTH)
        return [
            WeightPiece(n, "float32", shape, at, at + len(rows))
            for n, (at, rows) in self.rows.items()
        ]

    def weight_tensors(self):
        for name, (_, rows) in self.rows.items():
            self.reach(f"pack {name}", self.version)
            yield rows

    def score(self, sequences: list[np.ndarray]) -> list[np.ndarray]:
        value = float(self.rows["a"][1][0, 0])
        return [np.full(len(s) - 1, -value, np.float32) for s in sequences]

    def update(self, batch: Any, learn: bool = True, profile: str = "") -> dict[str, float]:
        time.sleep(0.02)
        self.before_step()
        for _, rows in self.rows.values():
            rows += 1
        self.version += 1
        return {"ratio/mean": 1.0}

    def restore_beginning(self, overlap: bool) -> None:
        self.version, self.released, self.sync_failure, self.fault = 0, -1, "", None
        self.cfg.weight_sync.overlap = overlap
        for _, rows in self.rows.values():
            rows.zero_()


class LightReplica(Faults):
    """A replica whose engine is a thread that receives weights and repeats them."""

    calls_at_once = 100
    threads = {"control": 1}

    def __init__(self, cfg: Config, index: int) -> None:
        self.cfg, self.index, self.stamp, self.receiver = cfg, index, None, None
        self.engine = ThreadPoolExecutor(1)
        self.weights: dict[str, torch.Tensor] = {}

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

    async def connect_sync(self, info: dict[str, Any], first_receiver: int) -> None:
        await self._in_engine(self._connect, info, first_receiver)

    def _connect(self, info: dict[str, Any], index: int) -> None:
        self.reach("connect")
        pieces = [
            [WeightPiece(n, d, tuple(s), *cut) for n, d, s, *cut in sent] for sent in info["pieces"]
        ]
        if self.receiver is None:
            plan = BucketPlan.build(pieces, info["bucket_bytes"])
            self.receiver = WeightReceiver(plan, index, CPU, "127.0.0.1", info["timeout_s"])
        self.receiver.index = index
        self.receiver.connect(info["epoch"], info["addresses"], info["receivers"], info["near"])

    async def sync(self, stamp: tuple[int, int]) -> list[dict[str, Any]]:
        self.stamp = None
        report = await self._in_engine(self._receive, stamp[1])
        self.stamp = stamp
        return [report]

    def _receive(self, version: int) -> dict[str, Any]:
        def load(tensors: list[tuple[str, torch.Tensor]]) -> None:
            self.reach("load", version)
            self.weights.update({name: tensor.clone() for name, tensor in tensors})

        try:
            report = self.receiver.receive(load, version)
        except SyncError:
            raise
        self.reach("finish", version)
        if self.fault == ("canary", version, "corrupt"):
            self.weights["a"] += 1
        return report

    async def score(self, sequences: list[np.ndarray]) -> list[np.ndarray]:
        self.reach("score", self.stamp[1])
        value = float(self.weights["a"][0, 0])
        return [np.full(len(s) - 1, -value, np.float32) for s in sequences]

    async def rollout(self, prompts: list[Prompt], sampling: Any) -> list[Sample]:
        if self.stamp is None:
            raise RuntimeError("no verified weights")
        incarnation, version = self.stamp
        await asyncio.sleep(0.01)
        ids, versions = np.arange(3, dtype=np.int32), np.full(3, version, np.int32)
        given = ids, np.zeros(3, np.float32), np.ones(3, bool), versions
        return [
            Sample(p.id, i, p.ids, *given, incarnation=incarnation, reward=float(i))
            for p in prompts
            for i in range(sampling.size)
        ]

    async def stop(self) -> None:
        """Nothing to end."""


class Team:
    """A run's processes, and runs of the real pipeline over them."""

    def __init__(
        self, ranks: int, replicas: int, timeout_s: float = 5.0, near: bool = True
    ) -> None:
        cfg = self.cfg = Config()
        cfg.placement.roles = {"rollout": "rollout", "actor": "actor"}
        cfg.trainer.step_timeout_s = 600.0  # no test waits for it
        cfg.weight_sync.timeout_s, cfg.weight_sync.bucket_mb = timeout_s, 1
        cfg.data.train_batch_size = 2
        cfg.rollout.n, cfg.rollout.heartbeat_s = 2, 0.2
        self.respawned: list[int] = []
        workers = [spawn(LightTrainer, (cfg, i, ranks), None, "cpu") for i in range(ranks)]
        actor = TrainGroup("actor", workers, cfg)
        first = [spawn(LightReplica, (cfg, i), None, "cpu") for i in range(replicas)]
        self.rollout = RolloutGroup(first, cfg, True, respawn=self._respawn)
        self.on_respawn: Any = lambda replica: None
        canary = [np.arange(4, dtype=np.int32)]
        places = [list(range(replicas)) if near else [] for _ in workers]
        self.sync = WeightSync(actor, self.rollout.supervisor, canary, "127.0.0.1", places)
        self.roles = Roles(actor, self.rollout, self.sync)
        self.groups = {"actor": actor}

    def _respawn(self, i: int) -> Any:
        ray.kill(self.rollout.replicas[i])
        self.respawned.append(i)
        replica = spawn(LightReplica, (self.cfg, i), None, "cpu")
        self.on_respawn(replica)
        return replica

    async def connect(self) -> None:
        await asyncio.gather(
            *(rank.__ray_ready__.remote() for rank in self.roles.actor.ranks)
        )  # no start counts
        await self.rollout.setup()
        await self.sync.connect()

    async def restore_beginning(self, overlap: bool) -> None:
        """As when the processes had just started, but for the groups between them."""
        while any(not task.done() for task in self.rollout.supervisor.restart_tasks.values()):
            await asyncio.sleep(0.05)
        self.cfg.weight_sync.overlap = overlap
        ranks = self.roles.actor.ranks
        await asyncio.gather(*(rank.restore_beginning.remote(overlap) for rank in ranks))
        for replica in self.rollout.replicas:
            await replica.set_fault.remote("nowhere", None, "")
        self.sync.last_sent, self.rollout.supervisor.syncing = None, False
        self.respawned.clear()

    def pipeline(self, folder: Any) -> Pipeline:
        """A run of STEPS steps, with an evaluation of the last version."""
        prompts = [Prompt((0, row), np.arange(3, dtype=np.int32), "q", "1") for row in range(8)]
        stream = PromptStream(prompts, 2, True, 0, STEPS)
        self.said: list[str] = []
        tracker = Tracker(str(folder), STEPS, out=open(os.devnull, "w"))
        tracker.log = self.said.append
        return Pipeline(self.cfg, self.roles, stream, prompts[:2], tracker)

    async def is_process_failure(self, error: Exception) -> bool:
        from one_step_off.runtime.processes import RunProcesses

        return await RunProcesses.is_process_failure(
            SimpleNamespace(roles=self.roles, groups=self.groups), error
        )

    def kill(self) -> None:
        for one in (*self.roles.actor.ranks, *self.rollout.replicas):
            ray.kill(one)
