"""Policy losses and rollout corrections, per token.

Formulas and sources: docs/concepts/policy_losses.md.

The PPO clip loss is `ppo_clip`, registered as "vanilla". To add a loss, write one function here
with `@register("name")`: `algorithm.policy_loss` then knows it. A policy loss takes `LossInputs`,
and its own settings by keyword. It returns

    the loss [n], to be minimized, before its aggregation weight, and
    bool [n]: the tokens that the loss clips or masks, which the metric clip_frac counts.

Users name their own as `module:function`. A micro-batch holds whole sequences, so ratios of
sequences do not depend on how the batch was cut.

The functions use methods of tensors only, and do not import torch: a config is checked against the
names here, and must not wait for that import.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from one_step_off.config.registry import Registry

if TYPE_CHECKING:
    from torch import Tensor

    Loss = tuple[Tensor, Tensor]  # what every policy loss returns

LOG_RATIO_LIMIT = 20.0
"""exp(20) = 4.9e8 is far outside every clip range, yet finite in float32. Without the limit one
token with a log-ratio above 88 gives an infinite ratio, and inf * 0 in the backward pass turns the
whole gradient into NaN."""

POLICY_LOSSES = Registry("algorithm.policy_loss")
register = POLICY_LOSSES.register


@dataclass(frozen=True)
class LossInputs:
    """The n trained tokens of a micro-batch, one sequence after another, and the clip ranges.

    Attributes:
        log_probs: log theta(token), [n]; the gradient flows through it.
        old_log_probs: log-prob under the policy that the clip is centered on (mu or proximal), [n].
        advantage: [n].
        sequence: int64 [n]: which sequence a token belongs to, counted from 0 without gaps.
        weight: [n]; the weight of the token's loss in the sum over the mini-batch, see
            `core_algos.token_weights`.
        clip_low, clip_high: the clip range of the ratio is 1 - clip_low to 1 + clip_high.
        clip_c: bound of the dual clip for negative advantages; None: no dual clip.
    """

    log_probs: Tensor
    old_log_probs: Tensor
    advantage: Tensor
    sequence: Tensor
    weight: Tensor
    clip_low: float = 0.2
    clip_high: float = 0.2
    clip_c: float | None = None

    def ratio(self) -> Tensor:
        """theta / old, [n]."""
        return ratio_of(self.log_probs, self.old_log_probs)


def ratio_of(log_probs: Tensor, old_log_probs: Tensor) -> Tensor:
    """exp(log_probs - old_log_probs), with the log-ratio clamped to ±LOG_RATIO_LIMIT. Any equal
    shapes.

    Beyond the limit the gradient is zero: such a token is an outlier, not a direction to follow.
    """
    return clamp_log_ratio(log_probs - old_log_probs).exp()


def clamp_log_ratio(log_ratio: Tensor) -> Tensor:
    """The log-ratio within ±LOG_RATIO_LIMIT."""
    return log_ratio.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)


def sequence_sums(x: Tensor, sequence: Tensor) -> Tensor:
    """For each token the sum of x over its sequence, [n].

    Computed in float64, which sums of thousands of small log-ratios need.
    """
    sums = x.new_zeros(len(x)).double().index_add(0, sequence, x.double())
    return sums[sequence].to(x.dtype)


def sequence_means(x: Tensor, sequence: Tensor) -> Tensor:
    """For each token the mean of x over its sequence, [n]."""
    return sequence_sums(x, sequence) / sequence_sums(x.new_ones(len(x)), sequence)


def _none_held_back(x: LossInputs) -> Tensor:
    """bool [n], all False."""
    return x.sequence < 0


def _clipped_surrogate(ratio: Tensor, x: LossInputs) -> Loss:
    """-min(r A, clip(r) A), and where the clip binds."""
    unclipped = ratio * x.advantage
    clipped = ratio.clamp(1.0 - x.clip_low, 1.0 + x.clip_high) * x.advantage
    return -unclipped.minimum(clipped), (clipped < unclipped).detach()


@register("vanilla")
def ppo_clip(x: LossInputs) -> Loss:
    """The PPO clip loss (arXiv:1707.06347, eq. 7).

        l = -min(r A, clip(r, 1 - clip_low, 1 + clip_high) A)      r = theta / old

    Two clip ranges: DAPO (arXiv:2503.14476, eq. 10). Dual clip (arXiv:1912.09729): with clip_c,
    where A < 0, l = min(l, -clip_c A), so that a huge ratio does not give a huge loss.
    """
    loss, clipped = _clipped_surrogate(x.ratio(), x)
    if x.clip_c is None:
        return loss, clipped
    bound = -x.clip_c * x.advantage
    binds = (x.advantage < 0) & (loss > bound).detach()
    return bound.where(binds, loss), clipped | binds


@register("gspo")
def gspo(x: LossInputs) -> Loss:
    """GSPO (arXiv:2507.18071, eq. 5 to 7) in its token form (eq. 13 and 14): one ratio for a whole
    sequence.

        s = exp(mean_t log(theta / old))
        s_t = sg(s) theta_t / sg(theta_t)
        l_t = -min(s_t A_t, clip(s_t) A_t)

    With one advantage per sequence the gradient is that of the sequence form. The clip ranges are
    far smaller than PPO's: the paper uses 3e-4 and 4e-4. Use loss_agg=sequence-mean.
    """
    # The token's own factor is clamped too, so that it has no gradient beyond the limit.
    log_ratio = clamp_log_ratio(x.log_probs - x.old_log_probs)
    sequence_ratio = sequence_means(log_ratio.detach(), x.sequence).exp()
    own_factor = (log_ratio - log_ratio.detach()).exp()
    return _clipped_surrogate(sequence_ratio * own_factor, x)


@register("gmpo")
def gmpo(x: LossInputs) -> Loss:
    """GMPO (arXiv:2507.20673): the geometric mean over a sequence of ratios clipped one by one.

        l_t = -A exp(mean_t k_t)
        k = min(log r, clip_high) where A > 0, else max(log r, -clip_low)

    The clip range is one of log-ratios; the paper uses 0.4 on both sides. It is meant for
    advantages per sequence, and for loss_agg=sequence-mean.
    """
    log_ratio = clamp_log_ratio(x.log_probs - x.old_log_probs)
    clipped_above = log_ratio.clamp(max=x.clip_high)
    clipped_below = log_ratio.clamp(min=-x.clip_low)
    clipped = clipped_above.where(x.advantage > 0, clipped_below)
    loss = -x.advantage * sequence_means(clipped, x.sequence).exp()
    return loss, (clipped != log_ratio).detach()


@register("cispo")
def cispo(x: LossInputs) -> Loss:
    """CISPO (arXiv:2506.13585, eq. 4 and 5): the weight is clipped, and every token keeps a
    gradient.

        l = -sg(clip(r, 1 - clip_low, 1 + clip_high)) A log theta

    clip_low = 1 gives no lower bound, as in the paper.
    """
    ratio = x.ratio().detach()
    weight = ratio.clamp(1.0 - x.clip_low, 1.0 + x.clip_high)
    return -weight * x.advantage * x.log_probs, weight != ratio


@register("sapo")
def sapo(x: LossInputs, *, tau_pos: float = 1.0, tau_neg: float = 1.05) -> Loss:
    """SAPO (arXiv:2511.20347): a soft gate instead of the clip; it weakens off-policy tokens
    gradually.

        l = -A (4 / tau) sigmoid(tau (r - 1))      tau = tau_pos where A > 0, else tau_neg

    At r = 1 the gradient is PPO's. There is no clip range, and no token counts as held back.
    """
    tau = (x.advantage > 0).to(x.advantage.dtype) * (tau_pos - tau_neg) + tau_neg
    gate = (tau * (x.ratio() - 1.0)).sigmoid() * 4.0 / tau
    return -gate * x.advantage, _none_held_back(x)


@register("gpg")
def gpg(x: LossInputs) -> Loss:
    """GPG (arXiv:2504.02546): the plain policy gradient, l = -A log theta.

    It has no ratio, so the step between mu and theta is corrected only by rollout_correction.
    """
    return -x.advantage * x.log_probs, _none_held_back(x)


@register("dro")
def dro(x: LossInputs, *, beta: float = 0.1) -> Loss:
    """DRO, Direct Reward Optimization (arXiv:2405.19107), per token: a quadratic penalty instead of
    a ratio.

        l = -(A log theta - beta / 2 (log r)^2)      r = theta / old

    The paper's policy gradient uses reward - value as A, calls beta tau, is over whole responses,
    and uses a reference policy as `old`. There is no clip range, and no token counts as held back.
    Beyond the limit of log-ratios the penalty is constant, so its gradient is zero.
    """
    log_ratio = clamp_log_ratio(x.log_probs - x.old_log_probs)
    loss = 0.5 * beta * log_ratio.square() - x.advantage * x.log_probs
    return loss, _none_held_back(x)


def _trust_region_loss(x: LossInputs, inside: Tensor, cap: float) -> Loss:
    """The loss of DPPO: tokens outside the trust region are masked if the update would push them
    further out.

    `inside`: bool [n], the tokens within the trust region.
    """
    ratio = x.ratio().detach()
    moves_inward = x.advantage * (ratio - 1) <= 0
    keep = inside | moves_inward
    loss = -x.advantage * ratio.clamp(max=cap) * keep * x.log_probs
    return loss, ~keep


@register("dppo_tv")
def dppo_tv(x: LossInputs, *, cap: float = 20.0) -> Loss:
    """DPPO with the binary total variation (arXiv:2602.04879): it bounds probabilities, not their
    ratio.

        l = -A min(r, cap) m log theta
        m = 0 where |theta - old| > clip and the update pushes outward

    clip_high bounds tokens with A > 0, clip_low those with A < 0. `old` should be mu:
    old_log_probs=rollout.
    """
    difference = x.log_probs.detach().exp() - x.old_log_probs.exp()
    inside = (difference <= x.clip_high) & (difference >= -x.clip_low)
    return _trust_region_loss(x, inside, cap)


@register("dppo_kl")
def dppo_kl(x: LossInputs, *, cap: float = 20.0) -> Loss:
    """DPPO with the binary KL (arXiv:2602.04879): as `dppo_tv`, with the KL of "this token or
    another".

    KL(old || theta) = q log(q / p) + (1 - q) log((1 - q) / (1 - p))    q = old, p = theta, in nats
    """
    log_p = x.log_probs.detach()
    log_q = x.old_log_probs
    p = log_p.exp().clamp(max=1 - 1e-6)
    q = log_q.exp().clamp(max=1 - 1e-6)
    divergence = q * (log_q - log_p) + (1 - q) * ((-q).log1p() - (-p).log1p())
    has_grown = (log_p > log_q).to(q.dtype)
    bound = has_grown * (x.clip_high - x.clip_low) + x.clip_low
    return _trust_region_loss(x, divergence <= bound, cap)


def _covariance(x: LossInputs) -> Tensor:
    """(A - mean A)(log theta - mean log theta) per token (arXiv:2505.22617): large ones reduce
    entropy most.
    """
    log_probs = x.log_probs.detach()
    return (x.advantage - x.advantage.mean()) * (log_probs - log_probs.mean())


def _largest(values: Tensor, share: float) -> Tensor:
    """bool [n]: the largest values, a share of all, but at least one."""
    count = min(len(values), max(1, int(share * len(values))))
    largest = values.topk(count).indices
    return values.new_zeros(len(values)).index_fill(0, largest, 1.0) > 0


@register("clip_cov")
def clip_cov(
    x: LossInputs, *, share: float = 2e-4, cov_low: float = 1.0, cov_high: float = 5.0
) -> Loss:
    """Clip-Cov (arXiv:2505.22617): the PPO clip loss, but a few random tokens of high covariance
    get no gradient.

    `share` of all tokens (at least one) is drawn from those with cov_low < covariance < cov_high
    that PPO does not clip. The paper takes means and share over the mini-batch. Here they are those
    of the micro-batch, so in micro-batches of fewer than 1 / share tokens more than `share` may be
    held back.
    """
    loss, clipped = ppo_clip(x)
    covariance = _covariance(x)
    is_candidate = (covariance > cov_low) & (covariance < cov_high) & ~clipped
    # A random priority for each candidate; the other tokens come after all candidates.
    random_priority = covariance.new_empty(len(loss)).uniform_()
    priority = random_priority.where(is_candidate, covariance.new_zeros(()) - 1)
    drawn = _largest(priority, share) & is_candidate
    return loss.detach().where(drawn, loss), clipped | drawn


@register("kl_cov")
def kl_cov(x: LossInputs, *, share: float = 2e-4, coef: float = 1.0) -> Loss:
    """KL-Cov (arXiv:2505.22617): no clip, but a KL penalty on the tokens of highest covariance.

        l = -r A, plus coef |log(theta / old)| for the `share` (at least one token) of highest
        covariance

    Means and share are those of the micro-batch, as in `clip_cov`. Penalized tokens count as held
    back.
    """
    loss = -x.ratio() * x.advantage
    penalized = _largest(_covariance(x), share)
    penalty = coef * penalized * (x.log_probs - x.old_log_probs).abs()
    return loss + penalty, penalized


def correction_weights(
    proximal: Tensor, mu: Tensor, sequence: Tensor, mode: str, cap: float, low: float | None = None
) -> Tensor:
    """Importance weight w = proximal / mu of decoupled PPO.

    Sources: arXiv:2110.00641, section 3; AReaL, arXiv:2505.24298, eq. 5.

        none      1
        tis       w clamped to [low, cap]: truncated importance sampling
        mis       w where it is within [low, cap], else 0: masked importance sampling
        seq-tis, seq-mis
                  the same with the product of w over the sequence, for all its tokens
        geo-mask  1 where the geometric mean of w over the sequence is within [low, cap], else 0

    `mis` with both bounds is IcePop (arXiv:2510.18855). Masked tokens still count in the
    denominator of the loss: masking is part of the estimator.

    Args:
        proximal, mu: log-probs, [n], nats.
        sequence: int64 [n], as in `LossInputs`.
        mode: `algorithm.rollout_correction`.
        cap, low: bounds of w; low None: 0, and 1 / cap for geo-mask.

    Returns:
        [n], detached: the weight is a constant of the loss.

    Raises:
        ValueError: there is no such mode.
    """
    log_w = clamp_log_ratio((proximal - mu).detach())
    if mode == "geo-mask":
        return _geometric_mask(log_w, sequence, cap, low)
    if mode.startswith("seq-"):
        log_w = clamp_log_ratio(sequence_sums(log_w, sequence))
        mode = mode.removeprefix("seq-")
    w = log_w.exp()
    if mode == "tis":
        return w.clamp(low, cap)
    if mode == "mis":
        return w * ((w >= (low or 0.0)) & (w <= cap))
    if mode == "none":
        return w.new_ones(len(w))
    raise ValueError(f"unknown rollout correction {mode!r}")


def _geometric_mask(log_w: Tensor, sequence: Tensor, cap: float, low: float | None) -> Tensor:
    """1 for tokens of sequences whose geometric mean of w is within the bounds, else 0."""
    log_mean = sequence_means(log_w, sequence)
    log_cap = math.log(cap)
    if low is None:
        inside = log_mean.abs() <= abs(log_cap)
    else:
        inside = (log_mean >= math.log(low)) & (log_mean <= log_cap)
    return inside.to(log_w.dtype)
