"""weight_sync.canary_overlap with real engines: what is generated with weights whose canary then
fails is used by nobody."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from one_step_off.rollout.replica_supervisor import ReplicaSupervisor
from one_step_off.weight_sync.canary_beside import CanaryBeside
from tests.conftest import tiny_config
from tests.e2e.chosen_kills import run_with_kills
from tests.e2e.run_folder import assert_same_weights, learned_metrics, read_rows
from tests.spoiled_engine import SPOILED_RECEIVER, SPOILED_VERSION

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(900)]

STEPS = 5
VERDICT_DELAY_S = 4.0
"""Longer than a generation and an evaluation, so that their samples wait for the verdict."""


def config(model: str, folder: Path, overlap: bool, **changes: Any) -> Any:
    """Two replicas, and an evaluation of each version."""
    settings: dict[str, Any] = {
        "placement.pools": {"rollout": [2], "actor": [1]},
        "trainer.total_steps": STEPS,
        "trainer.test_freq": 1,
        "weight_sync.canary_overlap": overlap,
    }
    return tiny_config(model, str(folder), **settings | changes)


def samples_of(folder: Path) -> list[dict]:
    """The rows of all samples that were trained."""
    return [row for path in sorted(folder.glob("samples/*")) for row in read_rows(folder, path)]


def without_canary(metrics: list[dict]) -> list[dict]:
    """The rows without what tells of the canary alone."""
    return [{k: v for k, v in row.items() if not k.startswith("canary/")} for row in metrics]


@pytest.fixture
def held_back(monkeypatch) -> list[int]:
    """Let each verdict come late. Returns the replicas whose samples were ready before it."""
    held: list[int] = []
    real_answers = CanaryBeside.answers
    real_wait = ReplicaSupervisor.wait_until_verified

    async def late_answers(self: CanaryBeside, *args: Any) -> Any:
        answers = await real_answers(self, *args)
        await asyncio.sleep(VERDICT_DELAY_S)
        return answers

    async def noted_wait(self: ReplicaSupervisor, i: int) -> None:
        if i in self._canaries:
            held.append(i)
        await real_wait(self, i)

    monkeypatch.setattr(CanaryBeside, "answers", late_answers)
    monkeypatch.setattr(ReplicaSupervisor, "wait_until_verified", noted_wait)
    return held


@pytest.mark.parametrize("in_flight", ["wait", "recompute"])
def test_nothing_of_a_sync_whose_canary_fails_is_used(models, tmp_path, held_back, in_flight):
    """Replica 1 holds other weights after the sync of version 2. The run ends as without overlap,
    and what it has written is the same."""
    from one_step_off.cluster.errors import SyncError
    from one_step_off.runtime import launch

    message = (
        f"canary after the sync of version {SPOILED_VERSION}: "
        f"rollout replica {SPOILED_RECEIVER} and the trainer differ"
    )
    changes = {
        "rollout.engine_kwargs": {
            "worker_extension_cls": "tests.spoiled_engine.SyncWorkerExtension"
        },
        "weight_sync.in_flight": in_flight,
        "pipeline.staleness": 1 if in_flight == "wait" else 2,
    }
    for name, overlap in (("beside", True), ("before", False)):
        cfg = config(models(), tmp_path / name, overlap, **changes)
        with pytest.raises(SyncError, match=message):
            launch.run(cfg)
        if overlap:
            waited = list(held_back)
    assert SPOILED_RECEIVER in waited, "its samples were complete before the verdict"
    for name in ("beside", "before"):
        folder = tmp_path / name
        assert [row["step"] for row in read_rows(folder, "metrics.jsonl")] == [0, 1]
        assert len(read_rows(folder, "ledger.jsonl")) == 2
        evaluated = [row["val/version"] for row in read_rows(folder, "evaluations.jsonl")]
        assert evaluated == [0, 1], "an evaluation of weights that were not verified"
        versions = {version for row in samples_of(folder) for version in row["versions"]}
        assert max(versions) < SPOILED_VERSION
    if in_flight == "wait":
        assert samples_of(tmp_path / "beside") == samples_of(tmp_path / "before")


def test_a_run_has_the_same_bits_with_it_and_without(models, tmp_path, held_back):
    """In float32 on CPUs the canary's tokens beside the prompts change no bit of the samples."""
    from one_step_off.runtime import launch

    for name, overlap in (("beside", True), ("before", False)):
        assert launch.run(config(models(), tmp_path / name, overlap)) == 0
    beside, before = tmp_path / "beside", tmp_path / "before"
    assert held_back
    rows = read_rows(beside, "metrics.jsonl")
    assert all(row["time/canary_overlapped_s"] > VERDICT_DELAY_S for row in rows[1:])
    assert all(row["time/canary_s"] < VERDICT_DELAY_S for row in rows[1:])
    assert without_canary(learned_metrics(beside)) == without_canary(learned_metrics(before))
    assert samples_of(beside) == samples_of(before)
    assert_same_weights(beside, before)


def test_replicas_die_while_their_canary_is_scored_beside_prompts(tmp_path, monkeypatch):
    """kill -9 of a replica and of an engine. The other replica's samples are used, no prompt is
    lost or repeated, and the run itself never ends."""
    points = [("replica", "in the canary"), ("engine", "in the canary")]
    keys = ["weight_sync.canary_overlap=true"]
    result = run_with_kills(tmp_path, monkeypatch, points, *keys)
    assert result["starts"] == 2, "one start, and the one that resumes at the end"
