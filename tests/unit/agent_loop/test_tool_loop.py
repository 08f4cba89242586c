"""Function calling: forms of calls, and conversations with tools."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import pytest

from agent_loop.base import Loops
from agent_loop.tool_loop import hermes_calls, llama_calls
from one_step_off.config.errors import ConfigError
from one_step_off.config.loading import load_config
from one_step_off.data.word_problems import make_products
from one_step_off.models import tiny_qwen
from tests.unit.agent_loop.stand_ins import (
    LONG_LIMITS,
    ScriptedEngine,
    calculator_call,
    make_config,
    make_prompt,
    observations,
    run_loop,
)


def test_calls_of_hermes_and_qwen():
    assert hermes_calls("<think>a <tool_call>{}</tool_call></think>plain") == []
    text = (
        '<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call> and '
        '<tool_call>\n{"name": "g", "arguments": "{}"}'
    )
    assert hermes_calls(text) == [("f", {"a": 1}), ("g", {})]


def test_calls_of_llama():
    text = '{"name": "f", "parameters": {"a": 1}}; {"name": "g", "parameters": {}}'
    assert llama_calls(text) == [("f", {"a": 1}), ("g", {})]
    assert llama_calls("The answer is {5}") == []
    ((name, _),) = llama_calls('{"name": ')
    assert name == ""


def test_many_calls_are_parsed_in_linear_time():
    count = 40000
    begin = time.process_time()
    assert llama_calls('{"name": "f", "parameters": {}};\n' * count) == [("f", {})] * count
    assert time.process_time() - begin < 3


@pytest.mark.parametrize(
    "text",
    [
        "[1]",
        '{"name": "f", "arguments": {}}}',
        '{"name": 5, "arguments": {}}',
        '{"name": "f", "arguments": "x"}',
        "[" * 100000,
    ],
    ids=["list", "brace too many", "number as name", "text as arguments", "deep"],
)
def test_a_malformed_call_has_no_name(text):
    ((name, _),) = hermes_calls(f"<tool_call>{text}</tool_call>")
    assert name == ""


def test_calls_beyond_the_most_of_a_turn_are_answered_in_one_message(tokenizer):
    engine = ScriptedEngine(tokenizer, calculator_call("2 * 3") * 30, " #### 6")
    trajectory = run_loop(make_config(), tokenizer, engine, limits=LONG_LIMITS)
    text = observations(trajectory, tokenizer)[0]
    assert text.count("error: more than 8 calls in one turn; the last 22 were not made") == 1
    assert text.count("6\n") == 8
    assert trajectory.facts == {"tool_calls": 30, "tool_errors": 22, "used_tools": 1}


def test_a_model_whose_calls_no_text_shows_is_refused():
    tokenizer = tiny_qwen.build_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": ["<tool_call>"]})
    with pytest.raises(ConfigError, match="<tool_call> is a special token"):
        Loops(make_config(), tokenizer).get()


def test_the_config_of_the_example_answers_by_tool_within_its_limits():
    tokenizer = tiny_qwen.build_tokenizer("tools")
    path = Path(__file__).parents[3] / "config" / "tool_agent.yaml"
    cfg = load_config([f"config={path}"])
    assert cfg.agent.tools == "calculator"
    assert cfg.reward.function == "gsm8k"
    loops = Loops(cfg, tokenizer)
    (row,) = make_products("train", 1, 0)
    prompt = make_prompt(tokenizer, row["question"])
    assert len(prompt.ids) <= cfg.data.max_prompt_length
    limits = loops.limits(cfg.data.max_response_length)
    answer = " 99 * 99 = 9801\n#### 9801"
    engine = ScriptedEngine(tokenizer, calculator_call("99 * 99"), answer)
    trajectory = asyncio.run(loops.get().run(prompt, engine, None, limits))
    assert trajectory.turns == 2
    assert trajectory.finish_reason == "stop"
    assert trajectory.facts["tool_errors"] == 0
    assert observations(trajectory, tokenizer) == ["\n9801\nAnswer:"]
