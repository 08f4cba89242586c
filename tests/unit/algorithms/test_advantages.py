"""Advantage estimators, checked by hand."""

import math
from itertools import combinations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from one_step_off.algorithms import advantages as adv
from one_step_off.algorithms.advantages import estimate_advantages
from one_step_off.algorithms.trajectories import Options, Trajectories
from one_step_off.config.errors import ConfigError
from tests.unit.algorithms.advantage_helpers import (
    first,
    outcome,
    quick,
    some,
    vars_of,
)


def test_grpo_by_hand():
    t = outcome([0.0, 1.0, 1.0, 2.0, 5.0], ["a", "b", "a", "b", "c"])
    # group a: mean .5, sample std sqrt(.5); group b: mean 1.5, the same std; c stands alone
    s = 0.5 / (math.sqrt(0.5) + 1e-6)
    np.testing.assert_allclose(first(t, "grpo"), [-s, -s, s, s, 0.0], rtol=1e-6)
    np.testing.assert_allclose(
        first(t, "grpo", Options(norm_by_std=False)), [-0.5, -0.5, 0.5, 0.5, 0.0]
    )
    np.testing.assert_allclose(first(t, "dr_grpo"), [-0.5, -0.5, 0.5, 0.5, 0.0])
    assert estimate_advantages("grpo", t)[0][0].dtype == np.float32


def test_without_variance_exactly_zero():
    # 0.1 three times has a mean that is not 0.1 in floating point; 1 / eps must not blow that up.
    for name in (
        "grpo",
        "dr_grpo",
        "rloo",
        "opo",
        "gpg",
        "grpo_passk",
        "reinforce_plus_plus_baseline",
    ):
        assert first(outcome([0.1] * 3, [0] * 3), name) == [0, 0, 0], name
        assert first(outcome([7.0], [0]), name) == [0], name


def test_rloo_by_hand():
    # 0 against (1 + 5) / 2, 1 against (0 + 5) / 2, 5 against (0 + 1) / 2
    np.testing.assert_allclose(
        first(outcome([0, 1, 5], [0, 0, 0]), "rloo"), [-3, -1.5, 4.5], rtol=1e-6
    )


def test_opo_by_hand():
    # (1 * 1 + 0 * 3) / 4 = .25: the long failure weighs three times as much as the short success
    np.testing.assert_allclose(first(outcome([1, 0], [0, 0], [1, 3]), "opo"), [0.75, -0.25])


def test_gpg_by_hand():
    # Two of four samples are in a group without variance: alpha = 4 / (4 - 2) = 2; mean of the
    # other group .5
    np.testing.assert_allclose(first(outcome([1, 1, 0, 1], [0, 0, 1, 1]), "gpg"), [0, 0, -1, 1])


@given(st.lists(st.integers(-3, 3), min_size=2, max_size=7), st.integers(2, 7))
@quick
def test_passk_equals_the_mean_over_all_sets(rewards, k):
    n, k = len(rewards), min(k, len(rewards))
    expected = [
        np.mean(
            [
                max(rewards[j] for j in chosen) - max(rewards[j] for j in chosen if j != i)
                for chosen in combinations(range(n), k)
                if i in chosen
            ]
        )
        for i in range(n)
    ]
    actual = first(outcome(rewards, [0] * n), "grpo_passk", Options(norm_by_std=False), pass_k=k)
    np.testing.assert_allclose(actual, expected, atol=1e-6)


def test_passk_of_the_whole_group_is_the_lead_of_the_best():
    s = np.std([1, 4, 2], ddof=1) + 1e-6
    np.testing.assert_allclose(
        first(outcome([1, 4, 2], [0] * 3), "grpo_passk"), [0, 2 / s, 0], rtol=1e-6
    )
    with pytest.raises(ValueError, match="pass_k=1"):
        estimate_advantages("grpo_passk", outcome([1, 2], [0, 0]), pass_k=1)


def test_gae_by_hand():
    t = outcome([1.0], [0], [3], values=[np.array([0.5, 0.2, 0.4])])
    result = estimate_advantages("gae", t, Options(gamma=0.9, lam=0.5), whiten=False)
    # deltas: .9*.2-.5 = -.32; .9*.4-.2 = .16; 1-.4 = .6.  A3 = .6, A2 = .16 + .45*.6 = .43, A1 =
    # -.32 + .45*.43
    np.testing.assert_allclose(result[0][0], [-0.1265, 0.43, 0.6], rtol=1e-6)
    np.testing.assert_allclose(result[1][0], [0.3735, 0.63, 1.0], rtol=1e-6)


@given(st.integers(0, 1000), st.floats(0.5, 1), st.floats(0, 1))
@quick
def test_gae_goes_from_one_trained_token_to_the_next(seed, gamma, lam):
    t = some(seed)
    result = estimate_advantages("gae", t, Options(gamma=gamma, lam=lam), whiten=False)
    for i, mask in enumerate(t.masks):
        at = np.flatnonzero(mask)
        ahead = 0.0
        value = 0.0
        for j in at[::-1]:
            reward = float(t.token_rewards[i][j]) + (t.rewards[i] if j == at[-1] else 0.0)
            ahead = reward + gamma * value - float(t.values[i][j]) + gamma * lam * ahead
            value = float(t.values[i][j])
            assert result[0][i][j] == pytest.approx(ahead, abs=1e-5)
            assert result[1][i][j] == pytest.approx(ahead + value, abs=1e-5)
        assert (result[0][i][~mask] == 0).all()
        assert (result[1][i][~mask] == 0).all()


def test_gae_ends():
    t = some(3)
    # lam 1: reward-to-go less the value; lam 0: one step of temporal difference
    full, one = (estimate_advantages("gae", t, Options(lam=x), whiten=False) for x in (1.0, 0.0))
    to_go = adv.discounted_sums(t.step_rewards(), 1.0)
    values = t.rows(t.values)
    np.testing.assert_allclose(t.rows(full[0]), (to_go - values) * t.alive, atol=1e-5)
    ahead = np.pad(values[:, 1:], ((0, 0), (0, 1)))
    np.testing.assert_allclose(
        t.rows(one[0]), (t.step_rewards() + ahead - values) * t.alive, atol=1e-5
    )


def test_reinforce_plus_plus_by_hand():
    t = outcome(
        [1.0, 0.0], [0, 1], [2, 1], token_rewards=[np.array([-0.5, 0.25]), np.array([0.75])]
    )
    raw = estimate_advantages("reinforce_plus_plus", t, Options(gamma=0.5), whiten=False)[0]
    # the outcome's 1 joins the last token: 1.25; the first has -.5 + .5 * 1.25; the other
    # trajectory .75
    assert [a.tolist() for a in raw] == [[0.125, 1.25], [0.75]]
    white = estimate_advantages("reinforce_plus_plus", t, Options(gamma=0.5))[0]
    x = np.array([0.125, 1.25, 0.75])
    np.testing.assert_allclose(
        np.concatenate(white), (x - x.mean()) / (x.std(ddof=1) + 1e-6), rtol=1e-5
    )


def test_reinforce_plus_plus_baseline_by_hand():
    t = outcome([0, 1, 3, 3], [0, 0, 1, 1], [1, 1, 1, 2])
    # centred -.5 .5 0 (0 0); over five tokens: mean 0, variance .5 / 4
    s = 0.5 / math.sqrt(0.125)
    np.testing.assert_allclose(first(t, "reinforce_plus_plus_baseline"), [-s, s, 0, 0], rtol=1e-4)


def test_remax_by_hand():
    t = outcome([1.0], [0], [2], token_rewards=[np.array([0.1, -0.2])], baselines=np.array([0.4]))
    np.testing.assert_allclose(estimate_advantages("remax", t)[0][0], [0.5, 0.4], rtol=1e-6)


def test_gdpo_by_hand():
    parts = {"right": np.array([0.0, 1, 1, 1]), "form": np.array([0.0, 10, 0, 10])}
    t = outcome([0, 11, 1, 11], [0, 0, 1, 1], parts=parts)
    # in each group of two a part is -s, s or no variance at all: its range does not matter
    s = math.sqrt(0.5)
    x = np.array([-2 * s, 2 * s, -s, s])
    np.testing.assert_allclose(first(t, "gdpo"), x / x.std(ddof=1), rtol=1e-4)
    x = np.array([-3 * s, 3 * s, -2 * s, 2 * s])
    np.testing.assert_allclose(
        first(t, "gdpo", weights={"form": 2.0}), x / x.std(ddof=1), rtol=1e-4
    )
    with pytest.raises(ConfigError, match="'fom'.*not a part.*'form', 'right'"):
        estimate_advantages("gdpo", t, weights={"fom": 1.0})


def test_optimal_token_baseline_by_hand():
    logs = [np.log([0.5, 0.8]), np.log([0.2])]
    t = outcome(
        [1.0, 0.0],
        [0, 0],
        [2, 1],
        log_probs=logs,
        prob_squares=[np.array([0.5, 0.7]), np.array([0.6])],
    )
    # energies: 1 - 1 + .5 = .5 and 1 - .4 + .6 = 1.2: B = 1 * .5 / 1.7 for the first tokens; the
    # second is alone
    b = 0.5 / 1.7
    actual = estimate_advantages("optimal_token_baseline", t)[0]
    np.testing.assert_allclose(np.concatenate(actual), [1 - b, 1.0, -b], rtol=1e-6)


def test_optimal_token_baseline_has_the_least_variance():
    """Of all baselines at the first token: E[(G - b)^2 W] is smallest at B."""
    t = some(5, n=40, turns=False)
    t = Trajectories(**vars_of(t) | {"groups": [0] * 40})
    result = estimate_advantages("optimal_token_baseline", t)[0]
    live = np.flatnonzero(t.lengths)
    to_go = adv.discounted_sums(t.step_rewards(), 1.0)[live, 0]
    weight = np.array([1 - 2 * np.exp(t.log_probs[i][0]) + t.prob_squares[i][0] for i in live])
    best = to_go[0] - result[live[0]][0]

    def cost(b):
        return ((to_go - b) ** 2 * weight).sum()

    assert weight.sum() > 0
    assert cost(best) < min(cost(best + 0.01), cost(best - 0.01), cost(to_go.mean() + 1e-3))
