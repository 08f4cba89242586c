"""weight_sync.receive_ahead with real engines: the same samples and weights as without it, and
processes that die between the early transfer and the pause."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.chaos.command import rows
from tests.conftest import tiny_config
from tests.e2e.chosen_kills import run_with_kills
from tests.e2e.run_folder import assert_same_weights, learned_metrics, read_rows

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(900)]

STEPS = 5

LONG_GENERATION = {
    "data.train_batch_size": 4,
    "data.max_response_length": 256,
    "rollout.n": 2,
    "rollout.sampling_kwargs": {"ignore_eos": True},
    "actor.ppo_mini_batch_size": 4,
}
"""Few long responses: generation is longer than training, so that weights can come ahead."""


def sample_rows(folder: Path) -> list[dict]:
    """All that the run recorded of its samples: texts, versions, rewards, advantages."""
    all_rows = []
    for step in range(STEPS):
        all_rows += read_rows(folder, f"samples/step_{step:06d}.jsonl")
    return all_rows


def without_canary(metrics: list[dict]) -> list[dict]:
    """The rows without what tells of the canary alone."""
    return [{k: v for k, v in row.items() if not k.startswith("canary/")} for row in metrics]


def came_ahead(folder: Path) -> list[bool]:
    """Per step whether weights came before the pause."""
    return ["sync/ahead_s" in row for row in rows(folder, "metrics.jsonl")]


def test_a_run_has_the_same_bits_with_it_and_without(models, tmp_path):
    """Two replicas and two ranks, all of which send. From the second sync on the layouts are
    proved."""
    from one_step_off.runtime import launch

    pools = {"rollout": [2], "actor": [2]}
    settings = LONG_GENERATION | {"trainer.total_steps": STEPS, "placement.pools": pools}
    arms = {
        "ahead": {"weight_sync.receive_ahead": True, "weight_sync.max_senders": 0},
        "pause": {"weight_sync.receive_ahead": False},
    }
    for name, changes in arms.items():
        changes = settings | changes
        assert launch.run(tiny_config(models(), str(tmp_path / name), **changes)) == 0
    ahead, pause = tmp_path / "ahead", tmp_path / "pause"
    assert came_ahead(ahead)[1:] == [True] * (STEPS - 1)
    assert not any(came_ahead(pause))
    assert without_canary(learned_metrics(ahead)) == without_canary(learned_metrics(pause))
    assert sample_rows(ahead) == sample_rows(pause)
    assert len(sample_rows(ahead)) == STEPS * 8
    assert_same_weights(ahead, pause)


@pytest.mark.parametrize(
    "points",
    [
        pytest.param([("engine", "received ahead"), ("replica", "received ahead")], id="replicas"),
        pytest.param([("trainer", "sent ahead"), ("trainer", "sent ahead")], id="trainers"),
    ],
)
def test_a_process_dies_between_the_early_transfer_and_the_pause(tmp_path, monkeypatch, points):
    """kill -9. No prompt is lost or repeated, each step has one row, and weights come ahead again
    after the recovery."""
    keys = [f"{name}={value}" for name, value in LONG_GENERATION.items()]
    keys.append("weight_sync.receive_ahead=true")
    run_with_kills(tmp_path, monkeypatch, points, "--ranks=2", *keys)
    folder = tmp_path / "c/run"
    assert any(came_ahead(folder)[-3:])
    dead_kinds = {kind for kind, _ in points}
    count = "restarts/trainer" if "trainer" in dead_kinds else "restarts/replicas"
    assert max(row[count] for row in rows(folder, "metrics.jsonl")) >= len(points)
