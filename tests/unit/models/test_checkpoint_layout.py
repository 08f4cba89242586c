"""Where the tensors of a checkpoint lie in the model: proved against files, family by family."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file
from torch import Tensor
from transformers import PreTrainedModel

from one_step_off.models import checkpoint_layout
from one_step_off.models.checkpoint_layout import (
    CheckpointLayout,
    OtherLayout,
    TensorPlace,
    saved_tensors,
)
from tests.unit.models.families import CONFIGS

Tensors = dict[str, Tensor]


def saved_model(name: str, folder: Path) -> tuple[PreTrainedModel, Tensors]:
    """A random model, and the tensors of its files."""
    torch.manual_seed(1)
    model = transformers.AutoModelForCausalLM.from_config(CONFIGS[name]())
    model.save_pretrained(folder)
    return model, load_file(folder / "model.safetensors")


def layout_of_files(folder: Path) -> CheckpointLayout:
    """Of headers alone, as at the start of a run."""
    read = transformers.AutoModelForCausalLM.from_pretrained(folder, device_map="meta")
    return CheckpointLayout.of_model(read)


def assert_same(found: Tensors, stored: Tensors) -> None:
    assert found.keys() == stored.keys()
    for name, tensor in stored.items():
        assert torch.equal(found[name], tensor), name


def put_together(layout: CheckpointLayout, tensors: Tensors, ranks: int) -> Tensors:
    """The checkpoint out of the blocks of ranks that hold some rows of every parameter, as FSDP2
    cuts them; each number comes from one rank."""
    whole = {name: torch.zeros(shape) for name, shape in layout.shapes().items()}
    times = {name: torch.zeros(shape) for name, shape in layout.shapes().items()}
    for place in layout.places:
        parameter = tensors[place.parameter].detach()
        for first, rows in rows_of_ranks(parameter, ranks):
            block = place.block_in(first, first + len(rows))
            if block is not None:
                count = block.stop - block.start
                whole[place.name].narrow(block.dim, block.start, count).copy_(block.view_of(rows))
                times[place.name].narrow(block.dim, block.start, count).add_(1)
    assert all((count == 1).all() for count in times.values())
    return whole


def rows_of_ranks(parameter: Tensor, ranks: int) -> list[tuple[int, Tensor]]:
    """First row, and rows, of each rank that has some."""
    parts = parameter.chunk(ranks)
    firsts = [sum(map(len, parts[:rank])) for rank in range(len(parts))]
    return [(first, part.clone()) for first, part in zip(firsts, parts, strict=True)]


@pytest.mark.parametrize("name", CONFIGS)
def test_the_layout_gives_the_files_tensor_by_tensor_from_all_ranks(name, tmp_path):
    model, stored = saved_model(name, tmp_path)
    layout = layout_of_files(tmp_path)
    layout.check_cuttable()
    tensors = saved_tensors(model)
    assert_same(dict(layout.views({k: t.detach() for k, t in tensors.items()})), stored)
    for ranks in (2, 3, 4):
        assert_same(put_together(layout, tensors, ranks), stored)


def test_each_expert_lies_whole_in_one_rank(tmp_path):
    model, _ = saved_model("qwen3_moe", tmp_path)
    layout = layout_of_files(tmp_path)
    name = "model.layers.0.mlp.experts.gate_up_proj"
    assert saved_tensors(model)[name].shape == (4, 32, 32)
    held = {
        rank: [place.name for place in layout.of_parameter(name) if place.block_in(rank, rank + 1)]
        for rank in range(4)
    }
    for rank, names in held.items():
        prefix = f"model.layers.0.mlp.experts.{rank}"
        assert names == [f"{prefix}.gate_proj.weight", f"{prefix}.up_proj.weight"]


def test_a_transposed_tensor_is_cut_along_its_columns():
    place = TensorPlace("w", "p", (6, 4), (4, 6), 0, (1, 4))
    parameter = torch.arange(24.0).view(6, 4)
    block = place.block_in(2, 5)
    assert block is not None
    assert (block.dim, block.start, block.stop) == (1, 2, 5)
    assert torch.equal(block.view_of(parameter[2:5].clone()), parameter.T[:, 2:5])
    assert place.block_in(6, 6) is None


def test_rows_that_walk_along_two_dimensions_are_refused():
    place = TensorPlace("w", "p", (6, 4), (2, 3, 4), 0, (12, 4, 1))
    with pytest.raises(OtherLayout, match="w cannot be cut where the rows of p are"):
        place.block_in(0, 1)


def test_what_is_no_view_of_one_parameter_is_refused(monkeypatch):
    model = transformers.AutoModelForCausalLM.from_config(CONFIGS["qwen3"]())

    def layout_after(convert) -> CheckpointLayout:
        monkeypatch.setattr(
            checkpoint_layout, "revert_weight_conversion", lambda _, state: convert(state)
        )
        return CheckpointLayout.of_model(model)

    with pytest.raises(OtherLayout, match="is not a regular part of one parameter"):
        layout_after(lambda state: {name: tensor * 2 for name, tensor in state.items()})
    with pytest.raises(OtherLayout, match="are not all of model.embed_tokens.weight"):
        layout_after(lambda state: dict(list(state.items())[1:]))


def test_transformers_conversions_still_copy_by_clone_alone():
    """Copies in another way would have a storage of their own, and every family with fused experts
    would be refused."""
    tensor = torch.empty(4, 6, device="meta")
    with checkpoint_layout._ClonesAreViews():
        copies = [tensor.T.contiguous(), tensor.clone(), tensor.T.chunk(2)[1].contiguous()]
    assert {copy.untyped_storage()._cdata for copy in copies} == {tensor.untyped_storage()._cdata}
    assert copies[2].stride() == (1, 6)
    assert copies[2].storage_offset() == 3
