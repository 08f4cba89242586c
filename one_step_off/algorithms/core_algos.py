"""The mathematics of the trainer: pure functions of numpy arrays or tensors.

No I/O, no config object, no collective. Three policies appear throughout:

    mu        the policy that made the tokens (the engine's weights, one step behind)
    proximal  the policy around which PPO clips: mu itself, or the trainer's weights before the update
    theta     the policy being trained

Advantages are in `advantages.py`, policy losses and rollout corrections in `policy_losses.py`. Log-probs are in nats.
Sums over micro-batches and ranks are expressed as per-token weights with global denominators (`token_weights`), so the
gradient does not depend on how the batch was cut.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from one_step_off.algorithms.policy_losses import LOG_RATIO_LIMIT, ratio_of
from one_step_off.algorithms.schedule import Decay

TokenOutputs = tuple[Tensor, Tensor | None]
"""What a model is asked about n tokens: their log-probs (or a scalar head's output), [n], and a figure of each, [n]."""

Stats = dict[str, Tensor]


def token_weights(
    lengths: Sequence[int] | np.ndarray,
    agg: str,
    global_tokens: int,
    global_sequences: int,
    longest: int = 1,
) -> np.ndarray:
    """The weight of each trained token of a sequence in the loss, so that loss = sum over all tokens of weight * l.

        token-mean          w_i = 1 / global_tokens                     (DAPO, arXiv:2503.14476, eq. 12)
        token-sum           w_i = 1
        sequence-mean       w_i = 1 / (len_i * global_sequences)        (GRPO, arXiv:2402.03300, eq. 3)
        seq-mean-token-sum  w_i = 1 / global_sequences
        seq-sum-norm        w_i = 1 / (longest * global_sequences)      (Dr. GRPO, arXiv:2503.20783, section 3.2)

    The denominators count the whole mini-batch over all ranks, so parts simply add up.

    Args:
        lengths: trained tokens of each sequence, [B].
        global_tokens: trained tokens of the whole mini-batch.
        global_sequences: sequences of the whole mini-batch with at least one trained token.
        longest: a constant: the most tokens that a response may have.

    Returns:
        float64 [B]; 0 for a sequence without trained tokens.
    """
    n = np.asarray(lengths, dtype=np.float64)
    sequences = max(global_sequences, 1)
    counts = {"token-mean": max(global_tokens, 1), "token-sum": 1}
    counts |= {"sequence-mean": np.maximum(n, 1) * sequences, "seq-mean-token-sum": sequences}
    counts["seq-sum-norm"] = longest * sequences
    return np.where(n > 0, 1.0 / counts[agg], 0.0)


def value_loss(
    values: Tensor, old_values: Tensor, returns: Tensor, clip: float
) -> tuple[Tensor, Tensor]:
    """Squared error of a critic; clipped as PPO's code has it (arXiv:2005.12729, section 3; not in the PPO paper).

        l = max((v - R)^2, (clip(v, v_old - clip, v_old + clip) - R)^2) / 2

    Args:
        values: [n]; the gradient flows through it.
        old_values: [n], before the update, in the unit of the reward.
        returns: [n].
        clip: how far a value may move, in the unit of the reward.

    Returns:
        The loss [n], and bool [n]: where the clip binds, so that the gradient is zero.
    """
    free = (values - returns).square()
    held = (torch.clamp(values, old_values - clip, old_values + clip) - returns).square()
    return 0.5 * torch.maximum(free, held), (held > free).detach()


@dataclass
class KLController:
    """The coefficient of a KL penalty: fixed without a `target`, else adaptive (arXiv:1909.08593, section 2.2).

        value <- value * (1 + clip(kl / target - 1, -0.2, 0.2) * samples / horizon)

    kl and target: nats per response. `horizon`: samples in which a lasting error of 20 % changes it by about 20 %.
    """

    value: float
    target: float | None = None
    horizon: int = 10000

    def update(self, kl: float, samples: int) -> None:
        """After a batch of `samples` responses whose mean KL was `kl`."""
        if self.target is not None:
            self.value *= 1.0 + min(max(kl / self.target - 1.0, -0.2), 0.2) * samples / self.horizon


def kl(log_p: Tensor, log_q: Tensor, estimator: str = "k3") -> Tensor:
    """Estimate KL(p || q) from tokens that p made, one value per token (http://joschu.net/blog/kl-approx.html).

    With r = q / p:     k1 = -log r        k2 = (log r)^2 / 2        k3 = (r - 1) - log r        abs = |log r|

    k1 is unbiased but can be negative, k2 is biased and never negative, k3 is unbiased and never negative; abs is no
    estimate of the KL but a distance. This is about values. As a loss differentiated through log_p, k1's gradient has mean
    zero and only adds noise, and that of k2 alone has the KL's gradient as its mean. So k1+, k3+ and abs+ have the value
    of k1, k3 and abs, and the gradient of k2.

    Args:
        log_p, log_q: log-probs of the same tokens, equal shapes, nats.
    """
    log_r = log_q - log_p
    k2 = 0.5 * log_r.square()
    if estimator.endswith("+"):
        return kl(log_p, log_q, estimator[:-1]).detach() + (k2 - k2.detach())
    near = log_r.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    return {"k1": -log_r, "k2": k2, "k3": torch.expm1(near) - near, "abs": log_r.abs()}[estimator]


def log_probs_and_entropy(
    logits: Tensor, tokens: Tensor, temperature: float = 1.0, entropy: str = "none"
) -> TokenOutputs:
    """Log-prob of each token and a figure of its distribution, after temperature, in float32 nats.

    Args:
        logits: [n, vocabulary].
        tokens: int64 [n].
        temperature: the logits are divided by it, as the engine does before it samples.
        entropy: the figure: "none"; the entropy as "metric" (no gradient) or with "grad"; or "squares": sum_v p(v)^2.

    Returns:
        [n], and [n] or None.
    """
    log_p = torch.log_softmax(logits.float() / temperature, dim=-1)
    chosen = log_p.gather(-1, tokens.unsqueeze(-1)).squeeze(-1)
    if entropy in ("none", "squares"):
        return chosen, log_p.exp().square().sum(-1) if entropy == "squares" else None
    # entr(p) = -p log p with entr(0) = 0, so a vocabulary entry masked by -inf logits gives no NaN.
    with torch.set_grad_enabled(entropy == "grad" and torch.is_grad_enabled()):
        return chosen, torch.special.entr(log_p.exp()).sum(-1)


def token_stats(log_probs: Tensor, mu_log_probs: Tensor, clipped: Tensor) -> tuple[Stats, Stats]:
    """Sums and maxima over trained tokens that say how far theta is from the policy that made them.

    Args:
        log_probs, mu_log_probs: [n], nats.
        clipped: bool [n], from the policy loss.

    Returns:
        sums: ratio (theta / mu), clip (tokens whose clip binds), approx_kl (k3 of KL(mu || theta)),
        logprob_diff (|log theta - log mu|); maxima: ratio, logprob_diff. Scalars in float64.
    """
    theta, mu = log_probs.detach().double(), mu_log_probs.double()
    ratio, difference = ratio_of(theta, mu), (theta - mu).abs()
    sums = {"ratio": ratio.sum(), "logprob_diff": difference.sum()}
    sums |= {"clip": clipped.double().sum(), "approx_kl": kl(mu, theta, "k3").sum()}
    zero = theta.new_zeros(1)
    return sums, {
        "ratio": torch.cat([ratio, zero]).max(),
        "logprob_diff": torch.cat([difference, zero]).max(),
    }


def learning_rate(
    step: int,
    total: int | None,
    peak: float,
    schedule: str = "constant",
    warmup: int = 0,
    min_ratio: float = 0.0,
    begin: int | None = None,
    done: float = 0.0,
) -> float:
    """Learning rate of optimiser step `step` (from 0) of `total`: linear warm-up, then constant, cosine or linear.
    Warm-up step s uses peak * (s + 1) / warmup, so that the first step is not wasted on a rate of zero. cosine (SGDR,
    arXiv:1608.03983, eq. 5) and linear end at peak * min_ratio on the last step. `begin`, `done`: as in `schedule.Decay`;
    None: the decay begins after the warm-up."""
    if step < warmup:
        return peak * (step + 1) / warmup
    if schedule == "constant":
        return peak
    progress = Decay(total, warmup if begin is None else begin, done).progress(step)
    share = {"cosine": 0.5 * (1.0 + math.cos(math.pi * progress)), "linear": 1.0 - progress}[
        schedule
    ]
    return peak * (min_ratio + (1.0 - min_ratio) * share)
