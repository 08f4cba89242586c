"""Each rank reads only its own rows of a checkpoint, and holds what a whole load gives, bit for
bit."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
import transformers

from one_step_off.config.errors import ConfigError
from one_step_off.models import checkpoint_layout
from one_step_off.models.stored_weights import StoredWeights
from one_step_off.training.fsdp import fsdp_model
from one_step_off.training.fsdp.fsdp_workers import WORKERS, CriticWorker, PolicyWorker
from tests.unit.forked_ranks import run_ranks
from tests.unit.training.fsdp_helpers import config, make_batch
from tests.unit.training.rank_helpers import join, leave, of_fsdp

RANKS = 2
CASES = {
    # name: model, dtype of the files, role, dtype of the run, read by rows
    "tied": ("tied", torch.float32, "actor", "float32", True),
    "bf16 files": ("untied", torch.bfloat16, "actor", "float32", True),
    "frozen bf16": ("untied", torch.float32, "ref", "bfloat16", True),
    "new scalar head": ("tied", torch.float32, "critic", "float32", False),
}


def write_case(name: str, model_folders: Any, folder: Path) -> str:
    """A copy of a model in several files of this dtype."""
    model, dtype, *_ = CASES[name]
    path = folder / name
    shutil.copytree(model_folders[model], path)
    for file in path.glob("model*.safetensors*"):
        file.unlink()
    loaded = transformers.AutoModelForCausalLM.from_pretrained(model_folders[model], dtype=dtype)
    loaded.save_pretrained(path, max_shard_size="5KB")
    assert len(list(path.glob("*.safetensors"))) > 1
    return str(path)


def run_rank(rank: int, folder: Path) -> None:
    torch.set_num_threads(1)
    read_by = []
    real_read = fsdp_model.read_checkpoint

    def read_checkpoint(*arguments: Any) -> Any:
        read_by.append(arguments[-1])
        return real_read(*arguments)

    fsdp_model.read_checkpoint = read_checkpoint
    for name, (_, _, role, dtype, by_rows) in CASES.items():
        cfg = config(str(folder / name), model__dtype=dtype)
        read_by.clear()
        worker = WORKERS[role](cfg, role, rank, RANKS, "cpu", total_steps=10)
        join(worker, name.replace(" ", "_"), folder)
        if rank == 0:
            assert read_by == (["meta"] if by_rows else ["meta", "cpu"]), name
        parameters: Any = worker.model.named_parameters()
        found = {tensor: parameter.full_tensor().detach() for tensor, parameter in parameters}
        if rank == 0:
            torch.save(found, folder / f"{name}.pt")
        leave(of_fsdp)


def test_each_rank_reads_its_rows_and_holds_what_a_whole_load_gives(model_folders, tmp_path):
    paths = {name: write_case(name, model_folders, tmp_path) for name in CASES}
    run_ranks(run_rank, (tmp_path,), RANKS)
    for name, (_, _, role, dtype, _) in CASES.items():
        found = torch.load(tmp_path / f"{name}.pt")
        expected = transformers.AutoModelForCausalLM.from_pretrained(
            paths[name], dtype=torch.float32 if role != "ref" else getattr(torch, dtype)
        )
        tensors = dict(expected.named_parameters())
        assert found.keys() - {"score.weight"} <= tensors.keys()
        assert len(found) >= len(tensors) - 1
        for tensor_name in found.keys() & tensors.keys():
            got = found[tensor_name]
            assert got.dtype == tensors[tensor_name].dtype
            assert torch.equal(got, tensors[tensor_name]), (name, tensor_name)


def test_blocks_of_a_stored_tensor_are_those_of_the_whole(tmp_path):
    tensors = {"w": torch.randn(7, 5), "scalar": torch.tensor(3.0), "b": torch.randn(4)}
    safetensors.torch.save_file(tensors, tmp_path / "model.safetensors")
    stored = StoredWeights.find(str(tmp_path))
    assert torch.equal(stored.read("w", (2, 1), (3, 4)), tensors["w"][2:5, 1:5])
    assert torch.equal(stored.read("scalar", (), ()), tensors["scalar"])
    assert torch.equal(stored.read_whole("b"), tensors["b"])
    assert stored.covers({"w": (7, 5), "scalar": ()})
    assert not stored.covers({"w": (5, 7)})
    assert not stored.covers({"w": (7, 5), "x": (7, 5)})
    assert StoredWeights.find(str(tmp_path / "nothing")) is None


def test_a_checkpoint_that_lacks_a_weight_is_refused_by_name(model_folders, tmp_path, start_single):
    path = tmp_path / "model"
    shutil.copytree(model_folders["tied"], path)
    file = path / "model.safetensors"
    tensors = safetensors.torch.load_file(file)
    del tensors["model.norm.weight"]
    safetensors.torch.save_file(tensors, file, metadata={"format": "pt"})
    with pytest.raises(ConfigError, match=r"lacks 1 weights .* model\.norm\.weight"):
        start_single(config(str(path)))


def test_only_the_actor_needs_a_layout_that_can_be_streamed(
    model_folders, start_single, monkeypatch
):
    """Other roles are read whole then, and never sent."""
    path = model_folders["untied"]
    batch = make_batch(path)
    plain = start_single(config(path), cls=PolicyWorker, role="ref")
    expected = plain.log_prob(batch)
    monkeypatch.setattr(
        checkpoint_layout,
        "revert_weight_conversion",
        lambda _, state: {name.replace("mlp", "ffn"): tensor for name, tensor in state.items()},
    )
    found = start_single(config(path), cls=PolicyWorker, role="ref").log_prob(batch)
    assert found.keys() == expected.keys()
    for number, log_probs in found.items():
        assert (log_probs == expected[number]).all()
    critic = start_single(config(path), cls=CriticWorker, role="critic")
    assert critic.values(batch).keys() == expected.keys()
    with pytest.raises(ConfigError, match="cannot stream its weights"):
        start_single(config(path), cls=PolicyWorker)
