"""avg@n and pass@k against counting, and the line that people read."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from one_step_off.data.difficulty import visits_of
from one_step_off.data.evaluation import evaluation_metrics, pass_at_k, set_epoch
from one_step_off.data.samples import Sample
from one_step_off.monitoring.summary import evaluation_text


@given(st.integers(1, 7), st.data())
def test_pass_at_k_is_the_share_of_subsets_with_a_pass(n, data):
    passed = data.draw(st.integers(0, n))
    k = data.draw(st.integers(1, n))
    subsets = list(itertools.combinations([True] * passed + [False] * (n - passed), k))
    assert pass_at_k(n, passed, k) == pytest.approx(sum(map(any, subsets)) / len(subsets))


def samples(index: int, rewards: list[list[float]]) -> list[Sample]:
    z = np.zeros(2)
    return [
        Sample((set_epoch(index), row), i, z, z, z, z > -1, z, reward=r)
        for row, group in enumerate(rewards)
        for i, r in enumerate(group)
    ]


def test_pass_at_k_by_a_threshold():
    rewards = [[0.6, 0.4], [0.5, 0.9]]
    passed = [
        evaluation_metrics(samples(0, rewards), ["val"], at)["val/pass@1"]
        for at in (0.3, 0.5, 0.6, 1.0)
    ]
    assert passed == [1.0, 0.75, 0.5, 0.0]


def test_a_reward_reaches_its_threshold_up_to_rounding():
    almost = 0.7 + 0.2 + 0.1
    assert almost < 1.0
    rewards = [[almost, 0.3], [1.0, 0.999999]]
    result = samples(0, rewards)
    assert evaluation_metrics(result, ["val"], 1.0)["val/pass@1"] == 0.5
    assert [solved for *_, solved in visits_of(result, 1.0)] == [1, 1]
    assert [solved for *_, solved in visits_of(result, 0.1 + 0.2)] == [2, 2]


def test_parts_of_rewards_stand_beside_them():
    """A sample that was not scored counts 0, one whose reward has no such part does not count."""
    result = samples(0, [[1.5, 0.5], [0.0, 0.25]]) + samples(1, [[1.0]])
    for sample, parts in zip(
        result,
        ({"right": 1.0, "form": 0.5}, {"form": 0.5}, None, {}, {"samples": 1.0}),
        strict=True,
    ):
        sample.extra = (
            {"reward_parts": parts} if parts else {"error": "why"} if parts is None else {}
        )
    result = evaluation_metrics(result, ["val", "hard"])
    assert result["val/reward/right"] == 0.5
    assert result["val/reward/form"] == pytest.approx(1 / 3)
    assert result["val/hard/reward/samples"] == 1.0
    assert "val/hard/reward/right" not in result
    assert evaluation_text({"val/version": 3.0} | result, "greedy") == (
        "held-out reward of v3, greedy: 0.562 (right 0.500, form 0.333) over 4 samples, "
        "pass@2 0.500; hard 1.000 (samples 1.000) over 1 samples"
    )


def test_figures_of_two_sets():
    result = evaluation_metrics(
        samples(0, [[1, 0], [0, 0]]) + samples(1, [[0.5], [1.0]]), ["val", "hard"]
    )
    assert result["val/reward"] == result["val/avg@2"] == result["val/pass@1"] == 0.25
    assert result["val/pass@2"] == 0.5
    assert result["val/hard/reward"] == 0.75
    assert result["val/hard/samples"] == 2
    assert "val/hard/pass@1" not in result, "one sample each says nothing that the reward does not"
    assert evaluation_text({"val/version": 3.0} | result, "greedy") == (
        "held-out reward of v3, greedy: 0.250 over 4 samples, pass@2 0.500; "
        "hard 0.750 over 2 samples"
    )
