"""Layer inputs in host memory: when, what is moved, and that nothing else changes."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import numpy as np
import psutil
import pytest
import torch

from one_step_off.models.hf_model import empty_model
from one_step_off.training.fsdp import fsdp_model
from one_step_off.training.fsdp.fsdp_workers import PolicyWorker
from tests.unit.training.fsdp_helpers import config, make_batch, whole
from tests.unit.training.rank_helpers import without_times

RECOMPUTED = {"actor__activation_checkpointing": True, "actor__micro_batch_tokens": 31}


@pytest.mark.parametrize("compiles", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_an_update_with_offloaded_inputs_is_the_same(
    model_folders, start_single, monkeypatch, compiles
):
    path = model_folders["tied"]
    weights = []
    metrics = []
    moved: list[tuple[int, ...]] = []
    save_on_cpu = torch.autograd.graph.save_on_cpu

    def counting(**settings: Any) -> Any:
        context = save_on_cpu(**settings)
        pack = context.pack_hook
        context.pack_hook = lambda tensor: moved.append(tuple(tensor.shape)) or pack(tensor)
        return context

    monkeypatch.setattr(torch.autograd.graph, "save_on_cpu", counting)
    for offloads in (False, True):
        monkeypatch.setattr(
            fsdp_model, "layer_inputs_go_to_host", lambda *_, answer=offloads: answer
        )
        cfg = config(path, actor__torch_compile=compiles, actor__lr=1e-3, **RECOMPUTED)
        worker = start_single(cfg, cls=PolicyWorker)
        moved.clear()
        metrics.append([without_times(worker.update(make_batch(path, seed=s))) for s in (0, 1)])
        weights.append(whole(worker))
        # A layer's input and nothing else: what a new torch would keep besides stays on the GPU.
        assert bool(moved) == offloads
        assert all(len(shape) == 3 and shape[-1] == 32 for shape in moved)
        assert len(moved) % worker.model.config.num_hidden_layers == 0
    assert metrics[0] == metrics[1]
    for name, tensor in weights[0].items():
        np.testing.assert_array_equal(tensor, weights[1][name])


def test_it_is_chosen_by_the_memory(model_folders, start_single, caplog, monkeypatch):
    path = model_folders["tied"]
    cfg = config(path, **RECOMPUTED)
    start_single(cfg, cls=PolicyWorker)  # for the process group
    model = empty_model(cfg, "actor", None, None)

    def offloads(gigabytes: float, **changes: Any) -> bool:
        changed = config(path, **(RECOMPUTED | changes))
        return fsdp_model.layer_inputs_go_to_host(model, changed, "actor", gigabytes * 1e9)

    # Two layers of 32 numbers, of 16 million tokens: 2 GB, beside 8.0 GB that are set aside, a
    # layer that is computed again and the state.
    tokens = {"actor__micro_batch_tokens": 16_000_000}
    besides = 16e6 * (16 * 32 + 12 * 32 + 10 * 16 + 8 * 37) / 1e9
    with caplog.at_level(logging.WARNING):
        assert not offloads(10.2 + besides, **tokens)
        assert not caplog.records
        assert offloads(10.0 + besides, **tokens)
    assert "actor: the inputs of 2 layers, 2.0 GB for 16000000 tokens" in caplog.text
    assert not offloads(1.0, actor__activation_checkpointing=False, **tokens)

    # The ranks of a node share its memory.
    for gigabytes, is_enough in ((6.2, True), (6.0, False)):
        caplog.clear()
        host = SimpleNamespace(available=gigabytes * 1e9)
        monkeypatch.setattr(psutil, "virtual_memory", lambda host=host: host)
        with caplog.at_level(logging.WARNING):
            assert offloads(1.0, placement__pools={"rollout": [1, 1], "actor": [2, 3]}, **tokens)
        assert f"its 3 ranks need 6.1 GB of the {gigabytes} GB that the host has" in caplog.text
        assert ("which is too little" in caplog.text) != is_enough
    assert not offloads(float("inf"), **tokens)
