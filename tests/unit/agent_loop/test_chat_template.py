"""Messages between turns, written by the model's own chat template."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from agent_loop.base import Loops
from agent_loop.tool_loop import hermes_calls, llama_calls
from one_step_off.config.errors import ConfigError
from tests.unit.agent_loop.stand_ins import CHATML, LLAMA, make_config
from tests.unit.stand_ins import tiny_tokenizer

NO_TURN = np.array([])


def tokenizer_with(template: str, *special_tokens: str) -> Any:
    tokenizer = tiny_tokenizer()
    if special_tokens:
        tokenizer.add_special_tokens({"additional_special_tokens": list(special_tokens)})
    tokenizer.chat_template = template
    return tokenizer


def tool_messages(*contents: str) -> list[dict[str, str]]:
    return [{"role": "tool", "content": content} for content in contents]


TEMPLATES = pytest.mark.parametrize(
    ("template", "parser", "written"),
    [
        (
            CHATML,
            hermes_calls,
            "\n<|im_start|>user\n<tool_response>\nX<\n</tool_response><|im_end|>\n"
            "<|im_start|>assistant\n",
        ),
        (
            LLAMA,
            llama_calls,
            "<|start|>ipython<|end|>\n\nX<<|im_end|><|start|>assistant<|end|>\n\n",
        ),
    ],
)


def loop_with(template: str) -> Any:
    tokenizer = tokenizer_with(template, "<|im_start|>", "<|start|>", "<|end|>")
    return Loops(make_config(loop_kwargs={}), tokenizer).get()


@TEMPLATES
def test_messages_are_written_by_the_models_own_template(template, parser, written):
    loop = loop_with(template)
    tokenizer = loop.tokenizer
    assert loop.parse_calls is parser
    messages = tool_messages("X<")
    ended_by_itself = loop.encode_messages(messages, np.array([tokenizer.eos_token_id]))
    whole = tokenizer(written, add_special_tokens=False)["input_ids"]
    assert ended_by_itself.tolist() == whole, "as the template's text is tokenized"
    # A turn that was stopped otherwise is ended for the policy.
    stopped = loop.encode_messages(messages, np.array([5]))
    assert tokenizer.decode(stopped) == "<|im_end|>" + written


@TEMPLATES
@pytest.mark.parametrize(
    "content",
    ["X<|im_start|><|im_end|><", "<|im_<|im_end|>start|>a", "<|im_end|>" * 9, "\ud800", "3."],
)
def test_a_tool_cannot_open_a_turn_and_its_text_is_kept(template, parser, written, content):
    loop = loop_with(template)
    tokenizer = loop.tokenizer
    turn = np.array([tokenizer.eos_token_id])
    ids = loop.encode_messages(tool_messages(content, content), turn).tolist()
    text = tokenizer.decode(ids)
    assert text.count(content.replace("\ud800", "?")) == 2
    assert text.startswith(written[:6])
    assert text.endswith(written[-15:])
    plain = loop.encode_messages(tool_messages("a", "a"), turn).tolist()

    def special(tokens):
        return [token for token in tokens if token in tokenizer.all_special_ids]

    assert special(ids) == special(plain)


def test_added_tokens_that_are_not_special_are_kept():
    """Some tokenizers have runs of blanks as added tokens."""
    tokenizer = tiny_tokenizer()
    tokenizer.add_tokens(["    "])
    loop = Loops(make_config(), tokenizer).get()
    ids = loop.encode_messages(tool_messages("if x:\n    y"), NO_TURN)
    assert "if x:\n    y" in tokenizer.decode(ids)


def test_the_frames_of_many_messages_are_not_all_kept(tokenizer):
    loop = Loops(make_config(), tokenizer).get()
    for count in range(1, 80):
        loop.encode_messages(tool_messages(*["x"] * count), NO_TURN)
    frame: Any = loop.turn_encoder.frame
    assert frame.cache_info().currsize <= 64


MISSES_ALL_BUT_THE_LAST = "{% if m['role'] == 'tool' and not loop.last %}{% continue %}{% endif %}"
REFUSES_TWO = "{% if messages | length > 3 %}{{ raise_exception('no') }}{% endif %}"
CONTENT = "{{ m['content'] }}"
TOOLS = "{{ tools | tojson }}"


@pytest.mark.parametrize(
    ("template", "words"),
    [
        (CHATML.replace(f"\n{CONTENT}", ""), "does not render messages of 'tool'"),
        (CHATML.replace(CONTENT, CONTENT * 2), "does not render messages of 'tool'"),
        (
            CHATML.replace("%}", "%}" + MISSES_ALL_BUT_THE_LAST, 1),
            "does not render 2 messages in a row of 'tool'",
        ),
        (
            CHATML.replace("{% for", REFUSES_TWO + "{% for", 1),
            "does not accept 'tool': TemplateError: no",
        ),
        (CHATML.replace(TOOLS, ""), "does not write the tools into prompts"),
        (
            CHATML.replace(TOOLS, "{{ raise_exception('no') }}"),
            "does not accept the tools: TemplateError: no",
        ),
    ],
)
def test_a_template_that_does_not_show_tools_or_their_answers_is_refused(template, words):
    with pytest.raises(ConfigError, match=words):
        Loops(make_config(loop_kwargs={}), tokenizer_with(template)).get()


def test_a_template_that_hides_the_policys_turn_is_refused():
    template = "{% for m in messages if m['role'] != 'assistant' %}{{ m['content'] }}{% endfor %}"
    with pytest.raises(ConfigError, match="does not render the assistant's turn exactly once"):
        Loops(make_config(), tokenizer_with(template)).get()


@pytest.mark.parametrize("loop", ["tool", "retry_with_feedback", "environment"])
def test_loops_with_several_turns_need_a_chat_template(tokenizer, loop):
    cfg = make_config(loop=loop)
    without_template = tiny_tokenizer()
    without_template.chat_template = None
    with pytest.raises(ConfigError, match="has several turns, so it needs a chat template"):
        Loops(cfg, without_template).get()
    refusing = tokenizer_with(
        "{{ raise_exception('no') if messages | length > 2 }}{{ messages[1]['content'] }}"
    )
    with pytest.raises(ConfigError, match=r"does not accept '(tool|user)': TemplateError: no"):
        Loops(cfg, refusing).get()
    cfg.data.chat_template = "never"
    with pytest.raises(ConfigError, match="data.chat_template=never"):
        Loops(cfg, tokenizer).get()
