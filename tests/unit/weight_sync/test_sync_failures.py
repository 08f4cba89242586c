"""A failed weight sync releases everything that waits for it: real Ray actors with real endpoints.

The actors have no model (`sync_actors.py`). `python -m tests.chaos --syncs` does the same with real
engines and trainers.
"""

from __future__ import annotations

import asyncio
import itertools
import re
import time
from pathlib import Path
from typing import Any

import pytest

from one_step_off.cluster.errors import ProcessDied, RoleError, SyncError
from tests.sync_actors import SOON_S, STEPS, Fault, Team, connected_team, soon

pytestmark = pytest.mark.timeout(240)


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
