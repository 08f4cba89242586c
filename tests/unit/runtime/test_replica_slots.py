"""The placement groups of replicas that join and leave, over attempts: which are reserved and which
are freed. With stand-ins for Ray; the chaos and e2e tests have real ones."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from one_step_off.cluster.placement import ProcessSlot
from one_step_off.config.errors import ConfigError
from one_step_off.config.loading import load_config
from one_step_off.runtime import persistent_actors
from one_step_off.runtime.persistent_actors import PersistentActors
from tests.unit.rollout.test_replica_supervisor import MortalReplica, group_of
from tests.unit.stand_ins import ActorMethod, RecordedEvents


class Cluster:
    """Placement groups by name, in place of Ray.

    Attributes:
        reserved: names of the groups that are there.
        killed: actors.
        free: groups that may be reserved.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, free: int = 10) -> None:
        self.reserved: set[str] = set()
        self.killed: list[Any] = []
        self.free = free
        self.count = 0
        monkeypatch.setattr(persistent_actors, "reserve_replicas", self.reserve)
        monkeypatch.setattr(persistent_actors, "remove_placement_group", self.reserved.remove)
        monkeypatch.setattr(persistent_actors, "kill_all", self.killed.extend)

    def reserve(
        self, cfg: Any, device: str, count: int, present: list[ProcessSlot]
    ) -> list[ProcessSlot]:
        if count > self.free:
            raise ConfigError(f"needs {count} CPUs, but the cluster has {self.free} free")
        self.free -= count
        return [self.slot() for _ in range(count)]

    def slot(self) -> ProcessSlot:
        group: Any = f"group {self.count}"
        self.count += 1
        self.reserved.add(group)
        return ProcessSlot(group, 0, 0, ())


class Engines(PersistentActors):
    """With two replicas in the config, whose processes are stand-ins."""

    def __init__(self, cluster: Cluster) -> None:
        self.cfg = load_config(["model.path=tiny:qwen2", "placement.device=cpu"])
        self.device = "cpu"
        self.events = RecordedEvents()
        self.rollout_pool = "rollout"
        self.pools = {"rollout": [cluster.slot(), cluster.slot()]}
        self.replica_slots = dict(enumerate(self.pools["rollout"]))
        self.reserved = []
        self.lent_slots = {}
        self.former_rollout = None
        self.rollout = group_of([self._create_replica(i) for i in self.replica_slots])

    def _create_replica(self, index: int) -> Any:
        return MortalReplica()

    def _create_rollout_group(self, replicas: list[Any]) -> Any:
        return group_of(replicas)


def slots_of(engines: Engines) -> set[str]:
    groups: list[Any] = [slot.group for slot in engines.pools["rollout"]]
    return set(groups)


def test_a_replica_that_leaves_frees_its_group_and_is_killed(monkeypatch):
    async def main():
        cluster = Cluster(monkeypatch)
        engines = Engines(cluster)
        engines.reserve_replicas(1)
        assert engines.join() == 2
        assert cluster.reserved == {"group 0", "group 1", "group 2"} == slots_of(engines)
        await asyncio.wait(engines.rollout.supervisor.restart_tasks.values())
        assert await engines.leave(1, 5.0)
        assert cluster.reserved == {"group 0", "group 2"} == slots_of(engines)
        assert cluster.killed == [engines.rollout.replicas[1]]
        engines.reserve_replicas(1)
        assert engines.join() == 1
        assert cluster.reserved == {"group 0", "group 2", "group 3"} == slots_of(engines)

    asyncio.run(main())


def test_the_engine_of_a_replica_that_does_not_stop_is_killed(monkeypatch):
    monkeypatch.setattr(persistent_actors, "STOP_S", 0.05)
    killed = []

    async def kill_engine(self: Any, index: int, children: Any) -> None:
        killed.append((index, children))

    monkeypatch.setattr(PersistentActors, "_kill_engine", kill_engine)

    async def main():
        engines = Engines(Cluster(monkeypatch))
        engines.rollout.supervisor.child_processes[1] = [(4711, 1.0)]
        engines.rollout.replicas[1].stop = ActorMethod(None, delay=30)
        assert await engines.leave(1, 5.0)

    asyncio.run(main())
    assert killed == [(1, [(4711, 1.0)])]


def test_the_next_attempt_frees_what_was_leaving_or_about_to_join(monkeypatch):
    async def first(engines: Engines) -> None:
        engines.reserve_replicas(1)
        engines.join()
        engines.reserve_replicas(1)  # the attempt ends before it joins
        supervisor = engines.rollout.supervisor
        await asyncio.wait(supervisor.restart_tasks.values())
        supervisor.mark_left(0)  # it ends before the process is stopped
        supervisor.leaving.add(1)

    cluster = Cluster(monkeypatch)
    engines = Engines(cluster)
    asyncio.run(first(engines))
    engines.begin_attempt(1)
    assert engines.rollout.supervisor.members == [2]
    assert cluster.reserved == {"group 2"} == slots_of(engines)
    assert cluster.killed == engines.rollout.replicas[:2]


def test_a_restart_of_a_replica_that_leaves_may_replace_the_processes_to_kill(monkeypatch):
    monkeypatch.setattr(persistent_actors, "STOP_S", 0.05)
    killed = []

    async def kill_engine(self: Any, index: int, children: Any) -> None:
        killed.append(children)

    monkeypatch.setattr(PersistentActors, "_kill_engine", kill_engine)

    async def main():
        engines = Engines(Cluster(monkeypatch))
        supervisor = engines.rollout.supervisor
        starting = MortalReplica()
        starting.start = ActorMethod((8, [(4712, 2.0)]), delay=0.05)
        starting.stop = ActorMethod(None, delay=30)
        supervisor.respawn = lambda i: starting
        supervisor.child_processes[1] = [(4711, 1.0)]
        supervisor.mark_failed(1, "killed")
        await asyncio.sleep(0.01)  # now it starts
        assert await engines.leave(1, 5.0)

    asyncio.run(main())
    assert killed == [[(4712, 2.0)]]


def test_the_next_attempt_kills_the_engine_of_a_replica_that_was_leaving(monkeypatch):
    cluster = Cluster(monkeypatch)
    killed = []

    def begin_engine_kill(self: Any, index: int, children: Any) -> str:
        assert len(cluster.reserved) == 2, "without its group the call would never run"
        killed.append((index, children))
        return "answer"

    monkeypatch.setattr(PersistentActors, "_begin_engine_kill", begin_engine_kill)
    waited = []
    monkeypatch.setattr(
        persistent_actors.ray, "wait", lambda answers, **options: waited.extend(answers)
    )
    engines = Engines(cluster)
    engines.rollout.supervisor.child_processes[:] = [[(4711, 1.0)], [(4712, 1.0)]]
    engines.rollout.supervisor.leaving.add(1)
    engines.begin_attempt(1)
    assert killed == [(1, [(4712, 1.0)])]
    assert waited == ["answer"]


@pytest.mark.parametrize("ended", [False, True])
def test_groups_that_are_reserved_when_the_attempt_ends_are_freed(monkeypatch, ended):
    """Ray is asked in a thread, which goes on. Some are reserved already."""
    cluster = Cluster(monkeypatch)
    monkeypatch.setattr(persistent_actors, "kill_engines_of_run", lambda: None)
    engines = Engines(cluster)
    engines.endpoint = None
    engines.frozen_groups = {}
    engines.actors = []
    engines.reserve_replicas(1)
    reserve = cluster.reserve

    def reserve_late(*args: Any) -> list[ProcessSlot]:
        slots = reserve(*args)
        if ended:
            asyncio.run(engines.end())
        else:
            engines.begin_attempt(1)
        return slots

    monkeypatch.setattr(persistent_actors, "reserve_replicas", reserve_late)
    engines.reserve_replicas(2)
    assert engines.reserved == []
    assert cluster.reserved == (set() if ended else {"group 0", "group 1"})


@pytest.mark.parametrize(("more", "count"), [(-1, 2), (0, 2), (2, 4), (7, 5)])
def test_new_engines_are_as_many_as_were_asked_for_or_those_of_the_config(monkeypatch, more, count):
    """After the failure of a node there may be no room for more."""
    cluster = Cluster(monkeypatch, free=3)
    engines = Engines(cluster)
    engines._reserve_more(more)
    assert list(engines.replica_slots) == list(range(count))
    assert len(cluster.reserved) == count
    assert slots_of(engines) == cluster.reserved
    if more == 7:
        events: Any = engines.events
        line = "4 rollout replicas less than before: needs 1 CPUs, but the cluster has 0 free"
        assert events.lines == [line]
