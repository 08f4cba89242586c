"""A training batch whose episodes have several samples: penalties, filters, KL, faults, dynamic
sampling and metrics count episodes."""

from __future__ import annotations

import copy

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from one_step_off.algorithms.batch_advantages import (
    fill_advantages,
    set_baselines,
    shaped_rewards,
)
from one_step_off.algorithms.core_algos import KLController
from one_step_off.config.schema import Config
from one_step_off.data.samples import Batch
from one_step_off.monitoring.summary import agent_stats, sample_stats
from one_step_off.ray_trainer import count_faults
from one_step_off.rollout.dynamic_sampling import uninformative_prompts
from tests.unit.data.episode_helpers import cut, cut_arrays, make_sample

REWARDS = [1.0, 0.25, 0.5, 1.0]
ENDS = [[2, 4], [], [5], [1, 2, 3]]


def whole_batch() -> Batch:
    """Two prompts with two episodes of 6 tokens each."""
    samples = []
    for i, reward in enumerate(REWARDS):
        parts = {"right": reward, "form": 1 - reward}
        samples.append(make_sample(i % 2, 6, reward, row=i // 2, reward_parts=parts))
    rng = np.random.default_rng(0)
    batch = Batch(0, samples, (0, 0))
    batch.ref_log_probs = [rng.normal(-1, 0.3, 6).astype(np.float32) for _ in samples]
    batch.values = [rng.normal(0, 1, 6).astype(np.float32) for _ in samples]
    return batch


def cut_batch(batch: Batch, ends: list[list[int]]) -> tuple[Batch, list[list]]:
    """The batch with each sample cut into segments, and these by sample."""
    episodes = [cut(s, own) for s, own in zip(copy.deepcopy(batch.samples), ends, strict=True)]
    result = Batch(batch.step, [s for own in episodes for s in own], batch.expected_stamp)
    for name in ("ref_log_probs", "values"):
        setattr(result, name, cut_arrays(getattr(batch, name), episodes))
    return result, episodes


def make_config(estimator: str) -> Config:
    cfg = Config()
    cfg.algorithm.adv_estimator = estimator
    cfg.algorithm.kl_in_reward = True
    cfg.algorithm.kl_coef = 0.1
    return cfg


@pytest.mark.parametrize("estimator", ["grpo", "rloo", "opo", "gdpo", "gpg"])
@given(ends=st.lists(st.lists(st.integers(1, 5), max_size=3, unique=True), min_size=4, max_size=4))
@settings(max_examples=15, deadline=None)
def test_cuts_change_neither_advantages_nor_metrics(estimator, ends):
    cfg = make_config(estimator)
    before = whole_batch()
    after, episodes = cut_batch(before, ends)
    controllers = [KLController(0.1, target=0.5, horizon=40) for _ in range(2)]
    metrics = fill_advantages(before, cfg, controllers[0])
    found = fill_advantages(after, cfg, controllers[1])
    assert found == pytest.approx(metrics)
    assert controllers[1].value == pytest.approx(controllers[0].value)
    wanted = cut_arrays(before.advantages, episodes)
    for a, b in zip(after.advantages, wanted, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


def test_the_longest_segment_is_punished_once_for_all():
    cfg = Config()
    cfg.data.max_response_length = 8
    cfg.reward.overlong_buffer = 4
    long_work = make_sample(0, 20)  # five times four tokens: none of its contexts is long
    one_long = make_sample(1, 20)
    samples = [
        *cut(long_work, [4, 8, 12, 16]),
        *cut(one_long, [2, 8, 10]),  # segments of 2, 6, 2 and 10 tokens
        make_sample(2, 6),
    ]
    assert shaped_rewards(samples, cfg).tolist() == [1.0] * 5 + [0.0] * 4 + [0.5]


def test_a_cut_segment_takes_its_episode_out_of_the_loss():
    cfg = Config()
    cfg.algorithm.adv_estimator = "dr_grpo"
    cfg.algorithm.filter_overlong = True
    batch, episodes = cut_batch(whole_batch(), ENDS)
    episodes[3][1].finish_reason = "length"
    fill_advantages(batch, cfg, KLController(0.0))
    trained = [bool(sample.loss_mask.any()) for sample in batch.samples]
    assert trained == [True] * 6 + [False] * 4
    # Its reward stays in the mean of its group.
    assert float(batch.advantages[4][0]) == pytest.approx(-0.25)


def test_a_greedy_episode_is_the_baseline_of_its_prompt():
    cfg = Config()
    samples = cut(make_sample(0), [3])
    greedy = cut(make_sample(1, reward=0.25, greedy=True), [1, 2])
    set_baselines(samples, samples + greedy, cfg)
    assert [sample.extra["baseline"] for sample in samples] == [0.25, 0.25]


def test_faults_and_uninformative_groups_count_episodes():
    fault = {"fault": "agent/errors", "error": "it ended"}
    samples = [*cut(make_sample(0, reward=0.0, **fault), [1, 2]), make_sample(1)]
    assert count_faults(samples)["agent/errors"] == 1.0
    assert uninformative_prompts(samples) == []  # it has an error, and two rewards
    alike = [*cut(make_sample(0, row=1), [1, 2]), make_sample(1, row=1)]
    differing = [*cut(make_sample(0, row=2), [1, 2]), make_sample(1, row=2, reward=0.0)]
    assert uninformative_prompts(samples + alike + differing) == [(0, 1)]


def test_metrics_of_a_step_count_rewards_by_episode_and_lengths_by_sample():
    counts = {"agent": {"turns": 1.0, "tool_calls": 2.0}}  # one turn in each of three segments
    samples = [*cut(make_sample(0, 6, reward=1.0, **counts), [1, 3]), make_sample(1, 4, reward=0.0)]
    stats = sample_stats(samples)
    assert stats["reward/mean"] == 0.5
    assert stats["reward/std"] == 0.5
    assert stats["samples"] == 4.0
    assert stats["response_length/mean"] == 2.5  # 1, 2, 3 and 4 tokens
    assert agent_stats(samples) == {"agent/turns/mean": 2.0, "agent/tool_calls/mean": 1.0}
