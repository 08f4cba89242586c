"""The FSDP back end on a GPU: what it computes is what it computes on CPUs, as test_fsdp_workers.py
checks that."""

from __future__ import annotations

import contextlib

import numpy as np
import pytest
import torch
import transformers

from one_step_off.training.fsdp_workers import PolicyWorker
from tests.unit.training.fsdp_helpers import (
    OBJECTIVES,
    Recorder,
    assert_gradients_equal,
    config,
    end,
    free_port,
    hf_log_probs,
    hf_model,
    make_batch,
    whole,
)


def assert_same_update(worker, path, wanted_update, rtol):
    """Log-probs, loss, gradients and what an update makes of the weights are those of the reference
    on CPUs. `rtol`: of gradients, by their norm."""
    batch = make_batch(path)
    found = worker.log_prob(batch)
    model = hf_model(path)
    with torch.no_grad():
        for i, sample in enumerate(batch.samples):
            np.testing.assert_allclose(
                found[i], hf_log_probs(model, sample, 0.7).numpy(), atol=1e-4, rtol=0
            )
    before = whole(worker)
    metrics = worker.update(batch)
    gradients, wanted, weights = wanted_update
    assert_gradients_equal(worker.gradients, gradients, rtol)
    for key in (
        "actor/loss",
        "actor/grad_norm",
        "actor/entropy",
        "actor/kl",
        "ratio/mean",
        "ratio/max",
    ):
        assert metrics[key] == pytest.approx(wanted[key], rel=1e-3, abs=1e-5), key
    after = whole(worker)
    steps = {name: after[name].astype(np.float64) - before[name] for name in after}
    wanted_steps = {name: weights[name].astype(np.float64) - before[name] for name in after}
    apart = np.sqrt(sum(((steps[name] - wanted_steps[name]) ** 2).sum() for name in steps))
    length = np.sqrt(sum((step**2).sum() for step in wanted_steps.values()))
    assert apart < 0.05 * length, (
        "AdamW's first step has the size of the rate, however small a gradient is"
    )


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU; this machine has none")
@pytest.mark.parametrize("offload", [False, True])
def test_cuda_equals_cpu(model_folders, one_rank_update, offload):
    path = model_folders["tied"]
    cfg = config(
        path,
        **OBJECTIVES["everything"],
        actor__param_offload=offload,
        actor__optimizer_offload=not offload,
    )
    worker = Recorder(cfg, "actor", 0, 1, "cuda", total_steps=10)
    try:
        worker.setup("127.0.0.1", free_port())
        assert_same_update(worker, path, one_rank_update["tied"], rtol=1e-4)
        # The rows that are sent are the live ones, which an offload keeps in host memory.
        assert {t.device.type for t in worker.weight_tensors()} == {"cpu" if offload else "cuda"}
    finally:
        end()


@pytest.mark.parametrize("broken", [None, "loss", "gradient", "step", "log_probs"])
def test_the_comparison_with_cuda_sees_what_differs(model_folders, one_rank_update, broken):
    """The comparison itself, on CPUs."""
    path = model_folders["tied"]

    class Other(Recorder):
        def _micro_batch_loss(self, *args, **kwargs):
            return super()._micro_batch_loss(*args, **kwargs) * (1.01 if broken == "loss" else 1.0)

        def _optimizer_step(self, stats):
            metrics = super()._optimizer_step(stats)
            if broken == "gradient":
                name = next(iter(self.gradients))
                self.gradients[name] = 1.01 * self.gradients[name]
            if broken == "step":
                next(self.model.parameters()).data.mul_(1 + 1e-4)
            return metrics

        def log_prob(self, batch):
            shift = 1e-3 if broken == "log_probs" else 0.0
            return {i: row + shift for i, row in super().log_prob(batch).items()}

    worker = Other(config(path, **OBJECTIVES["everything"]), "actor", 0, 1, "cpu", total_steps=10)
    try:
        worker.setup("127.0.0.1", free_port())
        with pytest.raises(AssertionError) if broken else contextlib.nullcontext():
            assert_same_update(worker, path, one_rank_update["tied"], rtol=1e-4)
    finally:
        end()


@pytest.mark.gpu
@pytest.mark.skipif(
    not (torch.cuda.is_available() and transformers.utils.is_flash_attn_2_available()),
    reason="needs a GPU with flash_attn; this machine has none",
)
def test_packed_flash_equals_padded(model_folders):
    path = model_folders["tied"]
    found = {}
    for attention in ("sdpa", "flash_attention_2"):
        cfg = config(path, model__dtype="bfloat16", model__attn_implementation=attention)
        worker = PolicyWorker(cfg, "ref", 0, 1, "cuda")
        try:
            worker.setup("127.0.0.1", free_port())
            assert worker.packed == (attention == "flash_attention_2")
            found[attention] = worker.log_prob(make_batch(path))
        finally:
            end()
    for i, log_probs in found["sdpa"].items():
        assert np.abs(found["flash_attention_2"][i] - log_probs).mean() < 0.05
