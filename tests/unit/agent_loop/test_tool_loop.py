"""Function calling: forms of calls, and conversations with tools."""

from __future__ import annotations

import asyncio
import json
import time
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent_loop.base import CURRENT_PROMPT, Loops
from agent_loop.tool_loop import FIRST_PIECE, hermes_calls, llama_calls
from one_step_off.config.errors import ConfigError
from one_step_off.config.loading import load_config
from one_step_off.data.word_problems import make_products
from tests.unit.agent_loop.stand_ins import (
    LONG_LIMITS,
    USUAL_LIMITS,
    ScriptedEngine,
    calculator_call,
    make_config,
    make_prompt,
    observations,
    run_loop,
)
from tests.unit.data.chat_templates import KIMI, QWEN
from tests.unit.stand_ins import tiny_tokenizer


def test_calls_of_hermes_and_qwen():
    assert hermes_calls("<think>a <tool_call>{}</tool_call></think>plain") == []
    text = (
        '<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call> and '
        '<tool_call>\n{"name": "g", "arguments": "{}"}'
    )
    assert hermes_calls(text) == [("f", {"a": 1}), ("g", {})]


def hermes_turn(*texts: str) -> str:
    calls = [json.dumps({"name": "write", "arguments": {"text": text}}) for text in texts]
    return "\n".join(f"<tool_call>\n{call}\n</tool_call>" for call in calls)


TAGS = st.lists(
    st.sampled_from(["<tool_call>", "</tool_call>", "<think>", "</think>", "<tool_response>"])
    | st.text(max_size=3),
    max_size=5,
).map("".join)


@given(
    texts=st.lists(TAGS, min_size=1, max_size=3),
    thought=st.sampled_from(
        ["", "<think>so</think>", "so</think>", "<think>a <tool_call> b</think>", "Now: "]
        + [f"<think>{hermes_turn('</think>')}</think>", f"<think>{hermes_turn('x')}</think>"]
        + ["<think>a <tool_call> b </tool_call> c</think>", "a <tool_call> b</think>"]
    ),
)
def test_tags_inside_of_a_calls_arguments_are_text(texts, thought):
    wanted = [("write", {"text": text}) for text in texts]
    assert hermes_calls(f"{thought}\n{hermes_turn(*texts)}") == wanted
    assert hermes_calls(f"{thought}\n{hermes_turn(*texts)} I wrote it.") == wanted


@pytest.mark.parametrize(
    "text",
    [
        'a </think> b <tool_call>{"name": "f", "arguments": {"a": "</think>", }}</tool_call>',
        '<tool_call>{"name": "f", "arguments": {"a": "</think>", }}</tool_call>',
        '<think>a</think><tool_call>{"name": "f", "arguments": {"a": "</think>"',
        '<tool_call>{"name": "f", "arguments": {}} more </tool_call>',
    ],
)
def test_a_broken_call_with_a_tag_inside_is_answered(text):
    ((name, reason),) = hermes_calls(text)
    assert name == ""
    assert "not valid JSON" in reason


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


@pytest.mark.parametrize(
    "token",
    [
        "<tool_call>",
        "<tool_call>{",
        "<tool_call>\n",
        '<tool_call>{"name": "',
        '<tool_call>{"name": "x", "arguments": {"a": "',
    ],
)
@pytest.mark.parametrize("before", ["", "<think>"])
def test_a_turn_of_nothing_but_broken_calls_is_read_in_linear_time(before, token):
    begin = time.process_time()
    assert len(hermes_calls(before + token * 40_000)) == 40_000
    assert time.process_time() - begin < 5


def test_a_call_longer_than_the_first_piece_is_whole():
    arguments = {"text": "a </tool_call> " * FIRST_PIECE, "rows": list(range(FIRST_PIECE))}
    call = json.dumps({"name": "write", "arguments": arguments})
    assert hermes_calls(f"<tool_call>{call}</tool_call>") == [("write", arguments)]
    assert llama_calls(f"{call}; {call}") == [("write", arguments)] * 2


def test_calls_beyond_the_most_of_a_turn_are_answered_in_one_message(tokenizer):
    engine = ScriptedEngine(tokenizer, calculator_call("2 * 3") * 30, " #### 6")
    trajectory = run_loop(make_config(), tokenizer, engine, limits=LONG_LIMITS)
    text = observations(trajectory, tokenizer)[0]
    assert text.count("error: more than 8 calls in one turn; the last 22 were not made") == 1
    assert text.count("6\n") == 8
    assert trajectory.facts == {"tool_calls": 30, "tool_errors": 22, "used_tools": 1}


def test_a_model_whose_calls_no_text_shows_is_refused():
    tokenizer = tiny_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": ["<tool_call>"]})
    with pytest.raises(ConfigError, match="<tool_call> is a special token"):
        Loops(make_config(), tokenizer).get()


def test_the_config_of_the_example_answers_by_tool_within_its_limits():
    tokenizer = tiny_tokenizer("tools")
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


def test_answers_have_the_id_and_the_name_of_their_call():
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = KIMI + "{# <tool_call> #}"
    turns = (calculator_call("2 * 3") * 2, " <tool_call>{oops</tool_call>", calculator_call("4"))
    engine = ScriptedEngine(tokenizer, *turns, " 6")
    trajectory = run_loop(make_config(), tokenizer, engine, limits=LONG_LIMITS)
    first, second, third = observations(trajectory, tokenizer)
    cue = "<|im_end|><|im_assistant|>assistant<|im_middle|>"
    answer = "<|im_system|>calculator<|im_middle|>## Return of "
    assert first == f"{answer}call00000\n6<|im_end|>{answer}call00001\n6{cue}"
    assert second.startswith("<|im_system|>tool<|im_middle|>## Return of \nerror: the call is not")
    assert third == f"{answer}call00003\n4{cue}"


def test_a_template_that_looks_up_the_name_of_a_call_gets_it():
    """As some do that refuse an answer without a call before it."""
    template = (
        "{% for m in messages %}{% if m.role == 'tool' %}"
        "{% if not messages[loop.index0 - 1].tool_calls and messages | length == 3 %}"
        "{% set found = namespace(name='nothing') %}"
        "{% else %}{% set found = namespace(name=messages[1].tool_calls[0].function.name) %}"
        "{% endif %}[{{ found.name }}: {{ m.content }}]"
        "{% else %}<{{ m.role }}>{{ m.content }}"
        "{% for call in m.tool_calls or [] %}<call>{% endfor %}<|im_end|>{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}<assistant>{% endif %}"
    )
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = template.replace("messages | length == 3", "true", 1)
    engine = ScriptedEngine(tokenizer, calculator_call("2 * 3"), " 6")
    trajectory = run_loop(make_config(), tokenizer, engine)
    assert observations(trajectory, tokenizer) == ["[calculator: 6]<assistant>"]


def test_every_turn_has_the_settings_of_the_run_and_of_the_row():
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = QWEN
    cfg = make_config()
    loop = Loops(cfg, tokenizer).get()
    empty_thoughts = "<|im_start|>assistant\n<think>\n\n</think>\n\n"

    def observed(**row):
        async def main():
            prompt = replace(make_prompt(tokenizer), chat_template_kwargs=row)
            CURRENT_PROMPT.set(prompt)
            engine = ScriptedEngine(tokenizer, calculator_call("2 * 3"), " 6")
            return await loop.run(prompt, engine, None, USUAL_LIMITS)

        (text,) = observations(asyncio.run(main()), tokenizer)
        return text

    assert not observed().endswith(empty_thoughts)
    assert observed(enable_thinking=False).endswith(empty_thoughts)
    cfg.data.chat_template_kwargs = {"enable_thinking": False}
    assert observed().endswith(empty_thoughts)
    assert not observed(enable_thinking=True).endswith(empty_thoughts)
