"""The formulas against numbers worked out by hand, and the properties that hold for any numbers."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from one_step_off.algorithms import core_algos as ca
from one_step_off.algorithms.schedule import learning_rate


def test_token_weights_by_hand():
    assert ca.token_weights([2, 0, 6], "token-mean", 8, 2).tolist() == [1 / 8, 0, 1 / 8]
    assert ca.token_weights([2, 0, 6], "sequence-mean", 8, 2).tolist() == [1 / 4, 0, 1 / 12]
    # Dr. GRPO divides by a constant, here 10 tokens, and by the sequences that count
    assert ca.token_weights([2, 0, 6], "seq-sum-norm", 8, 2, 10).tolist() == [1 / 20, 0, 1 / 20]
    assert ca.token_weights([0, 0], "token-mean", 0, 0).tolist() == [0, 0]
    # sums over tokens: of the whole mini-batch, or of each sequence, of which two count
    assert ca.token_weights([2, 0, 6], "token-sum", 8, 2).tolist() == [1, 0, 1]
    assert ca.token_weights([2, 0, 6], "seq-mean-token-sum", 8, 2).tolist() == [1 / 2, 0, 1 / 2]


@given(
    st.lists(st.integers(0, 9), min_size=1, max_size=8),
    st.sampled_from(["token-mean", "sequence-mean"]),
)
def test_token_weights_sum_to_one_however_the_batch_is_cut(lengths, agg):
    total = sum(lengths)
    alive = sum(n > 0 for n in lengths)
    parts = [ca.token_weights([n], agg, total, alive)[0] * n for n in lengths]
    assert sum(parts) == pytest.approx(1.0 if total else 0.0)


def test_kl_by_hand():
    log_p = torch.zeros(1)
    log_q = torch.tensor([math.log(2.0)])
    assert ca.kl(log_p, log_q, "k1").item() == pytest.approx(-math.log(2))
    assert ca.kl(log_p, log_q, "k2").item() == pytest.approx(math.log(2) ** 2 / 2)
    assert ca.kl(log_p, log_q, "k3").item() == pytest.approx(1 - math.log(2))


@given(st.integers(0, 1000))
@settings(max_examples=25, deadline=None)
def test_k1_and_k3_are_unbiased(seed):
    p, q = (
        torch.randn(2, 6, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    ).log_softmax(-1)
    exact = (p.exp() * (p - q)).sum()
    for estimator in ("k1", "k3"):
        assert (p.exp() * ca.kl(p, q, estimator)).sum().item() == pytest.approx(
            exact.item(), abs=1e-9
        )
    assert (ca.kl(p, q, "k3") >= 0).all()
    assert (ca.kl(p, q, "k2") >= 0).all()


STRAIGHT_THROUGH = ("k1+", "k3+", "abs+")


@given(st.integers(0, 1000))
@settings(max_examples=25, deadline=None)
def test_the_expected_gradient_of_k2_and_of_the_straight_through_estimators_is_that_of_the_kl(seed):
    """Over all tokens, each as likely as p has it: k1's is zero, k3's is that of the other KL."""
    g = torch.Generator().manual_seed(seed)
    logits = torch.randn(6, generator=g, dtype=torch.float64)
    q = torch.randn(6, generator=g, dtype=torch.float64)
    logits.requires_grad_()
    p, q = logits.log_softmax(-1), q.log_softmax(-1)
    (expected,) = torch.autograd.grad((p.exp() * (p - q)).sum(), logits, retain_graph=True)
    for estimator in ("k2", *STRAIGHT_THROUGH):
        (actual,) = torch.autograd.grad(
            (p.exp().detach() * ca.kl(p, q, estimator)).sum(), logits, retain_graph=True
        )
        torch.testing.assert_close(actual, expected)


def test_the_value_of_a_straight_through_estimator_is_the_plain_ones():
    log_p = torch.tensor([-1.0, -2.0])
    log_q = torch.tensor([-1.5, -0.5])
    for estimator in STRAIGHT_THROUGH:
        torch.testing.assert_close(
            ca.kl(log_p, log_q, estimator), ca.kl(log_p, log_q, estimator[:-1])
        )
    assert ca.kl(log_p, log_q, "abs").tolist() == [0.5, 1.5]


def test_token_stats():
    theta = torch.log(torch.tensor([0.2, 0.6]))
    mu = torch.log(torch.tensor([0.4, 0.3]))
    sums, maxima = ca.token_stats(theta, mu, torch.tensor([True, False]))
    assert sums["ratio"].item() == pytest.approx(2.5, rel=1e-6)
    assert maxima["ratio"].item() == pytest.approx(2)
    assert sums["clip"].item() == 1
    assert maxima["logprob_diff"].item() == pytest.approx(math.log(2))
    # k3 of KL(mu || theta), r = theta / mu: (.5 - 1 - ln .5) + (2 - 1 - ln 2)
    assert sums["approx_kl"].item() == pytest.approx(0.5, rel=1e-5)
    sums, maxima = ca.token_stats(theta[:0], mu[:0], torch.zeros(0, dtype=torch.bool))
    assert sums["ratio"] == 0
    assert maxima["ratio"] == 0


def test_value_loss_by_hand():
    values = torch.tensor([1.0, 3.0, 3.0, -1.0], requires_grad=True)
    old = torch.tensor([1.0, 1.0, 1.0, 0.0])
    returns = torch.tensor([2.0, 0.0, 3.0, -1.0])
    loss, clipped = ca.value_loss(values, old, returns, 0.5)
    # 1: unmoved, (1-2)^2/2. 2: clip(3) = 1.5, but (3-0)^2 is larger, so it counts and pulls back.
    # 3: 3 is right, yet 1.5 is as far as it may go: (1.5-3)^2/2, no gradient. 4: clip(-1) = -0.5,
    # (0.5)^2/2.
    torch.testing.assert_close(loss, torch.tensor([0.5, 4.5, 1.125, 0.125]))
    assert clipped.tolist() == [False, False, True, True]
    loss.sum().backward()
    assert values.grad.tolist() == [-1.0, 3.0, 0.0, 0.0]
    free, none = ca.value_loss(values, old, returns, 10.0)
    torch.testing.assert_close(free, torch.tensor([0.5, 4.5, 0.0, 0.0]))
    assert not none.any()


def test_kl_controllers():
    fixed = ca.KLController(0.1)
    adaptive = ca.KLController(0.1, target=6.0, horizon=1000)
    fixed.update(100.0, 50)
    assert fixed.value == 0.1
    adaptive.update(6.6, 50)  # 10 % too much: 1 + 0.1 * 50 / 1000
    assert adaptive.value == pytest.approx(0.1 * 1.005)
    adaptive.update(60.0, 50)  # never more than 20 % of an error: 1 + 0.2 * 50 / 1000
    assert adaptive.value == pytest.approx(0.1 * 1.005 * 1.01)
    adaptive.update(0.0, 50)
    assert adaptive.value == pytest.approx(0.1 * 1.005 * 1.01 * 0.99)


def test_learning_rate():
    assert [learning_rate(s, None, 1.0, warmup=4) for s in (0, 3, 4, 99)] == [0.25, 1, 1, 1]
    for schedule in ("cosine", "linear"):
        at = [learning_rate(s, 11, 2.0, schedule, 1, 0.1) for s in range(12)]
        assert at[0] == at[1] == 2.0
        assert at[10] > 0.2, "the last step learns too"
        assert at[11] == pytest.approx(0.2)
        assert at[1:] == sorted(at[1:], reverse=True)
        assert at[6] == pytest.approx(1.1)
        assert learning_rate(50, 12, 2.0, schedule, 1, 0.1) == pytest.approx(0.2)
