"""Properties of all policy losses."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from one_step_off.algorithms import policy_losses as pl
from one_step_off.algorithms.policy_losses import POLICY_LOSSES, LossInputs
from one_step_off.config.schema import AlgorithmConfig
from tests.unit.algorithms.policy_loss_helpers import NAMES, close, of, quick, run


@pytest.mark.parametrize("name", [n for n in NAMES if n != "kl_cov"])
def test_on_policy_all_are_the_policy_gradient(name):
    """At theta = old the gradient is -A for each token: an advantage weighs the same under every
    loss.

    clip_cov draws no token here (its range is empty), and kl_cov's |log r| has no slope at 0
    either.
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
    """Cut where the update pushes outward; else -A min(r, 20): 20 for a bad token above, nearly 0
    for a good one below.
    """
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
"""The gradient of a token whose ratio is far above (`up`) or far below the limit; 20 % of clip on
both sides.
"""

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
    """Log-prob of theta and of the old policy: the likelier one is -1, and the other that much
    below.
    """
    return min(log_ratio, 0.0) - 1.0, -1.0 - max(log_ratio, 0.0)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("log_ratio", EXTREME_LOG_RATIOS)
@pytest.mark.parametrize("advantage", [1.0, -1.0])
def test_the_gradient_of_an_extreme_log_ratio(name, log_ratio, advantage):
    """One token, alone in its sequence: its gradient is bounded, and zero where the loss follows
    the ratio.
    """
    theta, mu = far_out(log_ratio)
    log_probs = torch.tensor([theta], requires_grad=True)
    old = torch.tensor([mu])
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
    """The gradient of a token on the old policy whose sequence has one token beyond the limit, and
    no other.
    """
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
    log_probs = torch.tensor([theta, -1.0], requires_grad=True)
    old = torch.tensor([mu, -1.0])
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
    """proximal / mu beyond every cap, theta at proximal: at most cap times the policy gradient, and
    no gradient of the weight itself."""
    theta, mu = far_out(log_ratio)
    log_probs = torch.tensor([theta], requires_grad=True)
    proximal = torch.tensor([theta])
    sequence = torch.tensor([0])
    weight = pl.correction_weights(log_probs, torch.tensor([mu]), sequence, mode, 2.0)
    expected = (
        {"none": 1.0, "tis": 2.0, "seq-tis": 2.0}.get(mode, 0.0)
        if log_ratio > 0
        else float(mode == "none")
    )
    loss, _ = POLICY_LOSSES[name].function(
        LossInputs(log_probs, proximal, torch.ones(1), sequence, torch.ones(1))
    )
    (gradient,) = torch.autograd.grad((loss * weight).sum(), log_probs)
    close(gradient, [-expected])


@pytest.mark.parametrize("name", NAMES)
def test_an_empty_micro_batch(name):
    empty = torch.zeros(0)
    x = LossInputs(
        torch.zeros(0, requires_grad=True), empty, empty, empty.long(), empty, clip_c=3.0
    )
    loss, clipped, gradient = run(name, x)
    assert loss.shape == gradient.shape == (0,)
    assert clipped == []


@pytest.mark.parametrize("name", [n for n in NAMES if not n.endswith("_cov")])
@given(seed=st.integers(0, 1000))
@quick
def test_cutting_the_micro_batch_changes_nothing(name, seed):
    """Whole sequences in one micro-batch or in two: the same loss per token. (The _cov losses say
    that they differ.)
    """
    g = torch.Generator().manual_seed(seed)
    old = -torch.rand(8, generator=g) * 3 - 0.1
    log_probs = (old + 0.4 * torch.randn(8, generator=g)).clamp(max=-0.01).requires_grad_()
    advantage = torch.randn(8, generator=g)
    sequence = torch.tensor([0, 0, 0, 1, 1, 2, 2, 2])
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
