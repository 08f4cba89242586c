"""Rewards and their parts, as agent loops see them."""

from __future__ import annotations

import itertools
import json
import pickle

import numpy as np

from one_step_off.rewards.reward import Reward


def test_parts_sum_to_the_same_in_every_order():
    parts = {"accuracy": 0.7, "format": 0.2, "language": 0.1}
    for order in itertools.permutations(parts):
        assert Reward.of({name: parts[name] for name in order}).total == 1.0
    assert Reward.of({"a": 1e16, "b": 1.0, "c": -1e16}).total == 1.0


def test_a_reward_is_a_number_with_its_parts():
    reward = Reward.of({"right": 1.0, "form": 0.5})
    assert (reward.total, reward.parts) == (1.5, {"right": 1.0, "form": 0.5})
    assert type(reward.total) is float
    assert reward * 2 == 3.0
    assert 1 + reward == 2.5
    assert reward > 1
    assert sum([reward, reward]) == 3.0
    assert bool(reward)
    half = reward.scaled(0.5)
    again = pickle.loads(pickle.dumps(reward))
    assert (half.total, half.parts) == (0.75, {"right": 0.5, "form": 0.25})
    assert (again.total, again.parts) == (reward.total, reward.parts)
    assert json.dumps(reward) == "1.5"
    assert (Reward.of(0.25).total, Reward.of(0.25).parts) == (0.25, {})
    assert Reward.of(reward).parts == reward.parts
    assert Reward.of(np.float32(0.5)).total == 0.5
    for wrong in (
        None,
        "1",
        float("nan"),
        {"a": "b"},
        Reward(float("nan")),
        Reward(1.0, {"a": float("inf")}),
    ):
        assert Reward.of(wrong) is None
