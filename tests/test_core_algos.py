"""The formulas against numbers worked out by hand, and the properties that hold for any numbers."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from one_step_off import core_algos as ca

rewards_lists = st.lists(st.floats(-5, 5, width=16), min_size=1, max_size=12)


def test_grpo_by_hand():
    got = ca.advantages("grpo", [0.0, 1.0, 1.0, 2.0, 5.0], ["a", "b", "a", "b", "c"])
    # group a: mean .5, sample std sqrt(.5); group b: mean 1.5, the same std; c stands alone
    s = 0.5 / (math.sqrt(0.5) + 1e-6)
    np.testing.assert_allclose(got, [-s, -s, s, s, 0.0], rtol=1e-6)
    np.testing.assert_allclose(ca.advantages("grpo", [0, 1, 1, 2], [0, 1, 0, 1], False), [-0.5, -0.5, 0.5, 0.5])
    assert got.dtype == np.float32


def test_grpo_without_variance_is_exactly_zero():
    # 0.1 three times has a mean that is not 0.1 in floating point; 1 / eps must not blow that up.
    assert (ca.advantages("grpo", [0.1] * 3, [0] * 3) == 0).all()
    assert (ca.advantages("grpo", [7.0], [0]) == 0).all()


@given(rewards_lists, st.randoms(use_true_random=False))
@settings(max_examples=50, deadline=None)
def test_grpo_permutation(rewards, rng):
    groups = [i % 3 for i in range(len(rewards))]
    order = list(range(len(rewards)))
    rng.shuffle(order)
    base = ca.advantages("grpo", rewards, groups)
    moved = ca.advantages("grpo", [rewards[i] for i in order], [groups[i] for i in order])
    np.testing.assert_allclose(moved, base[order], rtol=1e-5, atol=1e-6)


@given(st.lists(st.integers(-20, 20), min_size=2, max_size=10), st.integers(-50, 50), st.integers(1, 16))
@settings(max_examples=50, deadline=None)
def test_grpo_shift_and_scale(rewards, shift, scale):
    r = np.array(rewards, dtype=float)
    base = ca.advantages("grpo", r, [0] * len(r))
    np.testing.assert_allclose(ca.advantages("grpo", r * scale + shift, [0] * len(r)), base, rtol=1e-4, atol=1e-5)
    plain = ca.advantages("grpo", r, [0] * len(r), norm_by_std=False)
    again = ca.advantages("grpo", r * scale + shift, [0] * len(r), norm_by_std=False)
    np.testing.assert_allclose(again, plain * scale, rtol=1e-5, atol=1e-4)
    assert abs(plain.sum()) < 1e-4


def test_advantage_errors():
    with pytest.raises(ValueError, match="sample 1 is not finite"):
        ca.advantages("grpo", [1.0, float("nan")], [0, 0])
    with pytest.raises(KeyError, match="known: \\['grpo'\\]"):
        ca.advantages("nothing", [1.0], [0])
    with pytest.raises(ValueError, match="exists already"):
        ca.register("grpo")(ca.grpo)


def test_to_tokens_leaves_out_masked_tokens():
    got = ca.to_tokens(np.array([2.0, -1.0]), [np.array([True, False, True]), np.array([True])])
    assert [g.tolist() for g in got] == [[2.0, 0.0, 2.0], [-1.0]]


def test_token_weights_by_hand():
    assert ca.token_weights([2, 0, 6], "token-mean", 8, 2).tolist() == [1 / 8, 0, 1 / 8]
    assert ca.token_weights([2, 0, 6], "sequence-mean", 8, 2).tolist() == [1 / 4, 0, 1 / 12]
    assert ca.token_weights([0, 0], "token-mean", 0, 0).tolist() == [0, 0]
    with pytest.raises(ValueError):
        ca.token_weights([1], "sum", 1, 1)


@given(st.lists(st.integers(0, 9), min_size=1, max_size=8), st.sampled_from(["token-mean", "sequence-mean"]))
def test_token_weights_sum_to_one_however_the_batch_is_cut(lengths, agg):
    total, alive = sum(lengths), sum(n > 0 for n in lengths)
    parts = [ca.token_weights([n], agg, total, alive)[0] * n for n in lengths]
    assert sum(parts) == pytest.approx(1.0 if total else 0.0)


def test_policy_loss_by_hand():
    ratio = torch.tensor([1.5, 1.5, 0.5, 0.5, 1.1])
    advantage = torch.tensor([1.0, -1.0, 1.0, -1.0, 2.0])
    loss, clipped = ca.policy_loss(ratio.log(), torch.zeros(5), advantage, 0.2, 0.3)
    # eq. 7: clipped only where that makes the objective smaller
    torch.testing.assert_close(loss, torch.tensor([-1.3, 1.5, -0.5, 0.8, -2.2]))
    assert clipped.tolist() == [True, False, False, True, False]


def test_policy_loss_gradient_is_zero_where_clipped():
    log_probs = torch.tensor([1.0, 0.1], requires_grad=True)
    loss, _ = ca.policy_loss(log_probs, torch.zeros(2), torch.ones(2), 0.2, 0.2)
    loss.sum().backward()
    assert log_probs.grad[0] == 0 and log_probs.grad[1] == pytest.approx(-math.exp(0.1))


@pytest.mark.parametrize("gap", [100.0, -100.0, 1e30, float("inf")])
def test_policy_loss_survives_any_log_ratio(gap):
    log_probs = torch.tensor([gap, 0.0], requires_grad=True)
    for sign in (1.0, -1.0):
        log_probs.grad = None
        loss, _ = ca.policy_loss(log_probs, torch.zeros(2), torch.tensor([sign, 0.0]), 0.2, 0.2)
        loss.sum().backward()
        assert torch.isfinite(loss).all() and torch.isfinite(log_probs.grad).all()


def test_correction_weights_by_hand():
    proximal, mu = torch.log(torch.tensor([0.5, 1.0, 3.0])), torch.zeros(3)
    proximal.requires_grad_()
    for mode, expected in (("none", [1, 1, 1]), ("tis", [0.5, 1, 2]), ("mis", [0.5, 1, 0])):
        got = ca.correction_weights(proximal, mu, mode, 2.0)
        torch.testing.assert_close(got, torch.tensor(expected, dtype=torch.float32))
        assert not got.requires_grad
    with pytest.raises(ValueError):
        ca.correction_weights(proximal, mu, "other", 2.0)


def test_decoupled_equals_plain_where_proximal_is_mu():
    theta, mu, advantage = torch.randn(9), torch.randn(9), torch.randn(9)
    plain, _ = ca.policy_loss(theta, mu, advantage, 0.2, 0.2)
    torch.testing.assert_close(plain * ca.correction_weights(mu, mu, "tis", 2.0), plain)


def test_kl_by_hand():
    log_p, log_q = torch.zeros(1), torch.tensor([math.log(2.0)])
    assert ca.kl(log_p, log_q, "k1").item() == pytest.approx(-math.log(2))
    assert ca.kl(log_p, log_q, "k2").item() == pytest.approx(math.log(2) ** 2 / 2)
    assert ca.kl(log_p, log_q, "k3").item() == pytest.approx(1 - math.log(2))
    with pytest.raises(ValueError):
        ca.kl(log_p, log_q, "k4")


@given(st.integers(0, 1000))
@settings(max_examples=25, deadline=None)
def test_k1_and_k3_are_unbiased(seed):
    p, q = (torch.randn(2, 6, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)).log_softmax(-1)
    exact = (p.exp() * (p - q)).sum()
    for estimator in ("k1", "k3"):
        assert (p.exp() * ca.kl(p, q, estimator)).sum().item() == pytest.approx(exact.item(), abs=1e-9)
    assert (ca.kl(p, q, "k3") >= 0).all() and (ca.kl(p, q, "k2") >= 0).all()


def test_log_probs_and_entropy():
    logits = torch.tensor([[0.0, math.log(3.0)], [0.0, -torch.inf]], requires_grad=True)
    log_probs, entropy = ca.log_probs_and_entropy(logits, torch.tensor([1, 0]), entropy="metric")
    torch.testing.assert_close(log_probs, torch.tensor([math.log(0.75), 0.0]))
    torch.testing.assert_close(entropy, torch.tensor([-0.75 * math.log(0.75) - 0.25 * math.log(0.25), 0.0]))
    assert log_probs.requires_grad and not entropy.requires_grad
    assert ca.log_probs_and_entropy(logits, torch.tensor([1, 0]))[1] is None
    half = ca.log_probs_and_entropy(logits, torch.tensor([1, 0]), temperature=0.5, entropy="grad")
    torch.testing.assert_close(half[0][0], torch.tensor(math.log(0.9)))
    assert half[1].requires_grad


def test_token_stats():
    theta, mu = torch.log(torch.tensor([0.2, 0.6])), torch.log(torch.tensor([0.4, 0.3]))
    sums, maxima = ca.token_stats(theta, mu, torch.tensor([True, False]))
    assert sums["ratio"].item() == pytest.approx(2.5, rel=1e-6) and maxima["ratio"].item() == pytest.approx(2)
    assert sums["clip"].item() == 1 and maxima["logprob_diff"].item() == pytest.approx(math.log(2))
    # k3 of KL(mu || theta), r = theta / mu: (.5 - 1 - ln .5) + (2 - 1 - ln 2)
    assert sums["approx_kl"].item() == pytest.approx(0.5, rel=1e-5)
    sums, maxima = ca.token_stats(theta[:0], mu[:0], torch.zeros(0, dtype=torch.bool))
    assert sums["ratio"] == 0 and maxima["ratio"] == 0


def test_learning_rate():
    assert [ca.learning_rate(s, None, 1.0, warmup=4) for s in (0, 3, 4, 99)] == [0.25, 1, 1, 1]
    for schedule in ("cosine", "linear"):
        at = [ca.learning_rate(s, 12, 2.0, schedule, 1, 0.1) for s in range(12)]
        assert at[0] == at[1] == 2.0 and at[11] == pytest.approx(0.2) and at[1:] == sorted(at[1:], reverse=True)
        assert at[6] == pytest.approx(1.1)
        assert ca.learning_rate(50, 12, 2.0, schedule, 1, 0.1) == pytest.approx(0.2)
    with pytest.raises(ValueError, match="total number"):
        ca.learning_rate(1, None, 1.0, "cosine")
