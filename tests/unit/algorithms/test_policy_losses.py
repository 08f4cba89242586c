"""The losses against numbers worked out by hand, and their gradients against what the papers say they are."""

import math
import subprocess
import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from one_step_off.algorithms import policy_losses as pl
from one_step_off.algorithms.policy_losses import POLICY_LOSSES, LossInputs
from one_step_off.config.errors import ConfigError
from one_step_off.config.schema import AlgorithmConfig

NAMES = list(POLICY_LOSSES)
quick = settings(max_examples=25, deadline=None)


def of(ratio, advantage, sequence=None, old=None, **clips):
    """Inputs whose theta / old is `ratio`; `old` are log-probs, -10 unless told, so that no probability exceeds 1."""
    log_ratio = torch.tensor(ratio).log()
    old = torch.full_like(log_ratio, -10.0) if old is None else torch.tensor(old)
    n = len(log_ratio)
    sequence = torch.tensor(sequence if sequence is not None else list(range(n)))
    log_probs = (old + log_ratio).requires_grad_()
    return LossInputs(log_probs, old, torch.tensor(advantage), sequence, torch.ones(n), **clips)


def run(name, x, **own):
    """Loss, clipped, and the gradient of the summed loss by each log-prob."""
    loss, clipped = POLICY_LOSSES[name].function(x, **own)
    (gradient,) = torch.autograd.grad((loss * x.weight).sum(), x.log_probs)
    assert loss.shape == clipped.shape == x.advantage.shape and clipped.dtype == torch.bool
    return loss.detach(), clipped.tolist(), gradient


def close(got, want, **kwargs):
    torch.testing.assert_close(got, torch.tensor(want), **({"rtol": 1e-5, "atol": 1e-5} | kwargs))


def test_vanilla_by_hand():
    x = of([1.5, 1.5, 0.5, 0.5, 1.1], [1.0, -1.0, 1.0, -1.0, 2.0], clip_low=0.2, clip_high=0.3)
    loss, clipped, gradient = run("vanilla", x)
    # eq. 7: clipped only where that makes the objective smaller; there the gradient is 0, elsewhere -r A
    close(loss, [-1.3, 1.5, -0.5, 0.8, -2.2])
    assert clipped == [True, False, False, True, False]
    close(gradient, [0.0, 1.5, -0.5, 0.0, -2.2])


def test_dual_clip_by_hand():
    x = of([5.0, 5.0, 2.5, 0.5], [1.0, -1.0, -1.0, -1.0], clip_c=3.0)
    loss, clipped, gradient = run("vanilla", x)
    # only where A < 0 and r > 3: the loss stays 3 instead of 5
    close(loss, [-1.2, 3.0, 2.5, 0.8])
    assert clipped == [True, True, False, True]
    close(gradient, [0.0, 0.0, 2.5, 0.0])


def test_gspo_by_hand():
    # sequence 0: sqrt(1.2 * .8); sequence 1: one token, over the range
    x = of([1.2, 0.8, 1.5], [1.0, 1.0, 1.0], [0, 0, 1])
    s = math.sqrt(1.2 * 0.8)
    loss, clipped, gradient = run("gspo", x)
    close(loss, [-s, -s, -1.2])
    assert clipped == [False, False, True]
    close(gradient, [-s, -s, 0.0])


@given(st.integers(0, 1000))
@quick
def test_gspo_gradient_is_that_of_its_sequence_form(seed):
    g = torch.Generator().manual_seed(seed)
    old, sequence = -torch.rand(9, generator=g) - 1, torch.tensor([0, 0, 0, 0, 1, 1, 2, 2, 2])
    log_probs = (old + 0.3 * torch.randn(9, generator=g)).requires_grad_()
    per_sequence = torch.randn(3, generator=g)
    lengths = torch.tensor([4.0, 2.0, 3.0])
    x = LossInputs(
        log_probs, old, per_sequence[sequence], sequence, (1 / (3 * lengths))[sequence], 0.1, 0.2
    )
    gradient = run("gspo", x)[2]
    total = 0.0
    for i in range(3):
        ratio = (log_probs - old)[sequence == i].mean().exp()  # eq. 7
        total -= (
            torch.minimum(ratio * per_sequence[i], ratio.clamp(0.9, 1.2) * per_sequence[i]) / 3
        )  # eq. 5
    (want,) = torch.autograd.grad(total, log_probs)
    torch.testing.assert_close(gradient, want, rtol=1e-5, atol=1e-6)


def test_gmpo_by_hand():
    x = of(
        [math.exp(0.9), math.exp(-0.5), math.exp(0.9)],
        [2.0, 2.0, -1.0],
        [0, 0, 1],
        clip_low=0.4,
        clip_high=0.4,
    )
    loss, clipped, gradient = run("gmpo", x)
    # A > 0: only above is clipped: (.4 - .5) / 2 = -.05. A < 0: .9 is not clipped above.
    g, h = math.exp(-0.05), math.exp(0.9)
    close(loss, [-2 * g, -2 * g, h])
    assert clipped == [True, False, False]
    # the mean over two tokens halves each one's share, and the sum over two tokens doubles it
    close(gradient, [0.0, -2 * g, h])


def test_cispo_by_hand():
    x = of([1.5, 0.1, 1.0], [1.0, -1.0, 2.0], old=[-1.0, -3.0, -2.0], clip_low=1.0, clip_high=0.28)
    loss, clipped, gradient = run("cispo", x)
    close(loss, [1.28 * (1 - math.log(1.5)), -0.1 * (3 - math.log(0.1)), 4.0])
    assert clipped == [True, False, False]
    close(gradient, [-1.28, 0.1, -2.0])  # never zero


def test_sapo_by_hand():
    x = of([1.0, 1.0, 3.0], [2.0, -1.0, -1.0])
    loss, clipped, gradient = run("sapo", x, tau_pos=1.0, tau_neg=2.0)
    gate = 2 / (1 + math.exp(-4.0))  # sigmoid(2 * (3 - 1)) * 4 / 2
    close(loss, [-4.0, 1.0, gate])  # at r = 1: sigmoid(0) * 4 / tau
    # eq. of its gradient: A * 4 p (1 - p) r; at r = 1 that of PPO
    p = 1 / (1 + math.exp(-4.0))
    close(gradient, [-2.0, 1.0, 4 * p * (1 - p) * 3])
    assert not any(clipped)


def test_gpg_by_hand():
    loss, clipped, gradient = run("gpg", of([2.0, 1.0], [1.0, -2.0], old=[-3.0, -1.0]))
    close(loss, [3 - math.log(2), -2.0])
    close(gradient, [-1.0, 2.0])
    assert not any(clipped)


def test_dro_by_hand():
    x = of([math.exp(0.5), math.exp(-1.0), 1.0], [1.0, -2.0, 3.0], old=[-3.0, -1.0, -2.0])
    loss, clipped, gradient = run("dro", x, beta=0.4)
    # -(A log theta - beta / 2 (log r)^2), and its slope by log theta: -A + beta log r
    close(loss, [2.5 + 0.2 * 0.25, -4.0 + 0.2 * 1.0, 6.0])
    close(gradient, [-1.0 + 0.4 * 0.5, 2.0 - 0.4 * 1.0, -3.0])
    assert not any(clipped)
    assert run("dro", x)[2][0].item() == pytest.approx(-1.0 + 0.1 * 0.5), "beta is 0.1 unless set"


def test_dro_settles_where_the_log_ratio_is_the_advantage_over_beta():
    """The minimum of its quadratic: the policy tilted by exp(A / beta), as the paper's closed form has it."""
    log_probs, old = torch.full((1,), -3.0, requires_grad=True), torch.full((1,), -3.0)
    for _ in range(200):
        x = LossInputs(log_probs, old, torch.tensor([0.8]), torch.tensor([0]), torch.ones(1))
        (slope,) = torch.autograd.grad(
            POLICY_LOSSES["dro"].function(x, beta=0.5)[0].sum(), log_probs
        )
        log_probs = (log_probs - 0.1 * slope).detach().requires_grad_()
    assert (log_probs - old).item() == pytest.approx(0.8 / 0.5, abs=1e-3)


def test_dppo_tv_by_hand():
    # probabilities old -> theta: .5 -> .8 and .5 -> .6 for a good token; .5 -> .2 and .01 -> .001 for a bad one
    p, q = [0.8, 0.6, 0.2, 0.001, 0.2], [0.5, 0.5, 0.5, 0.01, 0.5]
    advantage = [1.0, 1.0, -1.0, -1.0, 1.0]
    x = of([a / b for a, b in zip(p, q, strict=True)], advantage, old=[math.log(b) for b in q])
    loss, clipped, gradient = run("dppo_tv", x)
    # gaps .3, .1, .3, .009, .3; the last one is far out, but the update brings it back
    assert clipped == [True, False, True, False, False]
    close(gradient, [0.0, -1.2, 0.0, 0.1, -0.4])
    close(loss, [0.0, -1.2 * math.log(0.6), 0.0, 0.1 * math.log(0.001), -0.4 * math.log(0.2)])
    # PPO cuts the fourth too: a tenfold ratio, though of a probability of a hundredth
    assert run("vanilla", x)[1] == [True, False, True, True, False]
    far = of([50.0], [1.0], old=[math.log(1e-3)])
    close(run("dppo_tv", far)[2], [-20.0])
    close(run("dppo_tv", far, cap=2.0)[2], [-2.0])


def test_dppo_kl_by_hand():
    p, q = [0.8, 0.6, 0.2, 0.001, 0.2], [0.5, 0.5, 0.5, 0.01, 0.5]
    kl = [
        b * math.log(b / a) + (1 - b) * math.log((1 - b) / (1 - a))
        for a, b in zip(p, q, strict=True)
    ]
    x = of(
        [a / b for a, b in zip(p, q, strict=True)],
        [1.0, 1.0, -1.0, -1.0, 1.0],
        old=[math.log(b) for b in q],
    )
    for bound in (0.01, 0.02, 0.1, 0.3):
        y = LossInputs(**vars(x) | {"clip_low": bound, "clip_high": bound})
        assert run("dppo_kl", y)[1] == [k > bound and i != 4 for i, k in enumerate(kl)]
    # 0.0141 for the token of .01, 0.2231 for those of .5: one bound for each side
    y = LossInputs(**vars(x) | {"clip_low": 0.3, "clip_high": 0.1})
    assert run("dppo_kl", y)[1] == [True, False, False, False, False]


def test_covariance_by_hand():
    x = of([1.0] * 3, [1.0, -2.0, 1.0], old=[-1.0, -4.0, -4.0])
    close(pl._covariance(x), [2.0, 2.0, -1.0])


def test_clip_cov_by_hand():
    x = of(
        [1.0] * 4, [2.0, -2.0, 1.0, -1.0], old=[-1.0, -5.0, -2.5, -3.5]
    )  # covariances 4, 4, .5, .5
    vanilla = run("vanilla", x)[2]
    seen = set()
    for seed in range(20):
        torch.manual_seed(seed)
        loss, clipped, gradient = run("clip_cov", x)
        assert sum(clipped) == 1 and clipped.index(True) in (0, 1)  # one of the two within (1, 5)
        seen.add(clipped.index(True))
        torch.testing.assert_close(gradient, vanilla * ~torch.tensor(clipped))
        close(loss, [-2.0, 2.0, -1.0, 1.0])
    assert seen == {0, 1}
    assert run("clip_cov", x, share=0.5)[1] == [True, True, False, False]
    assert not any(run("clip_cov", x, cov_high=3.0)[1])
    x = of([2.0] * 4, [2.0, -2.0, 1.0, -1.0], old=[-2.0, -6.0, -3.5, -4.5])
    for seed in range(
        9
    ):  # PPO clips the first and the third; the one to draw is never spent on them
        torch.manual_seed(seed)
        assert run("clip_cov", x)[1] == [True, True, True, False]


def test_kl_cov_by_hand():
    x = of([1.1, 0.9, 1.3], [2.0, -2.0, 0.0], old=[-1.0, -5.0, -3.0])
    loss, clipped, gradient = run("kl_cov", x, coef=0.5)
    # means: A 0, log-prob about -3; covariances about 4.2, 4.2, 0, the first a little larger
    top = int(pl._covariance(x).argmax())
    want, slope = [-2.2, 1.8, 0.0], [-2.2, 1.8, 0.0]
    want[top] += 0.5 * abs(math.log([1.1, 0.9][top]))
    slope[top] += 0.5 * (1 if top == 0 else -1)
    close(loss, want)
    close(gradient, slope)
    assert clipped == [i == top for i in range(3)]
    assert run("kl_cov", x, share=0.7)[1] == [True, True, False]


# ---- what holds for all -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [n for n in NAMES if n != "kl_cov"])
def test_on_policy_all_are_the_policy_gradient(name):
    """At theta = old the gradient is -A for each token: an advantage weighs the same under every loss.

    clip_cov draws no token here (its range is empty), and kl_cov's |log r| has no slope at 0 either.
    """
    x = of(
        [1.0] * 5, [1.0, -2.0, -2.0, 0.5, 3.0], [0, 1, 1, 2, 3], old=[-1.0, -2.0, -0.5, -3.0, -1.5]
    )
    own = {"cov_low": 1e9, "cov_high": 1e9} if name == "clip_cov" else {}
    torch.testing.assert_close(run(name, x, **own)[2], -x.advantage)


def test_kl_cov_on_policy_is_the_policy_gradient():
    x = of([1.0] * 3, [1.0, -2.0, 0.5])
    torch.testing.assert_close(run("kl_cov", x)[2], -x.advantage)


def zero(up, advantage):
    return 0.0


def dppo(up, advantage):
    """Cut where the update pushes outward; else -A min(r, 20): 20 for a bad token above, nearly 0 for a good one below."""
    return 20.0 if up and advantage < 0 else 0.0


BEYOND_THE_LIMIT = {
    # The ratio is held there, so these have no slope.
    "vanilla": zero,
    "gspo": zero,
    "gmpo": zero,
    "sapo": zero,
    "clip_cov": zero,
    # Their weights are bounded, and every token keeps its gradient.
    "cispo": lambda up, advantage: -advantage * (1.2 if up else 0.8),
    "gpg": lambda up, advantage: -advantage,
    # Only its penalty follows the ratio.
    "dro": lambda up, advantage: -advantage,
    "dppo_tv": dppo,
    "dppo_kl": dppo,
    # The pull of |log r| towards the old policy, which is what this loss is for.
    "kl_cov": lambda up, advantage: 1.0 if up else -1.0,
}
"""The gradient of a token whose ratio is far above (`up`) or far below the limit; 20 % of clip on both sides."""

EXTREME_LOG_RATIOS = [
    21.0,
    -21.0,
    30.0,
    -30.0,
    100.0,
    -100.0,
    1e30,
    -1e30,
    float("inf"),
    float("-inf"),
]


def far_out(log_ratio):
    """Log-prob of theta and of the old policy: the likelier one is -1, and the other that much below."""
    return min(log_ratio, 0.0) - 1.0, -1.0 - max(log_ratio, 0.0)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("log_ratio", EXTREME_LOG_RATIOS)
@pytest.mark.parametrize("advantage", [1.0, -1.0])
def test_the_gradient_of_an_extreme_log_ratio(name, log_ratio, advantage):
    """One token, alone in its sequence: its gradient is bounded, and zero where the loss follows the ratio."""
    theta, mu = far_out(log_ratio)
    log_probs, old = torch.tensor([theta], requires_grad=True), torch.tensor([mu])
    x = LossInputs(log_probs, old, torch.tensor([advantage]), torch.tensor([0]), torch.ones(1))
    loss, _, gradient = run(name, x)
    close(gradient, [BEYOND_THE_LIMIT[name](log_ratio > 0, advantage)])
    unbounded = abs(log_ratio) == math.inf and name in (
        "kl_cov",
        "gpg",
        "dro",
        "cispo",
        "dppo_tv",
        "dppo_kl",
    )
    assert (
        torch.isfinite(loss).all() or unbounded
    )  # losses of log theta, or of |log r|, are as large as that


def gradient_beside(name, up, advantage):
    """The gradient of a token on the old policy whose sequence has one token beyond the limit, and no other."""
    held = (advantage > 0) == up
    if (
        name == "gspo"
    ):  # the mean of the two log-ratios is half the limit; its clip holds all of the sequence back
        return 0.0 if held else -advantage * math.exp(10.0 if up else -10.0)
    if (
        name == "gmpo"
    ):  # the other's log-ratio is clipped before the mean is taken, or counts as the limit
        other = 0.2 if held else 20.0
        return -advantage * math.exp((other if up else -other) / 2)
    return -advantage


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("log_ratio", EXTREME_LOG_RATIOS)
@pytest.mark.parametrize("advantage", [1.0, -1.0])
def test_the_gradient_beside_an_extreme_log_ratio(name, log_ratio, advantage):
    """Two tokens of one sequence, the second on the old policy."""
    theta, mu = far_out(log_ratio)
    log_probs, old = torch.tensor([theta, -1.0], requires_grad=True), torch.tensor([mu, -1.0])
    x = LossInputs(log_probs, old, torch.full((2,), advantage), torch.tensor([0, 0]), torch.ones(2))
    extreme, beside = run(name, x)[2].tolist()
    up = log_ratio > 0
    assert beside == pytest.approx(gradient_beside(name, up, advantage), rel=1e-4, abs=1e-6)
    not_drawn = name == "kl_cov" and extreme == 0.0  # it draws one of the two back
    assert not_drawn or extreme == pytest.approx(BEYOND_THE_LIMIT[name](up, advantage), abs=1e-5)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("log_ratio", [30.0, -30.0, 1e30])
@pytest.mark.parametrize(
    "mode", AlgorithmConfig.__dataclass_fields__["rollout_correction"].metadata["choices"]
)
def test_an_extreme_correction_weight_bounds_the_gradient(name, log_ratio, mode):
    """proximal / mu beyond every cap, theta at proximal: at most cap times the policy gradient, and no gradient of the
    weight itself."""
    theta, mu = far_out(log_ratio)
    log_probs, proximal = torch.tensor([theta], requires_grad=True), torch.tensor([theta])
    sequence = torch.tensor([0])
    weight = pl.correction_weights(log_probs, torch.tensor([mu]), sequence, mode, 2.0)
    want = (
        {"none": 1.0, "tis": 2.0, "seq-tis": 2.0}.get(mode, 0.0)
        if log_ratio > 0
        else float(mode == "none")
    )
    loss, _ = POLICY_LOSSES[name].function(
        LossInputs(log_probs, proximal, torch.ones(1), sequence, torch.ones(1))
    )
    (gradient,) = torch.autograd.grad((loss * weight).sum(), log_probs)
    close(gradient, [-want])


@pytest.mark.parametrize("name", NAMES)
def test_an_empty_micro_batch(name):
    empty = torch.zeros(0)
    x = LossInputs(
        torch.zeros(0, requires_grad=True), empty, empty, empty.long(), empty, clip_c=3.0
    )
    loss, clipped, gradient = run(name, x)
    assert loss.shape == gradient.shape == (0,) and clipped == []


@pytest.mark.parametrize("name", [n for n in NAMES if not n.endswith("_cov")])
@given(seed=st.integers(0, 1000))
@quick
def test_cutting_the_micro_batch_changes_nothing(name, seed):
    """Whole sequences in one micro-batch or in two: the same loss per token. (The _cov losses say that they differ.)"""
    g = torch.Generator().manual_seed(seed)
    old = -torch.rand(8, generator=g) * 3 - 0.1
    log_probs = (old + 0.4 * torch.randn(8, generator=g)).clamp(max=-0.01).requires_grad_()
    advantage, sequence = torch.randn(8, generator=g), torch.tensor([0, 0, 0, 1, 1, 2, 2, 2])
    whole = run(name, LossInputs(log_probs, old, advantage, sequence, torch.ones(8)))
    parts = []
    for part in (slice(0, 3), slice(3, 8)):
        ids = sequence[part] - sequence[part][0]
        piece = log_probs[part].detach().requires_grad_()
        parts.append(
            run(name, LossInputs(piece, old[part], advantage[part], ids, torch.ones(len(ids))))
        )
    torch.testing.assert_close(torch.cat([p[0] for p in parts]), whole[0])
    torch.testing.assert_close(torch.cat([p[2] for p in parts]), whole[2])


@pytest.mark.parametrize("name", [n for n in NAMES if not n.endswith("_cov") and n != "dro"])
def test_the_loss_scales_with_the_advantage(name):
    x = of([1.5, 0.6, 1.1, 0.9], [1.0, -1.0, 1.0, -2.0], [0, 0, 1, 2])
    y = LossInputs(**vars(x) | {"advantage": x.advantage * 3})
    torch.testing.assert_close(run(name, y)[2], 3 * run(name, x)[2])


# ---- rollout correction ---------------------------------------------------------------------------------------------


def test_correction_weights_by_hand():
    proximal, mu = torch.log(torch.tensor([0.5, 1.0, 3.0, 1.0, 2.1])), torch.zeros(5)
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
        got = pl.correction_weights(proximal, mu, sequence, mode, cap)
        torch.testing.assert_close(got, torch.tensor(expected, dtype=torch.float32))
        assert not got.requires_grad
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
        got = pl.correction_weights(proximal, mu, sequence, mode, cap, low)
        torch.testing.assert_close(
            got, torch.tensor(expected, dtype=torch.float32), msg=f"{mode} {low} {cap}"
        )
    # the geometric mean is held from below too
    assert pl.correction_weights(mu, mu + 1, sequence, "geo-mask", 2.0).tolist() == [0] * 5
    with pytest.raises(ValueError, match="unknown rollout correction 'other'"):
        pl.correction_weights(proximal, mu, sequence, "other", 2.0)


def test_decoupled_equals_plain_where_proximal_is_mu():
    mu, sequence = torch.randn(9), torch.arange(9) // 3
    for mode in AlgorithmConfig.__dataclass_fields__["rollout_correction"].metadata["choices"]:
        assert pl.correction_weights(mu, mu, sequence, mode, 2.0).tolist() == [1.0] * 9


@given(st.integers(0, 1000))
@quick
def test_sequence_truncation_is_unbiased_without_a_cap(seed):
    """Sum over all two-token sequences of mu * w = 1: the weight of a sequence is its true importance ratio."""
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


# ---- the registry -----------------------------------------------------------------------------------------------------


def squared(x, *, power=2.0):
    return x.log_probs.abs() ** power, x.sequence < 0


def test_a_loss_of_ones_own():
    x = of([1.0], [1.0], old=[-3.0])
    entry = POLICY_LOSSES.find(f"{__name__}:squared")
    assert entry.function(x)[0].tolist() == [9.0] and entry.settings() == {"power": 2.0}
    with pytest.raises(ConfigError, match="algorithm.policy_loss.*unknown.*vanilla, gspo"):
        POLICY_LOSSES.find("nothing")
    with pytest.raises(ValueError, match="exists already"):
        pl.register("gspo")(pl.gspo)


def test_the_names_are_known_without_torch():
    code = "import sys; from one_step_off.algorithms import policy_losses; from one_step_off.algorithms import advantages; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
