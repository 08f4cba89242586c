"""Advantages of a training batch: penalties, filters, and the KL in the reward."""

import numpy as np
import pytest

from one_step_off.algorithms.batch_advantages import fill_advantages
from one_step_off.algorithms.core_algos import KLController
from one_step_off.config.schema import Config
from one_step_off.data.samples import Batch, Sample
from one_step_off.ray_trainer import Pipeline, Resumed, RunGroups


def make_sample(
    index: int, log_probs: list[float], reward: float, finish_reason: str = "stop"
) -> Sample:
    """A sample of one prompt; all its tokens are generated and trained."""
    n = len(log_probs)
    return Sample(
        prompt_id=(0, 0),
        index=index,
        prompt_ids=np.zeros(2, np.int32),
        response_ids=np.zeros(n, np.int32),
        log_probs=np.array(log_probs, np.float32),
        loss_mask=np.ones(n, bool),
        versions=np.zeros(n, np.int32),
        reward=reward,
        finish_reason=finish_reason,
    )


def test_rewards_are_shaped_filtered_and_hold_the_kl():
    cfg = Config()
    cfg.data.max_response_length = 4
    cfg.reward.overlong_buffer = 2
    cfg.algorithm.adv_estimator = "dr_grpo"
    cfg.algorithm.filter_overlong = True
    cfg.algorithm.kl_in_reward = True
    cfg.algorithm.kl_coef = 0.1
    samples = [
        make_sample(0, [-1.0] * 4, reward=1.0, finish_reason="length"),
        make_sample(1, [-1.0] * 3, reward=1.0),
        make_sample(2, [-1.0], reward=0.0),
    ]
    batch = Batch(0, samples, (0, 0))
    batch.ref_log_probs = [np.full(len(s.log_probs), -1.5, np.float32) for s in samples]
    metrics = fill_advantages(batch, cfg, KLController(0.1, target=0.5, horizon=6))
    # The KL of the two samples that remain is 1.5 and 0.5. The totals are 1 - 1 (filtered, so
    # without KL), 1 - 0.5 - 0.15 and 0 - 0.05.
    assert metrics == {"kl/response": 1.0, "kl/coef": 0.1}
    mean = (0.0 + 0.35 - 0.05) / 3
    expected = [[0] * 4, [0.35 - mean] * 3, [-0.05 - mean]]
    for advantages, wanted in zip(batch.advantages, expected, strict=True):
        np.testing.assert_allclose(advantages, wanted, rtol=1e-5, atol=1e-7)
    assert batch.returns is None
    assert not batch.samples[0].loss_mask.any()


@pytest.mark.parametrize(
    ("recomputed", "kl"),
    [
        (None, [1.0, 0.5]),
        ([np.array([-1.5, -1.75], np.float32)], [0.5, 0.25]),
    ],
)
def test_the_kl_in_the_reward_is_that_of_the_recomputed_log_probs(recomputed, kl):
    """It is the KL of mu only where nothing was recomputed."""
    cfg = Config()
    cfg.algorithm.adv_estimator = "reinforce_plus_plus"
    cfg.algorithm.whiten_adv = False
    cfg.algorithm.kl_in_reward = True
    cfg.algorithm.kl_coef = 0.1
    batch = Batch(0, [make_sample(0, [-1.0, -1.5], reward=1.0)], (0, 0))
    batch.ref_log_probs = [np.full(2, -2.0, np.float32)]
    batch.old_log_probs = recomputed
    metrics = fill_advantages(batch, cfg, KLController(0.1))
    assert metrics == {"kl/response": pytest.approx(sum(kl)), "kl/coef": 0.1}
    # The reward-to-go: the KL of this token and of those after it, and the reward.
    expected = [1 - 0.1 * sum(kl), 1 - 0.1 * kl[1]]
    np.testing.assert_allclose(batch.advantages[0], expected, rtol=1e-6)


@pytest.mark.parametrize(
    ("kl_target", "coefficient"),
    [
        (None, 0.1),  # fixed: the config's
        (6.0, 0.25),  # adaptive: the checkpoint's
    ],
)
def test_a_checkpoint_restores_the_adapted_kl_coefficient(kl_target, coefficient):
    cfg = Config()
    cfg.algorithm.kl_coef = 0.1
    cfg.algorithm.kl_target = kl_target
    resumed = Resumed(3, kl_coef=0.25)
    pipeline = Pipeline(cfg, RunGroups(None, None, None), None, None, None, resumed=resumed)
    assert pipeline.kl_controller.value == coefficient
