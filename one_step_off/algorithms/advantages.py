"""Advantage estimators: by how much each trained token did better than expected. Pure numpy, for the driver.

    estimate("grpo", Trajectories(rewards, groups, masks))[0]     # one float32 [R] per trajectory

An estimator takes (Trajectories, Options), and its own settings by keyword; it returns float [B] (one value per
trajectory, given to all its trained tokens), or one float array [R] per trajectory, or a pair of that and the returns
a critic is to learn. Registered with a decorator here, it is known to `algorithm.adv_estimator`; one of your own
comes in as `module:function`. Formulas and sources: docs/concepts/algorithms.md.

Only tokens whose mask is True exist for the estimators. Time steps go from one trained token to the next: a tool's
output between two turns is skipped, and the trajectory's reward falls on the last trained token.
"""

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import comb
from typing import Any

import numpy as np

from one_step_off.config.registry import Registry
from one_step_off.config.schema import ConfigError
from one_step_off.data.samples import chunks, split_by_lengths

TokenArrays = list[np.ndarray]

EPS = 1e-6

# Fields of `Trajectories` that not every run has, and what gives them. The others that an estimator may need, the run
# makes for it: "baselines" (a greedy response to each prompt) and "prob_squares" (beside the trainer's log-probs).
NEEDS = {
    "values": "the role critic; set placement.roles.critic to a pool",
    "parts": "rewards in parts; let your reward.function return {name: number}, or add a reward model",
    "baselines": "greedy responses; samples of a checkpoint that lacks them cannot be used: set trainer.resume=never",
}


@dataclass(frozen=True)
class Trajectories:
    """What estimators see of a batch of B trajectories; arrays per token have the length R of the response.

    Attributes:
        rewards: float [B], the outcome's score.
        groups: B names; equal names are samples of one prompt, wherever they stand.
        masks: bool [R]; True where the policy made the token and it is trained.
        token_rewards: float [R], added at each token, as -beta * KL; None: all zero.
        values: float [R], the critic's.
        parts: the reward's parts, name -> float [B].
        baselines: float [B], the reward of the prompt's greedy response.
        log_probs: float [R], nats: of each token by the proximal policy, or by mu where the run does not compute it.
        prob_squares: float [R]: sum of squared probabilities of the proximal policy over the vocabulary, at each token.
    """

    rewards: np.ndarray
    groups: Sequence[Hashable]
    masks: TokenArrays
    token_rewards: TokenArrays | None = None
    values: TokenArrays | None = None
    parts: dict[str, np.ndarray] | None = None
    baselines: np.ndarray | None = None
    log_probs: TokenArrays | None = None
    prob_squares: TokenArrays | None = None

    @cached_property
    def lengths(self) -> np.ndarray:
        """Trained tokens of each trajectory, int64 [B]."""
        return np.array([np.count_nonzero(m) for m in self.masks], dtype=np.int64)

    @cached_property
    def trained(self) -> np.ndarray:
        """bool: the masks, one after the other."""
        return np.concatenate([np.zeros(0, dtype=bool), *self.masks])

    @cached_property
    def alive(self) -> np.ndarray:
        """bool [B, T]: whether trajectory i has a t-th trained token; T is the largest of `lengths`."""
        return np.arange(max(self.lengths, default=0)) < self.lengths[:, None]

    @cached_property
    def members(self) -> list[np.ndarray]:
        """The positions of each group's samples."""
        found: dict[Hashable, list[int]] = {}
        for i, group in enumerate(self.groups):
            found.setdefault(group, []).append(i)
        return [np.array(index) for index in found.values()]

    @cached_property
    def totals(self) -> np.ndarray:
        """float64 [B]: the outcome's reward and those of the trained tokens together."""
        return self.rewards + (
            self.rows(self.token_rewards).sum(1) if self.token_rewards is not None else 0.0
        )

    def rows(self, arrays: TokenArrays | None) -> np.ndarray:
        """The trained tokens' values side by side, float64 [B, T], with zeros behind the end (None: all zero)."""
        result = np.zeros(self.alive.shape)
        if arrays is not None:
            if [*map(len, arrays)] != [*map(len, self.masks)]:
                raise ValueError(
                    "what is given for each token has other lengths than the responses"
                )
            result[self.alive] = np.concatenate([np.zeros(0, np.float32), *arrays])[self.trained]
        return result

    def step_rewards(self) -> np.ndarray:
        """float64 [B, T]: the reward of each step, the outcome's on the last one."""
        result = self.rows(self.token_rewards)
        some = np.flatnonzero(self.lengths)
        result[some, self.lengths[some] - 1] += self.rewards[some]
        return result

    def per_token(self, rows: np.ndarray) -> TokenArrays:
        """Back from [B, T] to the tokens' places: one float32 [R] each, 0 where the mask is False."""
        return self.placed(rows[self.alive])

    def placed(self, values: np.ndarray) -> TokenArrays:
        """As `per_token`, of the trained tokens' values in a row."""
        flat = np.zeros(len(self.trained), dtype=np.float32)
        flat[self.trained] = values
        return split_by_lengths(flat, [*map(len, self.masks)])

    def per_group(self, function: Callable[..., np.ndarray], *columns: np.ndarray) -> np.ndarray:
        """Apply `function` to the columns [B] of every group; float64 [B]."""
        result = np.zeros(len(self.groups))
        for index in self.members:
            result[index] = function(*(column[index] for column in columns))
        return result


@dataclass(frozen=True)
class Options:
    """gamma: discount per trained token; lam: GAE's lambda; norm_by_std: divide by the group's standard deviation."""

    gamma: float = 1.0
    lam: float = 1.0
    norm_by_std: bool = True


ADVANTAGE_ESTIMATORS = Registry("algorithm.adv_estimator")
register = ADVANTAGE_ESTIMATORS.register


def estimate_advantages(
    name: str,
    t: Trajectories,
    options: Options | None = None,
    whiten: bool | None = None,
    **own: Any,
) -> tuple[TokenArrays, TokenArrays | None]:
    """Advantages by the estimator `name`, registered or `module:function`, and what a critic is to learn (None without
    a critic): one float32 [R] per trajectory.

    Args:
        whiten: shift and scale over all trained tokens to mean 0 and deviation 1; None: as the estimator's source does.
        own: the estimator's own settings.

    Raises:
        ConfigError: no such estimator, or something that it needs is missing.
        ValueError: a reward that is not finite, or advantages of other lengths than the responses'.
    """
    entry = ADVANTAGE_ESTIMATORS.find(name)
    t = replace(t, rewards=np.asarray(t.rewards, dtype=np.float64))
    if not np.isfinite(t.rewards).all():
        raise ValueError(
            f"the reward of sample {int(np.flatnonzero(~np.isfinite(t.rewards))[0])} is not finite"
        )
    for field in entry.needs:
        if getattr(t, field) is None:
            raise ConfigError(f"{ADVANTAGE_ESTIMATORS.key}={name}: needs {NEEDS.get(field, field)}")
    for part, values in t.parts.items() if "parts" in entry.needs else ():
        for i in np.flatnonzero(~np.isfinite(values))[:1]:
            lacking = f"sample {i}, of prompt {t.groups[i]}, has no part {part!r}"
            raise ConfigError(
                f"{ADVANTAGE_ESTIMATORS.key}={name}: {lacking}; give every response the same parts"
            )
    result, returns = entry.function(t, options or Options(), **own), None
    if isinstance(result, tuple):
        result, returns = result
    lengths = [*map(len, t.masks)]
    if isinstance(result, np.ndarray):
        columns = zip(
            chunks(result.astype(np.float32)), chunks(t.masks), chunks(lengths), strict=True
        )
        result = [
            a
            for x, masks, own in columns
            for a in split_by_lengths(np.repeat(x, own) * np.concatenate(masks), own)
        ]
    if [*map(len, result)] != lengths:
        raise ValueError(
            f"the advantage estimator {name} gave advantages of other lengths than the responses'"
        )
    if entry.whitens if whiten is None else whiten:
        result = t.placed(standardize(np.concatenate([np.zeros(0), *result])[t.trained]))
    return result, returns


def standardize(x: np.ndarray, scale: bool = True) -> np.ndarray:
    """(x - mean) / (std + 1e-6), with the sample's deviation (n - 1); without `scale` only x - mean. Equal values, and
    a single one, give exact zeros: rounding in the mean must not be blown up by 1 / eps."""
    if len(x) < 2 or (x == x[0]).all():
        return np.zeros(len(x))
    centred = x - x.sum() / len(x)
    return centred / (np.sqrt((centred * centred).sum() / (len(x) - 1)) + EPS) if scale else centred


def discounted_sums(x: np.ndarray, factor: float) -> np.ndarray:
    """y_t = x_t + factor * y_{t+1} along the rows of [B, T]."""
    y = np.ascontiguousarray(x.T)
    for t in range(len(y) - 2, -1, -1):
        y[t] += factor * y[t + 1]
    return y.T


@register("gae", needs=("values",), whitens=True)
def gae(t: Trajectories, o: Options) -> tuple[TokenArrays, TokenArrays]:
    """GAE (arXiv:1506.02438, eq. 16); PPO's advantages and returns (arXiv:1707.06347, eq. 11 and 12).

        delta_t = r_t + gamma V_{t+1} - V_t     A_t = delta_t + gamma lam A_{t+1}     return_t = A_t + V_t

    t counts trained tokens; after the last one V = 0. The returns come from the advantages before whitening.
    """
    values = t.rows(t.values)
    following = np.pad(values[:, 1:], ((0, 0), (0, 1))) if values.size else values
    advantages = discounted_sums(t.step_rewards() + o.gamma * following - values, o.gamma * o.lam)
    return t.per_token(advantages), t.per_token(advantages + values)


@register("grpo", grouped=True)
def grpo(t: Trajectories, o: Options) -> np.ndarray:
    """GRPO, outcome supervision (arXiv:2402.03300, section 4.1.2): A_i = (r_i - mean(r)) / (std(r) + eps). A group
    without variance, so also a group of one, teaches nothing: exact zeros."""
    return t.per_group(lambda r: standardize(r, o.norm_by_std), t.totals)


@register("reinforce_plus_plus_baseline", grouped=True, whitens=True)
@register("dr_grpo", grouped=True)
def centred(t: Trajectories, o: Options) -> np.ndarray:
    """A_i = r_i - mean(r) of its group. Dr. GRPO (arXiv:2503.20783, section 3.2), whose loss is loss_agg=seq-sum-norm;
    and, whitened over the whole batch, REINFORCE++ with baseline (arXiv:2501.03262)."""
    return t.per_group(lambda r: standardize(r, False), t.totals)


@register("rloo", grouped=True)
def rloo(t: Trajectories, o: Options) -> np.ndarray:
    """RLOO (arXiv:2402.14740): A_i = r_i - mean of the others = (r_i - mean(r)) n / (n - 1)."""
    return t.per_group(lambda r: standardize(r, False) * len(r) / max(len(r) - 1, 1), t.totals)


@register("opo", grouped=True)
def opo(t: Trajectories, o: Options) -> np.ndarray:
    """OPO (arXiv:2505.23585): A_i = r_i - sum_j(len_j r_j) / sum_j(len_j), len in trained tokens. The baseline of least
    variance where every token's gradient has the same norm and is orthogonal to the others'."""
    return t.per_group(lambda r, n: r - (n * r).sum() / max(n.sum(), 1), centred(t, o), t.lengths)


@register("gpg", grouped=True)
def gpg(t: Trajectories, o: Options) -> np.ndarray:
    """GPG (arXiv:2504.02546): A_i = alpha (r_i - mean(r)), alpha = B / (B - M). M samples stand in groups without
    variance, which give no gradient; alpha makes up for them in the mean."""
    centred = t.per_group(lambda r: standardize(r, False), t.totals)
    useful = t.per_group(lambda r: np.full(len(r), r.max() > r.min()), t.totals).sum()
    return centred * len(centred) / max(useful, 1)


@register("grpo_passk", grouped=True)
def grpo_passk(t: Trajectories, o: Options, *, pass_k: int | None = None) -> np.ndarray:
    """Pass@k, or the largest of k rewards (arXiv:2505.15201, s^(loo-1), times n / k; k = n: arXiv:2503.19595).

        A_i = mean over the sets I of k samples with i in them of (max_I r - max_{I without i} r)

    In ranks r_(1) <= ... <= r_(n): A_(i) = sum_{j<i} C(j-1, k-2) (r_(i) - r_(j)) / C(n-1, k-1). With norm_by_std
    divided by the group's deviation. pass_k None, or larger than the group: the whole group.
    """
    if pass_k is not None and pass_k < 2:
        raise ValueError(f"pass_k={pass_k}: must be at least 2; pass@1 is what grpo and rloo train")

    def one(r: np.ndarray) -> np.ndarray:
        n = len(r)
        if n < 2 or r.max() == r.min():
            return np.zeros(n)
        k, order = min(pass_k or n, n), np.argsort(r, kind="stable")
        shares = np.array([comb(j, k - 2) / comb(n - 1, k - 1) for j in range(n)])
        gaps = np.tril(r[order][:, None] - r[order])
        result = np.empty(n)
        result[order] = gaps @ shares
        return result / (r.std(ddof=1) + EPS) if o.norm_by_std else result

    return t.per_group(one, t.totals)


@register("gdpo", needs=("parts",), grouped=True)
def gdpo(t: Trajectories, o: Options, *, weights: dict[str, float] | None = None) -> np.ndarray:
    """GDPO (arXiv:2601.05242): each part of the reward normalised in its group, their weighted sum over the batch. A
    part with a wide range does not drown the others, as it would in GRPO of the sum. `weights`: part -> weight; 1."""
    unknown = set(weights or {}) - set(t.parts)
    if unknown:
        no_part = f"{sorted(unknown)} is no part of the reward"
        raise ConfigError(
            f"algorithm.adv_kwargs.weights={weights}: {no_part}; its parts are {sorted(t.parts)}"
        )
    total = np.zeros(len(t.groups))
    for name, part in t.parts.items():
        part = np.asarray(part, dtype=np.float64)
        total += (weights or {}).get(name, 1.0) * t.per_group(
            lambda r: standardize(r, o.norm_by_std), part
        )
    return standardize(total)


@register("reinforce_plus_plus", whitens=True)
def reinforce_plus_plus(t: Trajectories, o: Options) -> TokenArrays:
    """REINFORCE++ (arXiv:2501.03262): discounted reward-to-go of each token, whitened over the whole batch."""
    return t.per_token(discounted_sums(t.step_rewards(), o.gamma))


@register("remax", needs=("baselines",))
def remax(t: Trajectories, o: Options) -> TokenArrays:
    """ReMax (arXiv:2310.10505, algorithm 1): A_t = reward-to-go of the token - reward of the greedy response."""
    return t.per_token(
        discounted_sums(t.step_rewards(), 1.0) - np.asarray(t.baselines, dtype=np.float64)[:, None]
    )


@register("optimal_token_baseline", needs=("log_probs", "prob_squares"), grouped=True)
def optimal_token_baseline(t: Trajectories, o: Options) -> TokenArrays:
    """Optimal token baseline (arXiv:2602.07078): A_t = G_t - B_t, G the reward-to-go, B per step t of a group.

        B_t = sum_i G_it W_it / sum_i W_it     W_it = sum_{s<=t} (1 - 2 p_is + sum_v p_is(v)^2)

    W adds up the squared norm of each token's gradient at the logits; p is the policy whose gradient is about to be
    taken, the proximal one. Where one trajectory alone is so long, it would be its own baseline and learn nothing: B = 0.
    """
    to_go = discounted_sums(t.step_rewards(), 1.0)
    energy = (
        np.cumsum(
            (1.0 - 2.0 * np.exp(t.rows(t.log_probs)) + t.rows(t.prob_squares)) * t.alive, axis=1
        )
        * t.alive
    )
    order, sizes = np.concatenate(t.members), [len(index) for index in t.members]
    starts = np.cumsum([0, *sizes[:-1]])
    weighted, weight, alive = (
        np.add.reduceat(x[order], starts) for x in (to_go * energy, energy, t.alive.astype(int))
    )
    baseline = np.divide(
        weighted, weight, out=np.zeros(weight.shape), where=(alive > 1) & (weight > 0)
    )
    to_go[order] -= np.repeat(baseline, sizes, axis=0)
    return t.per_token(to_go)


def overlong_penalty(
    lengths: Sequence[int] | np.ndarray, longest: int, buffer: int, penalty: float = 1
) -> np.ndarray:
    """Soft overlong punishment (DAPO, arXiv:2503.14476, eq. 13), to be added to the rewards: float64 [B], <= 0. 0 up to
    longest - buffer tokens, then linearly down to -penalty at `longest` (and beyond)"""
    over = np.asarray(lengths, dtype=np.float64) - (longest - buffer)
    return -penalty * np.clip(over / buffer, 0.0, 1.0) if buffer > 0 else np.zeros(len(over))


def mask_overlong(masks: TokenArrays, cut: Sequence[bool]) -> TokenArrays:
    """Overlong filtering (DAPO, arXiv:2503.14476, section 3.4): nothing of a response that was cut off is trained. Its
    reward stays in its group's mean and deviation: only the loss leaves it out."""
    return [np.zeros(len(m), dtype=bool) if c else m for m, c in zip(masks, cut, strict=True)]


def zero_variance_groups(
    rewards: Sequence[float] | np.ndarray, groups: Sequence[Hashable]
) -> list[Hashable]:
    """The groups whose samples all score alike, in order: those that dynamic sampling replaces (DAPO, eq. 11)."""
    members = Trajectories(np.zeros(0), groups, []).members
    return [groups[index[0]] for index in members if len({float(rewards[i]) for i in index}) == 1]
