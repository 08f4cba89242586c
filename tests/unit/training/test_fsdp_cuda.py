"""The FSDP back end on a GPU: what it computes is what it computes on CPUs, as test_fsdp_workers.py
checks that."""

from __future__ import annotations

import contextlib

import numpy as np
import pytest
import torch
import transformers

from one_step_off.training.packed_attention import FLASH_ATTN, PER_SEQUENCE, TORCH_VARLEN
from tests.unit.training.fsdp_helpers import (
    MODELS,
    OBJECTIVES,
    SIZES,
    Recorder,
    assert_gradients_equal,
    config,
    end,
    free_port,
    hf_log_probs,
    hf_model,
    make_batch,
    whole,
    write_model,
)

HYBRID = {
    "num_key_value_heads": 1,
    "head_dim": 16,
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
    "layer_types": ["linear_attention", "full_attention"],
}


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
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU; this machine has none")
@pytest.mark.parametrize("kernel", [TORCH_VARLEN, FLASH_ATTN, PER_SEQUENCE])
@pytest.mark.parametrize("name", [*MODELS, "hybrid"])
def test_packed_equals_padded(model_folders, tmp_path, monkeypatch, name, kernel):
    """In bf16, whose rounding differs between kernels. The hybrid model with the kernels of
    flash-linear-attention, if they are installed, else in plain torch."""
    has_flash_attn = transformers.utils.is_flash_attn_2_available()
    if kernel == FLASH_ATTN and not has_flash_attn:
        pytest.skip("needs the package flash_attn")
    if kernel == TORCH_VARLEN:
        monkeypatch.setattr(transformers.utils, "is_flash_attn_2_available", lambda: False)
    if name == "hybrid":
        write_model(transformers.Qwen3_5TextConfig(**SIZES, **HYBRID), tmp_path)
        path = str(tmp_path)
    else:
        path = model_folders[name]
    log_probs = {}
    gradients = {}
    for packing in ("off", "on"):
        cfg = config(path, model__dtype="bfloat16", actor__packing=packing)
        if kernel == PER_SEQUENCE:
            cfg.model.attn_implementation = "sdpa"
        worker = Recorder(cfg, "actor", 0, 1, "cuda", total_steps=10)
        try:
            worker.setup("127.0.0.1", free_port())
            assert worker.attention.kernel == (kernel if packing == "on" else "")
            log_probs[packing] = worker.log_prob(make_batch(path))
            worker.update(make_batch(path))
            gradients[packing] = worker.gradients
        finally:
            end()
    for i, padded in log_probs["off"].items():
        assert np.abs(log_probs["on"][i] - padded).mean() < 0.05
    assert_gradients_equal(gradients["on"], gradients["off"], rtol=0.05)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU; this machine has none")
@pytest.mark.parametrize("packing", ["off", "on"])
def test_micro_batches_do_not_wait_for_the_gpu(model_folders, packing):
    """The passes over all micro-batches run while torch forbids every wait."""
    path = model_folders["tied"]

    class Strict(Recorder):
        """Forbids waits in its passes, which end before the optimizer steps."""

        strict = False

        def _run_micro_batches(self, items, compute, timer):
            torch.cuda.set_sync_debug_mode("error" if self.strict else "default")
            try:
                super()._run_micro_batches(items, compute, timer)
            finally:
                torch.cuda.set_sync_debug_mode("default")

    cfg = config(
        path,
        **OBJECTIVES["everything"],
        model__dtype="bfloat16",
        actor__packing=packing,
        actor__micro_batch_tokens=60,
    )
    worker = Strict(cfg, "actor", 0, 1, "cuda", total_steps=10)
    try:
        worker.setup("127.0.0.1", free_port())
        worker.log_prob(make_batch(path))  # first calls compile kernels and create handles
        worker.update(make_batch(path))
        worker.strict = True
        worker.log_prob(make_batch(path))
        worker.update(make_batch(path, version=4))
    finally:
        end()
