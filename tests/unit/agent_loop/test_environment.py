"""Environments: puzzles, episodes that hang or die, and text of the model that is run as code."""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from pathlib import Path
from typing import Any

import pytest

from agent_loop import processes
from agent_loop.base import Limits, Loops, Trajectory
from agent_loop.environment import Puzzle
from one_step_off.config.errors import ConfigError
from one_step_off.data.samples import Prompt
from one_step_off.data.word_problems import make_puzzles
from tests.unit.agent_loop.stand_ins import (
    LONG_LIMITS,
    USUAL_LIMITS,
    ScriptedEngine,
    make_config,
    make_prompt,
    observations,
    run_loop,
)
from tests.unit.stand_ins import tiny_tokenizer


def environment_loop(name: str, **settings: Any) -> Any:
    """The loop with an environment of tests/environments.py."""
    kwargs = {"environment": {"env": f"tests.environments:{name}"}}
    cfg = make_config(loop="environment", loop_kwargs=kwargs, **settings)
    return Loops(cfg, tiny_tokenizer()).get()


def play(name: str, *turns: str, limits: Limits = LONG_LIMITS, **settings: Any) -> Trajectory:
    """One episode of an environment of tests/environments.py, with these turns of the model."""
    loop = environment_loop(name, **settings)
    engine = ScriptedEngine(loop.tokenizer, *(f" {turn}" for turn in turns))
    prompt = make_prompt(loop.tokenizer, truth="good")
    return asyncio.run(loop.run(prompt, engine, None, limits))


def run_puzzle(tokenizer, truth: str, *turns: str) -> Trajectory:
    engine = ScriptedEngine(tokenizer, *turns)
    return run_loop(make_config(loop="environment"), tokenizer, engine, truth=truth)


def test_a_puzzle_of_reasoning_gym(tokenizer):
    rows = make_puzzles("train", 40, 0)
    test_rows = make_puzzles("test", 40, 0)
    questions = {row["prompt"][0]["content"] for row in rows}
    assert not questions & {row["prompt"][0]["content"] for row in test_rows}
    truth = rows[3]["reward_model"]["ground_truth"]
    puzzle = Puzzle()
    assert puzzle.reset(truth) == rows[3]["prompt"][0]["content"]

    wrong = run_puzzle(tokenizer, truth, " 0", " nothing", " 1", " 2")
    assert wrong.turns == 3
    assert wrong.facts["steps"] == 3
    assert 0 <= wrong.reward < 1

    right = run_puzzle(tokenizer, truth, " 0", f" {puzzle.entry['answer']}", " 1")
    assert right.turns == 2
    assert right.reward == pytest.approx(1.0), "the best guess counts, and ends it"


@pytest.mark.parametrize("action", ["sleep", "spin", "die"])
def test_a_step_that_never_ends_is_killed_and_ends_only_its_episode(action):
    begin = time.perf_counter()
    trajectory = play("Moody", "x", action, "x", tool_timeout_s=1.0)
    assert trajectory.reward == 0.5
    assert trajectory.facts == {"steps": 2, "lost_steps": 1}
    sample = trajectory.sample(Prompt((0, 0), trajectory.prompt_ids, "q", "1"), 0)
    reasons = {"die": "its process ended"}
    reason = reasons.get(action, "took longer than agent.tool_timeout_s=1")
    assert sample.extra["agent_failure"].endswith(f"Moody.step: {reason}")
    assert time.perf_counter() - begin < 30


def test_an_environment_of_the_user(tokenizer):
    trajectory = play("Moody", "x", "end", "x", tool_timeout_s=1.0)
    assert trajectory.reward == 1.0
    assert trajectory.facts == {"steps": 2}
    assert observations(trajectory, tokenizer) == ["\nQuestion: x\nAnswer:"]


@pytest.mark.parametrize(
    ("action", "words"),
    [
        ("raise", "Moody.step: KeyError: 'mood'"),
        ("nan", "returned .*nan, False., not .* a finite number"),
    ],
)
def test_an_environment_that_raises_or_has_no_finite_reward_ends_the_run(action, words):
    with pytest.raises(RuntimeError, match=words):
        play("Moody", action, tool_timeout_s=1.0)


@pytest.mark.parametrize("action", ["none", "bytes", "set", "pair", "nothing", "long", "word"])
def test_an_environment_that_answers_wrongly_ends_the_run_by_name(action):
    words = (
        "environments:Moody.step: (TypeError: float|ValueError: .*(MiB|float)|it returned .*, not)"
    )
    with pytest.raises(RuntimeError, match=words):
        play("Moody", "x", action)


def test_an_environment_that_cannot_be_made_is_refused_with_the_reason():
    loop = environment_loop("Unmade")
    words = "Unmade does not begin .*OSError: its book is missing"
    with pytest.raises(ConfigError, match=words):
        asyncio.run(loop.check(make_prompt(loop.tokenizer)))


def test_rows_that_an_environment_does_not_take_are_refused_before_engines_start(tokenizer):
    loop = Loops(make_config(loop="environment"), tokenizer).get()
    puzzle = '{"dataset": "countdown", "seed": 2}'
    asyncio.run(loop.check(make_prompt(tokenizer, truth=puzzle)))
    words = "Puzzle does not begin with the ground truth '156'.*AttributeError"
    with pytest.raises(ConfigError, match=words):
        asyncio.run(loop.check(make_prompt(tokenizer)))


def test_the_clock_of_an_episode_begins_with_its_first_turn():
    assert play("Busy", "x", limits=Limits(400, 8, seconds=0.05)).turns == 1


# --- confined environments ------------------------------------------------------------------------

ESCAPED = Path("/tmp/one_step_off_escaped")


@pytest.mark.parametrize(
    ("guess", "lost_steps"),
    [
        ("9**9**9**9", 1),
        (f"__import__('os').system('touch {ESCAPED}')", 0),
        ("__import__('os')._exit(1)", 1),
        ("__import__('os').write(3, b'nope\\n')", 1),
    ],
)
def test_a_guess_that_is_code_does_no_harm(tokenizer, guess, lost_steps):
    truth = make_puzzles("train", 1, 0)[0]["reward_model"]["ground_truth"]
    assert "countdown" in truth
    cfg = make_config(loop="environment", tool_timeout_s=3.0)
    loop: Any = Loops(cfg, tokenizer).get()
    engine = ScriptedEngine(tokenizer, f" {guess}", " 1", " 2")

    async def main() -> tuple[Trajectory, float]:
        """The trajectory, and the longest time for which the event loop was blocked."""
        prompt = make_prompt(tokenizer, truth=truth)
        episode = asyncio.create_task(loop.run(prompt, engine, None, USUAL_LIMITS))
        longest = 0.0
        while not episode.done():
            begin = time.perf_counter()
            await asyncio.sleep(0.01)
            longest = max(longest, time.perf_counter() - begin)
        return await episode, longest

    trajectory, longest = asyncio.run(main())
    assert trajectory.reward < 0.1
    assert longest < 2
    assert not ESCAPED.exists()
    assert trajectory.facts.get("lost_steps", 0) == lost_steps


WRITES = """
import os
for fd in range(3, 9):
    try:
        os.write(fd, {0} + b"\\n")
    except OSError:
        pass
"""


@pytest.mark.parametrize(
    "line",
    [
        b"nope",
        b'{"error": "x"}',
        b'["x", NaN, false]',
        b'["x", 1e999, false]',
        b'["x", 1e31, false]',
        b'["x", "1", 2]',
        b'["x", 1.0]',
        b"[null, 1.0, true]",
        b'["x", "1", true]',
        b"\xff",
        "b'[' * 99999",
        "b'x' * 1100000",
    ],
)
def test_a_guess_that_answers_for_its_environment_is_a_lost_step(line):
    trajectory = play("Runs", "pass", WRITES.format(line), "pass")
    assert trajectory.reward == 0.5
    assert trajectory.facts == {"steps": 2, "lost_steps": 1}


def test_many_confined_episodes_at_once_are_in_time(monkeypatch):
    """Resets that take a quarter of a second of a core each: two at once, each within its two
    seconds. All at once would take two cores three seconds."""
    # A container may show more cores than it may use.
    cores = min(2, len(os.sched_getaffinity(0)))
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: set(range(cores)))
    loop = environment_loop("Busy", tool_timeout_s=2.0)
    prompt = make_prompt(loop.tokenizer)

    async def main() -> list[Trajectory]:
        episodes = []
        for _ in range(24):
            engine = ScriptedEngine(loop.tokenizer, " end")
            episodes.append(loop.run(prompt, engine, None, USUAL_LIMITS))
        return await asyncio.gather(*episodes)

    assert [trajectory.reward for trajectory in asyncio.run(main())] == [1.0] * 24


def test_an_episode_waits_for_a_core_no_longer_than_its_time():
    loop = environment_loop("Busy", tool_timeout_s=4.0)
    engine = ScriptedEngine(loop.tokenizer, " x")
    prompt = make_prompt(loop.tokenizer)
    limits = Limits(400, 8, seconds=2.0)  # the reset takes a quarter of a second of a core

    async def main() -> Trajectory:
        async with contextlib.AsyncExitStack() as stack:

            async def generate_and_take_all_cores(*request: Any) -> Any:
                for _ in os.sched_getaffinity(0):
                    await stack.enter_async_context(processes.reserve_core())
                return await engine(*request)

            episode = loop.run(prompt, generate_and_take_all_cores, None, limits)
            return await asyncio.wait_for(episode, 20)

    assert asyncio.run(main()).facts == {"steps": 1, "lost_steps": 1}
