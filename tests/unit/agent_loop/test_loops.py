"""Loops by name: their settings, the loop of the documentation, tries until an answer is right."""

from __future__ import annotations

import random
import re
import shlex
import sys
from pathlib import Path

import pytest

from agent_loop import base, tools
from agent_loop.base import Limits, Loops
from benchmarks.agent_loop.stand_in_engine import StandInEngine, serve_through_loop
from one_step_off.config.errors import ConfigError
from one_step_off.config.loading import load_config
from one_step_off.config.sections.agent import BUILT_IN_LOOPS, BUILT_IN_TOOLS
from one_step_off.rewards.reward import Reward
from tests.unit.agent_loop.stand_ins import (
    ScriptedEngine,
    make_config,
    observations,
    run_loop,
)

PAGE = Path(__file__).parents[3] / "docs" / "tutorials" / "your_own_agent.md"


def test_the_names_in_the_config_checks_are_those_that_exist():
    assert set(BUILT_IN_LOOPS) == set(base.LOOPS)
    assert set(BUILT_IN_TOOLS) == set(tools.BUILT_IN)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"loop": "nothing"}, "agent.loop='nothing': unknown; use module:Class or one of"),
        ({"loop": "json:dumps"}, "agent.loop='json:dumps': is not an agent loop; name a subclass"),
        ({"loop_kwargs": {"tool": {"color": 1}}}, "color"),
        ({"loop_kwargs": {"tool": {"format": "xml"}}}, "format='xml'"),
        ({"tools": ""}, "agent.tools is empty"),
        ({"tools": "json:dumps"}, "no JSON schema can be built"),
        ({"tools": "json:nothing"}, "agent.tools='json:nothing'"),
    ],
)
def test_settings_that_do_not_fit_are_refused_before_engines_start(tokenizer, settings, words):
    with pytest.raises(ConfigError, match=re.escape(words)):
        Loops(make_config(**settings), tokenizer).get()


async def score_in_parts(response: str) -> Reward | None:
    return Reward.of({"right": float("156" in response), "form": 0.25})


def test_tries_until_the_answer_is_right(tokenizer):
    settings = {"discount": 0.5, "feedback": "No."}
    cfg = make_config(loop="retry_with_feedback", loop_kwargs={"retry_with_feedback": settings})
    engine = ScriptedEngine(tokenizer, " 155", " 157", " 156")
    trajectory = run_loop(cfg, tokenizer, engine, score_in_parts)
    assert isinstance(trajectory.reward, Reward)
    assert trajectory.reward.parts == {"right": 0.25, "form": 0.0625}
    assert trajectory.reward.total == 0.3125
    assert trajectory.turns == 3
    assert trajectory.facts["tries"] == 3
    assert observations(trajectory, tokenizer) == ["\nQuestion: No.\nAnswer:"] * 2


def test_an_answer_is_right_up_to_the_rounding_of_its_parts(tokenizer):
    async def score(response: str) -> Reward | None:
        return Reward(0.7 + 0.2 + 0.1)

    cfg = make_config(loop="retry_with_feedback", loop_kwargs={})
    trajectory = run_loop(cfg, tokenizer, ScriptedEngine(tokenizer, " 1", " 2"), score)
    assert trajectory.turns == 1


def test_the_last_try_counts_where_none_is_right(tokenizer):
    cfg = make_config(loop="retry_with_feedback", loop_kwargs={})
    engine = ScriptedEngine(tokenizer, " 1", " 2")
    trajectory = run_loop(cfg, tokenizer, engine, score_in_parts, Limits(400, turns=2))
    assert isinstance(trajectory.reward, Reward)
    assert trajectory.reward.parts["right"] == 0.0


@pytest.mark.parametrize(("keys", "question"), [(1, "Are you sure?"), (2, "Really?")])
def test_the_loop_of_the_page_runs(tokenizer, tmp_path, monkeypatch, keys, question):
    """The page shows a loop of at most 20 lines, which runs here with the keys of the page."""
    page = PAGE.read_text()
    code = re.search(r"```python\n(# my_loop.py\n.*?)```", page, re.S)[1]
    assert len([line for line in code.splitlines() if line.strip()]) <= 20
    (tmp_path / "my_loop.py").write_text(code)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "my_loop", raising=False)

    async def score(response: str) -> Reward | None:
        return Reward.of(float("#### 156" in response))

    command = re.search(r"^python -m .*agent.loop=my_loop.*$", page, re.M)[0]
    agent_keys = [word for word in shlex.split(command) if word.startswith("agent.")]
    cfg = load_config([*agent_keys[:keys], "data.train_files=generator:word_problems"])
    engine = ScriptedEngine(tokenizer, " #### 155", " #### 156")
    trajectory = run_loop(cfg, tokenizer, engine, score)
    assert trajectory.turns == 2
    assert trajectory.facts == {"changed": 1}
    assert observations(trajectory, tokenizer) == [f"\nQuestion: {question}\nAnswer:"]


def test_500_conversations_at_once_cost_little(tokenizer):
    """Through a replica, with slots, reward queue and scoring; uneven lengths, and an engine that
    takes its time."""
    rng = random.Random(0)
    lengths = [rng.randrange(0, 12) for _ in range(500)]
    engine = StandInEngine(tokenizer, lengths, slots=64, token_s=5e-4)
    figures = serve_through_loop(engine, tokenizer, reward_workers=4, reward_s=0.0)
    assert engine.requests == sum(lengths) + len(lengths)
    cost_ms = figures["cpu_ms_per_turn"]
    print(f"{cost_ms:.2f} ms of CPU per turn")
    assert cost_ms < 5, "CPU time, and several times what a quiet machine needs"
