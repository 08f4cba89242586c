"""Messages, tools and settings in the one form of templates; the rest is refused by its place."""

from __future__ import annotations

import inspect
import json
from pathlib import Path
from typing import Any

import pytest

from one_step_off.config.errors import ConfigError
from one_step_off.config.loading import load_config
from one_step_off.config.schema import DataConfig
from one_step_off.config.sections.data import TEMPLATE_ARGUMENTS, check_data
from one_step_off.data.messages import (
    BadMessage,
    normalized_messages,
    normalized_settings,
    normalized_tools,
)
from one_step_off.data.rows import DataReport, load_rows
from one_step_off.data.tokenization import tokenize_rows
from tests.unit.data.chat_templates import HERMES, KIMI, QWEN
from tests.unit.data.data_helpers import (
    PLAIN,
    TEMPLATE,
    chat_row,
    make_tokenizer,
    prompts_of,
    write_jsonl,
)

CALL = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": {"a": 1}}}
USER = {"role": "user", "content": "?"}
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
FUNCTION = {"name": "f", "description": "F.", "parameters": SCHEMA}
TOOL = {"type": "function", "function": FUNCTION}


def one(**message: Any) -> dict[str, Any]:
    (normalized,) = normalized_messages([{"role": "assistant", **message}], "prompt")
    return normalized


@pytest.mark.parametrize("arguments", ['{"a": 1}', {"a": 1}, ' {"a":1}\n'])
def test_arguments_are_objects(arguments: Any) -> None:
    call = {**CALL, "function": {"name": "f", "arguments": arguments}}
    assert one(content=None, tool_calls=[call]) == {
        "role": "assistant",
        "content": "",
        "tool_calls": [CALL],
    }


@pytest.mark.parametrize("nothing", [None, "", "{}", {}])
def test_a_call_without_arguments(nothing: Any) -> None:
    (call,) = one(tool_calls=[{"function": {"name": "f", "arguments": nothing}}])["tool_calls"]
    assert call == {"function": {"name": "f", "arguments": {}}}


def test_the_old_form_of_calls_and_answers() -> None:
    chat = [
        {"role": "assistant", "content": None, "function_call": {"name": "f", "arguments": "{}"}},
        {"role": "function", "name": "f", "content": "7"},
    ]
    call = {"type": "function", "function": {"name": "f", "arguments": {}}}
    assert normalized_messages(chat, "prompt") == [
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "7", "name": "f"},
    ]


@pytest.mark.parametrize(
    ("content", "text"),
    [
        (None, ""),
        ("a", "a"),
        ([], ""),
        ([{"type": "text", "text": "a"}, "b", {"type": "refusal", "refusal": "c"}], "a\nb\nc"),
        ([{"type": "text", "text": None}, {"type": "text", "text": "b"}], "b"),
        ([{"type": "reasoning", "text": "hm"}, {"type": "text", "text": "a"}], "a"),
    ],
)
def test_contents_are_text(content: Any, text: str) -> None:
    assert one(content=content)["content"] == text


def test_thoughts_have_both_names() -> None:
    for message in ({"reasoning": "hm"}, {"reasoning_content": "hm"}):
        normalized = one(content="a", **message)
        assert (normalized["reasoning"], normalized["reasoning_content"]) == ("hm", "hm")
    assert one(content=[{"type": "reasoning", "text": "hm"}])["reasoning"] == "hm"
    assert one(reasoning="new", reasoning_content="old")["reasoning_content"] == "new"


def test_nulls_of_tables_and_empty_keys_of_other_roles_are_left_out() -> None:
    chat = [{**USER, "tool_calls": [], "tool_call_id": "", "name": None, "weight": 0}]
    assert normalized_messages(chat, "prompt") == [USER]
    assert normalized_messages([{**USER, "mood": "good"}], "prompt") == [{**USER, "mood": "good"}]


BAD = [
    ("hello", "message 1 of 'prompt' is not an object"),
    ({"content": "a"}, "message 1 of 'prompt' is not an object with the text 'role'"),
    ({**USER, "content": 12}, "message 1 of 'prompt': content: holds 12"),
    ({**USER, "content": {"a": 1}}, "content: holds {'a': 1}"),
    ({**USER, "content": [3]}, "content[0]: holds 3"),
    (
        {**USER, "content": ["a", {"type": "image_url", "image_url": {}}]},
        "content[1]: has a part",
    ),
    ({**USER, "content": [{"type": "input_audio"}]}, "type 'input_audio': only text"),
    ({**USER, "content": [{"type": "no_such"}]}, "type 'no_such'"),
    ({**USER, "content": [{"text": "a"}]}, "content[0]: has a part of type None"),
    ({**USER, "content": [{"type": "reasoning", "text": "a"}]}, "type 'reasoning'"),
    ({**USER, "content": [{"type": "text", "text": 3}]}, "content[0].text: holds 3"),
    ({**USER, "name": 3}, "name: holds 3, not a text"),
    ({**USER, "tool_calls": [CALL]}, "tool_calls: only a message of the role 'assistant'"),
    ({**USER, "reasoning_content": "hm"}, "reasoning_content: only a message of the role 'ass"),
    ({"role": "assistant", "audio": {"id": "x"}}, "audio: only text"),
    ({"role": "tool", "content": "7", "tool_call_id": 3}, "tool_call_id: holds 3"),
    ({"role": "assistant", "tool_calls": "f()"}, "tool_calls: holds 'f()', not a list"),
    ({"role": "assistant", "tool_calls": ["f"]}, "tool_calls[0]: is not an object with the object"),
    ({"role": "assistant", "tool_calls": [CALL, {"name": "f"}]}, "tool_calls[1]: is not an object"),
    ({"role": "assistant", "tool_calls": [{"function": {}}]}, "tool_calls[0].function.name: holds"),
    (
        {"role": "assistant", "tool_calls": [{**CALL, "type": "custom"}]},
        "tool_calls[0].type: is 'custom'",
    ),
    ({"role": "assistant", "function_call": {"arguments": "{}"}}, "function_call.function.name"),
]


@pytest.mark.parametrize(("message", "says"), BAD)
def test_what_cannot_be_carried_is_refused_by_message_and_key(message: Any, says: str) -> None:
    with pytest.raises(BadMessage) as error:
        normalized_messages([USER, message], "prompt")
    assert says in str(error.value)


@pytest.mark.parametrize("arguments", ["{broken", "[1]", "7", "null", [1], 7, "[" * 100_000])
def test_arguments_that_are_no_object(arguments: Any) -> None:
    chat = [
        {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": arguments}}]}
    ]
    with pytest.raises(BadMessage, match=r"message 0 of 'prompt': tool_calls\[0\].function.argum"):
        normalized_messages(chat, "prompt")
    (message,) = normalized_messages(chat, "prompt", empty_for_broken_arguments=True)
    assert message["tool_calls"][0]["function"]["arguments"] == {}


@pytest.mark.parametrize(
    "tools",
    [
        [TOOL],
        [FUNCTION],
        [{"type": "function", **FUNCTION}],
        json.dumps([TOOL]),
        [json.dumps(TOOL)],
        [{"function": {**FUNCTION, "parameters": json.dumps(SCHEMA), "strict": None}}],
    ],
)
def test_forms_of_tools(tools: Any) -> None:
    assert normalized_tools(tools) == [TOOL]


@pytest.mark.parametrize("nothing", [None, "", " ", [], "[]", "null"])
def test_no_tools_and_no_settings(nothing: Any) -> None:
    assert normalized_tools(nothing) is None
    if not isinstance(nothing, list) and nothing != "[]":
        assert normalized_settings(nothing, "settings") == {}


@pytest.mark.parametrize(
    ("tools", "says"),
    [
        ("hammer", "tools: is no list of tools in JSON"),
        ({"a": 1}, "tools: holds {'a': 1}, not a list"),
        ([3], r"tools[0]: holds 3"),
        ([TOOL, {"type": "web_search"}], "tools[1].type: is 'web_search'"),
        ([{"type": "function"}], "tools[0]: has no function with a text 'name'"),
        ([{"name": "f", "parameters": 3}], "tools[0].parameters: holds 3"),
    ],
)
def test_bad_tools(tools: Any, says: str) -> None:
    with pytest.raises(BadMessage) as error:
        normalized_tools(tools)
    assert says in str(error.value)


def test_the_programs_own_arguments_are_no_settings() -> None:
    from transformers import PreTrainedTokenizerBase

    own = {*inspect.signature(PreTrainedTokenizerBase.apply_chat_template).parameters, "messages"}
    assert set(TEMPLATE_ARGUMENTS) == own - {"self", "documents", "kwargs"}
    for key in TEMPLATE_ARGUMENTS:
        with pytest.raises(BadMessage, match=f"settings.{key}: is set by the program"):
            normalized_settings({key: True}, "settings")
    with pytest.raises(BadMessage, match="holds 3, not a mapping"):
        normalized_settings(3, "settings")


# --- rows of RL ---

CHAT = [
    USER,
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "content": "7", "name": "f", "tool_call_id": "c1"},
]


def test_tables_do_not_add_nulls_to_chats(tmp_path: Path) -> None:
    """Parquet gives each call the arguments of all calls, and each message all entries."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    other = {**CALL, "function": {"name": "g", "arguments": {"b": ["x", None], "c": {"d": 2.5}}}}
    schema = {"type": "object", "properties": {"b": {"type": "array"}}}
    tools = [TOOL, {"type": "function", "function": {**FUNCTION, "parameters": schema}}]
    row = {
        "prompt": [*CHAT, {**CHAT[1], "tool_calls": [other]}],
        "reward_model": {"ground_truth": "7"},
        "tools": tools,
        "chat_template_kwargs": {"enable_thinking": False},
    }
    plain = {"prompt": [USER], "reward_model": {"ground_truth": "1"}, "tools": None}
    pq.write_table(pa.Table.from_pylist([row, plain]), tmp_path / "d.parquet")
    rows = load_rows(str(tmp_path / "d.parquet"), "train", DataConfig(), 0, DataReport("data"))
    assert rows[0].messages == normalized_messages(row["prompt"], "prompt")
    assert rows[0].tools == tools
    assert rows[0].chat_template_kwargs == {"enable_thinking": False}
    assert (rows[1].messages, rows[1].tools, rows[1].chat_template_kwargs) == ([USER], None, {})


def test_an_explicit_null_in_json_is_an_argument(tmp_path: Path) -> None:
    call = {"function": {"name": "f", "arguments": {"a": None}}}
    chat = [USER, {"role": "assistant", "tool_calls": [call]}]
    (prompt,) = prompts_of(tmp_path, [chat_row(prompt=chat)], make_tokenizer(HERMES))
    assert '{"a": null}' in prompt.text


@pytest.mark.parametrize("template", [QWEN, HERMES, KIMI])
def test_whole_messages_tools_and_settings_reach_the_template(
    tmp_path: Path, template: str
) -> None:
    tokenizer = make_tokenizer(template)
    rows = [
        chat_row(prompt=CHAT, tools=[TOOL], chat_template_kwargs={"enable_thinking": True}),
        chat_row(prompt=CHAT),
        {"question": "1 + 1?", "answer": "#### 2", "tools": json.dumps([TOOL])},
    ]
    settings = {"enable_thinking": False}
    prompts = prompts_of(
        tmp_path, rows, tokenizer, chat_template_kwargs=settings, max_prompt_length=9999
    )
    options = {"tokenize": False, "add_generation_prompt": True}
    chat = normalized_messages(CHAT, "prompt")
    apply = tokenizer.apply_chat_template
    question = [{"role": "user", "content": "1 + 1?"}]
    assert [prompt.text for prompt in prompts] == [
        apply(chat, tools=[TOOL], enable_thinking=True, **options),
        apply(chat, enable_thinking=False, **options),
        apply(question, tools=[TOOL], enable_thinking=False, **options),
    ]


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"prompt": [USER, {"role": "assistant", "tool_calls": [{}]}]}, "tool_calls[0]"),
        ({"prompt": [{**USER, "content": [{"type": "image"}]}]}, "content[0]: has a part of type"),
        ({"tools": "hammer, saw"}, "column tools: is no list of tools in JSON"),
        ({"chat_template_kwargs": {"tokenize": True}}, "column chat_template_kwargs.tokenize: is"),
        (
            {"prompt": [{**USER, "content": "<image>?"}], "images": ["x"]},
            "column 'images': only te",
        ),
        ({"tools": [{"name": "\ud800"}]}, "not valid Unicode"),
        ({"prompt": [{**USER, "name": "\ud800"}]}, "not valid Unicode"),
        (
            {"prompt": [{"role": "assistant", "content": None}, USER]},
            "message 0 of 'prompt' has no",
        ),
    ],
)
def test_rows_that_cannot_be_carried_are_named(
    tmp_path: Path, changes: dict[str, Any], reason: str
) -> None:
    report = DataReport("data")
    tokenizer = make_tokenizer(HERMES)
    assert len(prompts_of(tmp_path, [chat_row(), chat_row(**changes)], tokenizer, report)) == 1
    ((where, why),) = report.bad
    assert where.endswith("d.jsonl:2")
    assert reason in why
    with pytest.raises(ConfigError, match=r"d.jsonl:1: .*bad_rows=skip"):
        prompts_of(tmp_path, [chat_row(**changes)], tokenizer, bad_rows="fail")


@pytest.mark.parametrize(
    ("changes", "needs"),
    [
        ({"prompt": CHAT}, "tool calls"),
        ({"tools": [TOOL]}, "tools"),
        ({"chat_template_kwargs": {"a": 1}}, "settings of a chat template"),
        ({"prompt": [USER, {"role": "assistant", "reasoning": "hm"}, USER]}, "thoughts"),
    ],
)
def test_what_only_a_template_can_write(tmp_path: Path, changes: Any, needs: str) -> None:
    report = DataReport("data")
    rows = [chat_row(), chat_row(**changes)]
    assert len(prompts_of(tmp_path, rows, PLAIN, report, chat_template="never")) == 1
    assert report.bad[0][1] == f"it has {needs}, which need a chat template"


def test_what_the_template_does_not_write_is_noted(tmp_path: Path) -> None:
    tokenizer = make_tokenizer(TEMPLATE.replace("raise_exception('no tools')", "''"))
    report = DataReport("data")
    rows = [chat_row(), chat_row(prompt=CHAT, tools=[TOOL]), chat_row(prompt=CHAT)]
    prompts_of(tmp_path, rows, tokenizer, report, chat_template_kwargs={"with_bos": 1, "typo": 1})
    where = f"{tmp_path / 'd.jsonl'}:2"
    assert report.notes == [
        "warning: data.chat_template_kwargs.typo: the chat template does not read it",
        "warning: 1 rows have tools, which the chat template of model.path does not write "
        f"(the first: {where})",
        "warning: 2 rows have tool calls, which the chat template of model.path does not write "
        f"(the first: {where})",
    ]


def test_tools_that_the_loop_lacks_are_noted(tmp_path: Path) -> None:
    report = DataReport("data")
    path = write_jsonl(tmp_path / "d.jsonl", [chat_row(tools=[TOOL])])
    cfg = DataConfig()
    rows = load_rows(path, "train", cfg, 0, report)
    loop_tools = [{"type": "function", "function": {**FUNCTION, "name": "g"}}]
    tokenizer = make_tokenizer(HERMES)
    (prompt,) = tokenize_rows(rows, tokenizer, cfg, 0, report, lambda loop: loop_tools)
    assert '"name": "f"' in prompt.text
    assert '"name": "g"' not in prompt.text
    assert report.notes == [
        f"warning: 1 rows have the tool 'f', not in agent.tools (the first: {path}:1)"
    ]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["data.chat_template_kwargs={tools: []}"], "tools is set by the program; remove it"),
        (["data.chat_template_kwargs=[1]"], "data.chat_template_kwargs"),
        (
            ["data.chat_template_kwargs={a: 1}", "data.chat_template=never"],
            "data.chat_template=never uses no template",
        ),
        (
            ["data.apply_chat_template_kwargs.enable_thinking=false"],
            "use data.chat_template_kwargs; .*from_verl.md",
        ),
        (
            ["data.apply_chat_template_kwargs={enable_thinking: false}"],
            "use data.chat_template_kwargs; .*from_verl.md",
        ),
        (["chat_template_kwargs={a: 1}"], "use data.chat_template_kwargs; .*from_trl.md"),
    ],
)
def test_settings_in_a_config_that_cannot_be_used(arguments: list[str], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        cfg = load_config(arguments)
        check_data(cfg.data, cfg.reward)


def test_settings_in_a_config() -> None:
    cfg = load_config(["data.chat_template_kwargs.enable_thinking=false"])
    check_data(cfg.data, cfg.reward)
    assert cfg.data.chat_template_kwargs == {"enable_thinking": False}
