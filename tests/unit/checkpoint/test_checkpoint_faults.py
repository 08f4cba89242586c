"""What is wrong with a checkpoint is found before anything is loaded; what goes wrong while one is written does no harm.

The checkpoints here are real ones, of a one-rank FSDP worker.
"""

from __future__ import annotations

import asyncio
import json
import os
import pickle
import random
import re
import shutil
import threading
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import FileSystemWriter

from one_step_off import checkpoint, main_ppo
from one_step_off.checkpoint.manifest import file_facts
from one_step_off.config.errors import ConfigError
from one_step_off.ray_trainer import Stopped
from one_step_off.runtime import launch
from one_step_off.runtime.validation import validate
from tests.conftest import tiny_config
from tests.unit.checkpoint.test_checkpoint import save
from tests.unit.ray_trainer.test_ray_trainer import World, build
from tests.unit.training.fsdp_helpers import (
    config,
    make_batch,
    whole,
)

FILES = [
    "manifest.json", "state.json", "samples.npz", "samples.jsonl", "actor_rank_0.npz", "actor/.metadata",
    "actor/__0_0.distcp",
]  # fmt: skip

OF_RUN = [
    "config=config/gsm8k_tiny_cpu.yaml",
    "model.dtype=float32",
    "data.train_batch_size=4",
    "actor.ppo_mini_batch_size=4",
    "rollout.n=4",
]


class Evil:
    """Unpickled, it makes a file named `pwned` in the working folder."""

    def __reduce__(self):
        return os.system, ("touch pwned",)


def taken(worker, cfg, step: int, samples=None) -> Path:
    """A checkpoint of the worker's state."""

    async def copied(folder: str) -> asyncio.Future:
        worker.save_state(folder)
        return asyncio.ensure_future(asyncio.to_thread(worker.saved))

    async def run() -> Path:
        return (
            await (await checkpoint.Checkpointer(cfg, copied).save(step, samples, {"stream": {}}))
        )[0]

    return asyncio.run(run())


@pytest.fixture(scope="module")
def made(model_folders, tmp_path_factory):
    """A run folder with checkpoints of steps 5 and 10, and its config."""
    from tests.unit.training.fsdp_helpers import end, start

    cfg = config(model_folders["tied"], trainer__output_dir=str(tmp_path_factory.mktemp("made")))
    worker, batch = start(cfg), make_batch(model_folders["tied"])
    for step in (5, 10):
        worker.update(batch)
        taken(worker, cfg, step, batch.samples)
    end()
    return cfg


@pytest.fixture
def run(made, model_folders, tmp_path):
    """A copy of it: config, and the folder of step 10."""
    shutil.copytree(made.trainer.output_dir, tmp_path / "run")
    cfg = config(model_folders["tied"], trainer__output_dir=str(tmp_path / "run"))
    return cfg, tmp_path / "run" / "checkpoints" / "step_000010"


def assert_refused(run, words: str) -> None:
    """`words` are said of step 10: as an error where it was named, as a warning where there is another one; and where
    there is none the run does not begin anew by itself."""
    cfg, path = run
    cfg.trainer.resume = str(path)
    with pytest.raises(
        ConfigError, match=f"trainer.resume={path}: checkpoint {path}: {words}.*; name a good one"
    ):
        checkpoint.find(cfg)
    said: list[str] = []
    cfg.trainer.resume = "auto"
    assert checkpoint.find(cfg, said.append).name == "step_000005"
    assert len(said) == 1 and re.search(f"warning: checkpoint {path}: {words}", said[0])
    shutil.rmtree(path.parent / "step_000005")
    with pytest.raises(
        ConfigError, match=f"trainer.resume=auto: checkpoint {path}: .*start from step 0 with"
    ):
        checkpoint.find(cfg)


def resealed(path: Path) -> None:
    """The manifest of the files as they are: what an attacker would write."""
    manifest = json.loads((path / "manifest.json").read_text())
    (path / "manifest.json").write_text(json.dumps(manifest | file_facts(path)))


def test_a_good_one_is_taken(run):
    cfg, path = run
    said: list[str] = []
    assert checkpoint.find(cfg, said.append) == path and not said
    manifest = json.loads((path / "manifest.json").read_text())
    assert (
        sorted(manifest["bytes"])
        == sorted(manifest["checksum"])
        == sorted(set(FILES) - {"manifest.json"})
    )
    assert manifest["bytes"]["actor/.metadata"] == (path / "actor" / ".metadata").stat().st_size
    assert manifest["shape"]["actor: model.norm.weight"] == [32]


@pytest.mark.parametrize("name", FILES)
def test_a_torn_file_is_named(run, name):
    file = run[1] / name
    size = file.stat().st_size
    os.truncate(file, size // 2)
    how = (
        "" if name == "manifest.json" else f"its bytes: {size // 2}, but {size} when it was written"
    )
    assert_refused(run, f"{name}: {how}")


@pytest.mark.parametrize("name", FILES)
def test_a_missing_file_is_named(run, name):
    file = run[1] / name
    size = file.stat().st_size
    file.unlink()
    assert_refused(
        run,
        name + (": FileNotFound" if "manifest" in name else f": its bytes: none, but {size} when"),
    )


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("where", [0.1, 0.5, 0.9])
def test_a_flipped_byte_is_found(run, name, where):
    file = run[1] / name
    data = bytearray(file.read_bytes())
    data[int(where * len(data))] ^= 1
    file.write_bytes(data)
    assert_refused(
        run,
        ""
        if name == "manifest.json"
        else f"{name}: its checksum: [0-9a-f]{{32}}, but [0-9a-f]{{32}} when",
    )


def test_a_file_that_was_not_written_with_it_is_named(run):
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


def test_a_role_that_it_lacks_is_named(run):
    cfg, path = run
    cfg.placement.roles["critic"] = "actor"
    cfg.critic.path = cfg.model.path
    with pytest.raises(
        ConfigError, match=r"critic: model.embed_tokens.weight: its shape: .*, but none when"
    ):
        checkpoint.find(cfg)


@pytest.mark.parametrize(("key", "value"), [("lora_rank", 4), ("lora_alpha", 3)])
def test_other_adapters_are_an_error_not_a_reason_to_go_back(run, key, value):
    cfg, path = run
    setattr(cfg.model, key, value)
    said: list[str] = []
    with pytest.raises(ConfigError, match=rf"model.{key}={value}: checkpoint {path} was made with"):
        checkpoint.find(cfg, said.append)
    assert not said


def test_a_run_looks_before_any_engine_starts(models, tmp_path, capsys):
    cfg = tiny_config(models(), str(tmp_path))
    prepared = launch.prepare(cfg, lambda line: None)
    for step in (1, 2):
        path = save(cfg, step, stream=prepared.data.stream.state_dict())
    os.truncate(path / "actor" / "__0_0.distcp", 1024)
    said: list[str] = []
    assert launch.prepare(cfg, said.append).resume_point.path == path.parent / "step_000001"
    assert any(
        "warning: checkpoint" in line and "its bytes: 1024, but 4096 when it was" in line
        for line in said
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


# ---- pickles ----------------------------------------------------------------------------------------------------


def test_a_pickle_that_would_run_something_is_refused_and_not_run(run, start_single, monkeypatch):
    cfg, path = run
    monkeypatch.chdir(path.parent)
    (path / "actor" / ".metadata").write_bytes(pickle.dumps(Evil()))
    resealed(path)
    with pytest.raises(
        ConfigError,
        match=r"the part of the actor does not fit .*names posix.system, which has no place",
    ):
        start_single(cfg).load_state(str(path))
    assert_refused(
        run, "actor/.metadata: UnpicklingError: names posix.system, which has no place there"
    )
    assert not Path("pwned").exists()
    pickle.loads(pickle.dumps(Evil()))
    assert Path("pwned").exists(), "it would have"


def test_a_pickle_inside_of_a_data_file_is_not_run(run, start_single, monkeypatch):
    cfg, path = run
    monkeypatch.chdir(path.parent)
    worker = start_single(cfg)
    real = worker._state()
    real["optimizer"]["param_groups"][0]["lr"] = Evil()
    dcp.save(real, checkpoint_id=path / "actor")
    resealed(path)
    assert checkpoint.find(cfg) == path, "the driver cannot see it"
    with pytest.raises(ConfigError, match="the part of the actor does not fit its model"):
        worker.load_state(str(path))  # which asks for it
    assert not Path("pwned").exists() and "TORCH_FORCE_WEIGHTS_ONLY_LOAD" not in os.environ


@pytest.mark.parametrize("name", ["actor_rank_0.npz", "samples.npz"])
def test_a_pickle_inside_of_an_array_is_not_run(run, start_single, monkeypatch, name):
    cfg, path = run
    monkeypatch.chdir(path.parent)
    np.savez(
        path / name,
        **dict.fromkeys(("version", "prompt_lengths"), np.array([Evil()], object)),
        allow_pickle=True,
    )
    resealed(path)
    with pytest.raises((ConfigError, ValueError), match="allow_pickle=False"):
        start_single(cfg).load_state(str(path)) if name.startswith(
            "actor"
        ) else checkpoint.read_samples(path)
    assert not Path("pwned").exists()


# ---- random numbers ---------------------------------------------------------------------------------------------


def test_ranks_go_on_with_their_random_numbers_and_new_ones_with_a_new_runs(run, start_single):
    cfg, path = run
    worker = start_single(cfg)
    torch.manual_seed(11)
    worker.save_state(str(path))
    worker.saved()
    want, drawn = torch.rand(3), []
    for rank in (0, 1):
        torch.manual_seed(0)
        worker.rank = rank  # as on more ranks than it was saved by
        worker.load_state(str(path))
        drawn.append(torch.rand(3))
    torch.manual_seed(0)
    assert torch.equal(drawn[0], want) and torch.equal(drawn[1], torch.rand(3))
    assert (worker.version, worker.optimizer_steps) == (0, 0)


# ---- writing ----------------------------------------------------------------------------------------------------


def test_training_goes_on_while_the_copy_is_written(run, start_single, model_folders, monkeypatch):
    cfg, path = run
    worker, batch = start_single(cfg), make_batch(model_folders["tied"])
    worker.update(batch)
    want, moments = whole(worker), worker.optimizer_steps
    real, may_write = FileSystemWriter.write_data, threading.Event()

    def slow(self, *args):
        assert may_write.wait(30)
        return real(self, *args)

    monkeypatch.setattr(FileSystemWriter, "write_data", slow)
    worker.save_state(str(path))
    worker.update(batch)
    assert any(not np.array_equal(v, want[n]) for n, v in whole(worker).items())
    assert not worker._writing.done()
    may_write.set()
    worker.saved()
    worker.load_state(str(path))
    assert all(np.array_equal(v, want[n]) for n, v in whole(worker).items()), (
        "what was saved is the state of then"
    )
    assert (worker.version, worker.optimizer_steps) == (1, moments)


def test_a_full_disk_is_named_and_leaves_the_others(run, start_single, monkeypatch):
    cfg, path = run
    worker = start_single(cfg)

    def full(self, *args):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(FileSystemWriter, "write_data", full)
    with pytest.raises(RuntimeError, match="cannot be written: .*No space left on device"):
        taken(worker, cfg, 15)
    assert checkpoint.find(cfg) == path
    monkeypatch.undo()
    taken(worker, cfg, 15)
    assert [p.name for p in sorted(path.parent.iterdir())] == [
        "step_000005",
        "step_000010",
        "step_000015",
    ]


def test_an_end_between_writing_and_renaming_leaves_the_last_one(run, start_single, monkeypatch):
    cfg, path = run
    monkeypatch.setattr(Path, "rename", lambda *_: (_ for _ in ()).throw(RuntimeError("killed")))
    with pytest.raises(RuntimeError, match="killed"):
        save(cfg, 15)
    assert (path.parent / ".step_000015.unfinished" / "manifest.json").exists()
    assert checkpoint.find(cfg) == path


def evaluated(**scores: float) -> list[dict[str, float]]:
    return [{"val/version": float(step[1:]), "val/reward": score} for step, score in scores.items()]


def test_the_best_stays_beside_the_last(tmp_path):
    cfg = config(
        "",
        trainer__output_dir=str(tmp_path),
        trainer__keep_checkpoints=2,
        trainer__keep_best="val/reward",
    )
    kept = {}
    for step, scores in {
        1: {},
        2: {"v1": 0.5},
        3: {"v1": 0.5, "v2": 0.9},
        4: {"v1": 0.5, "v2": 0.9, "v3": 0.9},
        5: {"v1": 0.5, "v2": 0.9, "v3": 0.9, "v4": 0.1},
        6: {"v1": 0.5, "v2": 0.9, "v3": 0.9, "v4": 0.1, "v5": 1.0},
    }.items():
        save(cfg, step, evaluations=evaluated(**scores))
        kept[step] = [int(p.name[5:]) for p in checkpoint.finished(tmp_path / "checkpoints")]
    assert kept == {1: [1], 2: [1, 2], 3: [2, 3], 4: [3, 4], 5: [3, 4, 5], 6: [5, 6]}


def names(folder) -> list[str]:
    return [p.name for p in checkpoint.finished(folder)]


def test_a_run_that_begins_anew_or_goes_back_takes_no_checkpoint_of_another_past(tmp_path):
    """Else a torn one would send it back to the earlier run's, or that would stay as the best, or be resumed while the
    ledger has this run's rows."""
    cfg = config("", trainer__output_dir=str(tmp_path), trainer__keep_checkpoints=9)
    folder = tmp_path / "checkpoints"
    for step in (5, 10, 15):
        save(cfg, step)
    checkpoint.put_aside(cfg, folder / "step_000010")
    assert names(folder) == ["step_000005", "step_000010"] and names(folder / "earlier") == [
        "step_000015"
    ]
    checkpoint.put_aside(cfg, tmp_path / "elsewhere/checkpoints/step_000099")
    assert names(folder) == [] and names(folder / "earlier") == ["step_000005", "step_000010"], (
        "the older ones are gone"
    )
    checkpoint.put_aside(cfg, None)
    assert checkpoint.find(cfg) is None and len(names(folder / "earlier")) == 2, (
        "nothing to put aside, nothing lost"
    )
    save(cfg, 3)
    checkpoint.put_aside(cfg, None)
    assert names(folder / "earlier") == ["step_000003"]


def test_a_life_goes_on_from_the_newest_that_is_whole(tmp_path):
    cfg = config("", trainer__output_dir=str(tmp_path), trainer__keep_checkpoints=9)
    for step in (5, 10):
        save(cfg, step)
    (tmp_path / "checkpoints/step_000010/state.json").write_text("{}")
    said = []
    assert (
        checkpoint.find(cfg, said.append) == tmp_path / "checkpoints/step_000005"
        and "step_000010" in said[0]
    )


@pytest.mark.parametrize(
    ("best", "freq", "good"),
    [
        (None, -1, True),
        ("val/reward", 5, True),
        ("val/hard/pass@4", 5, True),
        ("val/reward", -1, False),
    ]
    + [(name, 5, False) for name in ("reward", "val/seconds", "val/easy/reward", "")],
)
def test_keep_best_must_name_a_score(tmp_path, best, freq, good):
    cfg = config(
        "tiny:qwen2",
        trainer__keep_best=best,
        trainer__test_freq=freq,
        trainer__output_dir=str(tmp_path),
    )
    cfg.data.train_files = cfg.data.val_files = "generator:word_problems"
    cfg.data.val_sets, cfg.trainer.total_steps, cfg.placement.device = (
        {"hard": "generator:word_problems"},
        1,
        "cpu",
    )
    if good or best == "":
        validate(cfg, num_gpus=0)
    else:
        with pytest.raises(ConfigError, match=f"trainer.keep_best={best}: "):
            validate(cfg, num_gpus=0)


# ---- in the pipeline --------------------------------------------------------------------------------------------


def running(tmp_path: Path, write_s: float, steps: int = 6, fail_at: int = -1, stop_at: int = -1):
    """A pipeline of stand-ins with a checkpoint at each step, and notes of what began and ended."""
    pipeline, notes = build(tmp_path, World(random.Random(0), longest=0.01), steps, 1), []
    pipeline.cfg.trainer.save_freq, pipeline.cfg.trainer.output_dir = 1, str(tmp_path)

    async def copied(folder: str) -> asyncio.Future:
        step = int(re.search(r"step_(\d+)", folder)[1])
        notes.append(("copied", step))
        if step == stop_at:
            pipeline.stopping = True

        async def written() -> None:
            await asyncio.sleep(write_s)
            notes.append(("written", step))
            if step == fail_at:
                raise OSError(28, "No space left on device")

        return asyncio.ensure_future(written())

    pipeline.checkpointer = checkpoint.Checkpointer(pipeline.cfg, copied)
    update = pipeline.roles.actor.update

    async def noted(batch, learn=True):
        found = await update(batch, learn)
        notes.append(("trained", batch.step))
        return found

    pipeline.roles.actor.update = noted
    return pipeline, notes


def test_one_is_written_beside_the_next_step_and_the_end_waits_for_the_last(tmp_path):
    pipeline, notes = running(tmp_path, write_s=0.2)
    said: list[str] = []
    pipeline.tracker.log = said.append
    asyncio.run(pipeline.fit())
    assert notes.index(("trained", 1)) < notes.index(("written", 1)), (
        "step 1 trained while its checkpoint was written"
    )
    of_checkpoints = [(what, step) for what, step in notes if what != "trained"]
    assert of_checkpoints == [
        (what, step) for step in range(1, 7) for what in ("copied", "written")
    ], "one at a time"
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert "checkpoint/stall_s" not in rows[0] and all(
        row["checkpoint/stall_s"] < 0.35 for row in rows[1:]
    )
    assert rows[1]["checkpoint/stall_s"] < 0.2, "the first one waits for nothing but the copy"
    later = [row for row in rows if "checkpoint/write_s" in row]
    assert later and all(
        row["checkpoint/write_s"] >= 0.2 and row["checkpoint/bytes"] > 0 for row in later
    )
    found = checkpoint.finished(tmp_path / "checkpoints")[-1]
    assert found.name == "step_000006" and checkpoint.read_state(found)["incarnation"] == 0
    assert re.search(
        r"checkpoint of step 6 in .*step_000006 \(0.0 MB in 0\.\d+ s, training waited 0\.\d+ s\)",
        said[-1],
    )


def test_a_stop_waits_until_the_checkpoint_is_written(tmp_path):
    pipeline, notes = running(tmp_path, write_s=0.2, stop_at=2)
    with pytest.raises(Stopped):
        asyncio.run(pipeline.fit())
    newest = checkpoint.finished(tmp_path / "checkpoints")[-1].name
    assert newest == "step_000002" and notes[-1] == ("written", 2)


def test_a_write_that_fails_ends_the_run_and_the_older_ones_stay(tmp_path):
    pipeline, notes = running(tmp_path, write_s=0.05, steps=9, fail_at=3)
    with pytest.raises(OSError, match="No space left on device"):
        asyncio.run(pipeline.fit())
    assert [p.name for p in checkpoint.finished(tmp_path / "checkpoints")] == [
        "step_000001",
        "step_000002",
    ]
    assert ("trained", 8) not in notes
