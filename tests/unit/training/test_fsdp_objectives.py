"""Keys of the objective that reach the trainer: what they do to its gradient, against the formula
or another key."""

from __future__ import annotations

import copy

import numpy as np
import pytest

from tests.unit.training.fsdp_helpers import (
    assert_gradients_equal,
    config,
    hf_log_probs,
    hf_model,
    make_batch,
)

LOW = 0.9
CAP = 1.2


def gradients(start_single, path, batch, **keys):
    worker = start_single(
        config(path, **{f"algorithm__{name}": value for name, value in keys.items()})
    )
    worker.update(batch)
    return worker.gradients


def scaled(found, factor):
    return {name: x * factor for name, x in found.items()}


def test_sums_are_the_means_times_what_they_divide_by(model_folders, start_single):
    path = model_folders["tied"]
    batch = make_batch(path)
    tokens = sum(int(s.loss_mask.sum()) for s in batch.samples)
    per_token = gradients(start_single, path, batch, loss_agg="token-mean")
    assert_gradients_equal(
        gradients(start_single, path, batch, loss_agg="token-sum"),
        scaled(per_token, tokens),
        rtol=1e-5,
    )
    longest = config(path).data.max_response_length
    normed = gradients(start_single, path, batch, loss_agg="seq-sum-norm")
    summed = gradients(start_single, path, batch, loss_agg="seq-mean-token-sum")
    assert_gradients_equal(summed, scaled(normed, longest), rtol=1e-5)


@pytest.mark.parametrize("mode", ["mis", "seq-mis", "geo-mask"])
def test_what_the_bounds_mask_has_no_gradient(model_folders, start_single, mode):
    """As if its advantage were 0: it still counts in the denominator."""
    path = model_folders["tied"]
    batch = make_batch(path)
    masked = copy.deepcopy(batch)
    low_ones = 0
    for i, s in enumerate(batch.samples):
        gap = (batch.old_log_probs[i] - s.log_probs).astype(np.float64)
        trained = gap[s.loss_mask]
        if mode == "seq-mis":
            gap = np.full_like(gap, trained.sum())
        if mode == "geo-mask":
            gap = np.full_like(gap, trained.mean() if len(trained) else 0.0)
        below = (np.exp(gap) < LOW) & s.loss_mask
        masked.advantages[i] = np.where(below, 0.0, batch.advantages[i]).astype(np.float32)
        low_ones += int(below.sum())
    assert 0 < low_ones < sum(int(s.loss_mask.sum()) for s in batch.samples)
    how = {"old_log_probs": "recompute", "rollout_correction": mode, "rollout_correction_cap": CAP}
    got = gradients(start_single, path, batch, **how, rollout_correction_low=LOW)
    want = gradients(start_single, path, masked, **how, rollout_correction_low=1e-9)
    assert_gradients_equal(got, want, rtol=1e-6)


def test_dro_equals_the_formula(model_folders, start_single):
    path = model_folders["untied"]
    beta = 0.3
    batch = make_batch(path)
    model = hf_model(path)
    tokens = sum(int(s.loss_mask.sum()) for s in batch.samples)
    loss = 0.0
    for i, s in enumerate(batch.samples):
        log_probs = hf_log_probs(model, s, 0.7)
        for t in np.flatnonzero(s.loss_mask):
            advantage = float(batch.advantages[i][t])
            mu = float(s.log_probs[t])
            loss = loss - (log_probs[t] * advantage - beta / 2 * (log_probs[t] - mu) ** 2) / tokens
    loss.backward()
    found = gradients(
        start_single, path, batch, policy_loss="dro", policy_loss_kwargs={"beta": beta}
    )
    assert_gradients_equal(
        found, {name: p.grad.numpy() for name, p in model.named_parameters()}, rtol=1e-5
    )
