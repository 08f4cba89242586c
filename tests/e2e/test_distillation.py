"""On-policy distillation with real Ray, vLLM and FSDP2: two teachers in the actor's pool, a teacher
in an engine, and teachers that die."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from one_step_off.cluster.errors import RoleError
from one_step_off.runtime import launch
from tests.chaos.command import Command, left_behind, processes_titled, rows, wait_for_step
from tests.conftest import tiny_config
from tests.e2e.commands import REFERENCE_ENGINE
from tests.e2e.run_folder import read_rows, timeline_events
from tests.quantized_model import quantized_copy

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(400)]

SETTINGS: dict[str, Any] = {
    "algorithm.adv_estimator": "none",
    "actor.lr": 1e-6,  # so the student stays the teacher
    "data.val_files": "",
    "trainer.save_hf_model": False,
    "trainer.total_steps": 2,
}
ENGINE: dict[str, Any] = {
    "placement.pools": {"rollout": [1], "actor": [1], "teacher": [1]},
    "placement.roles": {"rollout": "rollout", "actor": "actor", "teacher": "teacher"},
    "teacher.backend": "vllm",
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
    """It scores as the student does, at every token and for the likeliest ones. The one engine of
    vLLM is the teacher's."""
    folder = tmp_path / "run"
    own = {"teacher.path": copied(models(), tmp_path), "teacher.top_k": 4}
    settings = SETTINGS | ENGINE | own | REFERENCE_ENGINE
    assert launch.run(tiny_config(models(), str(folder), **settings)) == 0
    rows = read_rows(folder, "metrics.jsonl")
    assert len(rows) == 2
    for row in rows:
        assert abs(row["distill/kl"]) < 1e-4
        assert abs(row["actor/distill_kl"]) < 1e-6


@pytest.mark.slow
def test_a_quantized_teacher_in_an_engine(models, tmp_path):
    """Its weights are the student's, rounded to eight bits."""
    folder = tmp_path / "run"
    settings = SETTINGS | ENGINE | {"teacher.path": quantized_copy(models(), tmp_path)}
    assert launch.run(tiny_config(models(), str(folder), **settings)) == 0
    rows = read_rows(folder, "metrics.jsonl")
    assert len(rows) == 2
    assert all(1e-6 < abs(row["distill/kl"]) < 0.1 for row in rows)


@pytest.mark.slow
def test_a_quantization_that_vllm_cannot_run_here_ends_the_run_in_one_line(models, tmp_path):
    teacher = Path(copied(models(), tmp_path))
    config = teacher / "config.json"
    keys = json.loads(config.read_text())
    keys["quantization_config"] = {"quant_method": "bitsandbytes", "load_in_4bit": True}
    config.write_text(json.dumps(keys))
    settings = SETTINGS | ENGINE | {"teacher.path": str(teacher)}
    reason = "teacher.path=.*: vLLM cannot serve it here: Unknown quantization method: bitsandbytes"
    with pytest.raises(RoleError, match=reason) as failed:
        launch.run(tiny_config(models(), str(tmp_path / "run"), **settings))
    assert "\n" not in str(failed.value)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("backend", "title"), [("fsdp", "ray::TeacherWorker"), ("vllm", "ray::TeacherEngine")]
)
def test_a_teacher_is_killed_and_the_run_goes_on(tmp_path: Path, backend: str, title: str):
    """Twice. No prompt is lost or repeated, and every step is judged by the teacher."""
    steps = 12
    keys = {
        "data.val_files": "",
        "data.train_batch_size": 4,
        "rollout.n": 4,
        "actor.ppo_mini_batch_size": 4,
        "placement.pools": "{rollout: [1], actor: [1], teacher: [1]}",
        "placement.roles": "{rollout: rollout, actor: actor, teacher: teacher}",
        "teacher.backend": backend,
        "trainer.save_freq": 2,
        "trainer.save_hf_model": "false",
        "trainer.test_freq": -1,
        "trainer.total_steps": steps,
        "trainer.output_dir": tmp_path / "run",
    }
    arguments = ["config=config/distill_tiny_cpu.yaml"]
    arguments += [f"{name}={value}" for name, value in keys.items()]
    command = Command(tmp_path, arguments, inject=False)
    try:
        command.start()
        for step in (2, 5):
            wait_for_step(command, step)
            (teacher,) = processes_titled(command, title)
            teacher.kill()
        assert command.process.wait(180) == 0, command.log.read_text()[-3000:]
        assert left_behind(command) == []
    finally:
        command.clear()
    metrics = rows(command.folder, "metrics.jsonl")
    assert [row["step"] for row in metrics] == list(range(steps))
    assert all(row["distill/kl"] is not None for row in metrics)
    assert metrics[-1]["restarts/trainer"] >= 2
    ledger = rows(command.folder, "ledger.jsonl")
    prompts = [tuple(prompt) for row in ledger for prompt in row["prompts"]]
    assert len(prompts) == len(set(prompts)) == steps * 4
