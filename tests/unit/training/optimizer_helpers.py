"""Helpers of the tests of optimizers: a model whose matrices are large enough to be quantized,
steps with given gradients, and the whole state of a worker."""

from __future__ import annotations

import numpy as np
import torch
import transformers
from torch.distributed.tensor import DTensor, distribute_tensor

from one_step_off.training import optimizers
from tests.unit.training.fsdp_helpers import VOCAB, config, write_model

STEP_SIZE = 1e-2
KEYS = {"actor__lr": STEP_SIZE, "actor__weight_decay": 0.1}
NAMES = ("adamw", "adamw_8bit", "muon", "tests.unit.training.own_optimizers:Lion")


def write_wide_model(folder) -> str:
    """Rows that do not divide by two, and rows of a length that is no power of two."""
    hf_config = transformers.Qwen2Config(
        vocab_size=VOCAB,
        hidden_size=96,
        intermediate_size=101,
        num_hidden_layers=1,
        num_attention_heads=3,
        num_key_value_heads=1,
        max_position_embeddings=64,
        tie_word_embeddings=True,
    )
    write_model(hf_config, folder)
    return str(folder)


def config_of(path: str, name: str, **changes):
    """The config of a run with this optimizer."""
    return config(path, **KEYS, actor__optimizer=name, **changes)


def steps(worker, seeds) -> None:
    """One step for each seed, with gradients that follow from the seed and the name alone, so that
    any number of ranks has the same ones."""
    for seed in seeds:
        for index, (_, parameter) in enumerate(worker.model.named_parameters()):
            generator = torch.Generator().manual_seed(1000 * seed + index)
            gradient = torch.randn(parameter.shape, generator=generator)
            placed = distribute_tensor(gradient, parameter.device_mesh, parameter.placements)
            parameter.grad = placed
        worker._clip_and_step(torch.ones(()), STEP_SIZE)
        worker._zero_grad()


def whole_state(worker) -> dict[str, np.ndarray]:
    """Every tensor of the optimizer's state as a checkpoint has it, gathered (collective)."""
    states = optimizers.as_plain(worker.model, worker.optimizer)["state"]
    return {
        ".".join(path): _whole(value) for path, value in _flat(states) if torch.is_tensor(value)
    }


def _flat(tree, path=()):
    if isinstance(tree, dict):
        for key, value in tree.items():
            yield from _flat(value, (*path, str(key)))
    else:
        yield path, tree


def _whole(tensor) -> np.ndarray:
    if isinstance(tensor, DTensor):
        tensor = tensor.full_tensor()
    return tensor.cpu().numpy().copy()


def assert_equal(got: dict[str, np.ndarray], want: dict[str, np.ndarray]) -> None:
    """The same names, and the same bits."""
    assert got.keys() == want.keys()
    for name, value in want.items():
        np.testing.assert_array_equal(got[name], value, err_msg=name)
