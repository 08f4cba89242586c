"""The comparison with TRL: its settings, its report, and its error lines."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.trl_comparison import __main__ as trl_comparison
from benchmarks.trl_comparison import report
from benchmarks.trl_comparison.trl_arm import grpo_config_fields
from one_step_off.config.loading import load_config

TINY = "config=config/gsm8k_tiny_cpu.yaml"
MACHINE = {"cpu": "X", "cores": [0, 1], "memory_gib": 1, "load_before": [0.0], "torch": "2"}


def test_trl_gets_what_the_config_says() -> None:
    settings = grpo_config_fields(load_config([TINY, "trainer.total_steps=7"]))
    assert settings["generation_batch_size"] == 256
    assert settings["per_device_train_batch_size"] == 256
    assert settings["num_generations"] == 16
    assert settings["max_completion_length"] == 32
    assert settings["max_steps"] == 7
    assert settings["learning_rate"] == 2e-4
    assert settings["warmup_steps"] == 5
    assert settings["loss_type"] == "dapo"
    assert not settings["use_vllm"]
    assert grpo_config_fields(load_config([TINY]), vllm=True)["vllm_max_model_length"] == 160
    with pytest.raises(ValueError, match="actor.ppo_epochs=2: this comparison needs 1"):
        grpo_config_fields(load_config([TINY, "actor.ppo_epochs=2"]))


def test_missing_trl_is_one_line(
    capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trl_comparison.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(SystemExit) as ended:
        trl_comparison.main(["--out", "x"])
    error = capsys.readouterr().err
    assert ended.value.code == 2
    assert error.count("\n") == 1
    assert 'pip install --target trl_site --no-deps "trl' in error
    with pytest.raises(SystemExit):
        trl_comparison.main(["--out", "x", "--arms", "ours", "--cores", "4711"])
    assert "--cores [4711]: this process may use" in capsys.readouterr().err


def test_a_model_brings_its_case(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    flags = ["--out", "x", "--arms", "ours"]
    _, args, keys = trl_comparison.arguments(flags)
    assert (Path(args.config).name, keys) == ("gsm8k_tiny_cpu.yaml", [])
    with pytest.raises(SystemExit):
        trl_comparison.arguments([*flags, "--model", str(tmp_path)])
    assert "has no config.json" in capsys.readouterr().err
    (tmp_path / "config.json").touch()
    _, args, keys = trl_comparison.arguments([*flags, "--model", str(tmp_path), "rollout.n=8"])
    cfg = load_config([f"config={args.config}", *keys])
    assert cfg.model.path == str(tmp_path)
    assert cfg.data.train_files == "generator:addition"
    assert (cfg.data.train_batch_size, cfg.data.max_response_length) == (4, 80)
    assert cfg.rollout.n == 8, "the user's keys win"


def arm(*step_seconds: float) -> dict[str, Any]:
    """An arm with a run of one step for each of these seconds."""
    row = {"samples": 256.0, "reward/mean": 0.5, "response_length/mean": 13.0}
    return report.summarize(
        [report.figures([row | {"time/step_s": seconds}]) for seconds in step_seconds]
    )


def test_trl_table_and_headline(tmp_path: Path) -> None:
    names = trl_comparison.ARMS
    arms = {
        names["ours"]: arm(0.5, 0.64, 0.8),
        names["trl-1"]: arm(1.0, 1.28, 1.6),
        names["trl-all"]: arm(2.0),
    }
    headline = report.headline(arms)
    assert headline == {"best of TRL": "TRL, 1 thread", "times as many samples/s": 2.0}
    assert report.headline({names["ours"]: arm(1.0)}) == {}
    result = {
        "machine": MACHINE,
        "cores": [0, 1],
        "config": "a/b.yaml",
        "keys": ["x.y=1"],
        "runs": 3,
        "warmup": 1,
        "arms": arms,
        "failed": {"TRL, vLLM colocate": "AttributeError: x"},
        "headline": headline,
        "trl_settings": grpo_config_fields(load_config([TINY])),
    }
    text = report.table(result)
    assert "| one_step_off | 0.640 (0.500 to 0.800) | 400 (320 to 512) |" in text
    assert "2.00 times the samples/s of TRL, 1 thread" in text
    assert "failed: AttributeError: x" in text
    assert "| `num_generations` | 16 |" in text
    assert json.dumps(result)
    report.plot(result, tmp_path / "x.png")
    assert (tmp_path / "x.png").stat().st_size > 5000
