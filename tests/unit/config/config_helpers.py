"""A small valid config, and the line that a changed one is refused with."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from one_step_off.config.errors import ConfigError
from one_step_off.config.loading import load_config
from one_step_off.config.schema import Config
from one_step_off.runtime.validation import validate

ROOT = Path(__file__).parents[3]
GOOD = (
    "model.path=tiny:qwen2",
    "data.train_files=generator:word_problems",
    "trainer.total_steps=2",
    "placement.device=cpu",
    "model.dtype=float32",
)

SHARED = ("placement.pools={all: [2]}", "placement.roles={rollout: all, actor: all}")


def good(*overrides: str) -> Config:
    """A valid config with these changes."""
    return load_config([*GOOD, *overrides])


def fault(*argv: str, num_gpus: int = 0, base: tuple[str, ...] = GOOD) -> str:
    """The one line that these arguments are refused with."""
    with pytest.raises(ConfigError) as caught:
        validate(load_config([*base, *argv]), num_gpus)
    line = str(caught.value)
    assert line, line
    assert len(line.splitlines()) == 1, line
    assert len(line) < 400, line
    return line


def write(path: Path, text: str) -> str:
    path.write_text(text)
    return str(path)


def load_text(text: str, folder: Path = Path("/tmp")) -> Config:
    path = folder / f"one_step_off_test_{os.getpid()}.yaml"
    try:
        return load_config([f"config={write(path, text)}"])
    finally:
        path.unlink()
