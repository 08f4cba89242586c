"""What advantage estimators see of a batch.

Only tokens whose mask is True exist for the estimators. Time steps go from one trained token to the
next: the output of a tool between two turns is skipped, and the trajectory's reward falls on the
last trained token.

A trajectory is one sample. Several of them may be the segments of one episode (data/episodes.py):
`merge_segments` makes one trajectory of each episode, and `split_segments` goes back.

Shapes: B trajectories; R, the length of one response; T, the largest number of trained tokens.
"""

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from one_step_off.data.arrays import split_by_lengths
from one_step_off.data.episodes import positions_of_episodes

TokenArrays = list[np.ndarray]
"""One array [R] per trajectory."""


@dataclass(frozen=True)
class Trajectories:
    """A batch of B trajectories.

    Attributes:
        rewards: float [B], the reward of the outcome.
        groups: B names; equal names are samples of one prompt, wherever they are in the batch.
        masks: bool [R]; True where the policy generated the token and it is trained.
        token_rewards: float [R], added at each token, as -beta * KL; None: all zero.
        values: float [R], of the critic.
        parts: the reward's parts, name -> float [B].
        baselines: float [B], the reward of the greedy response to the same prompt.
        log_probs: float [R], nats: of each token by the proximal policy, or by mu where the run
            does not compute it.
        prob_squares: float [R]: the sum over the vocabulary of the squared probabilities of the
            proximal policy.
        episodes: int64 [B], of each trajectory the number of its episode; those of one episode have
            one reward, group and baseline. None: each is an episode of its own.
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
    episodes: np.ndarray | None = None

    @cached_property
    def response_lengths(self) -> list[int]:
        """Tokens of each response, trained or not: B whole numbers."""
        return [len(mask) for mask in self.masks]

    @cached_property
    def lengths(self) -> np.ndarray:
        """Trained tokens of each trajectory, int64 [B]."""
        return np.array([np.count_nonzero(mask) for mask in self.masks], dtype=np.int64)

    @cached_property
    def trained(self) -> np.ndarray:
        """All masks concatenated, bool [sum of R]."""
        return np.concatenate([np.zeros(0, dtype=bool), *self.masks])

    @cached_property
    def alive(self) -> np.ndarray:
        """bool [B, T]: whether trajectory i has a t-th trained token."""
        return np.arange(max(self.lengths, default=0)) < self.lengths[:, None]

    @cached_property
    def members(self) -> list[np.ndarray]:
        """The positions of the samples of each group."""
        positions: dict[Hashable, list[int]] = {}
        for i, group in enumerate(self.groups):
            positions.setdefault(group, []).append(i)
        return [np.array(indices) for indices in positions.values()]

    @cached_property
    def totals(self) -> np.ndarray:
        """float64 [B]: the reward of the outcome plus those of the trained tokens."""
        if self.token_rewards is None:
            return self.rewards + 0.0
        return self.rewards + self.rows(self.token_rewards).sum(1)

    def rows(self, arrays: TokenArrays | None) -> np.ndarray:
        """The values of the trained tokens, float64 [B, T], with zeros behind the end (None: all
        zero).
        """
        result = np.zeros(self.alive.shape)
        if arrays is None:
            return result
        if [len(array) for array in arrays] != self.response_lengths:
            raise ValueError("values per token must have the lengths of the responses")
        flat = np.concatenate([np.zeros(0, np.float32), *arrays])
        result[self.alive] = flat[self.trained]
        return result

    def step_rewards(self) -> np.ndarray:
        """float64 [B, T]: the reward of each step; that of the outcome is on the last step."""
        result = self.rows(self.token_rewards)
        nonempty = np.flatnonzero(self.lengths)
        result[nonempty, self.lengths[nonempty] - 1] += self.rewards[nonempty]
        return result

    def per_token(self, rows: np.ndarray) -> TokenArrays:
        """From [B, T] back to the responses: one float32 [R] each, 0 where the mask is False."""
        return self.scatter(rows[self.alive])

    def scatter(self, values: np.ndarray) -> TokenArrays:
        """Values of all trained tokens, concatenated, back to the responses: as `per_token`."""
        flat = np.zeros(len(self.trained), dtype=np.float32)
        flat[self.trained] = values
        return split_by_lengths(flat, self.response_lengths)

    def per_group(self, function: Callable[..., np.ndarray], *columns: np.ndarray) -> np.ndarray:
        """Apply `function` to the values of every group, taken from columns [B]; float64 [B]."""
        result = np.zeros(len(self.groups))
        for indices in self.members:
            result[indices] = function(*(column[indices] for column in columns))
        return result


def merge_segments(t: Trajectories) -> Trajectories:
    """One trajectory per episode: the tokens of its segments, one segment after the other."""
    if t.episodes is None:
        return t
    members = positions_of_episodes(t.episodes)
    first = np.array([positions[0] for positions in members])

    def joined(arrays: TokenArrays | None) -> TokenArrays | None:
        if arrays is None:
            return None
        return [np.concatenate([arrays[i] for i in positions]) for positions in members]

    parts = None
    if t.parts is not None:
        parts = {name: np.asarray(values)[first] for name, values in t.parts.items()}
    return Trajectories(
        rewards=np.asarray(t.rewards)[first],
        groups=[t.groups[i] for i in first],
        masks=joined(t.masks) or [],
        token_rewards=joined(t.token_rewards),
        values=joined(t.values),
        parts=parts,
        baselines=None if t.baselines is None else np.asarray(t.baselines)[first],
        log_probs=joined(t.log_probs),
        prob_squares=joined(t.prob_squares),
    )


def split_segments(arrays: TokenArrays, t: Trajectories) -> TokenArrays:
    """From one array per episode, as `merge_segments` joins them, back to one [R] per trajectory of
    `t`."""
    if t.episodes is None:
        return arrays
    result: TokenArrays = [np.zeros(0, np.float32)] * len(t.masks)
    for array, positions in zip(arrays, positions_of_episodes(t.episodes), strict=True):
        lengths = [t.response_lengths[i] for i in positions]
        for i, part in zip(positions, split_by_lengths(array, lengths), strict=True):
            result[i] = part
    return result


@dataclass(frozen=True)
class Options:
    """Options of all estimators.

    Attributes:
        gamma: discount per trained token.
        lam: lambda of GAE.
        norm_by_std: divide by the group's standard deviation.
    """

    gamma: float = 1.0
    lam: float = 1.0
    norm_by_std: bool = True
