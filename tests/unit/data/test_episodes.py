"""Which samples make up an episode, what must hold of them, and what is counted once."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from one_step_off.data.episodes import (
    EpisodeError,
    agent_counts,
    check_episodes,
    episode_numbers,
    episode_stats,
    first_positions,
    group_by_episode,
    one_per_episode,
    segment_index,
)
from one_step_off.data.evaluation import evaluation_metrics
from tests.unit.data.episode_helpers import cut, make_sample


def test_samples_without_segments_are_episodes_even_with_equal_indices():
    samples = [make_sample(0), make_sample(0)]
    assert episode_numbers(samples) is None
    assert first_positions(samples).tolist() == [0, 1]
    assert one_per_episode(samples) == samples
    with_segments = [*samples, *cut(make_sample(0, row=1), [2, 4])]
    assert episode_numbers(with_segments).tolist() == [0, 1, 2, 2, 2]


def test_segments_are_found_wherever_they_are():
    first = cut(make_sample(0), [3])
    second = cut(make_sample(1), [2])
    single = make_sample(2)
    mixed = [first[0], second[0], single, first[1], second[1]]
    assert episode_numbers(mixed).tolist() == [0, 1, 2, 0, 1]
    assert first_positions(mixed).tolist() == [0, 1, 2]
    assert group_by_episode(mixed) == [first, second, [single]]
    assert [segment_index(sample) for sample in mixed] == [0, 0, 0, 1, 1]


def test_an_episode_must_be_complete():
    check_episodes([])
    check_episodes([make_sample(0), *cut(make_sample(1), [1, 2])])
    segments = cut(make_sample(1), [1, 2])
    with pytest.raises(EpisodeError, match=r"prompt \(0, 0\), sample 1: has the segments \[0, 2\]"):
        check_episodes([segments[0], segments[2]])
    with pytest.raises(EpisodeError, match="has 3 of them"):
        check_episodes(segments[:2])
    with pytest.raises(EpisodeError, match=r"\[1, 0, 2\]"):
        check_episodes([segments[1], segments[0], segments[2]])
    segments[2].reward = 0.5
    with pytest.raises(EpisodeError, match=r"the rewards \[0.5, 1.0\], not one"):
        check_episodes(segments)
    for segment in segments:
        segment.reward = float("nan")
    check_episodes(segments)


def test_figures_of_episodes():
    turns = [True, True, False, True, False, False, True]
    cut_in_three = cut(make_sample(0, mask=turns), [2, 5])
    samples = [*cut_in_three, make_sample(1, length=4)]
    assert episode_stats(samples) == {
        "episode/segments": 2.0,
        "episode/turns": 2.0,  # three and one
        "episode/trained_tokens": 4.0,
    }
    for segment, counted in zip(cut_in_three, (1.0, 4.0, 2.0), strict=True):
        segment.extra["agent"] = {"turns": counted}  # two turns may have nothing between them
    assert episode_stats(samples)["episode/turns"] == 4.0
    assert agent_counts(cut_in_three) == {"turns": 7.0}
    assert agent_counts(samples[3:]) == {"turns": 1.0}
    assert episode_stats(samples[3:]) == {}
    assert episode_stats(samples[3:], always=True)["episode/segments"] == 1.0
    assert episode_stats([], always=True) == {}


@given(
    rewards=st.lists(st.sampled_from([0.0, 0.5, 1.0]), min_size=2, max_size=12),
    seed=st.integers(0, 100),
)
@settings(max_examples=30, deadline=None)
def test_held_out_metrics_count_episodes(rewards, seed):
    """Rewards, parts and passes are those of the whole episodes, however they are cut."""
    rng = np.random.default_rng(seed)
    whole = []
    for i, reward in enumerate(rewards):
        sample = make_sample(i // 2, reward=reward, row=i % 2, reward_parts={"all": reward})
        sample.prompt_id = (-1, i % 2)
        whole.append(sample)
    segments = []
    for sample in whole:
        segments += cut(sample, rng.integers(0, 6, rng.integers(0, 4)).tolist())
    before = evaluation_metrics(whole, ["val"])
    after = evaluation_metrics(segments, ["val"])
    assert after.pop("val/samples") == len(segments)
    assert after.pop("val/episodes", float(len(whole))) == len(whole)
    del before["val/samples"], before["val/response_length"], after["val/response_length"]
    assert after == before
