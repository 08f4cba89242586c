"""Replicas that die, hang and come back, with stand-ins for Ray actors; real ones die in the e2e tests."""

from __future__ import annotations

import asyncio
import random
import time
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from one_step_off.cluster import remote_calls
from one_step_off.cluster.errors import PhaseTimeout, ProcessDied, RoleError, SyncError, TrainerDied
from one_step_off.config.schema import Config
from one_step_off.data.samples import Prompt
from one_step_off.ray_trainer import Pipeline, Resumed
from one_step_off.rollout import replica_group as groups
from one_step_off.rollout.health import ReplicaHealth, ReplicaState
from one_step_off.rollout.replica_group import NoReplica, RolloutGroup
from one_step_off.runtime.processes import RunProcesses
from one_step_off.training.trainer_group import TrainGroup
from one_step_off.weight_sync.coordinator import WeightSync
from tests.unit.ray_trainer.test_ray_trainer import FakeSync, World, build
from tests.unit.rollout.test_replica_group import CONTROL, Actor, Method, a_sample, healthy


@given(st.lists(st.sampled_from(ReplicaState), max_size=40))
def test_the_dead_serve_only_after_a_start_and_a_sync(way):
    """Whatever is tried: HEALTHY after DEAD only by way of STALE, and SUSPECT only from HEALTHY."""
    health, been = ReplicaHealth(1.0, 1.0), [ReplicaState.STALE]
    for state in way:
        try:
            health.transition_to(state)
            been.append(state)
        except ValueError as e:
            assert f"a {been[-1].name} replica never becomes {state.name}" == str(e)
        assert health.state is been[-1]
    for before, after in zip(been, been[1:], strict=False):
        assert after in (ReplicaState.STALE, ReplicaState.DEAD) or before is not ReplicaState.DEAD
        assert after is not ReplicaState.SUSPECT or before is ReplicaState.HEALTHY


def test_silence_makes_suspect_then_faulty_and_an_answer_clears_it():
    health = ReplicaHealth(silent_s=60, stuck_s=600)
    health.transition_to(ReplicaState.HEALTHY)
    health.begin(100.0)
    health.missed()
    assert health.state is ReplicaState.SUSPECT and not health.fault(159.0)
    health.heartbeat(159.5, 4, 2)
    assert health.state is ReplicaState.HEALTHY and not health.fault(219.0)
    assert health.fault(220.0) == "no heartbeat in 60 s"


def test_one_that_works_and_finishes_nothing_is_faulty_but_an_idle_one_is_not():
    busy, idle = ReplicaHealth(60, 600), ReplicaHealth(60, 600)
    for health in (busy, idle):
        health.transition_to(ReplicaState.HEALTHY)
        health.begin(0.0)
    for now in range(0, 1300, 50):
        busy.heartbeat(now, 7 if now < 650 else 8, 3)
        idle.heartbeat(now, 7, 0)
        assert not idle.fault(now)
        assert bool(busy.fault(now)) == (600 < now < 650 or now > 1250), now
    assert busy.fault(1251.0) == "it works, and has finished nothing in 600 s"


class Lossy(WeightSync):
    """A weight sync whose processes are stand-ins: `broken[i]` is how often replica i still dies in a sync. The groups are
    created by the real code; `regrouped` says for which replicas."""

    def __init__(
        self, replicas: int, broken: dict[int, int], respawn=None, answers: bool = False
    ) -> None:
        self.broken, self.regrouped, self.lines = broken, [], []
        actors = [self.replica(i, answers) for i in range(replicas)]
        cfg = Config()
        cfg.weight_sync.timeout_s = 1.0
        report = {"bytes": 8.0, "changed": 1.0, "bucket_wire": [[0, 0.1]], "spans": []}
        sends = {
            "connect_sync": None,
            "send_weights": lambda version: dict(report),
            "release": None,
        }
        trainer = Actor(score=lambda seqs: [np.array([-1.0])], **sends, **CONTROL)
        group = TrainGroup("actor", [trainer], cfg)
        rollout = RolloutGroup(
            actors, cfg, True, respawn=respawn or (lambda i: self.replica(i, answers))
        )
        rollout.child_processes = [[(i, 1.0)] for i in range(replicas)]
        super().__init__(group, rollout, [np.arange(2)], "127.0.0.1", [[]])
        self.senders = self.sending_ranks = group.ranks
        self.total_bytes, self.connect_info, rollout.on_message = 8, {}, self.lines.append

    def replica(self, i: int, answers: bool) -> Actor:
        async def sync(stamp):
            if self.broken.get(i, 0):
                self.broken[i] -= 1
                died.append(1)
                raise SyncError("its process died")
            return [{"bytes": 8.0, "bucket_wire": [[0, 0.1]], "spans": [], "bare_wire": 0.05}]

        async def alive():
            if died and not answers:
                raise RuntimeError("gone")

        def connect(info, first_receiver):
            if info["epoch"] > len(self.regrouped):
                self.regrouped.append([])
            self.regrouped[-1].append(i)

        async def start(former):
            assert former == [(i, 1.0)], "what the dead one left is to be ended"
            await asyncio.sleep(0.05)
            return 8, [(i, 1.0)]

        died: list[int] = []
        score = {"score": lambda seqs: [np.array([-1.0])]}
        return Actor(sync=sync, connect_sync=connect, alive=alive, start=start, **score)


def test_a_replica_that_dies_in_a_sync_is_left_out_and_gets_the_same_weights_when_it_is_back():
    async def main():
        sync = Lossy(3, {1: 1})
        await sync((0, 1))
        assert sync.regrouped == [[0, 1, 2], [0, 2]] and sync.rollout.active == [0, 2]
        assert len(sync.lines) == 1 and "rollout 1" in sync.lines[0]
        assert sync.rollout.health[1].state is ReplicaState.DEAD
        await sync((0, 2))
        assert sync.rollout.active == [0, 2], "it has not started yet"
        await asyncio.sleep(0.2)
        assert (
            sync.regrouped[2:] == [[1]] and sync.rollout.health[1].state is ReplicaState.HEALTHY
        ), "by a sync of its own"
        await sync((0, 3))
        assert sync.rollout.active == [0, 1, 2] and sync.regrouped[3:] == [[0, 1, 2]]
        assert sync.rollout.restarts == 1

    asyncio.run(main())


def test_where_nothing_is_kept_it_waits_for_the_next_sync():
    async def main():
        sync = Lossy(2, {1: 1})
        sync.cfg.keep_sent = False
        await sync((0, 1))
        await asyncio.sleep(0.2)
        assert sync.rollout.active == [0, 1] and sync.rollout.health[1].state is ReplicaState.STALE
        assert await sync.rollout.wait_for_healthy() == [0]
        await sync((0, 2))
        assert await sync.rollout.wait_for_healthy() == [0, 1]

    asyncio.run(main())


def test_with_no_replica_left_the_sync_waits_for_the_first_that_starts():
    async def main():
        sync = Lossy(2, {0: 1, 1: 1})
        metrics = await sync((0, 1))
        assert metrics["sync/bytes"] == 8 and await sync.rollout.wait_for_healthy()

    asyncio.run(main())


def test_the_only_replica_comes_back_to_the_very_sync_it_died_in_though_nothing_is_kept():
    async def main():
        sync = Lossy(1, {0: 1})
        sync.cfg.keep_sent = False
        assert (await sync((0, 1)))[
            "sync/bytes"
        ] == 8 and await sync.rollout.wait_for_healthy() == [0]

    asyncio.run(main())


def test_a_replica_that_answers_but_did_not_get_the_weights_ends_the_run():
    with pytest.raises(SyncError, match="rollout 1: its process died"):
        asyncio.run(Lossy(2, {1: 1}, answers=True)((0, 1)))


def test_a_replica_that_cannot_be_started_anew_is_left_out_and_the_last_one_ends_the_run():
    def respawn(i):
        raise OSError("no seat left")

    async def main():
        sync = Lossy(2, {0: 1}, respawn)
        await sync((0, 1))
        await asyncio.sleep(0.05)
        await sync((0, 2))
        assert (
            await sync.rollout.wait_for_healthy() == [1]
            and "left out from now on" in sync.lines[-1]
        )
        sync.broken[1] = 1
        await sync((0, 3))

    with pytest.raises(NoReplica, match="none could be started anew: no seat left; no seat left"):
        asyncio.run(main())


def test_a_replica_that_was_noticed_to_be_dead_elsewhere_does_not_end_the_attempt():
    """By a ping or a rollout under way: a new process stands in its place when the sync has failed, and that one answers."""

    async def main():
        sync = Lossy(2, {})

        async def dies(stamp):
            sync.rollout.mark_failed(1, "its process died")
            raise ProcessDied("rollout 1: its process died")

        async def gone():
            raise RuntimeError("gone")

        sync.rollout.replicas[1].sync, sync.rollout.replicas[1].alive = Method(dies), Method(gone)
        await sync((0, 1))
        assert sync.regrouped[:2] == [[0, 1], [0]] and sync.rollout.restarts == 1
        await asyncio.sleep(0.2)
        assert await sync.rollout.wait_for_healthy() == [0, 1]

    asyncio.run(main())


def test_a_healthy_replica_that_is_busy_when_another_dies_is_not_lost(monkeypatch):
    """It is packing layers, say, which nothing interrupts."""
    monkeypatch.setattr("one_step_off.weight_sync.sync_calls.ABORT_NOTICE_S", 0.05)

    async def main():
        sync = Lossy(2, {1: 1})
        slow = sync.rollout.replicas[0]
        slow.sync = Method(slow.sync.answer, delay=0.5)
        await sync((0, 1))
        assert sync.rollout.restarts == 1 and sync.rollout.replicas[0] is slow
        assert sync.regrouped[:2] == [[0, 1], [0]]

    asyncio.run(main())


def test_a_trainer_found_dead_when_a_replica_comes_back_ends_the_attempt():
    async def main():
        group = group_of([Dying(), Dying(at=5)], "static")
        restored = []

        async def restore(i: int) -> bool:
            restored.append(i)
            raise TrainerDied("weight sync of version 3: trainer rank 0: it hangs")

        group.restore = restore
        watch = asyncio.create_task(group.watch())
        await group.generate(PROMPTS, "step 0", group.train_sampling)
        with pytest.raises(TrainerDied, match="trainer rank 0: it hangs"):
            await asyncio.wait_for(watch, 5)
        assert restored == [1], "no other start of the replica would help"

    asyncio.run(main())


class Dying:
    """A replica that generates until it dies at the prompt of row `at`; another life of it is `next`."""

    def __init__(self, at: int = -1, hangs: bool = False) -> None:
        self.at, self.hangs, self.had, self.gone = at, hangs, [], False
        self.rollout, self.ping, self.wait_for_capacity = (
            Method(self.make),
            Method(self.answer),
            Method(0),
        )
        self.start, self.stop, self.alive = Method((8, [])), Method(None), Method(self.answer)

    async def make(self, prompts, sampling):
        for p in prompts:
            if p.id[1] == self.at:
                self.gone = True
                if self.hangs:
                    await asyncio.sleep(60)
                raise RuntimeError("the engine died")
        await asyncio.sleep(0.01)
        self.had += [p.id[1] for p in prompts]
        return [a_sample(p, i) for p in prompts for i in range(sampling.n)]

    async def answer(self):
        if self.gone and self.hangs:
            await asyncio.sleep(60)
        if self.gone:
            raise RuntimeError("gone")
        return len(self.had), 0


def group_of(replicas: list[Dying], routing: str, respawn=None) -> RolloutGroup:
    cfg = Config()
    cfg.rollout.routing, cfg.rollout.n = routing, 2
    cfg.rollout.heartbeat_s, cfg.rollout.heartbeat_timeout_s = 0.02, 0.3
    group = RolloutGroup(replicas, cfg, False, respawn=respawn or (lambda i: Dying()))

    async def restore(i: int) -> bool:
        group.health[i].transition_to(ReplicaState.HEALTHY)
        group.health[i].begin(time.monotonic())
        return True

    group.restore = restore
    for health in healthy(group).health:
        health.begin(time.monotonic())
    return group


PROMPTS = [Prompt((0, row), np.arange(2), "", "") for row in range(12)]


@pytest.mark.parametrize("routing", ["static", "least_loaded"])
@pytest.mark.parametrize("hangs", [False, True])
def test_what_a_lost_replica_had_not_returned_is_made_by_the_others(routing, hangs, monkeypatch):
    monkeypatch.setattr(groups, "PING_S", 0.05)

    async def main():
        replicas = [Dying(), Dying(at=4, hangs=hangs), Dying()]
        group = group_of(replicas, routing)
        watch = asyncio.create_task(group.watch())
        samples, _ = await group.generate(PROMPTS, "step 0", group.train_sampling)
        assert [(s.prompt_id[1], s.index) for s in samples] == [
            (row, i) for row in range(12) for i in range(2)
        ]
        await asyncio.sleep(0.1)
        assert (
            group.restarts == 1
            and group.replicas[1] is not replicas[1]
            and group.health[1].state is ReplicaState.HEALTHY
        )
        await group.generate(PROMPTS, "step 1", group.train_sampling)
        assert group.replicas[1].had or routing == "least_loaded", "it serves again"
        watch.cancel()

    asyncio.run(main())


@pytest.mark.parametrize("routing", ["static", "least_loaded"])
def test_with_one_replica_its_prompts_wait_for_its_next_life(routing):
    async def main():
        group = group_of([Dying(at=4)], routing)
        samples, _ = await group.generate(PROMPTS, "step 0", group.train_sampling)
        assert len(samples) == 24 and len({s.prompt_id for s in samples}) == 12

    asyncio.run(main())


def test_a_replica_that_dies_in_the_sync_of_every_new_life_is_left_out():
    async def main():
        group, lives = (
            group_of(
                [Dying(), Dying(at=5)], "static", respawn=lambda i: lives.append(i) or Dying()
            ),
            [],
        )

        async def restore(i: int) -> bool:
            return False

        group.restore = restore
        samples, _ = await group.generate(PROMPTS, "step 0", group.train_sampling)
        assert len(samples) == 24
        await asyncio.wait([group.restart_tasks[1]])
        assert (
            lives == [1] * groups.MAX_ATTEMPTS
            and group.active == [0] == await group.wait_for_healthy()
        )

    asyncio.run(main())


def test_an_idle_replica_that_dies_is_noticed_by_its_heartbeat():
    async def main():
        replicas = [Dying(), Dying()]
        group = group_of(replicas, "static")
        watch = asyncio.create_task(group.watch())
        await asyncio.sleep(0.05)
        replicas[0].gone = True
        await asyncio.sleep(0.1)
        assert (
            group.restarts == 1
            and group.replicas[0] is not replicas[0]
            and await group.wait_for_healthy() == [0, 1]
        )
        watch.cancel()

    asyncio.run(main())


@pytest.mark.parametrize("routing", ["static", "least_loaded"])
def test_a_prompt_that_replicas_die_of_ends_in_a_named_error_and_not_in_a_loop(routing):
    async def main():
        group = group_of([Dying(at=4), Dying(at=4)], routing, respawn=lambda i: Dying(at=4))
        with pytest.raises(
            ProcessDied,
            match="step 0, rollout .: 3 replicas in a row were lost with the same prompts",
        ):
            await asyncio.wait_for(group.generate(PROMPTS, "step 0", group.train_sampling), 5)

    asyncio.run(main())


def test_in_a_shared_pool_a_lost_replica_ends_this_life_of_the_run():
    async def main():
        group = group_of([Dying(at=4)], "static")
        group.shares_pool = True
        with pytest.raises(ProcessDied, match="rollout 0"):
            await group.generate(PROMPTS, "step 0", group.train_sampling)

    asyncio.run(main())


GONE, HANGS, WELL = type("ActorDiedError", (Exception,), {})("gone"), 30.0, 0.0


@pytest.mark.parametrize(
    ("error", "other", "answer"),
    [
        (ProcessDied("actor 0"), WELL, True),
        (PhaseTimeout("step 3, actor"), WELL, True),
        (SyncError("trainer rank 0 waited in vain"), GONE, True),
        (SyncError("trainer rank 0 waited in vain"), HANGS, True),
        (SyncError("checksum"), WELL, False),
        (RoleError("rollout 0: the reward raised"), WELL, False),
        (ValueError("a mistake of ours"), GONE, False),
        (NoReplica("all starts failed"), GONE, False),
    ],
)
def test_another_attempt_is_begun_only_where_a_process_is_gone_or_hangs(
    error, other, answer, monkeypatch
):
    """A process that waited for that one may have failed first. Real processes that are busy: test_sync_failures.py."""
    monkeypatch.setattr(remote_calls, "LIVENESS_TIMEOUT_S", 0.2)
    ranks: list[Any] = [Actor(alive=None), Actor(alive=None)]
    ranks[1].alive = Method(
        other if other is GONE else None, delay=other if isinstance(other, float) else 0.0
    )
    roles = SimpleNamespace(rollout=SimpleNamespace(replicas=[], active=[]))
    team = SimpleNamespace(roles=roles, groups={"actor": SimpleNamespace(ranks=ranks)})
    assert asyncio.run(RunProcesses.is_process_failure(team, error)) is answer


class Notes:
    """A checkpointer that keeps in memory what it is given."""

    in_use, saved = False, ()

    def has(self, step: int) -> bool:
        return False

    def is_due(self, step: int) -> bool:
        return False

    async def save(self, step, samples, state):
        self.saved = (*self.saved, (step, samples, state))

        async def write():
            return "notes", 0

        return write()


@pytest.mark.parametrize("staleness", [0, 1])
@pytest.mark.parametrize("where", ["generate", "sync"])
def test_with_no_replica_left_a_checkpoint_is_written_and_nothing_is_lost(
    tmp_path, staleness, where
):
    """At step 3. One step off the trainer ends the step that it is at; then the checkpoint has no samples, and the data
    position before them: resumed, every prompt is trained on once."""
    world, steps = World(random.Random(0)), 7
    pipeline = build(tmp_path, world, steps, staleness, rows=30)
    pipeline.checkpointer, rollout = Notes(), pipeline.roles.rollout
    generate, failing = rollout.generate, {"generate": "step 3", "sync": 3}[where]

    async def lost(prompts, what, sampling):
        if what == failing:
            await asyncio.sleep(0.005)  # in the middle of the update beside it
            raise NoReplica("none is left")
        return await generate(prompts, what, sampling)

    class Sync(FakeSync):
        async def __call__(self, stamp, expected=None):
            if stamp[1] == failing:
                raise NoReplica("none is left")
            return await super().__call__(stamp, expected)

        async def release(self, version):
            world.engine_version = version  # so that the stand-in of a worker goes on

    rollout.generate, pipeline.roles.sync = lost, Sync(world)
    with pytest.raises(NoReplica, match="none is left"):
        asyncio.run(pipeline.fit())
    checkpointer: Any = pipeline.checkpointer
    ((step, samples, state),) = checkpointer.saved
    assert samples is None and step == len(world.trained) == world.version == (
        4 if (staleness, where) == (1, "sync") else 3
    )
    again = build(tmp_path / "again", world, steps, staleness, rows=30)
    again.stream.load_state_dict(state["stream"])
    resumed = Resumed(step, None, 0.0, incarnation=state["incarnation"])
    world.engine_version = None
    again = Pipeline(
        again.cfg, again.roles, again.stream, None, again.tracker, None, resumed, incarnation=0
    )
    asyncio.run(again.fit())
    assert [t[0] for t in world.trained] == list(range(steps))
    trained = [tuple(prompt) for t in world.trained for prompt in t[1]]
    fresh = build(tmp_path / "fresh", World(random.Random(0)), steps, staleness, rows=30).stream
    assert trained == [p.id for _ in range(steps) for p in fresh.next_batch()], (
        "each once, in the order of the data"
    )
