"""The old names of agent loops work for one release, and warn."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

from agent_loop.base import AgentLoop, Generated, Limits, Trajectory
from one_step_off.config.schema import Config
from one_step_off.models import tiny_qwen


async def generate(ids: np.ndarray, max_tokens: int) -> Generated:
    return Generated(
        np.arange(2, dtype=np.int32),
        np.zeros(2, np.float32),
        np.zeros(2, np.int32),
        attempt=0,
        finish_reason="stop",
    )


def test_say_and_hear_are_generate_and_observe():
    trajectory = Trajectory(np.arange(3, dtype=np.int32), Limits(100, turns=2))
    with pytest.warns(DeprecationWarning, match=r"Trajectory\.say was renamed to .*generate"):
        turn = asyncio.run(trajectory.say(generate))
    assert turn is not None
    with pytest.warns(DeprecationWarning, match=r"Trajectory\.hear was renamed to .*observe"):
        assert trajectory.hear("tool", np.arange(4))
    with pytest.warns(DeprecationWarning, match=r"Trajectory\.cut was renamed to .*truncated"):
        assert not trajectory.cut
    assert [segment.role for segment in trajectory.segments] == ["assistant", "tool"]
    assert trajectory.length == 6


def test_hears_is_observation_role_and_turn_is_encode_messages():
    with pytest.warns(DeprecationWarning, match=r"AgentLoop\.hears .*observation_role"):

        class OldLoop(AgentLoop):
            hears = "user"

    loop = OldLoop(Config(), tiny_qwen.build_tokenizer())
    assert loop.observation_role == "user"
    messages = [{"role": "user", "content": "Are you sure?"}]
    turn_ids = np.array([5], np.int32)
    with pytest.warns(DeprecationWarning, match=r"AgentLoop\.turn .*encode_messages"):
        old = loop.turn(messages, turn_ids)
    assert old.tolist() == loop.encode_messages(messages, turn_ids).tolist()
    assert len(old) > 0


def test_the_new_names_do_not_warn(recwarn):
    class NewLoop(AgentLoop):
        observation_role = "user"

    NewLoop(Config(), tiny_qwen.build_tokenizer())
    trajectory = Trajectory(np.arange(3, dtype=np.int32), Limits(100))
    asyncio.run(trajectory.generate(generate))
    trajectory.observe("user", np.arange(2))
    assert not [w for w in recwarn if "was renamed" in str(w.message)]
