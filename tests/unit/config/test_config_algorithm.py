"""Keys of the objective: what is accepted, and what is refused in one line."""

from __future__ import annotations

import pytest

from tests.unit.config.config_helpers import fault, good

MASKED = "algorithm.old_log_probs=recompute", "algorithm.rollout_correction=mis"
REFUSED = [
    (["critic.loss_agg=sum"], ["critic.loss_agg=sum", "one of token-mean"]),
    (
        ["algorithm.rollout_correction_low=0.5"],
        ["algorithm.rollout_correction_low=0.5", "algorithm.rollout_correction=none", "null"],
    ),
    (
        [*MASKED, "algorithm.rollout_correction_low=3"],
        ["algorithm.rollout_correction_low=3", "above algorithm.rollout_correction_cap=2"],
    ),
    (
        [*MASKED, "algorithm.rollout_correction_low=0"],
        ["algorithm.rollout_correction_low=0", "above 0"],
    ),
    (
        ["algorithm.policy_loss=dro", "algorithm.policy_loss_kwargs={beta: 0}"],
        ["algorithm.policy_loss_kwargs.beta=0", "above 0"],
    ),
    (
        ["algorithm.policy_loss=dro", "algorithm.clip_ratio_c=3"],
        ["clip_ratio_c=3", "dro has no dual clip"],
    ),
    (["algorithm.kl_estimator=full"], ["algorithm.kl_estimator=full", "one of k1, k2, k3"]),
]


@pytest.mark.parametrize(("argv", "words"), REFUSED)
def test_what_does_not_fit_is_one_line(argv, words):
    line = fault(*argv)
    for word in words:
        assert word in line


def test_the_critic_has_an_aggregation_of_its_own():
    cfg = good("algorithm.loss_agg=seq-sum-norm")
    assert cfg.critic.loss_agg == "token-mean"
    assert good("critic.loss_agg=sequence-mean").critic.loss_agg == "sequence-mean"


@pytest.mark.parametrize("mode", ["tis", "mis", "seq-tis", "seq-mis", "geo-mask"])
def test_lower_bounds_of_the_correction(mode):
    cfg = good(
        *MASKED[:1], f"algorithm.rollout_correction={mode}", "algorithm.rollout_correction_low=0.5"
    )
    assert cfg.algorithm.rollout_correction_low == 0.5


@pytest.mark.parametrize("agg", ["token-sum", "seq-mean-token-sum"])
def test_sums_as_aggregation(agg):
    cfg = good(f"algorithm.loss_agg={agg}", f"critic.loss_agg={agg}")
    assert cfg.algorithm.loss_agg == cfg.critic.loss_agg == agg


@pytest.mark.parametrize("estimator", ["abs", "k1+", "k3+", "abs+"])
def test_estimators_of_the_kl(estimator):
    keys = (
        "algorithm.kl_coef=0.1",
        "placement.roles.ref=actor",
        f"algorithm.kl_estimator={estimator}",
    )
    assert good(*keys).algorithm.kl_estimator == estimator
