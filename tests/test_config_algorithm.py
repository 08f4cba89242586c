"""Keys of the objective: what is accepted, and what is refused in one line."""

from __future__ import annotations

import pytest

from tests.test_config import fault, good

REFUSED = [
    (["critic.loss_agg=sum"], ["critic.loss_agg=sum", "one of token-mean"]),
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
