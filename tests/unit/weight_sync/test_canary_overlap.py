"""The canary beside the first prompts of a version: the driver holds back what replicas return
until it was accepted. Stand-ins for the processes, and runs over real Ray actors without a model.
"""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from one_step_off.cluster.errors import SyncError
from one_step_off.rollout.batch_sources import BatchSource
from one_step_off.rollout.health import ReplicaState
from one_step_off.rollout.replica_supervisor import ReplicaFailed
from tests.sync_actors import STEPS, Fault, Team
from tests.unit.stand_ins import ActorMethod
from tests.unit.weight_sync.test_coordinator import SCORES, connected_sync

pytestmark = pytest.mark.timeout(240)

OTHER_SCORES = [np.array([-2.0])]
STAMP = (0, 3)


def slow_score(scores: Any, delay: float = 0.05) -> ActorMethod:
    return ActorMethod(lambda sequences: scores, delay)


async def held_states(supervisor: Any) -> list[bool]:
    """Per replica whether its samples are held back now."""
    waits = [
        asyncio.create_task(supervisor.wait_until_verified(i))
        for i in range(len(supervisor.replicas))
    ]
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    held = [not wait.done() for wait in waits]
    for wait in waits:
        wait.cancel()
    return held


def test_replicas_serve_at_once_and_what_they_return_waits_for_the_verdict():
    sync = connected_sync(SCORES, [SCORES, SCORES])
    supervisor: Any = sync.rollout
    released: list[int] = []
    sync.actor.ranks[0].release = ActorMethod(released.append)
    for replica in supervisor.replicas:
        replica.score = slow_score(SCORES)

    async def main() -> None:
        metrics = await sync.deliver(STAMP)
        assert metrics["time/canary_s"] < 0.05
        assert "canary/logprob_diff_max" not in metrics
        assert await supervisor.wait_for_healthy() == [0, 1]
        assert await held_states(supervisor) == [True, True]
        assert released == [], "the trainer's weights may have to be sent again"
        metrics = await sync.verified()
        assert metrics["canary/logprob_diff_max"] == 0.0
        assert metrics["time/canary_overlapped_s"] >= 0.04
        assert await held_states(supervisor) == [False, False]
        assert released == [3]
        assert await sync.verified() == {}

    asyncio.run(main())


def test_a_canary_that_differs_discards_what_is_held_back_of_all_replicas():
    sync = connected_sync(SCORES, [SCORES, OTHER_SCORES])
    supervisor: Any = sync.rollout

    async def main() -> None:
        await sync.deliver(STAMP)
        held = [asyncio.create_task(supervisor.wait_until_verified(i)) for i in range(2)]
        await asyncio.sleep(0)
        with pytest.raises(SyncError, match="of version 3: rollout replica 1 and the trainer"):
            await sync.verified()
        for error in await asyncio.gather(*held, return_exceptions=True):
            assert isinstance(error, SyncError)
        assert sync.connected_replicas == []

    asyncio.run(main())


@pytest.mark.parametrize("is_gone", [True, False], ids=["gone", "hangs"])
def test_a_replica_that_fails_is_restarted_and_the_others_canary_counts(is_gone):
    sync = connected_sync(SCORES, [SCORES, SCORES])
    sync.cfg.timeout_s = 0.1
    supervisor: Any = sync.rollout
    supervisor.respawn = lambda i: None
    failing: Any = supervisor.replicas[1]
    failing.score = slow_score(SCORES, delay=30)
    if is_gone:
        failing.score = failing.alive = ActorMethod(RuntimeError("it died"))

    async def main() -> None:
        await sync.deliver(STAMP)
        held = asyncio.create_task(supervisor.wait_until_verified(1))
        await asyncio.sleep(0)
        metrics = await sync.verified()
        assert metrics["canary/logprob_diff_max"] == 0.0
        with pytest.raises(ReplicaFailed):
            await held
        assert supervisor.active == [0]
        assert sync.failed_syncs.in_a_row == {1: 1}
        for task in supervisor.restart_tasks.values():
            task.cancel()

    asyncio.run(main())


def test_a_replica_that_fails_and_lives_ends_the_attempt_by_name():
    sync = connected_sync(SCORES, [SCORES])
    supervisor: Any = sync.rollout
    supervisor.replicas[0].score = ActorMethod(ValueError("broken on purpose"))

    async def main() -> None:
        await sync.deliver(STAMP)
        with pytest.raises(Exception, match="version 3, rollout 0: ValueError: broken on purpose"):
            await sync.verified()
        assert supervisor.health[0].state is ReplicaState.HEALTHY
        assert await held_states(supervisor) == [False], "nothing waits for ever"

    asyncio.run(main())


def test_a_replica_that_was_restarted_meanwhile_is_not_restarted_again():
    sync = connected_sync(SCORES, [SCORES, SCORES])
    supervisor: Any = sync.rollout
    former: Any = supervisor.replicas[1]
    former.score = former.alive = ActorMethod(RuntimeError("it died"))

    async def main() -> None:
        await sync.deliver(STAMP)
        supervisor.replicas[1] = connected_sync(SCORES, [SCORES]).rollout.replicas[0]
        await sync.verified()
        assert supervisor.active == [0, 1]
        assert sync.failed_syncs.in_a_row == {}

    asyncio.run(main())


def test_what_a_replica_returns_during_a_sync_waits_for_its_canary():
    """With partial rollouts it continues its prompts before the others have their weights."""
    sync = connected_sync(SCORES, [SCORES])
    supervisor: Any = sync.rollout

    async def main() -> None:
        supervisor.mark_stale()
        assert await held_states(supervisor) == [True]
        supervisor.mark_synced(0, supervisor.replicas[0])
        assert await held_states(supervisor) == [False]

    asyncio.run(main())


def run_team(folder: Path, monkeypatch: pytest.MonkeyPatch, fault: Fault) -> tuple[Team, list]:
    """A whole run with the canary beside the prompts, and a fault in the second replica. The canary
    takes longer than generation and evaluation. Returns also all samples that were trained."""
    trained: list = []
    real_batch = BatchSource.batch

    async def noted_batch(self: BatchSource, step: int) -> Any:
        batch, metrics = await real_batch(self, step)
        trained.extend(batch.samples)
        return batch, metrics

    monkeypatch.setattr(BatchSource, "batch", noted_batch)

    async def main() -> Team:
        team = Team(1, 2)
        team.cfg.weight_sync.canary_overlap = True
        team.cfg.trainer.test_freq = 1
        try:
            await team.connect()
            for replica in team.rollout.replicas:
                await replica.set_score_s.remote(0.4)
            await team.rollout.replicas[1].set_fault.remote(fault)
            await asyncio.wait_for(team.pipeline(folder).fit(), 60.0)
            return team
        finally:
            team.kill()

    return asyncio.run(main()), trained


def rows(folder: Path, name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / name).read_text().splitlines()]


def test_a_run_whose_canary_fails_has_used_nothing_of_that_version(cluster, tmp_path, monkeypatch):
    with pytest.raises(SyncError, match="canary after the sync of version 1: rollout replica 1"):
        run_team(tmp_path, monkeypatch, Fault("canary", 1, "corrupt"))
    assert [row["step"] for row in rows(tmp_path, "metrics.jsonl")] == [0]
    assert [row["val/version"] for row in rows(tmp_path, "evaluations.jsonl")] == [0]


def test_samples_of_a_replica_that_dies_before_its_verdict_are_generated_again(
    cluster, tmp_path, monkeypatch
):
    """It had returned them all."""
    team, trained = run_team(tmp_path, monkeypatch, Fault("score", 1, "die"))
    assert team.respawned == [1]
    assert len(rows(tmp_path, "metrics.jsonl")) == STEPS
    prompts = [tuple(prompt) for row in rows(tmp_path, "ledger.jsonl") for prompt in row["prompts"]]
    assert len(set(prompts)) == len(prompts) == 2 * STEPS
    pids_of_version = [
        {sample.extra["pid"] for sample in trained if sample.versions[0] == version}
        for version in range(STEPS - 1)
    ]
    dead = pids_of_version[0] - pids_of_version[1]
    assert len(pids_of_version[0]) == 2
    assert len(dead) == 1, "the replica that died made samples of version 0 only"
