"""`config=NAME` finds a config of the package from any folder."""

from __future__ import annotations

from pathlib import Path

import pytest

from one_step_off.config.errors import ConfigError
from one_step_off.config.loading import load_config

ROOT = Path(__file__).parents[3]


def test_a_config_of_the_package_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    by_name = load_config(["config=gsm8k_tiny_cpu"])
    assert by_name == load_config([f"config={ROOT}/config/gsm8k_tiny_cpu.yaml"])


def test_a_file_of_that_name_comes_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "gsm8k_tiny_cpu").write_text("trainer: {seed: 41}")
    assert load_config(["config=gsm8k_tiny_cpu"]).trainer.seed == 41


def test_an_unknown_name_lists_the_names() -> None:
    with pytest.raises(ConfigError, match=r"^config=gsm8k_tiny: .*gsm8k_tiny_cpu, .*ppo_gae"):
        load_config(["config=gsm8k_tiny"])
