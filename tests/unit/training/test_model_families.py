"""Families that no line of this program names, under FSDP: what is streamed and what is written has
the names, shapes and bits of their own checkpoints. docs/how_to/add_a_model_family.md says why."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file

import one_step_off
from one_step_off.config.errors import ConfigError
from one_step_off.models.hf_model import check_layout
from one_step_off.training.fsdp.fsdp_workers import PolicyWorker
from tests.unit.training.fsdp_helpers import VOCAB, config, end, make_batch, start, write_model

SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
}
FAMILIES = {
    "olmo2": lambda: transformers.Olmo2Config(**SIZES),  # norms behind the layers, norms of q and k
    "starcoder2": lambda: transformers.Starcoder2Config(**SIZES),  # biases, LayerNorm, a tied head
    "smollm3": lambda: transformers.SmolLM3Config(**SIZES),  # layers without rotary embeddings
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


def test_a_family_with_another_layout_in_its_files_is_refused_by_transformers_own_table(tmp_path):
    """Its experts lie in one tensor in training, and in many in the checkpoint."""
    experts = {"num_experts": 4, "num_experts_per_tok": 2}
    hf_config = transformers.OlmoeConfig(**SIZES, **experts)
    model = transformers.AutoModelForCausalLM.from_config(hf_config)
    with pytest.raises(ConfigError, match="is stored in a layout that differs"):
        check_layout(model, "allenai/OLMoE")
