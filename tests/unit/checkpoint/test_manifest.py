"""What is wrong with a checkpoint is found before anything is loaded. The checkpoints are real
ones."""

from __future__ import annotations

import json
import os
import shutil

import pytest

from one_step_off import checkpoint, main_ppo
from one_step_off.config.errors import ConfigError
from one_step_off.runtime import launch
from tests.conftest import tiny_config
from tests.unit.checkpoint.checkpoint_helpers import FILES, assert_refused, save

OF_RUN = [
    "config=config/gsm8k_tiny_cpu.yaml",
    "model.dtype=float32",
    "data.train_batch_size=4",
    "actor.ppo_mini_batch_size=4",
    "rollout.n=4",
]


def test_a_good_checkpoint_is_found(run):
    cfg, path = run
    warnings: list[str] = []
    assert checkpoint.find(cfg, warnings.append) == path
    assert not warnings
    manifest = json.loads((path / "manifest.json").read_text())
    other_files = sorted(set(FILES) - {"manifest.json"})
    assert sorted(manifest["bytes"]) == other_files
    assert sorted(manifest["checksum"]) == other_files
    assert manifest["bytes"]["actor/.metadata"] == (path / "actor" / ".metadata").stat().st_size
    assert manifest["shape"]["actor: model.norm.weight"] == [32]


@pytest.mark.parametrize("name", FILES)
def test_a_torn_file_is_named(run, name):
    file = run[1] / name
    size = file.stat().st_size
    os.truncate(file, size // 2)
    difference = f"its bytes: {size // 2}, but {size} when it was written"
    if name == "manifest.json":
        difference = ""  # some error of the parser
    assert_refused(run, f"{name}: {difference}")


@pytest.mark.parametrize("name", FILES)
def test_a_missing_file_is_named(run, name):
    file = run[1] / name
    size = file.stat().st_size
    file.unlink()
    fault = f"its bytes: none, but {size} when"
    if name == "manifest.json":
        fault = "FileNotFound"
    assert_refused(run, f"{name}: {fault}")


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("where", [0.1, 0.5, 0.9])
def test_a_flipped_byte_is_found(run, name, where):
    file = run[1] / name
    data = bytearray(file.read_bytes())
    data[int(where * len(data))] ^= 1
    file.write_bytes(data)
    words = f"{name}: its checksum: [0-9a-f]{{32}}, but [0-9a-f]{{32}} when"
    if name == "manifest.json":
        words = ""  # it may still be JSON, and then any file may differ from it
    assert_refused(run, words)


def test_an_additional_file_is_named(run):
    shutil.copy(run[1] / "actor_rank_0.npz", run[1] / "actor_rank_1.npz")
    assert_refused(run, "actor_rank_1.npz: its bytes: [0-9,]+, but none when it was written")


def test_a_file_that_cannot_be_read_is_named(run, monkeypatch):
    real = open

    def refuse(file, *args, **kwargs):  # root reads whatever its bits say
        if str(file).endswith("step_000010/actor/.metadata"):
            raise PermissionError(13, "Permission denied", str(file))
        return real(file, *args, **kwargs)

    monkeypatch.setattr("builtins.open", refuse)
    assert_refused(run, "its files: PermissionError: .*Permission denied: .*actor/.metadata")


def test_another_format_is_named(run):
    file = run[1] / "manifest.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"format": 3}))
    assert_refused(run, "it has format 3, and this version of one_step_off reads 2")


def test_another_model_is_named(run, model_folders):
    cfg, path = run
    cfg.model.path = model_folders["untied"]
    with pytest.raises(
        ConfigError,
        match=r"actor: lm_head.weight: its shape: \[67, 32\], but none when it was written",
    ):
        checkpoint.find(cfg)


def test_a_role_that_the_checkpoint_lacks_is_named(run, model_folders):
    cfg, path = run
    cfg.placement.roles["critic"] = "actor"
    cfg.critic.path = cfg.model.path
    with pytest.raises(
        ConfigError, match=r"critic: model.embed_tokens.weight: its shape: .*, but none when"
    ):
        checkpoint.find(cfg)
    cfg.trainer.val_only = True
    assert checkpoint.find(cfg) == path, "the actor alone is evaluated"
    cfg.model.path = model_folders["untied"]
    with pytest.raises(ConfigError, match="actor: lm_head.weight: its shape"):
        checkpoint.find(cfg)


@pytest.mark.parametrize(("key", "value"), [("lora_rank", 4), ("lora_alpha", 3)])
def test_other_adapters_are_an_error_not_a_reason_to_take_an_earlier_one(run, key, value):
    cfg, path = run
    setattr(cfg.model, key, value)
    warnings: list[str] = []
    with pytest.raises(
        ConfigError, match=rf"model.{key}={value}: checkpoint {path} was written with"
    ):
        checkpoint.find(cfg, warnings.append)
    assert not warnings


def test_a_run_verifies_before_any_engine_starts(models, tmp_path, capsys):
    cfg = tiny_config(models(), str(tmp_path))
    prepared = launch.prepare(cfg, lambda line: None)
    for step in (1, 2):
        path = save(cfg, step, stream=prepared.data.stream.state_dict())
    os.truncate(path / "actor" / "__0_0.distcp", 1024)
    warnings: list[str] = []
    assert launch.prepare(cfg, warnings.append).resume_point.path == path.parent / "step_000001"
    assert any(
        "warning: checkpoint" in line and "its bytes: 1024, but 4096 when it was" in line
        for line in warnings
    )
    line = [
        *OF_RUN,
        f"model.path={models()}",
        f"trainer.output_dir={tmp_path}",
        f"trainer.resume={path}",
    ]
    assert main_ppo.main(line) == 2
    assert (
        f"error: trainer.resume={path}: checkpoint {path}: actor/__0_0.distcp: its bytes: 1024"
        in capsys.readouterr().err
    )
