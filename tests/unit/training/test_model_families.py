"""Families that no line of this program names, under FSDP: what is streamed and what is written has
the names, shapes and bits of their own checkpoints. docs/how_to/add_a_model_family.md says why."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file

import one_step_off
from one_step_off.training.fsdp.fsdp_workers import PolicyWorker
from tests.unit.forked_ranks import run_ranks
from tests.unit.models.families import CONFIGS, SIZES
from tests.unit.training.fsdp_helpers import config, end, make_batch, start, write_model
from tests.unit.training.rank_helpers import join, leave, of_fsdp

FAMILIES = {
    "olmo2": lambda: transformers.Olmo2Config(**SIZES),  # norms behind the layers, norms of q and k
    "starcoder2": lambda: transformers.Starcoder2Config(**SIZES),  # biases, LayerNorm, a tied head
    "smollm3": lambda: transformers.SmolLM3Config(**SIZES),  # layers without rotary embeddings
    "olmoe": CONFIGS["olmoe"],  # experts of their own in the files, one tensor in memory
    "mixtral": CONFIGS["mixtral"],  # and by other names
    "glm4_moe": CONFIGS["glm4_moe"],  # and a dense layer, shared experts, a bias of the router
    "qwen3_5_text": CONFIGS["qwen3_5_text"],  # linear attention
    "qwen3_5_moe_text": CONFIGS["qwen3_5_moe_text"],  # and experts
}


@pytest.fixture(params=FAMILIES)
def family(request, tmp_path):
    """The folder of a small random model."""
    folder = tmp_path / request.param
    write_model(FAMILIES[request.param](), folder)
    yield folder
    end()


def stored_in(folder: Path) -> dict[str, torch.Tensor]:
    tensors: dict[str, torch.Tensor] = {}
    for file in folder.glob("*.safetensors"):
        tensors |= load_file(file)
    return tensors


def sent_by(worker: PolicyWorker) -> dict[str, torch.Tensor]:
    pieces = worker.weight_plan()
    tensors = worker.weight_tensors()
    return {piece.name: tensor.clone() for piece, tensor in zip(pieces, tensors, strict=True)}


def assert_same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name


@pytest.mark.parametrize("name", FAMILIES)
def test_no_line_of_this_program_names_the_family(name):
    sources = Path(one_step_off.__file__).parent.rglob("*.py")
    assert not [path for path in sources if re.search(name, path.read_text(), re.IGNORECASE)]


def test_its_weights_have_the_checkpoints_names_and_bits(family):
    stored = stored_in(family)
    worker = start(config(str(family)), cls=PolicyWorker)
    assert_same(sent_by(worker), stored)
    worker.save_hf(str(family.parent / "before"))
    assert_same(stored_in(family.parent / "before"), stored)

    worker.update(make_batch(str(family)))
    trained = sent_by(worker)
    assert any(not torch.equal(trained[name], stored[name]) for name in stored)
    folder = family.parent / "after"
    worker.save_hf(str(folder))
    assert_same(stored_in(folder), trained)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    assert type(loaded).__name__ == worker.model.__class__.__name__.removeprefix("FSDP")


def test_parts_of_a_tensor_follow_it_when_its_storage_moves(tmp_path):
    """As FSDP2 moves it in its first pass with param_offload: views that were taken at the start
    would send the first version of the experts for ever."""
    write_model(CONFIGS["mixtral"](), tmp_path / "model")
    worker = start(config(str(tmp_path / "model")), cls=PolicyWorker)
    rows = worker.weight_tensors()
    stacked = worker.model.model.layers[0].mlp.experts.down_proj
    stacked._local_tensor.data = stacked._local_tensor.clone() + 1.0
    assert worker.weight_tensors() is not rows
    sent = sent_by(worker)["model.layers.0.block_sparse_moe.experts.2.w2.weight"]
    assert torch.equal(sent, stacked.full_tensor()[2])
    worker.save_hf(str(tmp_path / "saved"))
    assert_same(stored_in(tmp_path / "saved"), sent_by(worker))
    end()


RANKS = 2
STEPS = 4


def train_rank(rank: int, folder: Path) -> None:
    torch.set_num_threads(1)
    path = str(folder / "model")
    worker = of_fsdp()["actor"](config(path, actor__lr=1e-3), "actor", rank, RANKS, "cpu", 10)
    join(worker, "ranks", folder)
    assert worker.model.device.type == "cpu"
    plan = worker.weight_plan()
    torch.save((plan, [t.clone() for t in worker.weight_tensors()]), folder / f"first{rank}.pt")
    for step in range(STEPS):
        worker.update(make_batch(path, seed=step))
    torch.save((plan, [t.clone() for t in worker.weight_tensors()]), folder / f"last{rank}.pt")
    worker.save_hf(str(folder / "saved"))
    leave(of_fsdp)


def sent_by_ranks(folder: Path, when: str) -> dict[str, torch.Tensor]:
    """The pieces of all ranks put together; each number of each tensor was sent once."""
    whole: dict[str, torch.Tensor] = {}
    sent: dict[str, torch.Tensor] = {}
    for rank in range(RANKS):
        pieces, tensors = torch.load(folder / f"{when}{rank}.pt", weights_only=False)
        for piece, tensor in zip(pieces, tensors, strict=True):
            whole.setdefault(piece.name, torch.zeros(piece.shape))
            sent.setdefault(piece.name, torch.zeros(piece.shape))
            piece.slice_of(whole[piece.name]).copy_(tensor)
            piece.slice_of(sent[piece.name]).add_(1)
    assert all((count == 1).all() for count in sent.values())
    return whole


@pytest.mark.parametrize(
    "name",
    [
        "qwen3_moe",
        *(pytest.param(n, marks=pytest.mark.slow) for n in ("glm4_moe", "qwen3_5_moe_text")),
    ],
)
def test_experts_on_two_ranks_learn_what_one_process_learns(name, tmp_path):
    """Each rank reads, trains and sends its own experts; no number twice, none left out."""
    folder = tmp_path / "model"
    write_model(CONFIGS[name](), folder)
    run_ranks(train_rank, (tmp_path,), RANKS)
    assert_same(sent_by_ranks(tmp_path, "first"), stored_in(folder))
    trained = sent_by_ranks(tmp_path, "last")
    assert_same(stored_in(tmp_path / "saved"), trained)

    worker = start(config(str(folder), actor__lr=1e-3), cls=PolicyWorker)
    for step in range(STEPS):
        worker.update(make_batch(str(folder), seed=step))
    alone = sent_by(worker)
    end()
    assert alone.keys() == trained.keys()
    for tensor_name, tensor in alone.items():
        torch.testing.assert_close(trained[tensor_name], tensor, atol=1e-5, rtol=0)
