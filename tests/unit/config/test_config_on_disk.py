"""What a config names on disk and elsewhere: models, data, checkpoints, folders, vLLM's fields."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from one_step_off.config.errors import ConfigError
from one_step_off.config.sections.rollout import check_engine_names
from one_step_off.runtime.validation import validate
from tests.unit.config.config_helpers import fault, good

# A warning would be a second line on the console.
pytestmark = pytest.mark.filterwarnings("error")


def test_model_directory_must_be_whole(tmp_path: Path) -> None:
    missing = []
    for name in ("config.json", "tokenizer.json", "model.safetensors"):
        missing.append(fault(f"model.path={tmp_path}"))
        (tmp_path / name).write_text("{}")
    for line, what in zip(missing, ("config.json", "tokenizer.json", ".safetensors"), strict=True):
        assert f"the directory has no {what}" in line
    validate(good(f"model.path={tmp_path}"), 0)


def test_resume_from_a_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "step_000002").mkdir()
    assert "state.json is missing" in fault("trainer.resume=~/step_000002")
    (tmp_path / "step_000002" / "state.json").write_text("{}")
    cfg = good("trainer.resume=~/step_000002")
    validate(cfg, 0)
    assert cfg.trainer.resume == f"{tmp_path}/step_000002"


def test_engine_names_that_vllm_does_not_know() -> None:
    names = ("max_num_seqs", "enforce_eager", "_api_process_rank")
    check_engine_names("rollout.engine_kwargs", {"max_num_seqs": 8, "enforce_eager": True}, names)
    for name, fix in (
        ("max_num_seq", "did you mean max_num_seqs?"),
        ("_api_process_rank", "remove it"),
    ):
        with pytest.raises(
            ConfigError,
            match=f"rollout.engine_kwargs.{name}=1: the installed vLLM has no such field",
        ):
            check_engine_names("rollout.engine_kwargs", {name: 1}, names)
        with pytest.raises(ConfigError, match=fix.replace("?", r"\?")):
            check_engine_names("teacher.engine_kwargs", {name: 1}, names)


@pytest.mark.parametrize("path", ["Qwen/Qwen2.5-0.5B-Instruct", "tiny:qwen3"])
def test_hub_and_tiny_models_pass(path: str) -> None:
    validate(good(f"model.path={path}"), 0)


def test_data_files(tmp_path: Path) -> None:
    one = tmp_path / "a.jsonl"
    two = tmp_path / "b.parquet"
    one.write_text('{"question": "1+1", "answer": "#### 2"}\n')
    validate(good(f"data.train_files={one}, {one}", "data.val_files=openai/gsm8k:main"), 0)
    assert "b.parquet: no such file" in fault(f"data.train_files={one},{two}")


def test_paths_in_the_home_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    cfg = good(
        "model.path=~/m", "data.train_files=~/a.jsonl,openai/gsm8k", "trainer.output_dir=~/out"
    )
    assert cfg.model.path == f"{tmp_path}/m"
    assert cfg.trainer.output_dir == f"{tmp_path}/out"
    assert cfg.data.train_files == f"{tmp_path}/a.jsonl,openai/gsm8k"


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_output_dir_without_permission(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    assert "cannot be written" in fault(f"trainer.output_dir={tmp_path}/run")


def test_user_reward_is_found_without_import(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my_reward_module.py").write_text("raise SystemExit('imported')")
    validate(good("reward.function=my_reward_module:score", "reward.kwargs.a=1"), 0)
