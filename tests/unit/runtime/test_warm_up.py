"""The supervised steps before RL: when they are made, when their model is found, and what is
refused. The steps themselves are made in tests/e2e/test_supervised.py."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from one_step_off.config.errors import ConfigError
from one_step_off.config.schema import Config
from one_step_off.config.supervised import warm_up_config
from one_step_off.config.yaml_io import resolved_yaml
from one_step_off.monitoring.console import RunConsole
from one_step_off.runtime import launch
from one_step_off.runtime import sft_phase as module
from one_step_off.runtime.prepare import ResumePoint, RunInputs

MODEL = "tiny:qwen2"


@pytest.fixture
def trained(monkeypatch: pytest.MonkeyPatch) -> list[Config]:
    """The configs of the warm-ups that were made; each leaves the files of a run."""
    made: list[Config] = []

    def prepare(cfg, print_line, show_progress):
        return RunInputs(cfg, "cpu", SimpleNamespace(), [], None, {"model": "folder"}, [])

    def train(prepared, console, begin):
        made.append(prepared.cfg)
        finish(Path(prepared.cfg.trainer.output_dir), prepared.cfg, prepared.named_models["model"])

    monkeypatch.setattr(module, "prepare_supervised", prepare)
    monkeypatch.setattr(launch, "train", train)
    monkeypatch.setattr(module, "is_complete", lambda *arguments: False)
    return made


def finish(folder: Path, cfg: Config, named_model: str = MODEL) -> None:
    """The files of a warm-up that has ended."""
    (folder / "hf_model").mkdir(parents=True, exist_ok=True)
    (folder / "summary.json").write_text("{}\n")
    path = cfg.model.path
    cfg.model.path = named_model
    (folder / "config.yaml").write_text(resolved_yaml(cfg))
    cfg.model.path = path


def a_run(folder: Path, resume_point: ResumePoint | None = None, **trainer: object) -> RunInputs:
    """A run with three supervised steps, about to start RL."""
    cfg = Config()
    cfg.model.path = "/cache/tiny"
    cfg.data.train_files = "generator:word_problems"
    cfg.trainer.sft_steps = 3
    cfg.trainer.output_dir = str(folder)
    for name, value in trainer.items():
        setattr(cfg.trainer, name, value)
    data = SimpleNamespace()
    return RunInputs(cfg, "cpu", data, [], None, {"model": MODEL}, [], resume_point)


def sft_phase(prepared: RunInputs) -> str:
    """The model with which RL starts."""
    with RunConsole() as console:
        module.sft_phase(prepared, console, launch.train)
    return prepared.cfg.model.path


def test_rl_starts_with_the_model_of_the_warm_up(tmp_path, trained):
    model = str(tmp_path / "sft/hf_model")
    assert sft_phase(a_run(tmp_path)) == model
    assert [cfg.trainer.total_steps for cfg in trained] == [3]
    assert f"path: {MODEL}" in (tmp_path / "sft/config.yaml").read_text()
    assert sft_phase(a_run(tmp_path)) == model
    assert len(trained) == 1, "a warm-up that has ended is not made again"
    assert sft_phase(a_run(tmp_path, resume="never", overwrite=True)) == model
    assert len(trained) == 2


def test_a_warm_up_with_other_settings_is_not_taken(tmp_path, trained):
    sft_phase(a_run(tmp_path))
    other = a_run(tmp_path)
    other.cfg.sft.lr = 0.5
    with pytest.raises(ConfigError, match=r"sft: holds a warm-up with sft.lr=2e-05, .* 0.5; start"):
        sft_phase(other)
    other = a_run(tmp_path)
    other.cfg.actor.optimizer_kwargs = {"momentum": 0.5}
    with pytest.raises(ConfigError, match=r"a warm-up with actor.optimizer_kwargs="):
        sft_phase(other)
    longer = a_run(tmp_path, sft_steps=4)
    with pytest.raises(ConfigError, match=r"trainer.total_steps=3, and this one has 4"):
        sft_phase(longer)
    other = a_run(tmp_path)
    other.named_models["model"] = "tiny:qwen3"
    with pytest.raises(ConfigError, match=r"model.path=tiny:qwen2"):
        sft_phase(other)
    rl_only = a_run(tmp_path)
    rl_only.cfg.actor.micro_batch_tokens = 100
    rl_only.cfg.rollout.n = 3
    rl_only.cfg.actor.lr = 0.25
    assert sft_phase(rl_only), "what does not change the model may change"
    assert len(trained) == 1


def test_a_run_that_resumes_rl_takes_the_model_of_its_warm_up(tmp_path, trained):
    checkpoint = ResumePoint(tmp_path / "checkpoints/step_000002", {"step": 2})
    with pytest.raises(ConfigError, match=r"sft holds no finished warm-up; put back"):
        sft_phase(a_run(tmp_path, checkpoint))
    finish(tmp_path / "sft", warm_up_config(a_run(tmp_path).cfg))
    assert sft_phase(a_run(tmp_path, checkpoint)) == str(tmp_path / "sft/hf_model")
    elsewhere = a_run(tmp_path / "other", checkpoint)
    assert sft_phase(elsewhere) == str(tmp_path / "sft/hf_model"), "that of the checkpoint's run"
    changed = a_run(tmp_path, checkpoint)
    changed.cfg.sft.lr = 0.5  # the warm-up has ended
    assert sft_phase(changed) == str(tmp_path / "sft/hf_model")
    assert not trained


def test_an_evaluation_alone_makes_no_steps(tmp_path, trained, capsys):
    assert sft_phase(a_run(tmp_path, val_only=True)) == "/cache/tiny"
    finish(tmp_path / "sft", warm_up_config(a_run(tmp_path).cfg))
    assert "supervised steps" not in capsys.readouterr().out
    assert sft_phase(a_run(tmp_path, val_only=True)) == str(tmp_path / "sft/hf_model")
    assert "the supervised steps have been made:" in capsys.readouterr().out
    assert not trained
