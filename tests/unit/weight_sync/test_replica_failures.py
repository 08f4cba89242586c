"""Replicas that fail in a weight sync, or are busy in one: real Ray actors as in
test_sync_failures.py."""

from __future__ import annotations

import asyncio
import time

import pytest
import ray

from one_step_off.cluster.remote_calls import not_alive
from one_step_off.rollout.replica_supervisor import NoReplica
from tests.sync_actors import Fault, Team, connected_team, soon

pytestmark = pytest.mark.timeout(240)

RUN_TIMEOUT_S = 100.0
FOREVER_S = 100.0
"""A limit that no test reaches."""


@pytest.mark.parametrize(
    ("replica", "fault", "same_device", "timeout_s", "limit_s"),
    [
        # The other engine is inside `connect_sync` and does not answer; its process does. An abort
        # must end its wait, before the group's limit of 30 s.
        pytest.param(0, Fault("connect", None, "die"), False, 30.0, 29.0, id="dies in connect"),
        pytest.param(
            1,
            Fault("load", 1, "hang"),
            True,
            5.0,
            RUN_TIMEOUT_S,
            id="hangs in load",
            marks=[pytest.mark.slow, pytest.mark.ci],
        ),
        pytest.param(
            1,
            Fault("score", 1, "hang"),
            True,
            5.0,
            RUN_TIMEOUT_S,
            id="hangs in canary",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_only_the_replica_that_failed_is_restarted_and_the_run_completes(
    cluster, tmp_path, replica, fault, same_device, timeout_s, limit_s
):
    async def main():
        async with connected_team(1, 2, timeout_s=timeout_s, same_device=same_device) as team:
            await team.reset(overlap=True)
            await team.rollout.replicas[replica].set_fault.remote(fault)
            begin = time.monotonic()
            await asyncio.wait_for(team.pipeline(tmp_path).fit(), RUN_TIMEOUT_S)
            assert team.respawned == [replica], team.events.lines
            assert time.monotonic() - begin < limit_s

    asyncio.run(main())


async def break_every_sync_of(team: Team, replica: int) -> None:
    """Let a replica die in every sync of all replicas, but pass the sync in which it returns."""

    async def pass_restore(number: int) -> bool:
        return True

    fault = Fault("finish", None, "die", repeats=True)
    team.rollout.supervisor.restore = pass_restore
    team.on_respawn = lambda actor: actor.set_fault.remote(fault)
    await team.reset(overlap=False)
    await team.rollout.replicas[replica].set_fault.remote(fault)


@pytest.mark.slow
@pytest.mark.ci
def test_the_only_replica_is_left_out_after_it_failed_in_three_syncs(cluster, tmp_path):
    async def main():
        async with connected_team(1, 1) as team:
            await break_every_sync_of(team, 0)
            with pytest.raises(NoReplica, match="rollout 0: it failed in 3 weight syncs in a row"):
                await asyncio.wait_for(team.pipeline(tmp_path).fit(), RUN_TIMEOUT_S)
            assert team.rollout.restarts == 2
            assert team.rollout.active == []
            assert "rollout 0 is excluded from now on" in " ".join(team.events.lines)

    asyncio.run(main())


@pytest.mark.slow
def test_one_of_two_replicas_is_left_out_after_it_failed_in_three_syncs(cluster, tmp_path):
    """Each run ends with the other replica, before the failed one is back."""

    async def main():
        async with connected_team(1, 2) as team:
            for run in range(3):
                await break_every_sync_of(team, 0)
                await asyncio.wait_for(team.pipeline(tmp_path / f"{run}").fit(), RUN_TIMEOUT_S)
            assert team.rollout.restarts == 2
            assert team.rollout.active == [1]
            assert "rollout 0 is excluded from now on" in " ".join(team.events.lines)

    asyncio.run(main())


async def release_does_not_wait_for_a_send(team: Team) -> None:
    """A version that is kept goes to a replica that comes back, however long that takes."""
    (rank,) = team.roles.actor.ranks
    connecting = rank.connect_sync.remote(7, 1, [])  # the receiver never comes
    await asyncio.sleep(0.5)
    await soon(team.sync.release(0))
    await soon(rank.alive.remote())
    await soon(rank.abort_sync.remote(7, "the receiver is gone"))
    with pytest.raises(Exception, match="given up, since the receiver is gone"):
        await soon(connecting)


def test_busy_processes_count_as_alive_and_release_what_they_keep(cluster, tmp_path):
    """An engine inside `connect_sync`, and a rank inside an update that waits for a sync."""

    async def main():
        async with connected_team(1, 1, timeout_s=FOREVER_S, same_device=False) as team:
            await release_does_not_wait_for_a_send(team)
            await team.reset(overlap=True)
            (rank,) = team.roles.actor.ranks
            (replica,) = team.rollout.replicas
            info = team.sync.connect_info | {"addresses": team.sync.addresses}
            info |= {"epoch": 9, "receivers": 1, "same_device": [[]]}
            connecting = replica.connect_sync.remote(info, 0)
            updating = rank.update.remote(None)
            await asyncio.sleep(0.5)
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(replica.ping.remote(), 1.0)  # the engine cannot answer
            assert await not_alive({"rollout 0": replica}) == {}
            assert await not_alive({"trainer rank 0": rank}) == {}

            await rank.abort_sync.remote(9, "enough")
            await rank.fail_sync.remote("enough")
            for call in (connecting, updating):
                with pytest.raises(Exception, match="enough"):
                    await soon(call)

            ray.kill(replica)
            reasons = {}
            async with asyncio.timeout(30):
                while not reasons:  # the kill takes its time on a busy machine
                    reasons = await not_alive({"rollout 0": replica})
            assert "its process died" in reasons["rollout 0"]

    asyncio.run(main())
