"""The mathematics of the trainer: pure functions of numpy arrays or tensors.

Value loss, KL, loss aggregation. No I/O, no config object, no
collective. Three policies appear throughout:

    mu        the policy that generated the tokens (the engine's weights, one step behind)
    proximal  the policy that the PPO clip is centered on: mu itself, or the trainer's weights
              before the update
    theta     the policy being trained

Advantages are in `advantages.py`, policy losses and rollout corrections in `policy_losses.py`,
log-probs and entropies in `training/token_outputs.py`. Log-probs are in nats. Sums over
micro-batches and ranks are per-token weights with global denominators (`token_weights`), so the
gradient does not depend on how the batch was cut.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from one_step_off.algorithms.policy_losses import clamp_log_ratio, ratio_of

Stats = dict[str, Tensor]
"""Scalars by name."""


def token_weights(
    lengths: Sequence[int] | np.ndarray,
    agg: str,
    global_tokens: int,
    global_sequences: int,
    longest: int = 1,
    episode_lengths: Sequence[int] | np.ndarray | None = None,
) -> np.ndarray:
    """The weight of each token of a sequence in the loss: loss = sum over all trained tokens of
    weight * l.

    A sequence is an episode: where several samples are its segments, they count as one. len_i is
    the length of the whole episode, so a token weighs the same however its episode was cut.

        token-mean          w_i = 1 / global_tokens               (DAPO, arXiv:2503.14476, eq. 12)
        token-sum           w_i = 1
        sequence-mean       w_i = 1 / (len_i * global_sequences)  (GRPO, arXiv:2402.03300, eq. 3)
        seq-mean-token-sum  w_i = 1 / global_sequences
        seq-sum-norm        w_i = 1 / (longest * global_sequences)
                            (Dr. GRPO, arXiv:2503.20783, section 3.2)

    The denominators count the whole mini-batch over all ranks, so the losses of its parts add up.

    Args:
        lengths: trained tokens of each sequence, a sample, [B].
        global_tokens: trained tokens of the whole mini-batch.
        global_sequences: episodes of the whole mini-batch with at least one trained token.
        longest: the largest number of tokens that a response may have; a constant.
        episode_lengths: trained tokens of the episode of each sequence, [B]; None: each sequence is
            an episode.

    Returns:
        float64 [B]; 0 for a sequence without trained tokens.
    """
    lengths = np.asarray(lengths, dtype=np.float64)
    if episode_lengths is None:
        episode_lengths = lengths
    of_episode = np.asarray(episode_lengths, dtype=np.float64)
    tokens = max(global_tokens, 1)
    sequences = max(global_sequences, 1)
    denominators: dict[str, float | np.ndarray] = {
        "token-mean": tokens,
        "token-sum": 1,
        "sequence-mean": np.maximum(of_episode, 1) * sequences,
        "seq-mean-token-sum": sequences,
        "seq-sum-norm": longest * sequences,
    }
    return np.where(lengths > 0, 1.0 / denominators[agg], 0.0)


def lengths_of_episodes(
    lengths: Sequence[int] | np.ndarray, episodes: np.ndarray | None
) -> tuple[np.ndarray, int]:
    """The trained tokens of each sequence's episode, int64 [B], and how many episodes have any.

    Args:
        lengths: trained tokens of each sequence, [B].
        episodes: int [B], which sequences belong together; None: each is an episode.
    """
    of_episode = np.asarray(lengths, np.int64)
    if episodes is None:
        return of_episode, int(np.count_nonzero(of_episode))
    names, numbers = np.unique(episodes, return_inverse=True)
    sums = np.zeros(len(names), np.int64)
    np.add.at(sums, numbers, of_episode)
    return sums[numbers], int(np.count_nonzero(sums))


def value_loss(
    values: Tensor, old_values: Tensor, returns: Tensor, clip: float
) -> tuple[Tensor, Tensor]:
    """Clipped squared error of a critic, as in PPO's code (arXiv:2005.12729, section 3; not in the
    PPO paper).

        l = max((v - R)^2, (clip(v, v_old - clip, v_old + clip) - R)^2) / 2

    Args:
        values: [n]; the gradient flows through it.
        old_values: [n], before the update, in the unit of the reward.
        returns: [n].
        clip: how far a value may move from the old one, in the unit of the reward.

    Returns:
        The loss [n], and bool [n]: where the clip binds, so that the gradient is zero.
    """
    clipped_values = torch.clamp(values, old_values - clip, old_values + clip)
    unclipped_error = (values - returns).square()
    clipped_error = (clipped_values - returns).square()
    loss = 0.5 * torch.maximum(unclipped_error, clipped_error)
    return loss, (clipped_error > unclipped_error).detach()


@dataclass
class KLController:
    """The coefficient of a KL penalty: fixed without a `target`, else adaptive (arXiv:1909.08593,
    section 2.2).

        value <- value * (1 + clip(kl / target - 1, -0.2, 0.2) * samples / horizon)

    Attributes:
        value: the coefficient.
        target: nats per response; None: the coefficient is fixed.
        horizon: the number of samples over which an error of 20 % changes the value by about 20 %.
    """

    value: float
    target: float | None = None
    horizon: int = 10000

    def update(self, kl: float, samples: int) -> None:
        """Adapt to a batch of `samples` responses whose mean KL was `kl`, in nats per response."""
        if self.target is None:
            return
        error = min(max(kl / self.target - 1.0, -0.2), 0.2)
        self.value *= 1.0 + error * samples / self.horizon


def kl(log_p: Tensor, log_q: Tensor, estimator: str) -> Tensor:
    """Estimate KL(p || q) from tokens that p made, one value per token
    (http://joschu.net/blog/kl-approx.html).

    With r = q / p:  k1 = -log r    k2 = (log r)^2 / 2    k3 = (r - 1) - log r    abs = |log r|

    As values: k1 is unbiased but can be negative; k2 is biased and never negative; k3 is unbiased
    and never negative; abs is a distance, and no estimate of the KL.

    As losses, differentiated through log_p: the gradient of k1 has mean zero and only adds noise;
    only the gradient of k2 has the gradient of the KL as its mean. So k1+, k3+ and abs+ have the
    values of k1, k3 and abs, and the gradient of k2.

    Args:
        log_p, log_q: log-probs of the same tokens, equal shapes, nats.

    Raises:
        ValueError: there is no such estimator.
    """
    log_r = log_q - log_p
    k2 = 0.5 * log_r.square()
    if estimator.endswith("+"):
        value = kl(log_p, log_q, estimator.removesuffix("+")).detach()
        return value + (k2 - k2.detach())
    if estimator == "k1":
        return -log_r
    if estimator == "k2":
        return k2
    if estimator == "abs":
        return log_r.abs()
    if estimator == "k3":
        clamped = clamp_log_ratio(log_r)
        return torch.expm1(clamped) - clamped
    raise ValueError(f"unknown KL estimator {estimator!r}")


def token_stats(log_probs: Tensor, mu_log_probs: Tensor, clipped: Tensor) -> tuple[Stats, Stats]:
    """How far theta is from the policy that generated the tokens: sums and maxima over trained
    tokens.

    Args:
        log_probs, mu_log_probs: [n], nats.
        clipped: bool [n], from the policy loss.

    Returns:
        Two dicts of float64 scalars. The sums: ratio (theta / mu), clip (tokens that the loss held
        back), approx_kl (k3 of KL(mu || theta)), logprob_diff (|log theta - log mu|). The maxima:
        ratio, logprob_diff.
    """
    theta = log_probs.detach().double()
    mu = mu_log_probs.double()
    ratio = ratio_of(theta, mu)
    difference = (theta - mu).abs()
    sums = {
        "ratio": ratio.sum(),
        "logprob_diff": difference.sum(),
        "clip": clipped.double().sum(),
        "approx_kl": kl(mu, theta, "k3").sum(),
    }
    zero = theta.new_zeros(1)  # the maximum over no tokens
    maxima = {
        "ratio": torch.cat([ratio, zero]).max(),
        "logprob_diff": torch.cat([difference, zero]).max(),
    }
    return sums, maxima
