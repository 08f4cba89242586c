"""Supervised rows with tool calls, thoughts, tools, settings and weights: what is trained is what
the policy would write behind the prompt that RL makes of the same messages."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from one_step_off.config.errors import ConfigError
from one_step_off.config.schema import DataConfig
from one_step_off.data.rows import DataReport, load_rows
from one_step_off.data.tokenization import tokenize_rows
from tests.unit.data.chat_templates import HERMES, KIMI, LLAMA, QWEN
from tests.unit.data.data_helpers import chat_row, write_jsonl
from tests.unit.data.test_supervised_data import CHATML, answers, load, rows_of, tokenizer_with

FUNCTION = {"name": "count_ships", "arguments": '{"harbour": "north", "since": 3}'}
CALL = {"id": "c1", "type": "function", "function": FUNCTION}
TOOL = {"name": "count_ships", "description": "Counts.", "parameters": {"type": "object"}}
CHAT = [
    {"role": "user", "content": [{"type": "text", "text": "How many ships?"}]},
    {"role": "assistant", "content": None, "reasoning_content": "I count.", "tool_calls": [CALL]},
    {"role": "tool", "content": "7", "name": "count_ships", "tool_call_id": "c1"},
    {"role": "assistant", "content": "Seven.", "reasoning_content": "Easy."},
]


@pytest.mark.parametrize("template", [QWEN, LLAMA, HERMES, KIMI])
@pytest.mark.parametrize("thinks", [True, False])
def test_answers_stand_behind_the_prompts_of_rl(
    tmp_path: Path, template: str, thinks: bool
) -> None:
    tokenizer = tokenizer_with(template)
    chat: list[dict[str, Any]] = [dict(message) for message in CHAT]
    own = {"enable_thinking": thinks}
    if not thinks:  # the prompt has empty thoughts, which the answers must have, too
        for message in chat:
            if message.pop("reasoning_content", None) and template is QWEN:
                message["content"] = "<think>\n\n</think>\n\n" + (message["content"] or "")
    row = {"messages": chat, "tools": json.dumps([TOOL])}
    (sample,) = rows_of(
        tmp_path, [row], tokenizer, data__chat_template_kwargs=own, sft__max_length=9999
    )
    edges = np.flatnonzero(np.diff(sample.is_answer.astype(int), prepend=0) == 1)
    prompts = [chat_row(prompt=chat[:i], tools=[TOOL]) for i in (1, 3)]
    cfg = DataConfig(chat_template_kwargs=own, max_prompt_length=9999)
    path = write_jsonl(tmp_path / "rl.jsonl", prompts)
    rl_rows = load_rows(path, "train", cfg, 0, DataReport("data"))
    rl_prompts = tokenize_rows(rl_rows, tokenizer, cfg, 0, DataReport("data"))
    assert [sample.ids[:edge].tolist() for edge in edges] == [p.ids.tolist() for p in rl_prompts]
    called, said = answers(sample, tokenizer)
    assert '{"harbour": "north", "since": 3}' in called
    assert "Seven." in said
    if thinks and template in (QWEN, KIMI):
        assert "I count." in called
        assert "Easy." in said
    assert called.endswith("<|im_end|>")


@pytest.mark.parametrize("key", ["train", "trainable", "training", "loss"])
def test_answers_that_are_marked_otherwise_are_context(tmp_path: Path, key: str) -> None:
    chat = [dict(message) for message in CHAT]
    chat[1][key] = False
    chat[3][key] = True
    tokenizer = tokenizer_with(HERMES)
    (sample,) = rows_of(tmp_path, [{"messages": chat}], tokenizer, sft__max_length=9999)
    (said,) = answers(sample, tokenizer)
    assert "Seven." in said


@pytest.mark.parametrize("weight", [0, 0.0, False])
def test_answers_of_weight_0_are_context(tmp_path: Path, weight: Any) -> None:
    chat = [dict(message) for message in CHAT]
    chat[1]["weight"] = weight
    chat[3]["weight"] = 1
    (row,) = rows_of(tmp_path, [{"messages": chat}], tokenizer_with(HERMES))
    assert answers(row, tokenizer_with(HERMES)) == ["Seven.<|im_end|>"]
    assert "count_ships" in row.text


def test_the_weights_of_a_template_that_marks_answers(tmp_path: Path) -> None:
    template = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}"
        "{% generation %}{{ m.content }}<|im_end|>{% endgeneration %}"
        "{% else %}{{ m.content }}<|im_end|>{% endif %}{% endfor %}"
    )
    chat = [
        {"role": "user", "content": "?"},
        {"role": "assistant", "content": "one", "weight": 0},
        {"role": "user", "content": "?"},
        {"role": "assistant", "content": "two"},
    ]
    tokenizer = tokenizer_with(template)
    (row,) = rows_of(tmp_path, [{"messages": chat}], tokenizer)
    assert answers(row, tokenizer) == ["two<|im_end|>"]
    piecewise = template.replace(
        "}<|im_end|>{% endg", "}{% endgeneration %}{% generation %}!{% endg"
    )
    with pytest.raises(ConfigError, match="has weight 0, and .* marks 4 texts for 2 answers"):
        load(tmp_path, [{"messages": chat}], tokenizer_with(piecewise))


def test_the_answers_of_a_prompt_are_context(tmp_path: Path) -> None:
    row = {"prompt": CHAT[:3], "completion": CHAT[3:]}
    tokenizer = tokenizer_with(HERMES)
    (loaded,) = rows_of(tmp_path, [row], tokenizer)
    assert answers(loaded, tokenizer) == ["Seven.<|im_end|>"]


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"messages": [*CHAT[:3], {**CHAT[3], "weight": 0.5}]}, "message 3: weight: is 0.5"),
        (
            {"messages": [CHAT[0], {**CHAT[3], "weight": 0}]},
            "none of its answers is to be trained on",
        ),
        ({"messages": CHAT, "tools": "{"}, "column tools: is no list of tools in JSON"),
        ({"messages": CHAT, "chat_template_kwargs": 3}, "column chat_template_kwargs: holds 3"),
        (
            {"messages": [CHAT[0], {"role": "assistant", "tool_calls": [{"function": {}}]}]},
            r"message 1 of 'messages': tool_calls\[0\].function.name",
        ),
        (
            {"prompt": "?", "completion": [{"role": "assistant", "content": [{"type": "image"}]}]},
            r"message 1 of 'prompt\+completion': content\[0\]: has a part of type 'image'",
        ),
    ],
)
def test_rows_that_cannot_be_learned_are_named(tmp_path: Path, row: Any, reason: str) -> None:
    good = {"question": "?", "answer": "!"}
    data = load(tmp_path, [row, good], tokenizer_with(HERMES))
    assert "training data: 2 rows, 1 used, 1 malformed skipped" in data.lines()
    with pytest.raises(ConfigError, match=reason):
        load(tmp_path, [row], tokenizer_with(HERMES))


def test_an_answer_of_calls_that_the_template_does_not_write_is_not_learned(tmp_path: Path) -> None:
    tokenizer = tokenizer_with(CHATML)
    data = load(tmp_path, [{"messages": CHAT}], tokenizer)
    assert answers(data.stream.prompts[0], tokenizer) == ["Seven.<|im_end|>"]
    assert any("1 rows have tool calls, which the chat temp" in line for line in data.lines())
    with pytest.raises(ConfigError, match="does not write the tool calls of its answers"):
        load(tmp_path, [{"messages": CHAT[:2]}], tokenizer)
    without_id = CHAT[1] | {"tool_calls": [CALL | {"id": ""}]}
    with pytest.raises(ConfigError, match="does not write the tool calls of its answers"):
        load(tmp_path, [{"messages": [CHAT[0], without_id]}], tokenizer)
    marked = (
        "{% for m in messages %}{{ m.role }}{% generation %}{{ m.content }}<|im_end|>"
        "{% endgeneration %}{% endfor %}"
    )
    with pytest.raises(ConfigError, match="message 1: .* does not write its tool calls"):
        load(tmp_path, [{"messages": CHAT[:2]}], tokenizer_with(marked))


def test_calls_need_a_template(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="it has tool calls, which need a chat template"):
        load(tmp_path, [{"messages": CHAT}], tokenizer_with(None))
