"""Importance weights of the rollout correction."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from one_step_off.algorithms import policy_losses as pl
from one_step_off.config.schema import AlgorithmConfig
from tests.unit.algorithms.policy_loss_helpers import quick


def test_correction_weights_by_hand():
    proximal = torch.log(torch.tensor([0.5, 1.0, 3.0, 1.0, 2.1]))
    mu = torch.zeros(5)
    proximal.requires_grad_()
    sequence = torch.tensor([0, 0, 0, 1, 2])
    # products of the sequences: 1.5, 1, 2.1; geometric means: 1.1447, 1, 2.1
    for mode, cap, expected in (
        ("none", 2.0, [1, 1, 1, 1, 1]),
        ("tis", 2.0, [0.5, 1, 2, 1, 2]),
        ("mis", 2.0, [0.5, 1, 0, 1, 0]),
        ("seq-tis", 2.0, [1.5, 1.5, 1.5, 1, 2]),
        ("seq-mis", 2.0, [1.5, 1.5, 1.5, 1, 0]),
        ("seq-mis", 1.2, [0, 0, 0, 1, 0]),
        ("geo-mask", 1.2, [1, 1, 1, 1, 0]),
        ("geo-mask", 1.1, [0, 0, 0, 1, 0]),
    ):
        actual = pl.correction_weights(proximal, mu, sequence, mode, cap)
        torch.testing.assert_close(actual, torch.tensor(expected, dtype=torch.float32))
        assert not actual.requires_grad
    # a lower bound: masked below it, or raised to it; for geo-mask in place of 1 / cap
    for mode, low, cap, expected in (
        ("tis", 0.7, 2.0, [0.7, 1, 2, 1, 2]),
        ("mis", 0.7, 3.5, [0, 1, 3, 1, 2.1]),
        ("mis", 0.5, 3.5, [0.5, 1, 3, 1, 2.1]),
        ("seq-tis", 1.2, 2.0, [1.5, 1.5, 1.5, 1.2, 2]),
        ("seq-mis", 1.2, 3.5, [1.5, 1.5, 1.5, 0, 2.1]),
        ("geo-mask", 1.1, 2.0, [1, 1, 1, 0, 0]),
        ("geo-mask", 0.9, 1.1, [0, 0, 0, 1, 0]),
        ("none", 0.9, 1.1, [1, 1, 1, 1, 1]),
    ):
        actual = pl.correction_weights(proximal, mu, sequence, mode, cap, low)
        torch.testing.assert_close(
            actual, torch.tensor(expected, dtype=torch.float32), msg=f"{mode} {low} {cap}"
        )
    # the geometric mean is held from below too
    assert pl.correction_weights(mu, mu + 1, sequence, "geo-mask", 2.0).tolist() == [0] * 5
    with pytest.raises(ValueError, match="unknown rollout correction 'other'"):
        pl.correction_weights(proximal, mu, sequence, "other", 2.0)


def test_decoupled_equals_plain_where_proximal_is_mu():
    mu = torch.randn(9)
    sequence = torch.arange(9) // 3
    for mode in AlgorithmConfig.__dataclass_fields__["rollout_correction"].metadata["choices"]:
        assert pl.correction_weights(mu, mu, sequence, mode, 2.0).tolist() == [1.0] * 9


@given(st.integers(0, 1000))
@quick
def test_sequence_truncation_is_unbiased_without_a_cap(seed):
    """Sum over all two-token sequences of mu * w = 1: the weight of a sequence is its true
    importance ratio.
    """
    g = torch.Generator().manual_seed(seed)
    p, q = (torch.randn(4, generator=g).log_softmax(-1) for _ in range(2))
    total = 0.0
    for a in range(4):
        for b in range(4):
            w = pl.correction_weights(
                torch.stack([p[a], p[b]]),
                torch.stack([q[a], q[b]]),
                torch.tensor([0, 0]),
                "seq-tis",
                1e9,
            )
            total += float((q[a] + q[b]).exp() * w[0])
    assert total == pytest.approx(1.0, abs=1e-4)
