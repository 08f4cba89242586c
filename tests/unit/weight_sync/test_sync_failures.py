"""A failed weight sync releases everything that waits for it: real Ray actors with both real ends of the stream.

The actors have no model (`sync_actors.py`); with real engines and trainers `python -m tests.chaos --syncs` goes further.
"""

from __future__ import annotations

import asyncio
import re
import time

import pytest
import ray

from one_step_off.cluster.errors import ProcessDied, RoleError, SyncError
from one_step_off.cluster.remote_calls import not_alive
from one_step_off.rollout.replica_supervisor import NoReplica
from tests.sync_actors import STEPS, Team

pytestmark = pytest.mark.timeout(240)
SOON_S = 15.0  # with liveness and settling on a busy machine; the limits that would end a hang are minutes


@pytest.fixture(scope="module")
def cluster():
    ray.init(
        address="local",
        num_cpus=8,
        include_dashboard=False,
        log_to_driver=False,
        _node_ip_address="127.0.0.1",
    )
    yield
    ray.shutdown()


async def fails(team: Team, folder, kind: type[Exception]) -> tuple[Exception, bool]:
    """Run the pipeline to its failure; returns it, and whether another attempt would begin. Asserts that all of it comes
    soon and that no trainer is left waiting."""
    begin = time.monotonic()
    with pytest.raises(kind) as caught:
        await asyncio.wait_for(team.pipeline(folder).fit(), 60)
    another = await asyncio.wait_for(team.is_process_failure(caught.value), SOON_S)
    assert time.monotonic() - begin < 2 * SOON_S
    if not another:
        ready = [rank.__ray_ready__.remote() for rank in team.roles.actor.ranks]
        await asyncio.wait_for(asyncio.gather(*ready), SOON_S)
    return caught.value, another


# who, where, what happens there, what the error says
FAULTS = [
    ("replica", "canary", "corrupt", "canary after the sync of version"),
    ("replica", "load", "raise", "phase load.*broken on purpose in load"),
    ("replica", "finish", "raise", "broken on purpose in finish"),
    ("replica", "score", "raise", "broken on purpose in score"),
    ("trainer", "pack b", "raise", "phase gather.*broken on purpose in pack b"),
]


@pytest.mark.parametrize(
    ("ranks", "near"), [(1, True), (2, False)], ids=["in shared memory", "two ranks over gloo"]
)
def test_a_failure_in_any_version_ends_the_run_by_name_and_leaves_no_rank_waiting(
    cluster, tmp_path, ranks, near
):
    async def main():
        team = Team(ranks, 2, near=near)
        await team.connect()
        for number, (who, place, action, words) in enumerate(FAULTS):
            for overlap in (True, False):
                for version in (0, 1, STEPS):
                    await team.restore_beginning(overlap)
                    victim = (
                        team.rollout.replicas[1] if who == "replica" else team.roles.actor.ranks[-1]
                    )
                    await victim.set_fault.remote(place, version, action)
                    folder = tmp_path / f"{number}-{overlap}-{version}"
                    error, another = await fails(team, folder, (SyncError, RoleError))
                    case = f"{who} {place} {version} overlap={overlap}: {error!r}"
                    assert not another and re.search(words, str(error)), case
                    assert f"version {version}" in str(error), case
                    trained = (
                        (folder / "metrics.jsonl").read_text()
                        if (folder / "metrics.jsonl").exists()
                        else ""
                    )
                    assert len(trained.splitlines()) <= version, f"{case}: trained on after it"
        team.kill()

    asyncio.run(main())


@pytest.mark.parametrize("overlap", [True, False])
def test_a_rank_that_dies_or_hangs_in_a_sync_leads_to_another_attempt(cluster, tmp_path, overlap):
    async def main():
        for action in ("die", "hang"):
            team = Team(2, 1, timeout_s=2.0)
            await team.connect()
            await team.restore_beginning(overlap)
            await team.roles.actor.ranks[1].set_fault.remote("pack b", 1, action)
            error, another = await fails(team, tmp_path / action, ProcessDied)
            assert another and re.search("(trainer rank|actor) 1", str(error)), error
            team.kill()

    asyncio.run(main())


def test_only_the_replica_that_died_is_restarted_while_another_still_waits_for_the_group(
    cluster, tmp_path
):
    """The engine of that one is inside `connect_sync`, and so does not answer; its process does."""

    async def main():
        team = Team(1, 2, timeout_s=30.0, near=False)
        await team.connect()
        await team.restore_beginning(True)
        await team.rollout.replicas[0].set_fault.remote("connect", None, "die")
        begin = time.monotonic()
        await asyncio.wait_for(team.pipeline(tmp_path).fit(), 100)
        assert team.respawned == [0], team.said
        assert time.monotonic() - begin < 29, (
            "not the limit of the group, but an abort ended the wait"
        )
        team.kill()

    asyncio.run(main())


def test_a_replica_that_hangs_in_a_sync_is_restarted_and_the_run_goes_on(cluster, tmp_path):
    async def main():
        team = Team(1, 2, timeout_s=2.0)
        await team.connect()
        for place in ("load", "score"):
            await team.restore_beginning(True)
            await team.rollout.replicas[1].set_fault.remote(place, 1, "hang")
            await asyncio.wait_for(team.pipeline(tmp_path / place).fit(), 100)
            assert team.respawned == [1], team.said
        team.kill()

    asyncio.run(main())


@pytest.mark.parametrize("replicas", [1, 2])
def test_a_replica_that_dies_in_every_sync_of_all_is_left_out_after_three(
    cluster, tmp_path, replicas
):
    """Though it passes the sync of its own with which it comes back."""

    async def passes_its_own(number: int) -> bool:
        return True

    async def main():
        team = Team(1, replicas, timeout_s=5.0)
        await team.connect()
        team.rollout.supervisor.restore = passes_its_own
        team.on_respawn = lambda replica: replica.set_fault.remote("finish", None, "die", True)
        for run in range(
            1 if replicas == 1 else 3
        ):  # with another one a run ends before it is back
            await team.restore_beginning(False)
            await team.rollout.replicas[0].set_fault.remote("finish", None, "die")
            pipeline = team.pipeline(tmp_path / f"{run}")
            if replicas == 1:
                with pytest.raises(
                    NoReplica, match="rollout 0: it failed in 3 weight syncs in a row"
                ):
                    await asyncio.wait_for(pipeline.fit(), 100)
            else:
                await asyncio.wait_for(pipeline.fit(), 100)
        assert team.rollout.restarts == 2
        assert team.rollout.active == list(range(1, replicas))
        assert "rollout 0 is excluded from now on" in " ".join(team.said)
        team.kill()

    asyncio.run(main())


def test_a_release_does_not_wait_for_a_send(cluster, tmp_path):
    """The weights of a version that is kept go to a replica that comes back, however long that takes."""

    async def main():
        team = Team(1, 1, timeout_s=100.0, near=False)
        await team.connect()
        (rank,) = team.roles.actor.ranks
        connecting = rank.connect_sync.remote(7, 1, [])  # the receiver never comes
        await asyncio.sleep(0.5)
        await asyncio.wait_for(team.sync.release(0), 10)
        await asyncio.wait_for(rank.alive.remote(), 10)
        await asyncio.wait_for(rank.abort_sync.remote(7, "the receiver is gone"), 10)
        with pytest.raises(Exception, match="given up, since the receiver is gone"):
            await asyncio.wait_for(connecting, 10)
        team.kill()

    asyncio.run(main())


def test_busy_processes_are_not_taken_for_dead_ones(cluster, tmp_path):
    """An engine inside `connect_sync`, and a rank inside an update that waits for the end of a sync."""

    async def main():
        team = Team(1, 1, timeout_s=100.0, near=False)
        await team.connect()
        await team.restore_beginning(True)
        (rank,), (replica,) = team.roles.actor.ranks, team.rollout.replicas
        info = team.sync.info | {"epoch": 9, "receivers": 1, "near": [[]]}
        connecting, updating = replica.connect_sync.remote(info, 0), rank.update.remote(None)
        await asyncio.sleep(0.5)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(replica.ping.remote(), 1.0)  # the engine cannot answer
        assert await not_alive({"rollout 0": replica}) == {}
        assert await not_alive({"trainer rank 0": rank}) == {}
        await rank.abort_sync.remote(9, "enough")
        await rank.fail_sync.remote("enough")
        for call in (connecting, updating):
            with pytest.raises(Exception, match="enough"):
                await asyncio.wait_for(call, 10)
        ray.kill(replica)
        assert "its process died" in (await not_alive({"rollout 0": replica}))["rollout 0"]
        team.kill()

    asyncio.run(main())
