"""A failed weight sync releases everything that waits for it: real Ray actors with real endpoints.

The actors have no model (`sync_actors.py`). `python -m tests.chaos --syncs` does the same with real
engines and trainers.
"""

from __future__ import annotations

import asyncio
import itertools
import re
import time
from collections.abc import AsyncIterator, Awaitable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import ray

from one_step_off.cluster.errors import ProcessDied, RoleError, SyncError
from one_step_off.cluster.remote_calls import not_alive
from one_step_off.rollout.replica_supervisor import NoReplica
from tests.sync_actors import STEPS, Fault, Team

pytestmark = pytest.mark.timeout(240)

SOON_S = 15.0
"""With liveness checks on a busy machine; the limits that would end a hang are minutes."""

RUN_TIMEOUT_S = 100.0
FOREVER_S = 100.0
"""A limit that no test reaches."""


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


async def run_to_failure(team: Team, folder: Path, kind: Any) -> tuple[Exception, bool]:
    """Run the pipeline to its failure. Returns the error, and whether another attempt would begin.

    Asserts that all of it takes a short time, and that no trainer is left waiting.
    """
    begin = time.monotonic()
    with pytest.raises(kind) as caught:
        await asyncio.wait_for(team.pipeline(folder).fit(), 60)
    begins_another_attempt = await soon(team.is_process_failure(caught.value))
    assert time.monotonic() - begin < 2 * SOON_S
    if not begins_another_attempt:
        ready = [rank.__ray_ready__.remote() for rank in team.roles.actor.ranks]
        await soon(asyncio.gather(*ready))
    return caught.value, begins_another_attempt


def steps_trained(folder: Path) -> int:
    path = folder / "metrics.jsonl"
    return len(path.read_text().splitlines()) if path.exists() else 0


# kind of process, place, action, the message's pattern
FAULTS = [
    ("replica", "canary", "corrupt", "canary after the sync of version"),
    ("replica", "load", "raise", "phase load.*broken on purpose in load"),
    ("replica", "finish", "raise", "broken on purpose in finish"),
    ("replica", "score", "raise", "broken on purpose in score"),
    ("trainer", "pack b", "raise", "phase gather.*broken on purpose in pack b"),
]


@pytest.mark.parametrize(
    ("ranks", "same_device", "versions"),
    [(1, True, (0, STEPS)), (2, False, (1,))],
    ids=["in shared memory", "two ranks over gloo"],
)
def test_a_failure_in_any_version_ends_the_run_by_name_and_leaves_no_rank_waiting(
    cluster, tmp_path, ranks, same_device, versions
):
    async def check(team: Team, fault_index: int, overlap: bool, version: int) -> None:
        kind, place, action, pattern = FAULTS[fault_index]
        await team.reset(overlap)
        victim = team.rollout.replicas[1] if kind == "replica" else team.roles.actor.ranks[-1]
        await victim.set_fault.remote(Fault(place, version, action))
        folder = tmp_path / f"{fault_index}-{overlap}-{version}"
        error, begins_another_attempt = await run_to_failure(team, folder, (SyncError, RoleError))
        case = f"{kind} {place} {version} overlap={overlap}: {error!r}"
        assert not begins_another_attempt, case
        assert re.search(pattern, str(error)), case
        assert f"version {version}" in str(error), case
        assert steps_trained(folder) <= version, f"{case}: trained on after it"

    async def main():
        async with connected_team(ranks, 2, same_device=same_device) as team:
            cases = itertools.product(range(len(FAULTS)), (True, False), versions)
            for case in cases:
                await check(team, *case)

    asyncio.run(main())


@pytest.mark.parametrize(
    ("action", "overlap", "max_senders"),
    [
        pytest.param("die", True, 2, id="dies beside an update"),
        pytest.param("die", False, 2, id="dies", marks=pytest.mark.slow),
        pytest.param("hang", True, 2, id="hangs beside an update", marks=pytest.mark.slow),
        pytest.param("hang", False, 2, id="hangs", marks=[pytest.mark.slow, pytest.mark.ci]),
        pytest.param("die", True, 1, id="dies as a member of a sender group"),
        pytest.param(
            "hang", True, 1, id="hangs as a member of a sender group", marks=pytest.mark.slow
        ),
    ],
)
def test_a_rank_that_fails_in_a_sync_leads_to_another_attempt(
    cluster, tmp_path, action, overlap, max_senders
):
    async def main():
        # A limit for syncs without a fault too, on a busy machine.
        timeout_s = 5.0 if action == "hang" else 30.0
        options = {"timeout_s": timeout_s, "max_senders": max_senders}
        async with connected_team(2, 1, **options) as team:
            await team.reset(overlap)
            victim = team.roles.actor.ranks[1]
            await victim.set_fault.remote(Fault("pack b", 1, action))
            error, begins_another_attempt = await run_to_failure(team, tmp_path, ProcessDied)
            assert begins_another_attempt
            assert re.search("(trainer rank|actor) 1", str(error))

    asyncio.run(main())


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
            info = team.sync.connect_info | {"epoch": 9, "receivers": 1, "same_device": [[]]}
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
