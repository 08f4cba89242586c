"""Runs in which replicas receive weights while they generate, with failures in that part: real Ray
actors with real endpoints, without a model."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from one_step_off.cluster.errors import RoleError, SyncError
from tests.sync_actors import STEPS, Fault, Team

pytestmark = pytest.mark.timeout(240)

RUN_S = 60.0
GENERATE_S = 0.5
"""Longer than an update, so that weights are there before generation ends."""


def run_ahead(folder: Path, fault: tuple[str, Fault] | None = None, **options: Any) -> Team:
    """A whole run with `weight_sync.receive_ahead`. `fault`: in the last replica or rank."""

    async def main() -> Team:
        team = Team(2, 2, **options)
        try:
            team.cfg.weight_sync.receive_ahead = True
            team.on_respawn = lambda replica: replica.set_rollout_s.remote(GENERATE_S)
            await team.connect()
            for replica in team.rollout.replicas:
                await replica.set_rollout_s.remote(GENERATE_S)
            if fault is not None:
                kind, what = fault
                victims = team.rollout.replicas if kind == "replica" else team.roles.actor.ranks
                await victims[-1].set_fault.remote(what)
            await asyncio.wait_for(team.pipeline(folder).fit(), RUN_S)
            return team
        finally:
            team.kill()

    return asyncio.run(main())


def rows(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.parametrize(
    "same_device",
    [
        pytest.param(True, marks=pytest.mark.slow, id="shared memory"),
        pytest.param(False, id="gloo"),
    ],
)
def test_weights_come_ahead_once_the_layouts_are_proved(cluster, tmp_path, same_device):
    run_ahead(tmp_path, same_device=same_device)
    metrics = rows(tmp_path)
    assert len(metrics) == STEPS
    came_ahead = ["sync/ahead_s" in row for row in metrics]
    assert came_ahead[-1], "the first sync proves the layouts, and a later one uses them"
    assert not came_ahead[0]
    assert metrics[-1]["sync/spare_mb"] > 0


@pytest.mark.slow
def test_a_rank_that_gives_its_pieces_to_another_gives_them_ahead(cluster, tmp_path):
    run_ahead(tmp_path, same_device=False, max_senders=1)
    assert "sync/ahead_s" in rows(tmp_path)[-1]


@pytest.mark.parametrize("action", ["die", pytest.param("hang", marks=pytest.mark.slow), "raise"])
def test_a_replica_that_fails_while_it_receives_ahead(cluster, tmp_path, action):
    """One that is gone or hangs is restarted, and the others get everything at the pause."""
    fault = ("replica", Fault("ahead", 2, action))
    if action == "raise":
        with pytest.raises(RoleError, match="version 2, ahead.*broken on purpose in ahead"):
            run_ahead(tmp_path, fault, same_device=False)
        return
    team = run_ahead(tmp_path, fault, same_device=False, timeout_s=3.0)
    assert len(rows(tmp_path)) == STEPS
    assert team.respawned == [1]


def test_a_rank_that_fails_while_it_sends_ahead_ends_the_run_by_name(cluster, tmp_path):
    fault = ("trainer", Fault("pack b", 2, "raise"))
    with pytest.raises(SyncError, match="version 2.*broken on purpose in pack b"):
        run_ahead(tmp_path, fault, same_device=False)
    assert len(rows(tmp_path)) <= 2
