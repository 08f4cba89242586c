"""Policy losses and rollout corrections, per token. Formulas and sources: docs/concepts/algorithms.md.

A policy loss takes `LossInputs`, and its own settings by keyword; it returns the loss [n] (to be minimised, before its
aggregation weight) and bool [n]: where the method held a token back. Registered with a decorator here, it is known to
`algorithm.policy_loss`; one of your own comes in as `module:function`.

A micro-batch holds whole sequences, so ratios of sequences are exact however the batch is cut. Written with methods
of tensors alone: a config is checked against the names here, and must not wait for torch.
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
"""exp(20) = 4.9e8 is far outside every clip range, yet finite in float32. Without the limit one token with a
log-ratio above 88 gives an infinite ratio, and inf * 0 in the backward pass turns the whole gradient into NaN."""

POLICY_LOSSES = Registry("algorithm.policy_loss")
register = POLICY_LOSSES.register


@dataclass(frozen=True)
class LossInputs:
    """The n trained tokens of a micro-batch, one sequence after the other, and the clip ranges.

    Attributes:
        log_probs: log theta(token), [n]; the gradient flows through it.
        old_log_probs: log of the policy clipped around (mu or proximal), [n].
        advantage: [n].
        sequence: int64 [n]: which sequence a token belongs to, counted from 0 without gaps.
        weight: [n]; what the token's loss counts in the sum over the mini-batch (`core_algos.token_weights`).
        clip_low, clip_high: the ratio may go from 1 - clip_low to 1 + clip_high.
        clip_c: dual clip's bound for negative advantages; None: none.
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
    """exp(log_probs - old_log_probs), with the log-ratio held within ±LOG_RATIO_LIMIT. Any equal shapes.

    Beyond the limit the gradient is zero: such a token is broken evidence, not a direction to follow.
    """
    return (log_probs - old_log_probs).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()


def sequence_sums(x: Tensor, sequence: Tensor) -> Tensor:
    """Each token's sequence's sum of x, [n]; added up in float64, as thousands of small log-ratios need."""
    return x.new_zeros(len(x)).double().index_add(0, sequence, x.double())[sequence].to(x.dtype)


def sequence_means(x: Tensor, sequence: Tensor) -> Tensor:
    """Each token's sequence's mean of x, [n]."""
    return sequence_sums(x, sequence) / sequence_sums(x.new_ones(len(x)), sequence)


def _clipped_surrogate(ratio: Tensor, x: LossInputs) -> Loss:
    free, held = ratio * x.advantage, ratio.clamp(1.0 - x.clip_low, 1.0 + x.clip_high) * x.advantage
    return -free.minimum(held), (held < free).detach()


@register("vanilla")
def vanilla(x: LossInputs) -> Loss:
    """PPO (arXiv:1707.06347, eq. 7); two clip ranges: DAPO (arXiv:2503.14476, eq. 10); dual clip (arXiv:1912.09729).

    l = -min(r A, clip(r, 1 - clip_low, 1 + clip_high) A)      r = theta / old
    with clip_c, where A < 0:  l = min(l, -clip_c A)           so that a huge ratio cannot blow it up
    """
    loss, clipped = _clipped_surrogate(x.ratio(), x)
    if x.clip_c is None:
        return loss, clipped
    bound = -x.clip_c * x.advantage
    binds = (x.advantage < 0) & (loss > bound).detach()
    return bound.where(binds, loss), clipped | binds


@register("gspo")
def gspo(x: LossInputs) -> Loss:
    """GSPO (arXiv:2507.18071, eq. 5 to 7) in its token form (eq. 13 and 14): one ratio for a whole sequence.

        s = exp(mean_t log(theta / old))      l_t = -min(s_t A_t, clip(s_t) A_t)      s_t = sg(s) theta_t / sg(theta_t)

    With one advantage per sequence its gradient is that of the sequence form. Clip ranges are far smaller than PPO's:
    the paper has 3e-4 and 4e-4. Use loss_agg=sequence-mean.
    """
    # The token's own factor goes through the clamp too, so that beyond the limit it has no gradient.
    log_ratio = (x.log_probs - x.old_log_probs).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    sequence_ratio = sequence_means(log_ratio.detach(), x.sequence).exp()
    own_factor = (log_ratio - log_ratio.detach()).exp()
    return _clipped_surrogate(sequence_ratio * own_factor, x)


@register("gmpo")
def gmpo(x: LossInputs) -> Loss:
    """GMPO (arXiv:2507.20673): the geometric mean over a sequence of ratios clipped one by one.

        l_t = -A exp(mean_t k_t)      k = min(log r, clip_high) where A > 0, else max(log r, -clip_low)

    The range is one of log-ratios; the paper has 0.4 on both sides. For advantages per sequence, and
    loss_agg=sequence-mean.
    """
    log_ratio = (x.log_probs - x.old_log_probs).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    kept = log_ratio.clamp(max=x.clip_high).where(x.advantage > 0, log_ratio.clamp(min=-x.clip_low))
    return -x.advantage * sequence_means(kept, x.sequence).exp(), (kept != log_ratio).detach()


@register("cispo")
def cispo(x: LossInputs) -> Loss:
    """CISPO (arXiv:2506.13585, eq. 4 and 5): the weight is clipped, and every token keeps a gradient.

        l = -sg(clip(r, 1 - clip_low, 1 + clip_high)) A log theta

    clip_low = 1 leaves the lower side open, as the paper does.
    """
    ratio = x.ratio().detach()
    weight = ratio.clamp(1.0 - x.clip_low, 1.0 + x.clip_high)
    return -weight * x.advantage * x.log_probs, weight != ratio


@register("sapo")
def sapo(x: LossInputs, *, tau_pos: float = 1.0, tau_neg: float = 1.05) -> Loss:
    """SAPO (arXiv:2511.20347): a soft gate in place of the clip; it holds back off-policy tokens by degrees.

        l = -A (4 / tau) sigmoid(tau (r - 1))      tau = tau_pos where A > 0, else tau_neg

    At r = 1 its gradient is PPO's. It has no clip range; no token counts as clipped.
    """
    tau = (x.advantage > 0).to(x.advantage.dtype) * (tau_pos - tau_neg) + tau_neg
    gate = (tau * (x.ratio() - 1.0)).sigmoid() * 4.0 / tau
    return -gate * x.advantage, x.sequence < 0


@register("gpg")
def gpg(x: LossInputs) -> Loss:
    """GPG (arXiv:2504.02546): the plain policy gradient, l = -A log theta.

    It knows no older policy, so the step between mu and theta goes uncorrected unless rollout_correction does it.
    """
    return -x.advantage * x.log_probs, x.sequence < 0


@register("dro")
def dro(x: LossInputs, *, beta: float = 0.1) -> Loss:
    """DRO, Direct Reward Optimisation (arXiv:2405.19107), token by token: no ratio, but a quadratic pull to the old policy.

        l = -(A log theta - beta / 2 (log r)^2)      r = theta / old

    The paper's policy gradient has the reward less the value in A's place and tau in beta's, whole responses for tokens,
    and a reference for `old`. It knows no clip range; no token counts as clipped. Beyond the limit of log-ratios the
    pull is constant, so its gradient is zero there.
    """
    log_ratio = (x.log_probs - x.old_log_probs).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    return 0.5 * beta * log_ratio.square() - x.advantage * x.log_probs, x.sequence < 0


def _masked(x: LossInputs, near: Tensor, cap: float) -> Loss:
    """DPPO's loss: tokens outside the trust region (not `near`) that the update would push still further out are cut."""
    ratio = x.ratio().detach()
    keep = near | (x.advantage * (ratio - 1) <= 0)
    return -x.advantage * ratio.clamp(max=cap) * keep * x.log_probs, ~keep


@register("dppo_tv")
def dppo_tv(x: LossInputs, *, cap: float = 20.0) -> Loss:
    """DPPO with the binary total variation (arXiv:2602.04879): probabilities, not their ratio, bound the update.

        l = -A min(r, cap) m log theta      m = 0 where |theta - old| > clip and the update pushes outward

    clip_high bounds tokens with A > 0, clip_low those with A < 0. `old` is meant to be mu: old_log_probs=rollout.
    """
    gap = x.log_probs.detach().exp() - x.old_log_probs.exp()
    return _masked(x, (gap <= x.clip_high) & (gap >= -x.clip_low), cap)


@register("dppo_kl")
def dppo_kl(x: LossInputs, *, cap: float = 20.0) -> Loss:
    """DPPO with the binary KL (arXiv:2602.04879): as `dppo_tv`, with KL(old || theta) of "this token or another".

    KL = q log(q / p) + (1 - q) log((1 - q) / (1 - p)), q = old, p = theta, in nats.
    """
    log_p, log_q = x.log_probs.detach(), x.old_log_probs
    p, q = log_p.exp().clamp(max=1 - 1e-6), log_q.exp().clamp(max=1 - 1e-6)
    divergence = q * (log_q - log_p) + (1 - q) * ((-q).log1p() - (-p).log1p())
    bound = (log_p > log_q).to(q.dtype) * (x.clip_high - x.clip_low) + x.clip_low
    return _masked(x, divergence <= bound, cap)


def _covariance(x: LossInputs) -> Tensor:
    """(A - mean A)(log theta - mean log theta) per token (arXiv:2505.22617): large ones cost the most entropy."""
    log_probs = x.log_probs.detach()
    return (x.advantage - x.advantage.mean()) * (log_probs - log_probs.mean())


def _largest(values: Tensor, share: float) -> Tensor:
    """bool [n]: which of them are the `share` (at least one) that is largest."""
    count = min(len(values), max(1, int(share * len(values))))
    return values.new_zeros(len(values)).index_fill(0, values.topk(count).indices, 1.0) > 0


@register("clip_cov")
def clip_cov(
    x: LossInputs, *, share: float = 2e-4, cov_low: float = 1.0, cov_high: float = 5.0
) -> Loss:
    """Clip-Cov (arXiv:2505.22617): vanilla, but a random few tokens of high covariance get no gradient.

    `share` of all tokens (at least one) is drawn from those with cov_low < covariance < cov_high that PPO does not
    clip. The paper takes means and share over the mini-batch; here they are the micro-batch's, so in micro-batches of
    fewer than 1 / share tokens more than `share` may be held back.
    """
    loss, clipped = vanilla(x)
    covariance = _covariance(x)
    able = (covariance > cov_low) & (covariance < cov_high) & ~clipped
    # A random order of the able tokens; the others come behind all of them.
    order = covariance.new_empty(len(loss)).uniform_().where(able, covariance.new_zeros(()) - 1)
    drawn = _largest(order, share) & able
    return loss.detach().where(drawn, loss), clipped | drawn


@register("kl_cov")
def kl_cov(x: LossInputs, *, share: float = 2e-4, coef: float = 1.0) -> Loss:
    """KL-Cov (arXiv:2505.22617): no clip; the tokens of highest covariance are drawn back to the old policy.

        l = -r A, plus coef |log(theta / old)| for the `share` (at least one token) of highest covariance

    Means and share are the micro-batch's, as in `clip_cov`. Tokens drawn back count as clipped.
    """
    loss = -x.ratio() * x.advantage
    drawn = _largest(_covariance(x), share)
    return loss + coef * drawn * (x.log_probs - x.old_log_probs).abs(), drawn


def correction_weights(
    proximal: Tensor, mu: Tensor, sequence: Tensor, mode: str, cap: float, low: float | None = None
) -> Tensor:
    """Importance weight w = proximal / mu of decoupled PPO (arXiv:2110.00641, section 3; AReaL, arXiv:2505.24298, eq. 5).

        none, tis, mis      1;  w held within [low, cap], truncated;  w where it lies in [low, cap], else 0, masked
        seq-tis, seq-mis    the same with the product of the sequence's w, for all its tokens
        geo-mask            1 where the geometric mean of the sequence's w lies in [low, cap], else 0

    `mis` with both bounds is IcePop (arXiv:2510.18855). Masked tokens still count in the loss's denominator: masking is
    part of the estimator.

    Args:
        proximal, mu: log-probs, [n], nats.
        sequence: int64 [n], as in `LossInputs`.
        low: None: 0, and 1 / cap for geo-mask.

    Returns:
        [n], detached: the weight says how much a token counts and is nothing to optimise.
    """
    log_w = (proximal - mu).detach().clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    if mode == "geo-mask":
        log_mean, top = sequence_means(log_w, sequence), math.log(cap)
        inside = (
            log_mean.abs() <= abs(top)
            if low is None
            else (log_mean >= math.log(low)) & (log_mean <= top)
        )
        return inside.to(log_w.dtype)
    if mode.startswith("seq-"):
        log_w = sequence_sums(log_w, sequence).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    w = log_w.exp()
    inside = (w >= (low or 0.0)) & (w <= cap)
    return {"none": w.new_ones(len(w)), "tis": w.clamp(low, cap), "mis": w * inside}[
        mode.removeprefix("seq-")
    ]
