"""Checkpoints written beside training, by the workers of both back ends: what is written is the
state of the copy, training waits for nothing, and an error in the writing reaches the run."""

from __future__ import annotations

import os
import shutil
import signal
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import FileSystemWriter
from torch.multiprocessing.spawn import ProcessExitedException

from one_step_off import checkpoint
from tests.unit.checkpoint.checkpoint_helpers import checkpoint_names, save_worker
from tests.unit.forked_ranks import run_ranks
from tests.unit.training.fsdp_helpers import config, free_port, make_batch
from tests.unit.training.rank_helpers import join, leave, of_fsdp, of_megatron, weights_of

NEEDS_MEGATRON = "megatron-core is not installed (the extra megatron)"


@pytest.fixture(params=["fsdp", "megatron"])
def worker(request, model_folders, tmp_path):
    """The one rank of an actor of each back end, with a run folder of its own."""
    workers = of_fsdp
    if request.param == "megatron":
        pytest.importorskip("megatron.core", reason=NEEDS_MEGATRON)
        workers = of_megatron
    path = model_folders["tied"]
    cfg = config(path, actor__backend=request.param, trainer__output_dir=str(tmp_path / "run"))
    rank = workers()["actor"](cfg, "actor", 0, 1, "cpu", total_steps=10)
    rank.setup("127.0.0.1", free_port())
    yield rank
    leave(workers)


def equal(ours: list[np.ndarray], theirs: list[np.ndarray]) -> bool:
    return all(np.array_equal(a, b) for a, b in zip(ours, theirs, strict=True))


def hold_writing(monkeypatch) -> threading.Event:
    """From now on nothing is written before the event is set."""
    write_data = FileSystemWriter.write_data
    may_write = threading.Event()

    def held(self, *args):
        assert may_write.wait(30)
        return write_data(self, *args)

    monkeypatch.setattr(FileSystemWriter, "write_data", held)
    return may_write


def test_training_continues_while_the_copy_is_written(worker, tmp_path, monkeypatch):
    batch = make_batch(worker.cfg.model.path)
    worker.update(batch)
    want = weights_of(worker)
    may_write = hold_writing(monkeypatch)
    worker.save_state(str(tmp_path))
    worker.update(batch)
    after_two_steps = weights_of(worker)
    assert not equal(after_two_steps, want)
    assert not worker._writing.done()
    may_write.set()
    facts = worker.saved()
    assert {"actor/.metadata", "actor/__0_0.distcp", "actor_rank_0.npz"} <= facts.keys()
    worker.load_state(str(tmp_path))
    assert equal(weights_of(worker), want), "what was saved is the state of then"
    assert (worker.version, worker.optimizer_steps) == (1, 1)
    worker.update(batch)
    assert equal(weights_of(worker), after_two_steps), "moments and step counts are those of then"


def test_a_full_disk_is_named_and_leaves_the_others(worker, monkeypatch):
    cfg = worker.cfg
    worker.update(make_batch(cfg.model.path))
    intact = save_worker(worker, cfg, 10)

    def full(self, *args):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(FileSystemWriter, "write_data", full)
    with pytest.raises(RuntimeError, match="cannot be written: .*No space left on device"):
        save_worker(worker, cfg, 15)
    assert checkpoint.find(cfg) == intact
    monkeypatch.undo()
    save_worker(worker, cfg, 15)
    assert checkpoint_names(intact.parent) == ["step_000010", "step_000015"]
    assert [path.name for path in intact.parent.glob(".*")] == [], "nothing unfinished stays"


def save_and_die(rank, workers, cfg):
    """A rank that is killed while its second checkpoint is written."""
    torch.set_num_threads(1)
    worker = workers()["actor"](cfg, "actor", rank, 1, "cpu", total_steps=10)
    worker.setup("127.0.0.1", free_port())
    worker.update(make_batch(cfg.model.path))
    save_worker(worker, cfg, 10)
    write_data = FileSystemWriter.write_data

    def write_and_die(self, *args):
        write_data(self, *args)
        os.kill(os.getpid(), signal.SIGKILL)

    FileSystemWriter.write_data = write_and_die
    save_worker(worker, cfg, 15)


@pytest.mark.parametrize(
    "backend", [pytest.param("fsdp", marks=pytest.mark.slow), pytest.param("megatron")]
)
def test_a_death_in_mid_writing_leaves_the_last_complete_one(model_folders, tmp_path, backend):
    workers = of_fsdp
    if backend == "megatron":
        pytest.importorskip("megatron.core", reason=NEEDS_MEGATRON)
        workers = of_megatron
    path = model_folders["tied"]
    cfg = config(path, actor__backend=backend, trainer__output_dir=str(tmp_path / "run"))
    with pytest.raises(ProcessExitedException, match="SIGKILL"):
        run_ranks(save_and_die, (workers, cfg), 1)
    folder = tmp_path / "run" / "checkpoints"
    assert sorted(path.name for path in folder.iterdir()) == [
        ".step_000015.unfinished",
        "step_000010",
    ]
    assert list((folder / ".step_000015.unfinished").rglob("*.distcp"))
    assert checkpoint.find(cfg) == folder / "step_000010"


def write_at_once(worker: Any, folder: str) -> None:
    """The back end's own checkpoint of a worker, written in the foreground."""
    if worker.cfg.actor.backend == "fsdp":
        dcp.save(worker._state(), checkpoint_id=folder)
        return
    from megatron.core import dist_checkpointing

    from one_step_off.training.megatron.megatron_workers import SHARDING, cuda_is_cpu

    os.makedirs(folder, exist_ok=True)
    with cuda_is_cpu(worker.device):
        state = worker._sharded_state(loading=False)
        dist_checkpointing.save(state, folder, content_metadata=SHARDING)


def run_rank(rank, workers, cfg, folder):
    """A step, a checkpoint in the foreground and one that is held while another step trains."""
    torch.set_num_threads(1)
    worker = workers()["actor"](cfg, "actor", rank, 2, "cpu", total_steps=10)
    join(worker, "ranks", folder)
    batch = make_batch(cfg.model.path)
    worker.update(batch)
    write_at_once(worker, str(folder / "foreground" / "actor"))
    with pytest.MonkeyPatch.context() as patches:
        may_write = hold_writing(patches)
        worker.save_state(str(folder / "background"))
        worker.update(batch)
        assert list((folder / "background").rglob("*.distcp")) == []
        assert not worker._writing.done()
        dist.barrier()  # both ranks have trained, and neither has written anything
        may_write.set()
        worker.saved()
    leave(workers)


def tensor_files(folder: Path) -> dict[str, bytes]:
    """Name -> bytes of the files with the ranks' tensors; torch leaves an empty one where a rank
    has none, and Megatron no file."""
    files = {path.name: path.read_bytes() for path in folder.glob("*.distcp")}
    return {name: data for name, data in files.items() if data}


def check_bytes(workers, cfg, folder) -> None:
    (folder / "background").mkdir(parents=True)
    run_ranks(run_rank, (workers, cfg, folder), 2)
    background = folder / "background" / "actor"
    foreground = folder / "foreground" / "actor"
    assert tensor_files(background) == tensor_files(foreground)
    names = {path.name for path in background.iterdir()}
    assert names >= {path.name for path in foreground.iterdir()}
    shutil.rmtree(folder)


def test_fsdp_writes_the_bytes_of_a_checkpoint_in_the_foreground(model_folders, tmp_path):
    check_bytes(of_fsdp, config(model_folders["untied"]), tmp_path / "ranks")


@pytest.mark.parametrize(
    ("model", "layout"),
    [
        pytest.param("qwen2", "TP", id="tp2"),
        pytest.param("qwen2", "", id="dp2", marks=pytest.mark.slow),
        pytest.param("qwen2", "PP VPP", id="vpp2", marks=pytest.mark.slow),
        pytest.param("moe", "EP", id="ep2", marks=pytest.mark.slow),
        pytest.param("bf16", "TP", id="bf16_tp2", marks=pytest.mark.slow),
    ],
)
def test_megatron_writes_the_bytes_of_a_checkpoint_in_the_foreground(tmp_path, model, layout):
    """Every tensor, the optimizer's included, is a copy: a step that trains before the writing
    begins changes none."""
    pytest.importorskip("megatron.core", reason=NEEDS_MEGATRON)
    from tests.unit.training import megatron_helpers

    models = megatron_helpers.write_models(tmp_path / "models")
    keys: dict[str, Any] = {}
    for name in layout.split():
        keys |= getattr(megatron_helpers, name)
    changes = {f"actor__{key}": value for key, value in keys.items()}
    if model == "bf16":
        changes["model__dtype"] = "bfloat16"
        model = "qwen2"
    cfg = config(str(models / model), **changes, actor__backend="megatron")
    check_bytes(of_megatron, cfg, tmp_path / "ranks")
