"""The sync of a plan, out of that of a run with other settings."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from one_step_off.config.errors import ConfigError
from one_step_off.config.loading import load_config
from one_step_off.config.schema import Config
from one_step_off.config.yaml_io import resolved_yaml
from one_step_off.tools.planner import measured_sync
from one_step_off.tools.planner.measured_sync import (
    MeasuredSync,
    assumptions_of_given_times,
    sent_bytes,
    with_settings_of_plan,
)
from one_step_off.tools.planner.work import Work

KEYS = ("model.path=a/b", "data.train_files=c/d", "trainer.total_steps=1", "model.lora_rank=8")
ADAPTER = "weight_sync.lora=adapter"
ROW = {
    "time/sync_s": 3.0,
    "time/canary_s": 1.0,
    "sync/full_bytes": 400e6,
    "sync/pause_s": 0.1,
    "sync/prepare_s": 0.0,
    "sync/wait_s": 0.6,
    "sync/apply_s": 0.0,
    "sync/verify_s": 0.1,
    "sync/load_s": 0.8,
    "sync/finish_s": 0.1,
}
SYNC = MeasuredSync(3.0, 0.5, 0.5, bytes_s=1.6, full_bytes=400e6)
WORK = Work(
    8,
    np.full((3, 4), 100),
    20.0,
    0.02,
    1e-4,
    2.0,
    5e-4,
    3.0,
    0.5,
    replica_canary_s=0.5,
)


def config(*keys: str) -> Config:
    return load_config([*KEYS, *keys])


def write_run(folder: Path, *keys: str, row: dict[str, float] = ROW) -> str:
    (folder / "config.yaml").write_text(resolved_yaml(config(*keys)))
    (folder / "metrics.jsonl").write_text((json.dumps(row) + "\n") * 5)
    return str(folder)


@pytest.fixture
def adapters_of_4_mb(monkeypatch: pytest.MonkeyPatch) -> None:
    """The adapters have 4 MB, the model 400 MB."""

    def fake_bytes(cfg: Config) -> int:
        return int(4e6) if cfg.weight_sync.lora == "adapter" else int(400e6)

    monkeypatch.setattr(measured_sync, "sent_bytes", fake_bytes)


def test_a_sync_has_its_parts() -> None:
    assert measured_sync.measured_sync([ROW, ROW]) == SYNC


def test_a_run_without_parts_has_a_whole_sync() -> None:
    row = {"time/sync_s": 3.0, "time/canary_s": 1.0}
    found = measured_sync.measured_sync([row])
    assert (found.canary_s, found.replica_canary_s, found.bytes_s) == (0.5, 0.5, 0)


def test_adapters_alone_count_their_own_bytes(tmp_path, adapters_of_4_mb) -> None:
    folder = write_run(tmp_path)
    work, lines = with_settings_of_plan(WORK, folder, config(ADAPTER))
    assert work.transfer_s == pytest.approx(0.4 + 1.6 / 100)
    assert (work.canary_s, work.replica_canary_s) == (0.5, 0.5)
    assert "4 MB are sent, 400 MB in the run" in lines[0]
    assert "1.6 s depend on the bytes: 0.416 s are counted" in lines[1]
    assert "generation and training are taken as the run's" in lines[2]


def test_a_model_out_of_adapters_is_said_to_be_uncertain(tmp_path, adapters_of_4_mb) -> None:
    row = ROW | {"sync/full_bytes": 4e6}
    folder = write_run(tmp_path, ADAPTER, row=row)
    work, lines = with_settings_of_plan(WORK, folder, config())
    assert work.transfer_s == pytest.approx(0.4 + 160)
    assert "more bytes than were measured" in lines[-1]


def test_another_rank_of_adapters_counts_its_bytes(tmp_path, adapters_of_4_mb) -> None:
    row = ROW | {"sync/full_bytes": 8e6}
    folder = write_run(tmp_path, ADAPTER, "model.lora_rank=16", row=row)
    work, _ = with_settings_of_plan(WORK, folder, config(ADAPTER))
    assert work.transfer_s == pytest.approx(0.4 + 0.8)


@pytest.mark.parametrize("keys", [(), (ADAPTER,)])
def test_the_sync_of_the_same_weights_is_taken_as_it_is(tmp_path, keys: tuple[str, ...]) -> None:
    """And no model is read: the path names none."""
    folder = write_run(tmp_path, *keys)
    assert with_settings_of_plan(WORK, folder, config(*keys)) == (WORK, [])


def test_bytes_that_a_run_did_not_measure_are_one_line(tmp_path, adapters_of_4_mb) -> None:
    folder = write_run(tmp_path, row={"time/sync_s": 3.0, "time/canary_s": 1.0})
    with pytest.raises(ConfigError, match="its metrics have no sync/full_bytes; name a run"):
        with_settings_of_plan(WORK, folder, config(ADAPTER))


def test_a_model_without_shapes_is_one_line(tmp_path) -> None:
    folder = write_run(tmp_path)
    nowhere = config(ADAPTER, f"model.path={tmp_path}/nowhere")
    with pytest.raises(ConfigError, match="its shapes cannot be read: .*; name a run") as raised:
        with_settings_of_plan(WORK, folder, nowhere)
    assert "\n" not in str(raised.value)


def test_given_times_say_what_is_assumed() -> None:
    assert assumptions_of_given_times(config()) == []
    (line,) = assumptions_of_given_times(config(ADAPTER))
    assert "GEN and SYNC are taken as those of adapters alone" in line


def test_bytes_are_those_of_the_shapes(tmp_path) -> None:
    from transformers import Qwen2Config

    Qwen2Config(
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=64,
        tie_word_embeddings=True,
    ).save_pretrained(tmp_path)
    path = f"model.path={tmp_path}"
    attention = 2 * (32 + 32) + 2 * (32 + 16)
    numbers = 2 * 8 * (attention + 3 * (32 + 48))
    assert sent_bytes(config(path, ADAPTER)) == 2 * numbers
    assert sent_bytes(config(path, ADAPTER, "model.dtype=float32")) == 4 * numbers
    only_q = config(path, ADAPTER, "model.lora_target_modules=q_proj")
    assert sent_bytes(only_q) == 2 * 2 * 8 * (32 + 32)
    layer = 2 * 32 * 32 + 2 * 32 * 16 + (32 + 16 + 16) + 3 * 32 * 48 + 2 * 32
    assert sent_bytes(config(path)) == 2 * (64 * 32 + 2 * layer + 32)  # the head is tied
