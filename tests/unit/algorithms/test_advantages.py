"""The estimators against numbers worked out by hand, slow and plain second versions, and properties for any numbers."""

import math
from itertools import combinations
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from one_step_off.algorithms import advantages as adv
from one_step_off.algorithms.advantages import Options, Trajectories, estimate_advantages
from one_step_off.algorithms.policy_losses import POLICY_LOSSES
from one_step_off.config.errors import ConfigError
from one_step_off.config.loading import KEYS

NAMES = list(adv.ADVANTAGE_ESTIMATORS)
CORRECTIONS = [
    name for name in KEYS["algorithm.rollout_correction"].metadata["choices"] if name != "none"
]
GROUPED = [n for n in NAMES if adv.ADVANTAGE_ESTIMATORS[n].grouped]
quick = settings(max_examples=25, deadline=None)


def outcome(rewards, groups, lengths=None, **more):
    lengths = lengths or [1] * len(rewards)
    return Trajectories(
        np.array(rewards, dtype=float), groups, [np.ones(n, dtype=bool) for n in lengths], **more
    )


def first(t, name, options=None, **kwargs):
    """One value per trajectory: its first trained token's."""
    found = estimate_advantages(name, t, options, **kwargs)[0]
    return [float(a[m][0]) for a, m in zip(found, t.masks, strict=True)]


def some(seed, n=12, turns=True):
    """Trajectories of three groups with everything that any estimator may need, and masks with gaps."""
    rng = np.random.default_rng(seed)
    lengths = rng.integers(1, 9, n)
    masks = [rng.random(r) < 0.7 if turns else np.ones(r, dtype=bool) for r in lengths]
    for m in masks[:3]:
        m[:] = False  # filtered: no trained token at all
    per_token = lambda low, high: [rng.uniform(low, high, r).astype(np.float32) for r in lengths]  # noqa: E731
    return Trajectories(
        rewards=rng.integers(0, 4, n).astype(float),
        groups=[int(g) for g in rng.integers(0, 3, n)],
        masks=masks,
        token_rewards=per_token(-0.2, 0.2),
        values=per_token(-1, 1),
        parts={"right": rng.integers(0, 2, n).astype(float), "form": rng.normal(size=n)},
        baselines=rng.normal(size=n),
        log_probs=per_token(-3, -0.1),
        prob_squares=per_token(0.3, 0.9),
    )


def vars_of(t):
    return {f: getattr(t, f) for f in Trajectories.__dataclass_fields__}


def take(t, order):
    """The same trajectories in another order."""

    def pick(x):
        if isinstance(x, dict):
            return {k: v[order] for k, v in x.items()}
        return x[order] if isinstance(x, np.ndarray) else [x[i] for i in order]

    return Trajectories(**{f: pick(getattr(t, f)) for f in Trajectories.__dataclass_fields__})


# ---- by hand ----------------------------------------------------------------------------------------------------


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
    # Two of four samples are in a group without variance: alpha = 4 / (4 - 2) = 2; mean of the other group .5
    np.testing.assert_allclose(first(outcome([1, 1, 0, 1], [0, 0, 1, 1]), "gpg"), [0, 0, -1, 1])


@given(st.lists(st.integers(-3, 3), min_size=2, max_size=7), st.integers(2, 7))
@quick
def test_passk_equals_the_mean_over_all_sets(rewards, k):
    n, k = len(rewards), min(k, len(rewards))
    want = [
        np.mean(
            [
                max(rewards[j] for j in chosen) - max(rewards[j] for j in chosen if j != i)
                for chosen in combinations(range(n), k)
                if i in chosen
            ]
        )
        for i in range(n)
    ]
    got = first(outcome(rewards, [0] * n), "grpo_passk", Options(norm_by_std=False), pass_k=k)
    np.testing.assert_allclose(got, want, atol=1e-6)


def test_passk_of_the_whole_group_is_the_lead_of_the_best():
    s = np.std([1, 4, 2], ddof=1) + 1e-6
    np.testing.assert_allclose(
        first(outcome([1, 4, 2], [0] * 3), "grpo_passk"), [0, 2 / s, 0], rtol=1e-6
    )
    with pytest.raises(ValueError, match="pass_k=1"):
        estimate_advantages("grpo_passk", outcome([1, 2], [0, 0]), pass_k=1)


def test_gae_by_hand():
    t = outcome([1.0], [0], [3], values=[np.array([0.5, 0.2, 0.4])])
    found = estimate_advantages("gae", t, Options(gamma=0.9, lam=0.5), whiten=False)
    # deltas: .9*.2-.5 = -.32; .9*.4-.2 = .16; 1-.4 = .6.  A3 = .6, A2 = .16 + .45*.6 = .43, A1 = -.32 + .45*.43
    np.testing.assert_allclose(found[0][0], [-0.1265, 0.43, 0.6], rtol=1e-6)
    np.testing.assert_allclose(found[1][0], [0.3735, 0.63, 1.0], rtol=1e-6)


@given(st.integers(0, 1000), st.floats(0.5, 1), st.floats(0, 1))
@quick
def test_gae_goes_from_one_trained_token_to_the_next(seed, gamma, lam):
    t = some(seed)
    found = estimate_advantages("gae", t, Options(gamma=gamma, lam=lam), whiten=False)
    for i, mask in enumerate(t.masks):
        at = np.flatnonzero(mask)
        ahead, value = 0.0, 0.0
        for j in at[::-1]:
            reward = float(t.token_rewards[i][j]) + (t.rewards[i] if j == at[-1] else 0.0)
            ahead = reward + gamma * value - float(t.values[i][j]) + gamma * lam * ahead
            value = float(t.values[i][j])
            assert found[0][i][j] == pytest.approx(ahead, abs=1e-5)
            assert found[1][i][j] == pytest.approx(ahead + value, abs=1e-5)
        assert (found[0][i][~mask] == 0).all() and (found[1][i][~mask] == 0).all()


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
    # the outcome's 1 joins the last token: 1.25; the first has -.5 + .5 * 1.25; the other trajectory .75
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
    with pytest.raises(ConfigError, match="'fom'.*no part.*'form', 'right'"):
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
    # energies: 1 - 1 + .5 = .5 and 1 - .4 + .6 = 1.2: B = 1 * .5 / 1.7 for the first tokens; the second is alone
    b = 0.5 / 1.7
    got = estimate_advantages("optimal_token_baseline", t)[0]
    np.testing.assert_allclose(np.concatenate(got), [1 - b, 1.0, -b], rtol=1e-6)


def test_optimal_token_baseline_has_the_least_variance():
    """Of all baselines at the first token: E[(G - b)^2 W] is smallest at B."""
    t = some(5, n=40, turns=False)
    t = Trajectories(**vars_of(t) | {"groups": [0] * 40})
    found = estimate_advantages("optimal_token_baseline", t)[0]
    live = np.flatnonzero(t.lengths)
    to_go = adv.discounted_sums(t.step_rewards(), 1.0)[live, 0]
    weight = np.array([1 - 2 * np.exp(t.log_probs[i][0]) + t.prob_squares[i][0] for i in live])
    best = to_go[0] - found[live[0]][0]

    def cost(b):
        return ((to_go - b) ** 2 * weight).sum()

    assert weight.sum() > 0 and cost(best) < min(
        cost(best + 0.01), cost(best - 0.01), cost(to_go.mean() + 1e-3)
    )


# ---- what holds for all -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
@given(seed=st.integers(0, 1000))
@quick
def test_order_does_not_matter(name, seed):
    t = some(seed)
    order = np.random.default_rng(seed).permutation(len(t.groups))
    base, moved = estimate_advantages(name, t)[0], estimate_advantages(name, take(t, order))[0]
    for i, a in zip(order, moved, strict=True):
        np.testing.assert_allclose(a, base[i], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", NAMES)
@given(seed=st.integers(0, 1000))
@quick
def test_what_is_not_trained_does_not_matter(name, seed):
    """Tokens with mask False have advantage 0; to leave them out, or to put more among them, changes nothing."""
    t = some(seed)
    base = estimate_advantages(name, t)[0]
    for a, m in zip(base, t.masks, strict=True):
        assert a.dtype == np.float32 and a.shape == m.shape and (a[~m] == 0).all()
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
    """A shift changes nothing; a scale nothing where it is divided out, and else scales the advantages."""
    r, n = np.array(rewards, dtype=float), len(rewards)
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
            assert after.mean() == pytest.approx(0, abs=1e-5) and after.std(
                ddof=1
            ) == pytest.approx(1, abs=1e-3)


def test_gae_of_a_constant_critic_and_reward_is_reinforce():
    """With V = 0, lam = 1 and gamma = 1 every token's advantage is the return, as in REINFORCE++."""
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


# ---- errors, and functions of one's own ---------------------------------------------------------------------------


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
    with pytest.raises(ValueError, match="other lengths"):
        estimate_advantages(f"{__name__}:ragged", t)
    with pytest.raises(ConfigError, match="adv_estimator.*has no attribute 'nothing'"):
        estimate_advantages(f"{__name__}:nothing", t)
    with pytest.raises(ConfigError, match="not callable"):
        estimate_advantages(f"{__name__}:NAMES", t)


# ---- before the advantages ------------------------------------------------------------------------------------------


def test_overlong_penalty_by_hand():
    # of 20 tokens the last 4 are the buffer: free up to 16, then a quarter of the penalty for each
    got = adv.overlong_penalty(np.array([3, 16, 17, 19, 20]), 20, 4, 2.0)
    assert got.tolist() == [0, 0, -0.5, -1.5, -2]
    assert adv.overlong_penalty(np.array([20]), 20, 0).tolist() == [0]


def test_overlong_filtering_leaves_the_groups_mean_alone():
    t = outcome([0.0, 1.0], [0, 0], [2, 2])
    masks = adv.mask_overlong(t.masks, [True, False])
    assert [m.tolist() for m in masks] == [[False, False], [True, True]]
    found = estimate_advantages("dr_grpo", Trajectories(t.rewards, t.groups, masks))[0]
    assert [a.tolist() for a in found] == [[0, 0], [0.5, 0.5]]


def test_uninformative_groups():
    assert adv.zero_variance_groups([1, 0, 1, 1, 2], ["a", "b", "a", "b", "c"]) == ["a", "c"]
    assert adv.zero_variance_groups([], []) == []


@pytest.mark.parametrize("name", [*NAMES, *POLICY_LOSSES, *CORRECTIONS])
def test_every_one_has_a_line_with_its_source(name):
    text = (Path(__file__).parents[3] / "docs/concepts/algorithms.md").read_text()
    assert any(
        f"| `{name}` |" in line and ("arXiv:" in line or ".xyz/" in line or ".site/" in line)
        for line in text.splitlines()
    )


# ---- in the pipeline ----------------------------------------------------------------------------------------------


def test_the_pipeline_shapes_filters_and_puts_the_kl_into_the_reward():
    from one_step_off.algorithms.core_algos import KLController
    from one_step_off.config.schema import Config
    from one_step_off.data.samples import Batch, Sample
    from one_step_off.ray_trainer import Pipeline

    def sample(index, reward, n, finish):
        arrays = (
            np.zeros(n, np.int32),
            np.full(n, -1.0, np.float32),
            np.ones(n, bool),
            np.zeros(n, np.int32),
        )
        return Sample(
            (0, 0), index, np.zeros(2, np.int32), *arrays, reward=reward, finish_reason=finish
        )

    cfg = Config()
    cfg.data.max_response_length, cfg.reward.overlong_buffer = 4, 2
    cfg.algorithm.adv_estimator, cfg.algorithm.filter_overlong = "dr_grpo", True
    cfg.algorithm.kl_in_reward, cfg.algorithm.kl_coef = True, 0.1
    batch = Batch(
        0,
        [sample(0, 1.0, 4, "length"), sample(1, 1.0, 3, "stop"), sample(2, 0.0, 1, "stop")],
        (0, 0),
    )
    batch.ref_log_probs = [np.full(len(s.log_probs), -1.5, np.float32) for s in batch.samples]
    metrics = Pipeline._advantages(
        SimpleNamespace(cfg=cfg, kl=KLController(0.1, target=0.5, horizon=6)), batch
    )
    # KL of the two that are left: 1.5 and .5. Totals: 1 - 1 (filtered, so without KL), 1 - .5 - .15, 0 - .05
    assert metrics == {"kl/response": 1.0, "kl/coef": 0.1}
    mean = (0.0 + 0.35 - 0.05) / 3
    want = [[0] * 4, [0.35 - mean] * 3, [-0.05 - mean]]
    for got, w in zip(batch.advantages, want, strict=True):
        np.testing.assert_allclose(got, w, rtol=1e-5, atol=1e-7)
    assert batch.returns is None and not batch.samples[0].loss_mask.any()


def test_the_kl_in_the_reward_is_that_of_the_recomputed_log_probs():
    """Of mu only where nothing was recomputed: the optimal token baseline has them without old_log_probs=recompute."""
    from one_step_off.algorithms.core_algos import KLController
    from one_step_off.config.schema import Config
    from one_step_off.data.samples import Batch, Sample
    from one_step_off.ray_trainer import Pipeline

    cfg = Config()
    cfg.algorithm.adv_estimator = "reinforce_plus_plus"
    cfg.algorithm.whiten_adv, cfg.algorithm.kl_in_reward, cfg.algorithm.kl_coef = False, True, 0.1
    for recomputed, kl in (
        (None, [1.0, 0.5]),
        ([np.array([-1.5, -1.75], np.float32)], [0.5, 0.25]),
    ):
        arrays = (
            np.zeros(2, np.int32),
            np.array([-1.0, -1.5], np.float32),
            np.ones(2, bool),
            np.zeros(2, np.int32),
        )
        batch = Batch(0, [Sample((0, 0), 0, np.zeros(2, np.int32), *arrays, reward=1.0)], (0, 0))
        batch.ref_log_probs, batch.old_log_probs = [np.full(2, -2.0, np.float32)], recomputed
        metrics = Pipeline._advantages(SimpleNamespace(cfg=cfg, kl=KLController(0.1)), batch)
        assert metrics == {"kl/response": pytest.approx(sum(kl)), "kl/coef": 0.1}
        # reward-to-go: the KL of this token and of those after it, and the reward
        np.testing.assert_allclose(
            batch.advantages[0], [1 - 0.1 * sum(kl), 1 - 0.1 * kl[1]], rtol=1e-6
        )


def test_a_checkpoint_brings_the_adapted_kl_coefficient_back():
    from one_step_off.config.schema import Config
    from one_step_off.ray_trainer import Pipeline, Resumed, Roles

    cfg = Config()
    cfg.algorithm.kl_coef = 0.1
    resumed = Resumed(3, None, 0.0, kl_coef=0.25)
    assert (
        Pipeline(cfg, Roles(None, None, None), None, None, None, resumed=resumed).kl.value == 0.1
    )  # fixed: what the config says
    cfg.algorithm.kl_target = 6.0
    assert (
        Pipeline(cfg, Roles(None, None, None), None, None, None, resumed=resumed).kl.value == 0.25
    )
