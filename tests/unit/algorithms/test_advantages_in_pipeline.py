"""Advantages in the pipeline: penalties, filters, and the KL in the reward."""

import numpy as np
import pytest

from one_step_off.algorithms.batch_advantages import fill_advantages
from one_step_off.algorithms.core_algos import KLController
from one_step_off.config.schema import Config
from one_step_off.data.samples import Batch, Sample
from one_step_off.ray_trainer import Pipeline, Resumed, Roles


def test_the_pipeline_shapes_filters_and_puts_the_kl_into_the_reward():
    def sample(index, reward, n, finish):
        arrays = (
            np.zeros(n, np.int32),
            np.full(n, -1.0, np.float32),
            np.ones(n, bool),
            np.zeros(n, np.int32),
        )
        return Sample(
            (0, 0), index, np.zeros(2, np.int32), *arrays, reward=reward, finish_reason=finish
        )

    cfg = Config()
    cfg.data.max_response_length, cfg.reward.overlong_buffer = 4, 2
    cfg.algorithm.adv_estimator, cfg.algorithm.filter_overlong = "dr_grpo", True
    cfg.algorithm.kl_in_reward, cfg.algorithm.kl_coef = True, 0.1
    batch = Batch(
        0,
        [sample(0, 1.0, 4, "length"), sample(1, 1.0, 3, "stop"), sample(2, 0.0, 1, "stop")],
        (0, 0),
    )
    batch.ref_log_probs = [np.full(len(s.log_probs), -1.5, np.float32) for s in batch.samples]
    metrics = fill_advantages(batch, cfg, KLController(0.1, target=0.5, horizon=6))
    # KL of the two that are left: 1.5 and .5. Totals: 1 - 1 (filtered, so without KL), 1 - .5 - .15, 0 - .05
    assert metrics == {"kl/response": 1.0, "kl/coef": 0.1}
    mean = (0.0 + 0.35 - 0.05) / 3
    want = [[0] * 4, [0.35 - mean] * 3, [-0.05 - mean]]
    for got, w in zip(batch.advantages, want, strict=True):
        np.testing.assert_allclose(got, w, rtol=1e-5, atol=1e-7)
    assert batch.returns is None and not batch.samples[0].loss_mask.any()


def test_the_kl_in_the_reward_is_that_of_the_recomputed_log_probs():
    """Of mu only where nothing was recomputed: the optimal token baseline has them without old_log_probs=recompute."""
    cfg = Config()
    cfg.algorithm.adv_estimator = "reinforce_plus_plus"
    cfg.algorithm.whiten_adv, cfg.algorithm.kl_in_reward, cfg.algorithm.kl_coef = False, True, 0.1
    for recomputed, kl in (
        (None, [1.0, 0.5]),
        ([np.array([-1.5, -1.75], np.float32)], [0.5, 0.25]),
    ):
        arrays = (
            np.zeros(2, np.int32),
            np.array([-1.0, -1.5], np.float32),
            np.ones(2, bool),
            np.zeros(2, np.int32),
        )
        batch = Batch(0, [Sample((0, 0), 0, np.zeros(2, np.int32), *arrays, reward=1.0)], (0, 0))
        batch.ref_log_probs, batch.old_log_probs = [np.full(2, -2.0, np.float32)], recomputed
        metrics = fill_advantages(batch, cfg, KLController(0.1))
        assert metrics == {"kl/response": pytest.approx(sum(kl)), "kl/coef": 0.1}
        # reward-to-go: the KL of this token and of those after it, and the reward
        np.testing.assert_allclose(
            batch.advantages[0], [1 - 0.1 * sum(kl), 1 - 0.1 * kl[1]], rtol=1e-6
        )


def test_a_checkpoint_brings_the_adapted_kl_coefficient_back():
    cfg = Config()
    cfg.algorithm.kl_coef = 0.1
    resumed = Resumed(3, None, 0.0, kl_coef=0.25)
    assert (
        Pipeline(
            cfg, Roles(None, None, None), None, None, None, resumed=resumed
        ).kl_controller.value
        == 0.1
    )  # fixed: what the config says
    cfg.algorithm.kl_target = 6.0
    assert (
        Pipeline(
            cfg, Roles(None, None, None), None, None, None, resumed=resumed
        ).kl_controller.value
        == 0.25
    )
