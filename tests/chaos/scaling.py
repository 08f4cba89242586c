"""Replicas that join and leave at random, between kills.

`ScaleChanges` asks a real run by the real command. `scale_light` does so hundreds of times: trainer
and replicas have no model (`tests/sync_actors.py`); the pipeline, the weight sync, the supervisor,
the placement groups and the command are the real ones.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import fcntl
import os
import random
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from tests.chaos.command import ROOT, Command

MOST_REPLICAS = 4
CHANGE_LIMIT_S = 240.0
"""More than any change may take."""

KILLS = ("", "", "start", "connect", "load", "score", "any")
"""What happens to a replica that joins; "": nothing. "any": to any replica, at any moment."""


class ScaleChanges:
    """Changes the number of replicas of a real run again and again, in a thread of its own.

    Attributes:
        done: exit code of the command -> how often.
        wrong: what is not as promised.
    """

    def __init__(self, command: Command, seed: int, count: int) -> None:
        self.command = command
        self.random = random.Random(seed)
        self.count = count
        self.done = {0: 0, 1: 0, 2: 0}
        self.wrong: list[str] = []
        self.stopped = threading.Event()
        self.thread = threading.Thread(target=self._run, daemon=True)

    def start(self) -> None:
        self.thread.start()

    def stop(self) -> None:
        """Wait for the end of the change that is under way."""
        self.stopped.set()
        self.thread.join(2 * CHANGE_LIMIT_S)

    @property
    def are_done(self) -> bool:
        """Whether so many as wanted were carried out."""
        return self.done[0] >= self.count

    def _run(self) -> None:
        while not self.stopped.is_set() and not self.are_done and not self.wrong:
            change = self.random.choice(["+1", "-1", "1", "2", "3"])
            self._change(change)
            self.stopped.wait(self.random.uniform(0, 3))

    def _change(self, change: str) -> None:
        """0: done; 1: the run ended or a kill hit it; 2: refused, as while the driver is dead."""
        program = [sys.executable, "-m", "one_step_off.scale", str(self.command.folder)]
        try:
            ended = subprocess.run(
                [*program, f"rollout={change}", f"--timeout={CHANGE_LIMIT_S}"],
                cwd=ROOT,
                env=os.environ | {"PYTHONPATH": str(ROOT)},
                capture_output=True,
                text=True,
                timeout=2 * CHANGE_LIMIT_S,
            )
        except subprocess.TimeoutExpired:
            self.wrong.append(f"rollout={change}: the command did not end")
            return
        output = ended.stdout + ended.stderr
        if ended.returncode not in self.done or " s; " in output or "Traceback" in output:
            self.wrong.append(f"rollout={change}: exit code {ended.returncode}: {output}")
            return
        self.done[ended.returncode] += 1

    def more_results(self) -> dict[str, Any]:
        """For result.json."""
        return {"scale_changes": self.done}


class LightRun:
    """The pipeline over light actors, and what it has trained on."""

    def __init__(self, args: argparse.Namespace) -> None:
        from one_step_off.cluster.placement import spawn
        from one_step_off.data.samples import Prompt
        from one_step_off.ray_trainer import RunGroups
        from one_step_off.runtime.scaling import ReplicaScaler
        from one_step_off.training.trainer_group import WorkerGroup
        from one_step_off.weight_sync.coordinator import WeightSync
        from tests.sync_actors import HOST, LightTrainer, light_config
        from tests.unit.stand_ins import RecordedEvents

        self.random = random.Random(args.seed)
        self.seconds = 60 * args.minutes
        self.cfg = light_config(timeout_s=20.0)
        self.cfg.placement.pools = {"rollout": [2], "actor": [1]}
        self.cfg.placement.device = "cpu"
        self.cfg.data.train_batch_size = 8
        self.cfg.rollout.routing = "least_loaded" if args.seed % 2 else "static"
        self.cfg.trainer.output_dir = str(args.out / "run")
        self.folder = args.out / "run"
        self.folder.mkdir()
        self.events = RecordedEvents()
        self.engines = light_engines(self.cfg, self.events, self._on_spawn)
        self.kill = ""  # of the next replica that is spawned
        rank = spawn(LightTrainer, (self.cfg, 0, 1), None, "cpu")
        self.actor = WorkerGroup("actor", [rank], self.cfg)
        supervisor = self.engines.rollout.supervisor
        canary = [np.arange(4, dtype=np.int32)]
        self.sync = WeightSync(self.actor, supervisor, canary, HOST, [[]], self.events)
        self.roles = RunGroups(self.actor, self.engines.rollout, self.sync)
        self.prompts = [Prompt((0, i), np.arange(3, dtype=np.int32), "q", "1") for i in range(64)]
        self.scaler = ReplicaScaler(self.cfg, self.events, resumed=False)
        self.trained: list[list[Any]] = []
        self.wrong: list[str] = []

    def stream(self) -> Any:
        from one_step_off.data.prompt_stream import PromptStream

        return PromptStream(self.prompts, self.cfg.data.train_batch_size, True, 0, 10**6)

    def _on_spawn(self, replica: Any) -> None:
        """Let the fault happen that is meant for the next replica that starts."""
        from tests.sync_actors import Fault

        kill, self.kill = self.kill, ""
        if kill in ("connect", "load", "score"):
            replica.set_fault.remote(Fault(kill, None, "die"))
        elif kill == "start":
            self._kill_later(lambda: replica, self.random.uniform(0, 4))
        replica.set_rollout_s.remote(self.random.choice([0.01, 0.05, 0.3]))

    def _kill_later(self, find: Callable[[], Any], delay_s: float) -> None:
        import ray

        asyncio.get_running_loop().call_later(delay_s, lambda: ray.kill(find()))

    def _any_replica(self) -> Any:
        rollout = self.engines.rollout
        return rollout.replicas[self.random.choice(rollout.supervisor.members)]

    async def run(self, changes: int, say: Callable[[str], None]) -> dict[str, Any]:
        """Change the number until so many replicas have joined or left."""
        from one_step_off.monitoring.tracker import Tracker
        from one_step_off.ray_trainer import Pipeline, Stopped

        await asyncio.gather(*(rank.__ray_ready__.remote() for rank in self.actor.ranks))
        self.actor.has_answered = True
        await self.engines.rollout.setup()
        await self.sync.connect()
        self._record_batches()
        with open(os.devnull, "w") as console:
            tracker = Tracker(str(self.folder), 10**6, out=console)
            pipeline = Pipeline(self.cfg, self.roles, self.stream(), None, tracker)
            training = asyncio.create_task(pipeline.fit())
            begin = time.monotonic()
            with self.scaler.watching(self.engines):
                while self._changed() < changes and not training.done() and not self.wrong:
                    if time.monotonic() - begin > self.seconds:
                        break
                    await self._change()
                    say(f"{self._changed()} joins and leaves, {len(self.trained)} steps")
            pipeline.stopping = True
            try:
                await asyncio.wait_for(training, CHANGE_LIMIT_S)
            except Stopped:
                pass
            except Exception as error:
                self.wrong.append(f"the run ended by {type(error).__name__}: {error}")
        self._check_batches()
        await self._check_what_is_left()
        return self._result(time.monotonic() - begin)

    def _record_batches(self) -> None:
        update = self.actor.update

        async def recorded(batch: Any, learn: bool = True) -> Any:
            self.trained.append([(sample.prompt_id, sample.index) for sample in batch.samples])
            return await update(batch, learn)

        self.actor.update = recorded

    async def _change(self) -> None:
        """One change by the command, maybe with a kill in it."""
        from one_step_off.runtime.scaling import number_of
        from one_step_off.tools.scale import main

        present = number_of(self.engines)
        possible = [n for n in range(1, MOST_REPLICAS + 1) if n != present]
        target = self.random.choice([n for n in possible if abs(n - present) <= 2])
        words = self.random.choice([f"{target}", f"{target - present:+d}"])
        self.kill = self.random.choice(KILLS) if target > present else ""
        if self.kill == "any" or (target < present and self.random.random() < 0.4):
            self.kill = ""
            self._kill_later(self._any_replica, self.random.uniform(0, 1))
        rollout = self.engines.rollout
        steps = len(self.trained)
        restarts = rollout.restarts
        calm = not rollout.supervisor.restart_tasks
        arguments = [str(self.folder), f"rollout={words}", f"--timeout={CHANGE_LIMIT_S}"]
        code = await asyncio.to_thread(main, arguments)
        if code != 0 or number_of(self.engines) != target:
            lines = "; ".join(self.events.lines[-8:])
            self.wrong.append(f"rollout={words} of {present}: exit code {code}: {lines}")
        calm = calm and rollout.restarts == restarts  # else there may have been no other one
        if target > present and calm and len(self.trained) == steps:
            self.wrong.append(f"rollout={words} of {present}: no step was made meanwhile")

    def _count(self, words: str) -> int:
        return sum(words in line for line in self.events.lines)

    def _changed(self) -> int:
        return self._count(" has joined ") + self._count(" has left")

    def _check_batches(self) -> None:
        """Each prompt once and in order, each with all its samples, as in a run of fixed size."""
        stream = self.stream()
        for step, samples in enumerate(self.trained):
            ids = [prompt.id for prompt in stream.next_batch()]
            expected = [(prompt, i) for prompt in ids for i in range(self.cfg.rollout.n)]
            if samples != expected:
                self.wrong.append(
                    f"step {step}: other samples than those of its prompts, once each"
                )
                return

    async def _check_what_is_left(self) -> None:
        """One placement group and one living process per replica."""
        from ray.util.placement_group import placement_group_table

        rollout = self.engines.rollout
        for i in rollout.active:
            await asyncio.wait_for(rollout.replicas[i].alive.remote(), 30)
        created = [g for g in placement_group_table().values() if g["state"] == "CREATED"]
        present = len(rollout.supervisor.members)
        # One more is that of the trainer's pool.
        if len(created) != present + 1 or len(self.engines.replica_slots) != present:
            self.wrong.append(f"{present} replicas, {len(created) - 1} placement groups")

    def _result(self, seconds: float) -> dict[str, Any]:
        counts = {
            "joined": self._count(" has joined "),
            "left": self._count(" has left"),
            "failed starts": self._count("restart of rollout"),
            "restarts of serving replicas": self.engines.rollout.restarts,
            "steps": len(self.trained),
        }
        lines = ["| Event | Count |", "| --- | --- |"]
        lines += [f"| {name} | {count} |" for name, count in counts.items()]
        result = {"table": "\n".join(lines), "hit": self._changed(), "kills": []}
        return counts | result | {"wrong": self.wrong, "seconds": seconds}


def light_engines(cfg: Any, events: Any, on_spawn: Callable[[Any], None]) -> Any:
    """`PersistentActors` whose replicas are `LightReplica`s."""
    from one_step_off.cluster.placement import create_pools, spawn
    from one_step_off.runtime.persistent_actors import PersistentActors
    from tests.sync_actors import LightReplica

    class LightEngines(PersistentActors):
        def __init__(self) -> None:
            self.cfg = cfg
            self.device = "cpu"
            self.events = events
            self.actors: list[Any] = []
            self.reserved = []
            self.lent_slots = {}
            self.pools = create_pools(cfg, "cpu")
            self.rollout_pool = "rollout"
            self.replica_slots = dict(enumerate(self.pools["rollout"]))
            self.rollout = self._create_rollout_group(
                [self._create_replica(i) for i in self.replica_slots]
            )

        def _create_replica(self, index: int) -> Any:
            replica = spawn(LightReplica, (cfg, index), self.replica_slots[index], "cpu")
            if hasattr(self, "rollout"):  # not the first ones
                on_spawn(replica)
            return replica

    return LightEngines()


def scale_light(args: argparse.Namespace, say: Callable[[str], None]) -> dict[str, Any]:
    """`args.scale` joins and leaves of light replicas. Returns the content of result.json."""
    import ray

    from one_step_off.cluster.ray_cluster import hide_worker_death_reports
    from one_step_off.runtime.run_folder import LOCK_FILE

    async def run() -> dict[str, Any]:
        light = LightRun(args)
        with open(light.folder / LOCK_FILE, "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            return await light.run(args.scale, say)

    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    hide_worker_death_reports()
    environment = {"env_vars": {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}}
    ray.init(
        address="local",
        num_cpus=MOST_REPLICAS + 1,
        include_dashboard=False,
        log_to_driver=False,
        runtime_env=environment,
    )
    try:
        return asyncio.run(run())
    finally:
        with contextlib.suppress(Exception):
            ray.shutdown()
