"""Policy losses, checked by hand, and their registry."""

import math
import subprocess
import sys

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from one_step_off.algorithms import policy_losses as pl
from one_step_off.algorithms.policy_losses import POLICY_LOSSES, LossInputs
from one_step_off.config.errors import ConfigError
from tests.unit.algorithms.policy_loss_helpers import close, of, quick, run


def test_vanilla_by_hand():
    x = of([1.5, 1.5, 0.5, 0.5, 1.1], [1.0, -1.0, 1.0, -1.0, 2.0], clip_low=0.2, clip_high=0.3)
    loss, clipped, gradient = run("vanilla", x)
    # eq. 7: clipped only where that makes the objective smaller; there the gradient is 0, elsewhere
    # -r A
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
    old = -torch.rand(9, generator=g) - 1
    sequence = torch.tensor([0, 0, 0, 0, 1, 1, 2, 2, 2])
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
    (expected,) = torch.autograd.grad(total, log_probs)
    torch.testing.assert_close(gradient, expected, rtol=1e-5, atol=1e-6)


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
    g = math.exp(-0.05)
    h = math.exp(0.9)
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
    """The minimum of its quadratic: the policy tilted by exp(A / beta), as the paper's closed form
    has it.
    """
    log_probs = torch.full((1,), -3.0, requires_grad=True)
    old = torch.full((1,), -3.0)
    for _ in range(200):
        x = LossInputs(log_probs, old, torch.tensor([0.8]), torch.tensor([0]), torch.ones(1))
        (slope,) = torch.autograd.grad(
            POLICY_LOSSES["dro"].function(x, beta=0.5)[0].sum(), log_probs
        )
        log_probs = (log_probs - 0.1 * slope).detach().requires_grad_()
    assert (log_probs - old).item() == pytest.approx(0.8 / 0.5, abs=1e-3)


def test_dppo_tv_by_hand():
    # probabilities old -> theta: .5 -> .8 and .5 -> .6 for a good token; .5 -> .2 and .01 -> .001
    # for a bad one
    p = [0.8, 0.6, 0.2, 0.001, 0.2]
    q = [0.5, 0.5, 0.5, 0.01, 0.5]
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
    p = [0.8, 0.6, 0.2, 0.001, 0.2]
    q = [0.5, 0.5, 0.5, 0.01, 0.5]
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
        assert sum(clipped) == 1
        assert clipped.index(True) in (0, 1)  # one of the two within (1, 5)
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
    expected = [-2.2, 1.8, 0.0]
    slope = [-2.2, 1.8, 0.0]
    expected[top] += 0.5 * abs(math.log([1.1, 0.9][top]))
    slope[top] += 0.5 * (1 if top == 0 else -1)
    close(loss, expected)
    close(gradient, slope)
    assert clipped == [i == top for i in range(3)]
    assert run("kl_cov", x, share=0.7)[1] == [True, True, False]


def squared(x, *, power=2.0):
    return x.log_probs.abs() ** power, x.sequence < 0


def test_a_loss_of_ones_own():
    x = of([1.0], [1.0], old=[-3.0])
    entry = POLICY_LOSSES.find(f"{__name__}:squared")
    assert entry.function(x)[0].tolist() == [9.0]
    assert entry.settings() == {"power": 2.0}
    with pytest.raises(ConfigError, match="algorithm.policy_loss.*unknown.*vanilla, gspo"):
        POLICY_LOSSES.find("nothing")
    with pytest.raises(ValueError, match="exists already"):
        pl.register("gspo")(pl.gspo)


def test_the_names_are_known_without_torch():
    code = (
        "import sys; from one_step_off.algorithms import policy_losses; "
        "from one_step_off.algorithms import advantages; sys.exit('torch' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
