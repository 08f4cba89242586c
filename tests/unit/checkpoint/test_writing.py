"""Writing checkpoints: what goes wrong meanwhile does no harm, and which ones stay."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from one_step_off import checkpoint
from one_step_off.checkpoint import manifest
from one_step_off.config.errors import ConfigError
from one_step_off.runtime.validation import validate
from one_step_off.training.written_files import file_checksum
from tests.unit.checkpoint.checkpoint_helpers import checkpoint_names, save, save_worker
from tests.unit.training.fsdp_helpers import config


def test_a_rank_resumes_its_random_numbers_and_a_new_rank_keeps_a_new_run_s(run, start_single):
    cfg, path = run
    worker = start_single(cfg)
    torch.manual_seed(11)
    worker.save_state(str(path))
    worker.saved()
    want = torch.rand(3)
    drawn = []
    for rank in (0, 1):
        torch.manual_seed(0)
        worker.rank = rank  # as on more ranks than it was saved by
        worker.load_state(str(path))
        drawn.append(torch.rand(3))
    torch.manual_seed(0)
    assert torch.equal(drawn[0], want)
    assert torch.equal(drawn[1], torch.rand(3))
    assert (worker.version, worker.optimizer_steps) == (0, 0)


def test_the_ranks_checksums_are_taken_over_and_their_files_not_read_again(
    tmp_path, start_single, model_folders, monkeypatch
):
    cfg = config(model_folders["tied"])
    cfg.trainer.output_dir = str(tmp_path)
    worker = start_single(cfg)
    read_by_driver = []

    def checksum(path: Path) -> str:
        read_by_driver.append(path.name)
        return file_checksum(path)

    monkeypatch.setattr(manifest, "file_checksum", checksum)
    path = save_worker(worker, cfg, 10)
    assert read_by_driver == ["state.json"]
    written = json.loads((path / "manifest.json").read_text())
    assert {key: written[key] for key in ("bytes", "checksum")} == manifest.file_facts(path)
    with pytest.raises(RuntimeError, match="__0_0.distcp has .* bytes, but its writer counted 1"):
        manifest.file_facts(path, {"actor/__0_0.distcp": (1, "0" * 32)})


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


def test_a_run_that_restarts_or_goes_back_uses_no_checkpoint_of_another_past(tmp_path):
    """Else a torn one would send it back to the earlier run's, or that would stay as the best, or
    be resumed while the ledger has this run's rows."""
    cfg = config("", trainer__output_dir=str(tmp_path), trainer__keep_checkpoints=9)
    folder = tmp_path / "checkpoints"
    for step in (5, 10, 15):
        save(cfg, step)
    checkpoint.put_aside(cfg, folder / "step_000010")
    assert checkpoint_names(folder) == ["step_000005", "step_000010"]
    assert checkpoint_names(folder / "earlier") == ["step_000015"]
    checkpoint.put_aside(cfg, tmp_path / "elsewhere/checkpoints/step_000099")
    assert checkpoint_names(folder) == []
    earlier = checkpoint_names(folder / "earlier")
    assert earlier == ["step_000005", "step_000010"], "what was there is removed"
    checkpoint.put_aside(cfg, None)
    assert checkpoint.find(cfg) is None
    assert checkpoint_names(folder / "earlier") == earlier, (
        "with nothing to move, nothing is removed"
    )
    save(cfg, 3)
    checkpoint.put_aside(cfg, None)
    assert checkpoint_names(folder / "earlier") == ["step_000003"]


def test_an_attempt_resumes_from_the_newest_whole_checkpoint(tmp_path):
    cfg = config("", trainer__output_dir=str(tmp_path), trainer__keep_checkpoints=9)
    for step in (5, 10):
        save(cfg, step)
    (tmp_path / "checkpoints/step_000010/state.json").write_text("{}")
    warnings: list[str] = []
    assert checkpoint.find(cfg, warnings.append) == tmp_path / "checkpoints/step_000005"
    assert "step_000010" in warnings[0]


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
    cfg.data.train_files = "generator:word_problems"
    cfg.data.val_files = "generator:word_problems"
    cfg.data.val_sets = {"hard": "generator:word_problems"}
    cfg.trainer.total_steps = 1
    cfg.placement.device = "cpu"
    if good or best == "":
        validate(cfg, num_gpus=0)
    else:
        with pytest.raises(ConfigError, match=f"trainer.keep_best={best}: "):
            validate(cfg, num_gpus=0)
