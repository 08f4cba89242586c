"""The mathematics of the trainer: pure functions of numpy arrays or tensors.

No I/O, no config object, no collective. Three policies appear throughout:

    mu        the policy that made the tokens (the engine's weights, one step behind)
    proximal  the policy around which PPO clips: mu itself, or the trainer's weights before the update
    theta     the policy being trained

Log-probs are in nats. Sums over micro-batches and ranks are expressed as per-token weights with global
denominators (`token_weights`), so the gradient does not depend on how the batch was cut.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Sequence

import numpy as np
import torch

AdvantageEstimator = Callable[..., np.ndarray]
ADVANTAGE_ESTIMATORS: dict[str, AdvantageEstimator] = {}

LOG_RATIO_LIMIT = 20.0
"""exp(20) = 4.9e8 is far outside every clip range, yet finite in float32. Without the limit one token with a
log-ratio above 88 gives an infinite ratio, and inf * 0 in the backward pass turns the whole gradient into NaN."""


def register(name: str) -> Callable[[AdvantageEstimator], AdvantageEstimator]:
    """Make an advantage estimator known by `name`, the value of `algorithm.adv_estimator`.

    An estimator takes (rewards [B], groups of length B, norm_by_std) and returns float32 [B].
    """

    def add(function: AdvantageEstimator) -> AdvantageEstimator:
        if name in ADVANTAGE_ESTIMATORS:
            raise ValueError(f"an advantage estimator named {name!r} exists already")
        ADVANTAGE_ESTIMATORS[name] = function
        return function

    return add


def advantages(
    name: str, rewards: Sequence[float] | np.ndarray, groups: Sequence[Hashable], norm_by_std: bool = True
) -> np.ndarray:
    """Advantages by the registered estimator `name`; float32 [B], one per sample."""
    if name not in ADVANTAGE_ESTIMATORS:
        raise KeyError(f"no advantage estimator {name!r}; known: {sorted(ADVANTAGE_ESTIMATORS)}")
    values = np.asarray(rewards, dtype=np.float64)
    if values.shape != (len(groups),):
        raise ValueError(f"rewards have shape {values.shape}, but there are {len(groups)} groups' names")
    if not np.isfinite(values).all():
        raise ValueError(f"the reward of sample {int(np.flatnonzero(~np.isfinite(values))[0])} is not finite")
    return ADVANTAGE_ESTIMATORS[name](values, groups, norm_by_std).astype(np.float32)


@register("grpo")
def grpo(rewards: np.ndarray, groups: Sequence[Hashable], norm_by_std: bool = True, eps: float = 1e-6) -> np.ndarray:
    """Group-relative advantages (GRPO, arXiv:2402.03300, section 4.1.2, outcome supervision).

        A_i = (r_i - mean(r)) / (std(r) + eps)          over the samples i of one prompt

    `std` is the sample standard deviation (n - 1), as in common implementations. Without `norm_by_std`
    the division is left out (Dr. GRPO, arXiv:2503.20783). A group without variance gives exact zeros:
    rounding in the mean must not be blown up by 1 / eps. A group of one is such a group: its only
    baseline is itself, so it teaches nothing.

    Args:
        rewards: [B], any unit.
        groups: B names; equal names form a group, wherever they stand.

    Returns:
        [B], in standard deviations, or in the unit of the reward without normalisation.
    """
    members: dict[Hashable, list[int]] = {}
    for i, group in enumerate(groups):
        members.setdefault(group, []).append(i)
    result = np.zeros(len(rewards), dtype=np.float64)
    for index in members.values():
        r = rewards[index]
        if len(r) == 1 or r.max() == r.min():
            continue
        centred = r - r.mean()
        result[index] = centred / (r.std(ddof=1) + eps) if norm_by_std else centred
    return result


def to_tokens(per_sample: np.ndarray, loss_masks: Sequence[np.ndarray]) -> list[np.ndarray]:
    """Give every trained token its sample's value: B values and B masks [R_i] -> B float32 arrays [R_i]."""
    return [np.where(mask, value, 0.0).astype(np.float32) for value, mask in zip(per_sample, loss_masks, strict=True)]


def token_weights(
    lengths: Sequence[int] | np.ndarray, agg: str, global_tokens: int, global_sequences: int
) -> np.ndarray:
    """The weight of each trained token of a sequence in the loss, so that loss = sum over all tokens of weight * l.

        token-mean     w_i = 1 / global_tokens                     (DAPO, arXiv:2503.14476, eq. 8)
        sequence-mean  w_i = 1 / (len_i * global_sequences)        (GRPO, arXiv:2402.03300, eq. 3)

    The denominators count the whole mini-batch over all ranks, so parts simply add up.

    Args:
        lengths: trained tokens of each sequence, [B].
        global_tokens: trained tokens of the whole mini-batch.
        global_sequences: sequences of the whole mini-batch with at least one trained token.

    Returns:
        float64 [B]; 0 for a sequence without trained tokens.
    """
    n = np.asarray(lengths, dtype=np.float64)
    if agg == "token-mean":
        return np.where(n > 0, 1.0 / max(global_tokens, 1), 0.0)
    if agg == "sequence-mean":
        return np.where(n > 0, 1.0 / (np.maximum(n, 1) * max(global_sequences, 1)), 0.0)
    raise ValueError(f"unknown loss aggregation {agg!r}")


def ratio_of(log_probs: torch.Tensor, old_log_probs: torch.Tensor) -> torch.Tensor:
    """exp(log_probs - old_log_probs), with the log-ratio held within ±LOG_RATIO_LIMIT. Any equal shapes.

    Beyond the limit the gradient is zero: such a token is broken evidence, not a direction to follow.
    """
    return (log_probs - old_log_probs).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()


def policy_loss(
    log_probs: torch.Tensor,
    old_log_probs: torch.Tensor,
    advantage: torch.Tensor,
    clip_low: float,
    clip_high: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Clipped surrogate per token (PPO, arXiv:1707.06347, eq. 7; two clip ranges: DAPO, arXiv:2503.14476, eq. 8).

        l = -min(r A, clip(r, 1 - clip_low, 1 + clip_high) A)      r = theta / old

    Args:
        log_probs: log theta(token), [n]; the gradient flows through it.
        old_log_probs: log of the policy clipped around, [n].
        advantage: [n].

    Returns:
        The loss [n] (to be minimised), and bool [n]: where the clip binds, so that the gradient is zero.
    """
    ratio = ratio_of(log_probs, old_log_probs)
    free = ratio * advantage
    held = ratio.clamp(1.0 - clip_low, 1.0 + clip_high) * advantage
    return -torch.minimum(free, held), (held < free).detach()


def value_loss(
    values: torch.Tensor, old_values: torch.Tensor, returns: torch.Tensor, clip_range: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Clipped value loss per token (PPO as in its authors' code; Engstrom et al., arXiv:2005.12729, eq. 2).

        l = max((V - R)^2, (clip(V, V_old - c, V_old + c) - R)^2) / 2

    Args:
        values: V, [n]; the gradient flows through it.
        old_values, returns: [n].
        clip_range: c, in units of the value.

    Returns:
        The loss [n], and bool [n]: where the clip binds.
    """
    held = old_values + (values - old_values).clamp(-clip_range, clip_range)
    free_error, held_error = (values - returns).square(), (held - returns).square()
    return 0.5 * torch.maximum(free_error, held_error), (held_error > free_error).detach()


def correction_weights(
    proximal_log_probs: torch.Tensor, mu_log_probs: torch.Tensor, mode: str, cap: float
) -> torch.Tensor:
    """Importance weight proximal / mu of decoupled PPO (arXiv:2110.00641, section 3; AReaL, arXiv:2505.24298, eq. 5).

        none  1                                (the proximal policy is taken for the sampling policy)
        tis   min(w, cap)                      truncated
        mis   w where w <= cap, else 0         masked

    Returns:
        [n], detached: the weight says how much a token counts and is nothing to optimise.
    """
    if mode == "none":
        return torch.ones_like(proximal_log_probs)
    weight = ratio_of(proximal_log_probs, mu_log_probs).detach()
    if mode == "tis":
        return weight.clamp(max=cap)
    if mode == "mis":
        return torch.where(weight <= cap, weight, torch.zeros_like(weight))
    raise ValueError(f"unknown rollout correction {mode!r}")


def kl(log_p: torch.Tensor, log_q: torch.Tensor, estimator: str = "k3") -> torch.Tensor:
    """Estimate KL(p || q) from tokens that p made, one value per token (http://joschu.net/blog/kl-approx.html).

    With r = q / p:     k1 = -log r        k2 = (log r)^2 / 2        k3 = (r - 1) - log r

    k1 is unbiased but can be negative, k2 is biased and never negative, k3 is unbiased and never negative.
    This is about values; as a loss differentiated through log_p, k1's gradient has mean zero and only adds noise.

    Args:
        log_p, log_q: log-probs of the same tokens, equal shapes, nats.
    """
    log_r = log_q - log_p
    if estimator == "k1":
        return -log_r
    if estimator == "k2":
        return 0.5 * log_r.square()
    if estimator == "k3":
        log_r = log_r.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
        return torch.expm1(log_r) - log_r
    raise ValueError(f"unknown KL estimator {estimator!r}")


def log_probs_and_entropy(
    logits: torch.Tensor, tokens: torch.Tensor, temperature: float = 1.0, entropy: str = "none"
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Log-prob of each token and entropy of its distribution, after temperature, in float32 nats.

    Args:
        logits: [n, vocabulary].
        tokens: int64 [n].
        temperature: the logits are divided by it, as the engine does before it samples.
        entropy: "none", "metric" (no gradient) or "grad".

    Returns:
        [n], and [n] or None.
    """
    log_p = torch.log_softmax(logits.float() / temperature, dim=-1)
    chosen = log_p.gather(-1, tokens.unsqueeze(-1)).squeeze(-1)
    if entropy == "none":
        return chosen, None
    # entr(p) = -p log p with entr(0) = 0, so a vocabulary entry masked by -inf logits gives no NaN.
    with torch.set_grad_enabled(entropy == "grad" and torch.is_grad_enabled()):
        return chosen, torch.special.entr(log_p.exp()).sum(-1)


def token_stats(
    log_probs: torch.Tensor, mu_log_probs: torch.Tensor, clipped: torch.Tensor
) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Sums and maxima over trained tokens that say how far theta is from the policy that made them.

    Args:
        log_probs, mu_log_probs: [n], nats.
        clipped: bool [n], from `policy_loss`.

    Returns:
        sums: ratio (theta / mu), clip (tokens whose clip binds), approx_kl (k3 of KL(mu || theta)),
        logprob_diff (|log theta - log mu|); maxima: ratio, logprob_diff. Scalars in float64.
    """
    theta, mu = log_probs.detach().double(), mu_log_probs.double()
    ratio, difference = ratio_of(theta, mu), (theta - mu).abs()
    sums = {
        "ratio": ratio.sum(),
        "clip": clipped.double().sum(),
        "approx_kl": kl(mu, theta, "k3").sum(),
        "logprob_diff": difference.sum(),
    }
    zero = theta.new_zeros(1)
    maxima = {"ratio": torch.cat([ratio, zero]).max(), "logprob_diff": torch.cat([difference, zero]).max()}
    return sums, maxima


def learning_rate(
    step: int, total: int | None, peak: float, schedule: str = "constant", warmup: int = 0, min_ratio: float = 0.0
) -> float:
    """Learning rate of optimiser step `step` (from 0) of `total`: linear warm-up, then constant, cosine or linear.

    Warm-up step s uses peak * (s + 1) / warmup, so that the first step is not wasted on a rate of zero.
    cosine (SGDR, arXiv:1608.03983, eq. 5) and linear end at peak * min_ratio on the last step.
    """
    if step < warmup:
        return peak * (step + 1) / warmup
    if schedule == "constant":
        return peak
    if total is None:
        raise ValueError(f"the {schedule} schedule needs the total number of steps")
    progress = min((step - warmup) / max(total - 1 - warmup, 1), 1.0)
    if schedule == "cosine":
        return peak * (min_ratio + (1.0 - min_ratio) * 0.5 * (1.0 + math.cos(math.pi * progress)))
    if schedule == "linear":
        return peak * (1.0 - (1.0 - min_ratio) * progress)
    raise ValueError(f"unknown learning-rate schedule {schedule!r}")
