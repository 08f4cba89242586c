"""On-policy distillation with real Ray, vLLM and FSDP2: two teachers in the actor's pool, and a
teacher in an engine."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from one_step_off.runtime import launch
from tests.conftest import tiny_config
from tests.e2e.run_folder import read_rows, timeline_events

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]

SETTINGS: dict[str, Any] = {
    "algorithm.adv_estimator": "none",
    "actor.lr": 1e-6,  # so the student stays the teacher
    "data.val_files": "",
    "trainer.save_hf_model": False,
    "trainer.total_steps": 2,
}
TWO_SOURCES = [
    {"files": "generator:word_problems", "name": "own", "weight": 0.5},
    {"files": "generator:word_problems", "name": "other", "weight": 0.5},
]


def copied(model: str, folder: Path) -> str:
    """The same model under another path, so that it is loaded as a model of its own."""
    shutil.copytree(model, folder / "copy")
    return str(folder / "copy")


@pytest.mark.slow
def test_two_teachers_in_the_actors_pool(models, tmp_path):
    """The teacher of one source is the student; that of the other is another model, and trains
    it."""
    folder = tmp_path / "run"
    settings = SETTINGS | {
        "data.train_files": TWO_SOURCES,
        "placement.roles": {"rollout": "rollout", "actor": "actor", "teacher": "actor"},
        "teacher.path": copied(models(), tmp_path),
        "teacher.by_source": {"other": models("qwen3")},
    }
    assert launch.run(tiny_config(models(), str(folder), **settings)) == 0
    rows = read_rows(folder, "metrics.jsonl")
    assert len(rows) == 2
    for row in rows:
        assert abs(row["distill/default/kl"]) < 1e-4, "the student is its teacher"
        assert abs(row["distill/other/kl"]) > 0.01
        assert row["actor/grad_norm"] > 1e-3
        assert row["time/teacher_score_responses_s"] > 0
    works = {(event.get("cat"), event["name"].split()[0]) for event in timeline_events(folder)}
    assert ("teacher", "score_responses") in works


@pytest.mark.slow
@pytest.mark.ci
def test_a_teacher_in_an_engine_of_its_own(models, tmp_path):
    """It scores as the student does, at every token and for the likeliest ones."""
    folder = tmp_path / "run"
    settings = SETTINGS | {
        "placement.pools": {"rollout": [1], "actor": [1], "teacher": [1]},
        "placement.roles": {"rollout": "rollout", "actor": "actor", "teacher": "teacher"},
        "teacher.backend": "vllm",
        "teacher.path": copied(models(), tmp_path),
        "teacher.top_k": 4,
    }
    assert launch.run(tiny_config(models(), str(folder), **settings)) == 0
    rows = read_rows(folder, "metrics.jsonl")
    assert len(rows) == 2
    for row in rows:
        assert abs(row["distill/kl"]) < 1e-4
        assert abs(row["actor/distill_kl"]) < 1e-6
