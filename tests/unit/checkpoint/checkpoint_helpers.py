"""Helpers of the checkpoints' tests: configs, checkpoints of a stand-in trainer, and of a real
worker."""

from __future__ import annotations

import asyncio
import json
import re
import shutil
from pathlib import Path

import pytest

from one_step_off import checkpoint
from one_step_off.checkpoint.manifest import file_facts
from one_step_off.config.errors import ConfigError
from one_step_off.config.schema import Config
from one_step_off.data.samples import Sample

FILES = [
    "manifest.json",
    "state.json",
    "samples.npz",
    "samples.jsonl",
    "actor_rank_0.npz",
    "actor/.metadata",
    "actor/__0_0.distcp",
]
"""What a checkpoint of a one-rank actor holds."""


def run_config(folder: Path, **trainer: object) -> Config:
    """A config with a run folder and keys of `trainer`."""
    cfg = Config()
    cfg.trainer.output_dir = str(folder)
    for name, value in trainer.items():
        setattr(cfg.trainer, name, value)
    return cfg


def save(
    cfg: Config, step: int, fail: bool = False, samples: list[Sample] | None = None, **state: object
) -> Path:
    """A checkpoint of a stand-in trainer, which writes one file. `fail`: the disk is full."""

    async def save_trainer(folder: str) -> asyncio.Future:
        (Path(folder) / "actor").mkdir()
        (Path(folder) / "actor" / "__0_0.distcp").write_bytes(bytes(4096))

        async def written() -> None:
            if fail:
                raise OSError("disk full")

        return asyncio.ensure_future(written())

    async def save_whole() -> Path:
        checkpointer = checkpoint.Checkpointer(cfg, save_trainer)
        writing = await checkpointer.save(step, samples, {"stream": {}} | state)
        path, size = await writing
        files = [file for file in path.rglob("*") if file.is_file()]
        assert size == sum(file.stat().st_size for file in files if file.name != "manifest.json")
        return path

    return asyncio.run(save_whole())


def save_worker(worker, cfg: Config, step: int, samples: list[Sample] | None = None) -> Path:
    """A checkpoint of a real worker's state."""

    async def save_trainer(folder: str) -> asyncio.Future:
        worker.save_state(folder)
        return asyncio.gather(asyncio.to_thread(worker.saved))

    async def save_whole() -> Path:
        checkpointer = checkpoint.Checkpointer(cfg, save_trainer)
        writing = await checkpointer.save(step, samples, {"stream": {}})
        path, _ = await writing
        return path

    return asyncio.run(save_whole())


def rewrite_manifest(path: Path) -> None:
    """The manifest of the files as they are: what an attacker would write."""
    manifest = json.loads((path / "manifest.json").read_text())
    (path / "manifest.json").write_text(json.dumps(manifest | file_facts(path)))


def assert_refused(run, words: str) -> None:
    """A broken checkpoint of step 10 is reported with these `words`.

    As an error where it was named; as a warning where there is another one; and where there is none
    the run does not restart by itself.
    """
    cfg, path = run
    cfg.trainer.resume = str(path)
    message = f"trainer.resume={path}: checkpoint {path}: {words}.*; name an intact one"
    with pytest.raises(ConfigError, match=message):
        checkpoint.find(cfg)
    lines: list[str] = []
    cfg.trainer.resume = "auto"
    found = checkpoint.find(cfg, lines.append)
    assert found is not None
    assert found.name == "step_000005"
    (line,) = lines
    assert re.search(f"warning: checkpoint {path}: {words}", line)
    shutil.rmtree(path.parent / "step_000005")
    message = f"trainer.resume=auto: checkpoint {path}: .*start from step 0 with"
    with pytest.raises(ConfigError, match=message):
        checkpoint.find(cfg)


def checkpoint_names(folder: Path) -> list[str]:
    """The names of the finished checkpoints."""
    return [path.name for path in checkpoint.finished(folder)]
