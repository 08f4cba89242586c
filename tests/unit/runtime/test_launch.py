"""A run up to the start of Ray: what is prepared and refused, what it writes first, and how
failures are reported."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import FrozenInstanceError, replace
from pathlib import Path

import pytest
import ray

from one_step_off.config.errors import ConfigError
from one_step_off.config.schema import Config
from one_step_off.monitoring import loggers
from one_step_off.runtime import launch, run_folder
from one_step_off.runtime import prepare as prepare_module
from one_step_off.runtime.failure_report import report_failure
from one_step_off.runtime.prepare import CANARY_TOKENS, ResumePoint, prepare
from tests.conftest import tiny_config
from tests.unit.stand_ins import train_with

ROOT = Path(__file__).parents[3]
MODELS = ("transformers", "peft", "vllm", "torch.distributed.tensor")


@pytest.mark.parametrize(
    ("module", "slow_imports"),
    [
        pytest.param("runtime.launch", ("torch", "ray", *MODELS), id="the first line"),
        pytest.param("ray_trainer", MODELS, id="the pipeline and its simulation"),
    ],
)
def test_what_runs_no_model_waits_for_no_slow_import(module, slow_imports):
    code = (
        f"import sys, one_step_off.{module}; "
        f"print([name for name in {slow_imports!r} if name in sys.modules])"
    )
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, cwd=ROOT)
    assert done.stdout == "[]\n", done.stderr


def test_a_run_asks_no_proxy_for_this_machine(monkeypatch):
    """From its first step on, so that reward functions and environments inherit it."""
    for name in ("NO_PROXY", "no_proxy"):
        monkeypatch.setenv(name, "corp.example")

    def stop(cfg: Config) -> None:
        raise ConfigError("here")

    monkeypatch.setattr(run_folder, "require", stop)
    for program in (launch.run, launch.run_supervised):
        with pytest.raises(ConfigError, match="here"):
            program(Config())
        for name in ("NO_PROXY", "no_proxy"):
            assert os.environ[name] == "corp.example,localhost,127.0.0.1,::1"
            monkeypatch.setenv(name, "corp.example")


# --- what is prepared ---


def test_an_evaluation_alone_may_have_other_training_data(models, tmp_path, monkeypatch):
    trained = prepare(tiny_config(models(), str(tmp_path)), lambda line: None)
    state = {"step": 2, "stream": trained.data.stream.state_dict()}
    point = ResumePoint(tmp_path / "checkpoints" / "step_000002", state)
    monkeypatch.setattr(prepare_module, "load_resume_point", lambda path: point)
    monkeypatch.setattr(prepare_module.checkpoint, "find", lambda cfg, print_line: point.path)
    cfg = tiny_config(models(), str(tmp_path), **{"trainer.seed": 7, "trainer.val_only": True})
    assert prepare(cfg, lambda line: None).resume_point is point
    cfg.trainer.val_only = False
    with pytest.raises(ConfigError, match="the checkpoint has other prompts or another order"):
        prepare(cfg, lambda line: None)


def test_a_prepared_run_has_its_canary_and_its_data(models, tmp_path):
    prepared = prepare(tiny_config(models(), str(tmp_path)), lambda line: None)
    assert len(prepared.canary) == 4
    assert all(2 <= len(token_ids) <= CANARY_TOKENS for token_ids in prepared.canary)
    assert prepared.data.stream.total_steps == 3
    assert len(prepared.data.val) == 8
    assert prepared.device == "cpu"
    assert prepared.resume_point is None


def test_a_prepared_run_does_not_change(models, tmp_path):
    prepared = prepare(tiny_config(models(), str(tmp_path)), lambda line: None)
    with pytest.raises(FrozenInstanceError):
        prepared.device = "cuda"


def test_rows_that_their_agent_loop_cannot_use_are_refused(models, tmp_path):
    cfg = tiny_config(models(), str(tmp_path), **{"agent.loop": "environment"})
    words = "agent_loop.environment:Puzzle does not begin with the ground truth"
    with pytest.raises(ConfigError, match=words) as caught:
        prepare(cfg, lambda line: None)
    assert "\n" not in str(caught.value)
    assert not ray.is_initialized()


UNUSED_LOOP_SETTINGS = {
    "agent.tools": "calculator",
    "agent.loop_kwargs": {"tool": {"taught": True}},
}


def test_settings_of_loops_that_no_row_uses_are_warned_of(models, tmp_path):
    lines: list[str] = []
    prepare(tiny_config(models(), str(tmp_path), **UNUSED_LOOP_SETTINGS), lines.append)
    warnings = [line for line in lines if line.startswith("warning: ")]
    assert [line.split(": ")[1] for line in warnings] == [
        "agent.loop_kwargs.tool",
        "agent.tools=calculator",
    ]


def test_settings_of_loops_that_rows_use_are_not_warned_of(models, tmp_path):
    lines: list[str] = []
    changes = {"agent.loop": "tool"} | UNUSED_LOOP_SETTINGS
    prepared = prepare(tiny_config(models(), str(tmp_path), **changes), lines.append)
    assert not [line for line in lines if "warning" in line]
    assert prepared.loop_names == ["tool"]


# --- what is written first ---


def test_the_run_folder_names_models_as_the_user_did(models, tmp_path):
    changes = {
        "placement.roles": {"rollout": "rollout", "actor": "actor", "ref": "actor"},
        "algorithm.kl_coef": 0.1,
        "ref.path": models(),
    }
    cfg = tiny_config(models(), str(tmp_path), **changes)
    prepared = prepare(cfg, lambda line: None)
    named_models = prepared.named_models | {"model": "tiny:qwen2", "ref": "tiny:qwen3"}
    run_folder.write_config_and_versions(cfg, named_models, prepared.device)
    written = (tmp_path / "config.yaml").read_text()
    assert "path: tiny:qwen2" in written
    assert "path: tiny:qwen3" in written
    assert models() not in written


EARLIER_FILES = ("metrics.jsonl", "summary.json", "config.yaml", "samples/step_000000.jsonl")


def test_a_refused_logger_leaves_an_earlier_run_as_it_is(models, tmp_path, monkeypatch):
    def refuse(cfg: Config, resumed: bool) -> None:
        raise ConfigError("not logged in")

    (tmp_path / "samples").mkdir()
    for name in EARLIER_FILES:
        (tmp_path / name).write_text("an earlier run's")
    monkeypatch.setattr(loggers, "Wandb", refuse)
    changes = {"logging.wandb": True, "trainer.overwrite": True}
    cfg = tiny_config(models(), str(tmp_path), **changes)
    with pytest.raises(ConfigError, match="not logged in"):
        launch.run(cfg)
    for name in EARLIER_FILES:
        assert (tmp_path / name).read_text() == "an earlier run's"


# --- a run at its last step ---


@pytest.fixture
def cfg_at_last_step(models, tmp_path, monkeypatch) -> Config:
    """A run whose checkpoint is at its last step."""
    state = {"step": 3, "evaluations": [], "unwritten": {}, "has_samples": False}
    resume_point = ResumePoint(tmp_path / "checkpoints/step_000003", state)

    def prepare_at_last_step(*arguments):
        return replace(prepare(*arguments), resume_point=resume_point)

    monkeypatch.setattr(launch, "prepare", prepare_at_last_step)
    return tiny_config(models(), str(tmp_path), **{"trainer.total_steps": 3})


def test_a_run_that_has_ended_has_nothing_left_to_do(
    cfg_at_last_step, tmp_path, monkeypatch, capsys
):
    def fail(prepared, tracker):
        raise AssertionError("nothing is left to do, and Ray was started")

    train_with(monkeypatch, fail)
    (tmp_path / "summary.json").write_text("{}")
    assert launch.run(cfg_at_last_step) == 0
    assert "nothing left to do; raise trainer.total_steps" in capsys.readouterr().out


def test_a_run_that_was_killed_before_its_model_was_written_writes_it(
    cfg_at_last_step, monkeypatch
):
    first_steps = []

    def interrupt(prepared, tracker):
        first_steps.append(tracker.first_step)
        raise KeyboardInterrupt

    train_with(monkeypatch, interrupt)
    with pytest.raises(KeyboardInterrupt):
        launch.run(cfg_at_last_step)
    assert first_steps == [3]


# --- failures ---


def test_a_failure_is_reported_in_one_line_and_kept_whole(tmp_path, models):
    cfg = tiny_config(models(), str(tmp_path))
    try:
        raise ValueError("first line\nsecond line")
    except ValueError as error:
        text = report_failure(cfg, error)
    assert text.startswith("error: the run ended by ValueError: first line\n")
    assert "second line" not in text
    assert "second line" in (tmp_path / "error.log").read_text()
