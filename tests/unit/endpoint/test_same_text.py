"""A conversation has the same text in rows of data as in vLLM's server, by the templates of five
families, and the same tokens turn by turn."""

from __future__ import annotations

import copy
import functools
import json
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agent_loop.chat_template import TurnEncoder
from one_step_off.config.errors import ConfigError
from one_step_off.config.schema import Config, DataConfig
from one_step_off.data.messages import normalized_messages, normalized_tools, render_chat
from one_step_off.data.rows import DataReport, load_rows
from one_step_off.data.tokenization import tokenize_rows
from one_step_off.models import tiny_qwen
from tests.unit.data.chat_templates import FAMILIES
from tests.unit.data.data_helpers import write_jsonl
from tests.unit.endpoint.scripted_policy import make_serving

WORDS = st.sampled_from(
    ["", "a", "Größe 数字 🙂", " two\nlines ", "</think>", "<tool_call>", '"quoted" \\ {x}', "0"]
)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-9, 9) | st.floats(-1, 1) | WORDS,
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(WORDS, inner, max_size=2),
    max_leaves=4,
)
NAMES = st.sampled_from(["f", "count_ships", "sea.depth"])
IDS = st.sampled_from(["call_1", "functions.f:0", "functions.f:0", "x"])  # duplicates too
TEXT_PARTS = st.builds(lambda text: {"type": "text", "text": text}, WORDS)
REFUSALS = st.builds(lambda text: {"type": "refusal", "refusal": text}, WORDS)


def contents_of(role: str) -> st.SearchStrategy:
    """What vLLM's server accepts of such a message."""
    parts = TEXT_PARTS | REFUSALS if role == "assistant" else TEXT_PARTS
    return WORDS | st.lists(parts, min_size=1, max_size=3)


ARGUMENTS = st.dictionaries(WORDS, VALUES, max_size=3)
CALLS = st.builds(
    lambda id, name, arguments, blanks: {
        "id": id,
        "type": "function",
        "function": {"name": name, "arguments": json.dumps(arguments, indent=blanks) or ""},
    },
    *(IDS, NAMES, ARGUMENTS, st.none() | st.just(1)),
)


@st.composite
def messages_of(draw: Any, role: str) -> dict[str, Any]:
    message: dict[str, Any] = {"role": role, "content": draw(contents_of(role))}
    if draw(st.booleans()):
        message["name"] = draw(NAMES)
    if role == "tool" and draw(st.booleans()):
        message["tool_call_id"] = draw(IDS)
    if role == "assistant":
        calls = draw(st.lists(CALLS, max_size=3))
        if calls:
            message["tool_calls"] = calls
            message["content"] = draw(st.none() | contents_of(role))
            if draw(st.booleans()):
                del message["content"]
        thoughts = draw(st.sampled_from(["", "reasoning", "reasoning_content"]))
        if thoughts:
            message[thoughts] = draw(WORDS)
    return message


ROLES = st.sampled_from(["user", "assistant", "tool", "system", "developer"])
CHATS = st.lists(ROLES.flatmap(messages_of), max_size=6).flatmap(
    lambda chat: messages_of("user").map(lambda question: [*chat, question])
)
TOOL_LISTS = st.lists(
    st.builds(
        lambda name, more: {"type": "function", "function": {"name": name} | more},
        NAMES,
        st.fixed_dictionaries(
            {}, optional={"parameters": ARGUMENTS, "description": WORDS, "strict": st.booleans()}
        ),
    ),
    max_size=2,
)
SETTINGS = st.dictionaries(
    st.sampled_from(["enable_thinking", "thinking", "no_such_setting"]), st.booleans(), max_size=2
)


@pytest.fixture(scope="module")
def serving(tmp_path_factory: pytest.TempPathFactory) -> Any:
    cfg = Config()
    cfg.model.dtype = "float32"
    cfg.model.path = tiny_qwen.build("qwen2", str(tmp_path_factory.mktemp("model")))
    return make_serving(cfg)


@functools.cache
def own_tokenizer(path: str) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(path, trust_remote_code=False)


def tokenizer_with(serving: Any, template: str) -> Any:
    """A tokenizer with this template. vLLM's renderer, which has its own, gets it, too."""
    renderer = serving.chat.renderer
    renderer.get_tokenizer().chat_template = template
    tokenizer = own_tokenizer(renderer.model_config.tokenizer)
    tokenizer.chat_template = template
    return tokenizer


def text_of_vllm(
    serving: Any, messages: list[Any], tools: list[Any], own_settings: dict[str, Any]
) -> str:
    """What vLLM's server gives to the engine for a request."""
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest

    body = {"model": "x", "messages": messages, "chat_template_kwargs": own_settings}
    if tools:
        body["tools"] = tools
    request = ChatCompletionRequest.model_validate(copy.deepcopy(body))
    dumped = [tool.model_dump() for tool in request.tools] if request.tools else None
    params = request.build_chat_params(None, "string")
    params = params.with_defaults({"tools": dumped, "tokenize": False})
    _, prompt = serving.chat.renderer.render_messages(request.messages, params)
    return prompt["prompt"]


@pytest.mark.parametrize("family", FAMILIES)
@settings(max_examples=100, deadline=None)
@given(messages=CHATS, tools=TOOL_LISTS, own_settings=SETTINGS)
def test_rows_have_the_text_of_vllms_server(
    serving: Any,
    family: str,
    messages: list[Any],
    tools: list[Any],
    own_settings: dict[str, Any],
) -> None:
    tokenizer = tokenizer_with(serving, FAMILIES[family])
    theirs = text_of_vllm(serving, messages, tools, own_settings)
    normalized = normalized_messages(messages, "messages")
    rendered_tools = normalized_tools(tools)
    ours = render_chat(
        tokenizer, normalized, rendered_tools, own_settings, add_generation_prompt=True
    )
    assert ours == theirs
    assert normalized_messages(normalized, "messages") == normalized
    assert normalized_tools(json.dumps(rendered_tools)) == rendered_tools
    # The same with objects for arguments, as data sets have them.
    for message in messages:
        for call in message.get("tool_calls", ()):
            call["function"]["arguments"] = json.loads(call["function"]["arguments"])
    assert normalized_messages(messages, "messages") == normalized


@pytest.mark.parametrize("family", FAMILIES)
def test_a_row_of_data_has_the_tokens_of_vllms_server(serving: Any, family: str, tmp_path) -> None:
    tokenizer = tokenizer_with(serving, FAMILIES[family])
    function = {"name": "count_ships", "arguments": '{"harbour": "north", "since": 3}'}
    call = {"id": "functions.count_ships:0", "type": "function", "function": function}
    messages = [
        {"role": "system", "content": [{"type": "text", "text": "Be brief."}]},
        {"role": "user", "content": "How many ships?", "name": "ann"},
        {"role": "assistant", "content": None, "reasoning_content": "hm", "tool_calls": [call]},
        {"role": "tool", "content": "7", "name": "count_ships", "tool_call_id": call["id"]},
        {"role": "user", "content": "And now?"},
    ]
    flat = {"name": "count_ships", "parameters": {"type": "object"}}
    own = {"enable_thinking": False, "thinking": True}
    row = {
        "prompt": messages,
        "reward_model": {"ground_truth": "7"},
        "tools": json.dumps([flat]),
        "chat_template_kwargs": {"thinking": True},
    }
    cfg = DataConfig(chat_template_kwargs={"enable_thinking": False, "thinking": False})
    cfg.max_prompt_length = 4096
    report = DataReport("data")
    rows = load_rows(write_jsonl(tmp_path / "d.jsonl", [row]), "train", cfg, 0, report)
    (prompt,) = tokenize_rows(rows, tokenizer, cfg, 0, report)
    wrapped = [{"type": "function", "function": flat}]
    assert prompt.text == text_of_vllm(serving, messages, wrapped, own)
    assert prompt.ids.tolist() == tokenizer(prompt.text, add_special_tokens=False)["input_ids"]
    assert prompt.chat_template_kwargs == own


@pytest.mark.parametrize("family", ["qwen", "llama", "hermes", "kimi"])
@settings(max_examples=60, deadline=None)
@given(
    calls=st.lists(CALLS, min_size=1, max_size=2, unique_by=lambda call: call["id"]),
    content=st.sampled_from(["7", "</think>", "a <|im_end|> b"]),
    own_settings=SETTINGS,
)
def test_answers_to_calls_are_what_the_template_writes_behind_the_calls(
    serving: Any, family: str, calls: list[Any], content: str, own_settings: dict[str, Any]
) -> None:
    tokenizer = tokenizer_with(serving, FAMILIES[family])
    turn = {"role": "assistant", "content": "", "tool_calls": calls}
    answers = [
        {
            "role": "tool",
            "content": content,
            "tool_call_id": call["id"],
            "name": call["function"]["name"],
        }
        for call in calls
    ]
    chat = normalized_messages([{"role": "user", "content": "?"}, turn, *answers], "messages")
    ended = np.array([tokenizer.eos_token_id])
    ids = TurnEncoder(tokenizer).encode(chat[2:], ended, chat[1]["tool_calls"], own_settings)
    whole = render_chat(tokenizer, chat, None, own_settings, add_generation_prompt=True)
    before = render_chat(tokenizer, chat[:2], None, own_settings).rstrip("\n")
    assert before.endswith("<|im_end|>")
    assert tokenizer.decode(ids) == whole[len(before) :]
    plain = answers[0] | {"content": "7"}
    special = [i for i in ids.tolist() if i in tokenizer.all_special_ids]
    alike = normalized_messages([plain | {"tool_call_id": c["id"]} for c in calls], "messages")
    others = TurnEncoder(tokenizer).encode(alike, ended, chat[1]["tool_calls"], own_settings)
    assert special == [i for i in others.tolist() if i in tokenizer.all_special_ids]


def test_a_template_that_hides_answers_to_calls_is_refused(serving: Any) -> None:
    hiding = FAMILIES["kimi"].replace("{{ m.content }}<|im_end|>\n", "", 1)
    tokenizer = tokenizer_with(serving, hiding)
    with pytest.raises(ConfigError, match="does not render messages of 'tool'"):
        TurnEncoder(tokenizer).check_roles(("tool",))
