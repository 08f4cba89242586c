"""Episodes of several samples: each counts once in its group; its segments get its advantage."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from one_step_off.algorithms import advantages as adv
from one_step_off.algorithms import core_algos
from one_step_off.algorithms.advantages import Trajectories, estimate_advantages
from one_step_off.algorithms.trajectories import Options, merge_segments
from one_step_off.config.loading import KEYS
from tests.unit.algorithms.advantage_helpers import NAMES, quick, some

PER_TOKEN = ("masks", "token_rewards", "values", "log_probs", "prob_squares")
PER_SEGMENT = [name for name in NAMES if adv.ADVANTAGE_ESTIMATORS[name].per_segment]
OVER_EPISODES = [name for name in NAMES if name not in PER_SEGMENT]
AGGREGATIONS = KEYS["algorithm.loss_agg"].metadata["choices"]


def segmented(t: Trajectories, seed: int) -> Trajectories:
    """The same episodes, each cut at random places into up to four segments."""
    rng = np.random.default_rng(seed)
    counts = rng.integers(1, 5, len(t.groups))
    columns: dict[str, list] = {name: [] for name in PER_TOKEN}
    for i, count in enumerate(counts):
        cuts = np.sort(rng.integers(0, len(t.masks[i]) + 1, count - 1))
        for name in PER_TOKEN:
            columns[name] += np.split(getattr(t, name)[i], cuts)
    return Trajectories(
        rewards=np.repeat(t.rewards, counts),
        groups=np.repeat(t.groups, counts).tolist(),
        parts={name: np.repeat(part, counts) for name, part in t.parts.items()},
        baselines=np.repeat(t.baselines, counts),
        episodes=np.repeat(np.arange(len(counts)), counts),
        **columns,
    )


def joined(arrays, cut: Trajectories) -> list[np.ndarray]:
    """Per episode the values of all its segments, one after the other."""
    return merge_segments(replace(cut, log_probs=arrays)).log_probs


def test_which_estimators_see_segments():
    assert PER_SEGMENT == ["gae", "reinforce_plus_plus", "remax"]


@pytest.mark.parametrize("name", OVER_EPISODES)
@given(seed=st.integers(0, 1000))
@quick
def test_cutting_an_episode_changes_no_advantage(name, seed):
    whole = some(seed)
    cut = segmented(whole, seed)
    base = estimate_advantages(name, whole)[0]
    found = estimate_advantages(name, cut)[0]
    assert [len(a) for a in found] == cut.response_lengths
    for a, b in zip(joined(found, cut), base, strict=True):
        assert np.array_equal(a, b)


@pytest.mark.parametrize("name", PER_SEGMENT)
@given(seed=st.integers(0, 1000))
@quick
def test_undiscounted_rewards_do_not_depend_on_the_cuts(name, seed):
    """Each segment ends with the reward of its episode: with gamma = lambda = 1 and no reward per
    token, every state is compared with the same outcome."""
    whole = replace(some(seed), token_rewards=None)
    cut = replace(segmented(some(seed), seed), token_rewards=None)
    base, returns = estimate_advantages(name, whole)
    found, found_returns = estimate_advantages(name, cut)
    for a, b in zip(joined(found, cut), base, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)
    if returns is not None:
        for a, b in zip(joined(found_returns, cut), returns, strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", PER_SEGMENT)
@given(seed=st.integers(0, 1000))
@quick
def test_a_segment_is_a_trajectory_of_its_own_for_these_estimators(name, seed):
    cut = segmented(some(seed), seed)
    options = Options(gamma=0.9, lam=0.8)
    found = estimate_advantages(name, cut, options)[0]
    alone = estimate_advantages(name, replace(cut, episodes=None), options)[0]
    for a, b in zip(found, alone, strict=True):
        assert np.array_equal(a, b)


@pytest.mark.parametrize("name", ["grpo", "dr_grpo", "rloo", "gpg", "grpo_passk", "gdpo"])
@given(seed=st.integers(0, 1000), copies=st.integers(1, 3))
@quick
def test_copies_of_a_segment_change_nothing_elsewhere(name, seed, copies):
    """These estimators weight episodes alike, whatever their number of tokens."""
    cut = replace(segmented(some(seed), seed), token_rewards=None)
    base = estimate_advantages(name, cut)[0]
    copied = int(np.random.default_rng(seed).integers(len(cut.masks)))
    order = [*range(len(cut.masks)), *[copied] * copies]

    def pick(values):
        if values is None or isinstance(values, dict):
            return values and {key: value[order] for key, value in values.items()}
        return values[order] if isinstance(values, np.ndarray) else [values[i] for i in order]

    more = Trajectories(**{key: pick(value) for key, value in vars(cut).items() if key in FIELDS})
    found = estimate_advantages(name, more)[0]
    for i, (a, b) in enumerate(zip(found, base, strict=False)):
        assert np.array_equal(a, b), i


FIELDS = Trajectories.__dataclass_fields__


def test_without_the_map_copies_would_count():
    """The test above can fail: as samples of their own the copies move the mean."""
    masks = [np.ones(1, bool)] * 3
    rewards = np.array([0.0, 1.0, 1.0])
    counted_once = Trajectories(rewards, "aaa", masks, episodes=np.array([0, 1, 1]))
    counted_twice = replace(counted_once, episodes=None)
    found = [float(a[0]) for a in estimate_advantages("dr_grpo", counted_once)[0]]
    assert found == [-0.5, 0.5, 0.5]
    wrong = [float(a[0]) for a in estimate_advantages("dr_grpo", counted_twice)[0]]
    assert wrong == pytest.approx([-2 / 3, 1 / 3, 1 / 3])


def test_leave_one_out_leaves_out_the_episode():
    """Three episodes, the first with three segments: its baseline is the mean of the two others."""
    t = Trajectories(
        np.array([1.0, 1.0, 1.0, 0.0, 0.5]),
        "aaaaa",
        [np.ones(2, bool)] * 5,
        episodes=np.array([0, 0, 0, 1, 2]),
    )
    found = [a.tolist() for a in estimate_advantages("rloo", t)[0]]
    assert found[:3] == [[0.75, 0.75]] * 3
    np.testing.assert_allclose(found[3:], [[-0.75, -0.75], [0.0, 0.0]])


def test_users_estimators_see_episodes_unless_they_ask_for_segments():
    t = Trajectories(np.array([1.0, 1.0]), "aa", [np.ones(1, bool)] * 2, episodes=np.array([0, 0]))
    spec = "tests.unit.algorithms.test_episode_advantages"
    assert estimate_advantages(f"{spec}:count_trajectories", t)[0][0].tolist() == [1.0]
    assert estimate_advantages(f"{spec}:count_segments", t)[0][0].tolist() == [2.0]


def count_trajectories(t, options):
    return np.full(len(t.groups), float(len(t.groups)))


class CountSegments:
    """As users may write it too: an object with the attribute."""

    per_segment = True

    def __call__(self, t, options):
        return count_trajectories(t, options)


count_segments = CountSegments()


@pytest.mark.parametrize("agg", AGGREGATIONS)
@given(
    st.lists(st.lists(st.integers(0, 9), min_size=1, max_size=4), min_size=1, max_size=8),
)
@quick
def test_a_token_weighs_the_same_however_its_episode_was_cut(agg, episodes):
    """`episodes`: trained tokens of the segments of each."""
    whole = [sum(segments) for segments in episodes]
    alive = sum(n > 0 for n in whole)
    before = core_algos.token_weights(whole, agg, sum(whole), alive, longest=9)
    flat = [n for segments in episodes for n in segments]
    sizes = [len(segments) for segments in episodes]
    numbers = np.repeat(np.arange(len(episodes)), sizes)
    of_episode, count = core_algos.lengths_of_episodes(flat, numbers)
    assert count == alive
    after = core_algos.token_weights(flat, agg, sum(flat), count, 9, of_episode)
    for i, n in enumerate(whole):
        own = numbers == i
        weight_of_episode = float((after[own] * np.array(flat)[own]).sum())
        assert weight_of_episode == pytest.approx(float(before[i]) * n)
        for weight, length in zip(after[own], np.array(flat)[own], strict=True):
            assert weight == (before[i] if length else 0.0)
    if agg == "sequence-mean":
        total = float((after * np.array(flat)).sum())
        assert total == pytest.approx(1.0 if alive else 0.0)


def test_without_episodes_the_lengths_are_those_of_the_sequences():
    of_episode, count = core_algos.lengths_of_episodes([2, 0, 6], None)
    assert of_episode.tolist() == [2, 0, 6]
    assert count == 2
