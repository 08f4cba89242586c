"""Properties of all advantage estimators, their errors, and what surrounds them."""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from one_step_off.algorithms import advantages as adv
from one_step_off.algorithms.advantages import Trajectories, estimate_advantages
from one_step_off.algorithms.policy_losses import POLICY_LOSSES
from one_step_off.config.errors import ConfigError
from tests.unit.algorithms.advantage_helpers import (
    CORRECTIONS,
    GROUPED,
    NAMES,
    first,
    outcome,
    quick,
    some,
    take,
    vars_of,
)


@pytest.mark.parametrize("name", NAMES)
@given(seed=st.integers(0, 1000))
@quick
def test_order_does_not_matter(name, seed):
    t = some(seed)
    order = np.random.default_rng(seed).permutation(len(t.groups))
    base = estimate_advantages(name, t)[0]
    moved = estimate_advantages(name, take(t, order))[0]
    for i, a in zip(order, moved, strict=True):
        np.testing.assert_allclose(a, base[i], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", NAMES)
@given(seed=st.integers(0, 1000))
@quick
def test_what_is_not_trained_does_not_matter(name, seed):
    """Tokens with mask False have advantage 0; to leave them out, or to put more among them,
    changes nothing.
    """
    t = some(seed)
    base = estimate_advantages(name, t)[0]
    for a, m in zip(base, t.masks, strict=True):
        assert a.dtype == np.float32
        assert a.shape == m.shape
        assert (a[~m] == 0).all()
    rng = np.random.default_rng(seed)
    keep = [np.flatnonzero(m) for m in t.masks]
    places = [np.sort(rng.choice(len(k) * 2 + 3, len(k), replace=False)) for k in keep]

    def spread(arrays, fill):
        result = []
        for a, k, p in zip(arrays, keep, places, strict=True):
            result.append(np.full(len(k) * 2 + 3, fill, dtype=a.dtype))
            result[-1][p] = a[k]
        return result

    per_token = {
        f: spread(getattr(t, f), 9.0)
        for f in ("token_rewards", "values", "log_probs", "prob_squares")
    }
    rest = {f: getattr(t, f) for f in ("rewards", "groups", "parts", "baselines")}
    again = estimate_advantages(
        name, Trajectories(masks=spread(t.masks, False), **per_token, **rest)
    )[0]
    for a, k, b, p in zip(base, keep, again, places, strict=True):
        np.testing.assert_allclose(b[p], a[k], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", GROUPED)
@given(
    st.lists(st.integers(-20, 20), min_size=2, max_size=10),
    st.integers(-50, 50),
    st.integers(1, 16),
)
@quick
def test_shift_and_scale_of_the_reward(name, rewards, shift, scale):
    """A shift changes nothing; a scale nothing where it is divided out, and else scales the
    advantages.
    """
    r = np.array(rewards, dtype=float)
    n = len(rewards)
    more = {"log_probs": [np.array([-1.0])] * n, "prob_squares": [np.array([0.5])] * n}
    t, moved = (outcome(x, [0] * n, parts={"all": x}, **more) for x in (r, r * scale + shift))
    normalised = name in ("grpo", "grpo_passk", "gdpo", "reinforce_plus_plus_baseline")
    factor = 1.0 if normalised else scale
    np.testing.assert_allclose(
        first(moved, name), np.array(first(t, name)) * factor, rtol=1e-4, atol=2e-4
    )


@pytest.mark.parametrize("name", [n for n in NAMES if n not in GROUPED])
@given(seed=st.integers(0, 1000), scale=st.integers(1, 16))
@quick
def test_the_scale_of_everything_in_the_rewards_unit(name, seed, scale):
    """Where no group is compared: advantages scale as the rewards do, and whitened ones stay."""
    t = some(seed)
    by = {f: [scale * x for x in getattr(t, f)] for f in ("token_rewards", "values")}
    moved = Trajectories(
        **vars_of(t) | by | {"rewards": scale * t.rewards, "baselines": scale * t.baselines}
    )
    factor = 1.0 if adv.ADVANTAGE_ESTIMATORS[name].whitens else scale
    for a, b in zip(
        estimate_advantages(name, t)[0], estimate_advantages(name, moved)[0], strict=True
    ):
        np.testing.assert_allclose(b, factor * a, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize(
    "name", ["grpo", "dr_grpo", "rloo", "gpg", "reinforce_plus_plus_baseline", "gdpo"]
)
@given(st.lists(st.integers(-20, 20), min_size=2, max_size=10))
@quick
def test_a_group_sums_to_zero(name, rewards):
    r = np.array(rewards, dtype=float)
    assert sum(first(outcome(r, [0] * len(r), parts={"all": r}), name)) == pytest.approx(
        0, abs=1e-4
    )


@given(st.integers(0, 1000))
@quick
def test_whitening(seed):
    t = some(seed)
    for name in ("gae", "grpo"):
        plain, white = (estimate_advantages(name, t, whiten=whiten)[0] for whiten in (False, True))
        assert all((a[~m] == 0).all() for a, m in zip(white, t.masks, strict=True))
        before, after = (
            np.concatenate([a[m] for a, m in zip(x, t.masks, strict=True)]) for x in (plain, white)
        )
        np.testing.assert_allclose(after, adv.standardize(before.astype(float)), atol=1e-6)
        if len(after) > 2 and before.std() > 1e-2:
            assert after.mean() == pytest.approx(0, abs=1e-5)
            assert after.std(ddof=1) == pytest.approx(1, abs=1e-3)


def test_gae_of_a_constant_critic_and_reward_is_reinforce():
    """With V = 0, lam = 1 and gamma = 1 every token's advantage is the return, as in
    REINFORCE++.
    """
    t = some(8)
    t = Trajectories(**vars_of(t) | {"values": [0 * v for v in t.values]})
    for a, b in zip(
        estimate_advantages("gae", t)[0],
        estimate_advantages("reinforce_plus_plus", t)[0],
        strict=True,
    ):
        np.testing.assert_allclose(a, b, atol=1e-6)


def test_token_rewards_count_in_the_outcome():
    t = outcome(
        [1.0, 1.0], [0, 0], [2, 2], token_rewards=[np.array([0.5, 0.5]), np.array([0.0, 0.0])]
    )
    np.testing.assert_allclose(first(t, "dr_grpo"), [0.5, -0.5])


SUMS = [0.1 + 0.2 + 0.3, 0.3 + 0.2 + 0.1, 0.6, 0.2 + 0.1 + 0.3]


@pytest.mark.parametrize("scale", [1.0, -1.0, 1e3, 1e16])
@pytest.mark.parametrize("name", [*GROUPED, "remax"])
def test_rewards_that_differ_by_rounding_alone_give_exact_zeros(name, scale):
    """And the other groups get what they would get beside exactly equal rewards."""
    equal = np.array([0.6] * 4 + [1.0, 0.0, 0.0, 1.0])
    groups = [0] * 4 + [1] * 4
    more = {
        "log_probs": [np.array([-1.0, -2.0])] * 8,
        "prob_squares": [np.array([0.5, 0.7])] * 8,
        "baselines": equal[[0] * 8] * scale,
    }
    rounded = np.array([*SUMS, *equal[4:]])
    results = []
    for rewards in (rounded * scale, equal * scale):
        t = outcome(rewards, groups, [2] * 8, parts={"all": rewards}, **more)
        results.append(estimate_advantages(name, t)[0])
    assert len(set(SUMS)) > 1
    assert all((a == 0).all() for a in results[0][:4])
    np.testing.assert_allclose(results[0][4:], results[1][4:], rtol=1e-6)


@pytest.mark.parametrize("name", NAMES)
def test_parts_that_cancel_each_other_are_zero(name):
    rewards = np.array([0.1 + 0.2 - 0.3, 0.0, 0.3 - 0.2 - 0.1])
    more = {"log_probs": [np.array([-1.0])] * 3, "prob_squares": [np.array([0.5])] * 3}
    t = outcome(rewards, [0] * 3, parts={"all": rewards}, baselines=np.zeros(3), **more)
    if name != "gae":
        t = Trajectories(**vars_of(t) | {"values": [np.zeros(1)] * 3})
        assert np.abs(first(t, name)).max() <= 1e-16
    assert adv.zero_variance_groups(rewards, [0] * 3) == [0]


def test_small_differences_that_are_no_rounding_count():
    for rewards in ([1.0, 1.0 + 1e-9], [1e-9, 0.0], [1e16, 1e16 + 1e6]):
        assert adv.zero_variance_groups(rewards, [0, 0]) == []
        assert first(outcome(rewards, [0, 0]), "dr_grpo")[0] != 0


def test_errors():
    with pytest.raises(ValueError, match="sample 1 is not finite"):
        estimate_advantages("grpo", outcome([1.0, float("nan")], [0, 0]))
    with pytest.raises(ConfigError, match="unknown.*gae, grpo"):
        estimate_advantages("nothing", outcome([1.0], [0]))
    with pytest.raises(ValueError, match="exists already"):
        adv.register("grpo")(adv.grpo)
    parts = {"right": np.array([1.0, 0.0, 1.0]), "form": np.array([1.0, np.nan, 1.0])}
    with pytest.raises(ConfigError, match="gdpo: sample 1, of prompt b, has no part 'form'"):
        estimate_advantages("gdpo", outcome([2, 0, 2], ["a", "b", "b"], parts=parts))
    assert first(outcome([1, 0], [0, 0], parts={"form": np.array([1.0, np.nan])}), "dr_grpo") == [
        0.5,
        -0.5,
    ]
    for name in NAMES:
        for field in adv.ADVANTAGE_ESTIMATORS[name].needs:
            with pytest.raises(
                ConfigError, match=f"adv_estimator={name}: needs {adv.NEEDS.get(field, field)[:9]}"
            ):
                estimate_advantages(name, Trajectories(**vars(some(0)) | {field: None}))


def double(t, options, *, times=2.0):
    return t.totals * times


double.whitens = False  # ty: ignore[missing-attribute]


def ragged(t, options):
    return [np.zeros(99)] * len(t.masks)


def test_an_estimator_of_ones_own():
    t = outcome([1.0, 3.0], [0, 1])
    assert first(t, f"{__name__}:double") == [2, 6]
    assert first(t, f"{__name__}:double", times=3.0) == [3, 9]
    with pytest.raises(ValueError, match="lengths differ"):
        estimate_advantages(f"{__name__}:ragged", t)
    with pytest.raises(ConfigError, match="adv_estimator.*has no attribute 'nothing'"):
        estimate_advantages(f"{__name__}:nothing", t)
    with pytest.raises(ConfigError, match="not callable"):
        estimate_advantages(f"{__name__}:NAMES", t)


def test_overlong_penalty_by_hand():
    # of 20 tokens the last 4 are the buffer: free up to 16, then a quarter of the penalty for each
    received = adv.overlong_penalty(np.array([3, 16, 17, 19, 20]), 20, 4, 2.0)
    assert received.tolist() == [0, 0, -0.5, -1.5, -2]
    assert adv.overlong_penalty(np.array([20]), 20, 0).tolist() == [0]


def test_overlong_filtering_leaves_the_groups_mean_alone():
    t = outcome([0.0, 1.0], [0, 0], [2, 2])
    masks = adv.mask_overlong(t.masks, [True, False])
    assert [m.tolist() for m in masks] == [[False, False], [True, True]]
    actual = estimate_advantages("dr_grpo", Trajectories(t.rewards, t.groups, masks))[0]
    assert [a.tolist() for a in actual] == [[0, 0], [0.5, 0.5]]


def test_groups_that_differ_by_rounding_are_uninformative():
    assert adv.zero_variance_groups([*SUMS, 1.0], ["a"] * 4 + ["b"]) == ["a", "b"]
    assert adv.zero_variance_groups([*SUMS, 0.7], ["a"] * 5) == []


def test_uninformative_groups():
    assert adv.zero_variance_groups([1, 0, 1, 1, 2], ["a", "b", "a", "b", "c"]) == ["a", "c"]
    assert adv.zero_variance_groups([], []) == []


@pytest.mark.parametrize("name", [*NAMES, *POLICY_LOSSES, *CORRECTIONS])
def test_every_one_has_a_line_with_its_source(name):
    concepts = Path(__file__).parents[3] / "docs/concepts"
    text = (concepts / "algorithms.md").read_text() + (concepts / "policy_losses.md").read_text()
    assert any(
        f"| `{name}` |" in line and ("arXiv:" in line or ".xyz/" in line or ".site/" in line)
        for line in text.splitlines()
    )
