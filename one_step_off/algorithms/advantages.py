"""Advantage estimators: how much better than expected each trained token did. Pure numpy.

    advantages, returns = estimate_advantages("grpo", Trajectories(rewards, groups, masks))

To add an estimator, write one function here with `@register("name")`: `algorithm.adv_estimator`
then knows it. An estimator takes (Trajectories, Options), and its own settings by keyword. It
returns

    float [B]                 one value per trajectory, given to all its trained tokens, or
    one float array [R] each  one value per token, or
    a pair                    of that and the returns that a critic is trained on.

Users name their own as `module:function`. Formulas and sources: docs/concepts/algorithms.md.

Where an episode has several samples, its segments, an estimator sees one trajectory per episode,
with the tokens of its segments one after the other; each segment gets its part of the result. So a
group counts each episode once. With `per_segment` an estimator sees one trajectory per sample, each
of which ends with the reward of its episode.
"""

from collections.abc import Hashable, Sequence
from dataclasses import replace
from math import comb
from typing import Any

import numpy as np

from one_step_off.algorithms.trajectories import (
    Options,
    TokenArrays,
    Trajectories,
    merge_segments,
    split_segments,
)
from one_step_off.config.errors import ConfigError
from one_step_off.config.registry import Entry, Registry
from one_step_off.data.arrays import chunks, split_by_lengths
from one_step_off.data.rounding import ROUNDING, all_equal, differences

EPS = 1e-6

# Fields of `Trajectories` that not every run has, and how to get them. The run provides the other
# fields that an estimator may need: "baselines" (a greedy response to each prompt), "log_probs" and
# "prob_squares" (both from the trainer).
NEEDS = {
    "values": "the role critic; set placement.roles.critic to a pool",
    "parts": (
        "rewards in parts; let your reward.function return {name: number}, or add a reward model"
    ),
    "baselines": (
        "greedy responses; samples of a checkpoint that lacks them cannot be used: "
        "set trainer.resume=never"
    ),
}

ADVANTAGE_ESTIMATORS = Registry("algorithm.adv_estimator")
register = ADVANTAGE_ESTIMATORS.register


def estimate_advantages(
    name: str,
    t: Trajectories,
    options: Options | None = None,
    whiten: bool | None = None,
    **settings: Any,
) -> tuple[TokenArrays, TokenArrays | None]:
    """Advantages, and the returns that a critic is trained on (None without a critic).

    Args:
        name: a registered estimator, or `module:function`.
        t: the batch.
        whiten: shift and scale over all trained tokens to mean 0 and standard deviation 1; None: as
            the estimator's source does.
        settings: the estimator's own settings.

    Returns:
        One float32 [R] per trajectory, for advantages and for returns.

    Raises:
        ConfigError: there is no such estimator, or something that it needs is missing.
        ValueError: a reward is not finite, or the advantages have other lengths than the responses.
    """
    entry = ADVANTAGE_ESTIMATORS.find(name)
    t = replace(t, rewards=np.asarray(t.rewards, dtype=np.float64))
    _check_inputs(name, entry.needs, t)
    if whiten is None:
        whiten = entry.whitens
    if entry.per_segment:
        return _estimate(name, entry, t, options or Options(), whiten, settings)
    result, returns = _estimate(
        name, entry, merge_segments(t), options or Options(), whiten, settings
    )
    if returns is not None:
        returns = split_segments(returns, t)
    return split_segments(result, t), returns


def _estimate(
    name: str,
    entry: Entry,
    t: Trajectories,
    options: Options,
    whiten: bool,
    settings: dict[str, Any],
) -> tuple[TokenArrays, TokenArrays | None]:
    """What the estimator makes of these trajectories, as tokens, whitened if `whiten`."""
    result = entry.function(t, options, **settings)
    returns = None
    if isinstance(result, tuple):
        result, returns = result
    if isinstance(result, np.ndarray):
        result = _broadcast_to_tokens(result, t)
    if [len(array) for array in result] != t.response_lengths:
        raise ValueError(
            f"the advantage estimator {name} returned advantages whose lengths differ from the "
            "responses'"
        )
    if whiten:
        flat = np.concatenate([np.zeros(0), *result])
        result = t.scatter(standardize(flat[t.trained]))
    return result, returns


def _check_inputs(name: str, needs: tuple[str, ...], t: Trajectories) -> None:
    """Check that the rewards are finite, and that what the estimator needs is there."""
    not_finite = np.flatnonzero(~np.isfinite(t.rewards))
    if len(not_finite):
        raise ValueError(f"the reward of sample {int(not_finite[0])} is not finite")
    for field in needs:
        if getattr(t, field) is None:
            raise ConfigError(f"{ADVANTAGE_ESTIMATORS.key}={name}: needs {NEEDS.get(field, field)}")
    if "parts" not in needs:
        return
    for part, values in t.parts.items():
        missing = np.flatnonzero(~np.isfinite(values))
        if len(missing):
            i = missing[0]
            problem = f"sample {i}, of prompt {t.groups[i]}, has no part {part!r}"
            raise ConfigError(
                f"{ADVANTAGE_ESTIMATORS.key}={name}: {problem}; give every response the same parts"
            )


def _broadcast_to_tokens(per_trajectory: np.ndarray, t: Trajectories) -> TokenArrays:
    """float [B] as one float32 [R] per trajectory, 0 where the mask is False."""
    values = per_trajectory.astype(np.float32)
    result: TokenArrays = []
    columns = zip(chunks(values), chunks(t.masks), chunks(t.response_lengths), strict=True)
    for chunk_values, chunk_masks, chunk_lengths in columns:
        flat = np.repeat(chunk_values, chunk_lengths) * np.concatenate(chunk_masks)
        result += split_by_lengths(flat, chunk_lengths)
    return result


# --- building blocks ---


def standardize(x: np.ndarray, scale: bool = True) -> np.ndarray:
    """(x - mean) / (std + 1e-6), with the sample standard deviation (n - 1).

    Without `scale`: x - mean.

    Equal values, and a single one, give exact zeros: a rounding error in the mean must not be
    multiplied by 1 / eps.
    """
    if all_equal(x):
        return np.zeros(len(x))
    mean = x.sum() / len(x)
    if abs(mean) <= ROUNDING * np.abs(x).max():
        mean = 0.0  # zeros among the values stay zeros
    centered = x - mean
    if not scale:
        return centered
    std = np.sqrt((centered * centered).sum() / (len(x) - 1))
    return centered / (std + EPS)


def subtract_mean(x: np.ndarray) -> np.ndarray:
    """x - mean; exact zeros where all values are equal."""
    return standardize(x, scale=False)


def discounted_sums(x: np.ndarray, factor: float) -> np.ndarray:
    """y_t = x_t + factor * y_{t+1} along the rows of [B, T]."""
    y = np.ascontiguousarray(x.T)
    for t in range(len(y) - 2, -1, -1):
        y[t] += factor * y[t + 1]
    return y.T


# --- estimators ---


@register("gae", needs=("values",), whitens=True, per_segment=True)
def gae(t: Trajectories, o: Options) -> tuple[TokenArrays, TokenArrays]:
    """GAE (arXiv:1506.02438, eq. 16); advantages and returns of PPO (arXiv:1707.06347, eq. 11 and
    12).

        delta_t = r_t + gamma V_{t+1} - V_t
        A_t = delta_t + gamma lam A_{t+1}
        return_t = A_t + V_t

    t counts trained tokens; after the last one V = 0. The returns use the advantages before
    whitening. A segment ends with the reward of its episode: segments may come from agents that
    work at once, so that no segment is known to be the next state of another.
    """
    values = t.rows(t.values)
    next_values = np.pad(values[:, 1:], ((0, 0), (0, 1))) if values.size else values
    deltas = t.step_rewards() + o.gamma * next_values - values
    advantages = discounted_sums(deltas, o.gamma * o.lam)
    return t.per_token(advantages), t.per_token(advantages + values)


@register("grpo", grouped=True)
def grpo(t: Trajectories, o: Options) -> np.ndarray:
    """GRPO, outcome supervision (arXiv:2402.03300, section 4.1.2).

        A_i = (r_i - mean(r)) / (std(r) + eps)

    A group without variance, and so a group of one, gives exact zeros.
    """
    return t.per_group(lambda r: standardize(r, o.norm_by_std), t.totals)


@register("reinforce_plus_plus_baseline", grouped=True, whitens=True)
@register("dr_grpo", grouped=True)
def group_mean_baseline(t: Trajectories, o: Options) -> np.ndarray:
    """A_i = r_i - mean(r) of the group.

    Dr. GRPO (arXiv:2503.20783, section 3.2), to be used with loss_agg=seq-sum-norm; and, whitened
    over the whole batch, REINFORCE++ with baseline (arXiv:2501.03262).
    """
    return t.per_group(subtract_mean, t.totals)


@register("rloo", grouped=True)
def rloo(t: Trajectories, o: Options) -> np.ndarray:
    """RLOO (arXiv:2402.14740): A_i = r_i - mean of the others = (r_i - mean(r)) n / (n - 1)."""

    def leave_one_out(r: np.ndarray) -> np.ndarray:
        return subtract_mean(r) * len(r) / max(len(r) - 1, 1)

    return t.per_group(leave_one_out, t.totals)


@register("opo", grouped=True)
def opo(t: Trajectories, o: Options) -> np.ndarray:
    """OPO (arXiv:2505.23585): A_i = r_i - sum_j(len_j r_j) / sum_j(len_j), len in trained tokens.

    This baseline has the least variance if the gradients of all tokens have the same norm and are
    orthogonal to each other.
    """

    def subtract_weighted_mean(r: np.ndarray, lengths: np.ndarray) -> np.ndarray:
        return r - (lengths * r).sum() / max(lengths.sum(), 1)

    # Subtracting the plain mean first does not change the result, and keeps equal rewards at exact
    # zeros.
    return t.per_group(subtract_weighted_mean, group_mean_baseline(t, o), t.lengths)


@register("gpg", grouped=True)
def gpg(t: Trajectories, o: Options) -> np.ndarray:
    """GPG (arXiv:2504.02546): A_i = alpha (r_i - mean(r)), alpha = B / (B - M).

    M samples are in groups without variance, which give no gradient; alpha makes up for them in the
    mean.
    """

    def has_variance(r: np.ndarray) -> np.ndarray:
        return np.full(len(r), not all_equal(r))

    centered = t.per_group(subtract_mean, t.totals)
    useful_samples = t.per_group(has_variance, t.totals).sum()
    return centered * len(centered) / max(useful_samples, 1)


@register("grpo_passk", grouped=True)
def grpo_passk(t: Trajectories, o: Options, *, pass_k: int | None = None) -> np.ndarray:
    """Pass@k, or the largest of k rewards (arXiv:2505.15201, s^(loo-1), times n / k).

        A_i = mean over the sets I of k samples with i in them of (max_I r - max_{I without i} r)

    In ranks r_(1) <= ... <= r_(n):

        A_(i) = sum_{j<i} C(j-1, k-2) (r_(i) - r_(j)) / C(n-1, k-1)

    k = n is arXiv:2503.19595. With norm_by_std it is divided by the group's standard deviation.
    pass_k None, or larger than the group: the whole group.
    """
    if pass_k is not None and pass_k < 2:
        raise ValueError(f"pass_k={pass_k}: must be at least 2; pass@1 is what grpo and rloo train")

    def advantages_of_group(r: np.ndarray) -> np.ndarray:
        n = len(r)
        if all_equal(r):
            return np.zeros(n)
        k = min(pass_k or n, n)
        order = np.argsort(r, kind="stable")
        shares = np.array([comb(j, k - 2) / comb(n - 1, k - 1) for j in range(n)])
        gaps = np.tril(r[order][:, None] - r[order])
        result = np.empty(n)
        result[order] = gaps @ shares
        if o.norm_by_std:
            return result / (r.std(ddof=1) + EPS)
        return result

    return t.per_group(advantages_of_group, t.totals)


@register("gdpo", needs=("parts",), grouped=True)
def gdpo(t: Trajectories, o: Options, *, weights: dict[str, float] | None = None) -> np.ndarray:
    """GDPO (arXiv:2601.05242): rewards in parts.

    Each part is normalized within its group, then their weighted sum over the batch. A part with a
    wide range does not dominate the others, as it would in GRPO of the sum. `weights`: part ->
    weight; 1 for parts that it does not name.
    """
    weights = weights or {}
    unknown = set(weights) - set(t.parts)
    if unknown:
        problem = f"{sorted(unknown)} is not a part of the reward"
        raise ConfigError(
            f"algorithm.adv_kwargs.weights={weights}: {problem}; its parts are {sorted(t.parts)}"
        )
    total = np.zeros(len(t.groups))
    for name, part in t.parts.items():
        part = np.asarray(part, dtype=np.float64)
        normalized = t.per_group(lambda r: standardize(r, o.norm_by_std), part)
        total += weights.get(name, 1.0) * normalized
    return standardize(total)


@register("reinforce_plus_plus", whitens=True, per_segment=True)
def reinforce_plus_plus(t: Trajectories, o: Options) -> TokenArrays:
    """REINFORCE++ (arXiv:2501.03262): discounted reward-to-go, whitened over the whole batch."""
    return t.per_token(discounted_sums(t.step_rewards(), o.gamma))


@register("remax", needs=("baselines",), per_segment=True)
def remax(t: Trajectories, o: Options) -> TokenArrays:
    """ReMax (arXiv:2310.10505, algorithm 1).

    A_t = reward-to-go of the token - reward of the greedy response
    """
    baselines = np.asarray(t.baselines, dtype=np.float64)
    return t.per_token(differences(discounted_sums(t.step_rewards(), 1.0), baselines[:, None]))


@register("optimal_token_baseline", needs=("log_probs", "prob_squares"), grouped=True)
def optimal_token_baseline(t: Trajectories, o: Options) -> TokenArrays:
    """Optimal token baseline (arXiv:2602.07078).

        A_t = G_t - B_t      G: reward-to-go; B: one per step t of a group
        B_t = sum_i G_it W_it / sum_i W_it
        W_it = sum_{s<=t} (1 - 2 p_is + sum_v p_is(v)^2)

    W sums the squared norms of the tokens' gradients at the logits; p is the proximal policy, whose
    gradient is about to be computed. Where only one trajectory has a t-th token, it would be its
    own baseline and learn nothing: B_t = 0.
    """
    rewards_to_go = discounted_sums(t.step_rewards(), 1.0)
    squared_norms = 1.0 - 2.0 * np.exp(t.rows(t.log_probs)) + t.rows(t.prob_squares)
    energy = np.cumsum(squared_norms * t.alive, axis=1) * t.alive
    # Samples in the order of their groups, so that the sums over a group are sums of adjacent rows.
    order = np.concatenate(t.members)
    sizes = [len(indices) for indices in t.members]
    starts = np.cumsum([0, *sizes[:-1]])
    weighted_sums = np.add.reduceat((rewards_to_go * energy)[order], starts)
    weights = np.add.reduceat(energy[order], starts)
    alive_counts = np.add.reduceat(t.alive.astype(int)[order], starts)
    has_baseline = (alive_counts > 1) & (weights > 0)
    baselines = np.divide(weighted_sums, weights, out=np.zeros(weights.shape), where=has_baseline)
    advantages = np.empty(rewards_to_go.shape)
    advantages[order] = differences(rewards_to_go[order], np.repeat(baselines, sizes, axis=0))
    return t.per_token(advantages)


@register("none")
def none(t: Trajectories, o: Options) -> np.ndarray:
    """Zeros: no reward is trained on. The teacher's advantages are added, see `distillation.py`."""
    return np.zeros(len(t.groups))


# --- around the estimators ---


def overlong_penalty(
    lengths: Sequence[int] | np.ndarray, longest: int, buffer: int, penalty: float = 1
) -> np.ndarray:
    """Soft overlong punishment (DAPO, arXiv:2503.14476, eq. 13), to be added to the rewards.

    Returns float64 [B], at most 0. It is 0 up to longest - buffer tokens, and falls linearly to
    -penalty at `longest` and beyond.
    """
    over = np.asarray(lengths, dtype=np.float64) - (longest - buffer)
    if buffer <= 0:
        return np.zeros(len(over))
    return -penalty * np.clip(over / buffer, 0.0, 1.0)


def mask_overlong(masks: TokenArrays, cut: Sequence[bool]) -> TokenArrays:
    """Overlong filtering (DAPO, arXiv:2503.14476, section 3.4): no token of a cut response is
    trained.

    Returns the new masks. The reward of a cut response stays in the mean and deviation of its
    group; only the loss leaves it out.
    """
    result = []
    for mask, is_cut in zip(masks, cut, strict=True):
        result.append(np.zeros(len(mask), dtype=bool) if is_cut else mask)
    return result


def zero_variance_groups(
    rewards: Sequence[float] | np.ndarray, groups: Sequence[Hashable]
) -> list[Hashable]:
    """The groups whose samples all have the same reward, up to rounding (`data.rounding`), in
    order. An episode may have several samples: with one reward they count as one.

    Dynamic sampling replaces them (DAPO, arXiv:2503.14476, eq. 11).
    """
    members = Trajectories(np.zeros(0), groups, []).members
    result = []
    for indices in members:
        if all_equal(np.array([rewards[i] for i in indices], np.float64)):
            result.append(groups[indices[0]])
    return result
