"""The command line of `benchmarks.rollout`."""

from pathlib import Path

import pytest

from benchmarks.rollout.__main__ import main


def test_a_wrong_key_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = "config/qwen_gsm8k_fsdp.yaml"
    assert main(["--out", str(tmp_path), "--config", config, "rollout.nn=1"]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and "rollout.nn" in error
