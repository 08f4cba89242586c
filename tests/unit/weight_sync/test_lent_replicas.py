"""Lent replicas in real syncs and a real loop: real Ray actors as in test_sync_failures.py."""

from __future__ import annotations

import asyncio
import json

import pytest

from one_step_off.rollout.health import ReplicaState
from tests.sync_actors import STEPS, Fault, Team, connected_team

pytestmark = pytest.mark.timeout(240)

RUN_TIMEOUT_S = 100.0


async def run(team: Team, folder) -> list[dict]:
    """A run in which one prompt is with the replica of its own and the other one waits."""
    team.rollout.router.replica_capacity = 2
    await team.rollout.replicas[0].set_rollout_s.remote(0.6)
    pipeline = team.pipeline(folder)
    pipeline.lending.choice.note = lambda lent, seconds: ""  # it lends in each step
    await asyncio.wait_for(pipeline.fit(), RUN_TIMEOUT_S)
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert len(rows) == STEPS
    for step, row in enumerate(rows):
        assert row["staleness/max"] == min(step, 1)
    return rows


@pytest.mark.parametrize(
    ("ranks", "max_senders", "same_device"),
    [
        pytest.param(1, 8, True, id="shared memory"),
        pytest.param(2, 1, False, id="gloo, two ranks with one sender", marks=pytest.mark.slow),
    ],
)
def test_lent_replicas_get_what_was_sent_last_in_groups_that_stay(
    cluster, tmp_path, ranks, max_senders, same_device
):
    async def main():
        options = {"same_device": same_device, "max_senders": max_senders}
        async with connected_team(ranks, 3, lent=2, **options) as team:
            rows = await run(team, tmp_path)
            assert sum(row["lend/samples"] for row in rows) > 0
            assert team.sync.own_groups.epoch == 1
            assert team.sync.lent_groups.epoch == 2
            assert team.sync.epoch == 2, "no groups were created again"
            states = [health.state for health in team.rollout.supervisor.health]
            assert states[1:] == [ReplicaState.ASLEEP, ReplicaState.ASLEEP]

    asyncio.run(main())


@pytest.mark.parametrize(
    "fault",
    [
        Fault("connect", None, "die"),
        pytest.param(Fault("load", 1, "die"), marks=pytest.mark.slow),
    ],
    ids=lambda fault: f"{fault.action} in {fault.place}",
)
def test_a_lent_replica_that_fails_in_its_sync_is_given_up_and_the_run_completes(
    cluster, tmp_path, fault
):
    """With deltas: the groups of the other replica stay, and send no whole tensors."""

    async def main():
        async with connected_team(1, 3, lent=2, mode="delta") as team:
            await team.rollout.replicas[2].set_fault.remote(fault)
            rows = await run(team, tmp_path)
            assert team.respawned == []
            assert team.rollout.supervisor.health[2].state is ReplicaState.LEFT
            given_up = [line for line in team.events.lines if line.startswith("rollout 2,")]
            assert len(given_up) == 1
            assert sum(row["lend/samples"] for row in rows) > 0

    asyncio.run(main())
