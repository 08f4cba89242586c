"""What an agent sends reaches the chat template whole, also behind recorded tokens; what cannot is
refused by its key. Tags inside of arguments are text."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from one_step_off.config.schema import Config
from one_step_off.data.messages import normalized_messages, normalized_tools, render_chat
from one_step_off.engines.vllm.chat import requests
from one_step_off.models import tiny_qwen
from tests.unit.data.chat_templates import KIMI, QWEN
from tests.unit.endpoint.scripted_policy import ScriptedPolicy, make_serving
from tests.unit.endpoint.simulated_agents import events_of
from tests.unit.endpoint.test_serving import ask, content_of, error_of

TOOL = {"name": "write", "parameters": {"type": "object"}}
TOOLS = [{"type": "function", "function": TOOL}]
QUESTION = {"role": "user", "content": "Write it."}
SWITCH = "{% if enable_thinking is defined %}[thinks: {{ enable_thinking }}]{% endif %}"
# Calls are read in the Hermes form, whatever is written.
KIMI_AS_HERMES = KIMI + SWITCH + "{# <tool_call> #}"


def make(template: str, folder: str, **settings: Any) -> Any:
    from transformers import AutoTokenizer

    cfg = Config()
    cfg.model.dtype = "float32"
    cfg.model.path = tiny_qwen.build("qwen2", folder)
    cfg.data.chat_template_kwargs = settings
    tokenizer = AutoTokenizer.from_pretrained(cfg.model.path, trust_remote_code=False)
    tokenizer.chat_template = template
    tokenizer.save_pretrained(cfg.model.path)
    return make_serving(cfg)


@pytest.fixture(scope="module")
def serving(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return make(KIMI_AS_HERMES, str(tmp_path_factory.mktemp("model")), enable_thinking=False)


def talk(serving: Any, *texts: str, **row: Any) -> tuple[ScriptedPolicy, Any]:
    """A policy that says these texts, and its episode; of a row with these fields."""
    policy = ScriptedPolicy(serving.chat.renderer.tokenizer, texts=list(texts))
    episode = policy.episode()
    episode.prompt = replace(episode.prompt, **row)
    return policy, episode


def context(policy: ScriptedPolicy) -> str:
    return policy.tokenizer.decode(policy.seen[-1][0])


def call_text(text: str) -> str:
    arguments = json.dumps({"text": text}, ensure_ascii=False)
    return f'<tool_call>\n{{"name": "write", "arguments": {arguments}}}\n</tool_call>'


CALLS = [
    {"id": "write:0", "type": "function", "function": {"name": "write", "arguments": '{"a":1}'}}
]
HISTORIES = {
    "calls": [
        {"role": "assistant", "content": None, "reasoning_content": "hm", "tool_calls": CALLS},
        {"role": "tool", "content": "done", "tool_call_id": "write:0", "name": "write"},
    ],
    "objects for arguments": [
        {
            "role": "assistant",
            "tool_calls": [{"function": {"name": "write", "arguments": {"a": 1}}}],
        },
        {"role": "tool", "content": [{"type": "text", "text": "done"}]},
    ],
    "the old form": [
        {"role": "assistant", "function_call": {"name": "write", "arguments": '{"a": 1}'}},
        {"role": "function", "name": "write", "content": "done"},
    ],
    "names and parts": [
        {"role": "user", "name": "ann", "content": ["a", {"type": "text", "text": "b"}]}
    ],
    "developer": [{"role": "developer", "content": "Be brief."}, QUESTION],
}


@pytest.mark.parametrize("kind", HISTORIES)
def test_a_history_is_rendered_whole(serving: Any, kind: str) -> None:
    policy, episode = talk(serving, "ok<|im_end|>")
    messages = [QUESTION, *HISTORIES[kind]]
    body = {"model": "x", "messages": messages, "tools": [TOOL]}
    answer = ask(serving, episode, requests.CHAT, body)
    assert answer.status == 200, content_of(answer)
    whole = render_chat(
        policy.tokenizer,
        normalized_messages(messages, "messages"),
        normalized_tools(TOOLS),
        {"enable_thinking": False},
        add_generation_prompt=True,
    )
    assert context(policy) == whole


@pytest.mark.parametrize("arguments", ["{broken", "[1]", '"text"', "5"])
def test_a_policy_may_have_written_arguments_that_are_no_object(
    serving: Any, arguments: str
) -> None:
    contexts = []
    for given in (arguments, "{}"):
        policy, episode = talk(serving, "ok<|im_end|>")
        calls = [{"function": {"name": "write", "arguments": given}}]
        messages = [QUESTION, {"role": "assistant", "tool_calls": calls}, QUESTION]
        answer = ask(serving, episode, requests.CHAT, {"model": "x", "messages": messages})
        assert answer.status == 200, content_of(answer)
        contexts.append(context(policy))
    assert contexts[0] == contexts[1]


@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_to_a_call_keeps_its_id_and_name_behind_recorded_tokens(
    serving: Any, stream: bool
) -> None:
    turn = f"<think>so</think>{call_text('a note')}<|im_end|>"
    policy, episode = talk(serving, turn, "ok<|im_end|>")
    body = {"model": "x", "messages": [QUESTION], "tools": TOOLS, "stream": stream}
    answer = ask(serving, episode, requests.CHAT, body)
    message = message_of(answer, stream)
    first = context(policy)
    told = {
        "role": "tool",
        "tool_call_id": message["tool_calls"][0]["id"],
        "name": "write",
        "content": [{"type": "text", "text": "done <|im_end|>"}],
    }
    again = body | {"messages": [QUESTION, message, told], "stream": False}
    assert ask(serving, episode, requests.CHAT, again).status == 200
    assert len(episode.segments()) == 1, "the turn was tokenized again"
    added = f"<|im_system|>write<|im_middle|>## Return of {told['tool_call_id']}\ndone <|im_end|>"
    cue = "<|im_end|><|im_assistant|>assistant<|im_middle|>[thinks: False]"
    assert context(policy) == first + turn + added + cue


def message_of(answer: Any, stream: bool) -> dict[str, Any]:
    if not stream:
        return content_of(answer)["choices"][0]["message"]
    message: dict[str, Any] = {"role": "assistant", "content": "", "reasoning": ""}
    message["tool_calls"] = []
    for event in events_of(answer):
        for choice in event["choices"]:
            message["content"] += choice["delta"].get("content") or ""
            message["reasoning"] += choice["delta"].get("reasoning") or ""
            for piece in choice["delta"].get("tool_calls") or []:
                add_piece(message["tool_calls"], piece)
    return message


def add_piece(calls: list[dict[str, Any]], piece: dict[str, Any]) -> None:
    """Add a piece of a streamed call to the calls so far."""
    if piece["index"] == len(calls):
        calls.append(piece)
    else:
        calls[piece["index"]]["function"]["arguments"] += piece["function"]["arguments"]


def test_a_developers_message_behind_a_turn_is_at_the_beginning_as_in_vllm(serving: Any) -> None:
    policy, episode = talk(serving, "one<|im_end|>", "two<|im_end|>")
    body = {"model": "x", "messages": [QUESTION]}
    message = content_of(ask(serving, episode, requests.CHAT, body))["choices"][0]["message"]
    late = {"role": "developer", "content": "Be brief."}
    again = body | {"messages": [QUESTION, message, late, QUESTION]}
    assert ask(serving, episode, requests.CHAT, again).status == 200
    assert context(policy).startswith("<|im_system|>system<|im_middle|>Be brief.")


def test_another_name_of_a_speaker_is_another_history(serving: Any) -> None:
    policy, episode = talk(serving, "one<|im_end|>", "two<|im_end|>")
    body = {"model": "x", "messages": [QUESTION | {"name": "ann"}]}
    message = content_of(ask(serving, episode, requests.CHAT, body))["choices"][0]["message"]
    again = body | {"messages": [QUESTION | {"name": "bob"}, message, QUESTION]}
    assert ask(serving, episode, requests.CHAT, again).status == 200
    assert context(policy).startswith("<|im_user|>bob")


@pytest.mark.parametrize(
    ("own", "row", "shown"),
    [
        ({}, {}, "[thinks: False]"),
        ({}, {"enable_thinking": True}, "[thinks: True]"),
        ({"enable_thinking": "a lot"}, {"enable_thinking": True}, "[thinks: a lot]"),
    ],
)
@pytest.mark.parametrize("path", [requests.CHAT, requests.MESSAGES, requests.RESPONSES])
def test_settings_of_the_run_the_row_and_the_request(
    serving: Any, path: str, own: dict[str, Any], row: dict[str, Any], shown: str
) -> None:
    policy, episode = talk(serving, "ok<|im_end|>", chat_template_kwargs=row)
    body = {"model": "x", "chat_template_kwargs": own, "max_tokens": 9, "messages": [QUESTION]}
    if path == requests.RESPONSES:
        body = {"model": "x", "chat_template_kwargs": own, "input": "Write it."}
    answer = ask(serving, episode, path, body)
    assert answer.status == 200, content_of(answer)
    assert context(policy).endswith(shown)


REFUSED = [
    ({"role": "user", "content": 12}, "message 1 of 'messages': content: holds 12"),
    ({"role": "user", "content": ["a", {"type": "image_url"}]}, "content[1]: has a part of type"),
    ({"role": "assistant", "tool_calls": [{"id": "a"}]}, "tool_calls[0]: is not an object with"),
    ({"role": "assistant", "function_call": {"arguments": "{}"}}, "function_call.function.name"),
    ({"role": "tool", "content": "7", "tool_call_id": 3}, "tool_call_id: holds 3"),
    ("hello", "message 1 of 'messages' is not an object"),
]


@pytest.mark.parametrize(("message", "says"), REFUSED)
def test_what_cannot_be_carried_is_refused_by_its_key(
    serving: Any, message: Any, says: str
) -> None:
    _, episode = talk(serving)
    body = {"model": "x", "messages": [QUESTION, message]}
    answer = ask(serving, episode, requests.CHAT, body)
    assert answer.status == 400
    assert says in error_of(answer)
    tools = body | {"messages": [QUESTION], "tools": [{"type": "web_search"}]}
    assert "tools[0].type: is 'web_search'" in error_of(ask(serving, episode, requests.CHAT, tools))


TEXTS = [
    "a note",
    "</think>",
    "<tool_call>",
    "</tool_call> more",
    "<tool_response>\\",
    '"</think>{',
]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("thought", ["", "<think>I <tool_call> it</think>\n", "Now: "])
@pytest.mark.parametrize("text", TEXTS)
def test_tags_inside_of_arguments_are_text(
    serving: Any, text: str, thought: str, stream: bool
) -> None:
    turn = f"{thought}{call_text(text)}\n{call_text('2nd')}<|im_end|>"
    _, episode = talk(serving, turn)
    body = {"model": "x", "messages": [QUESTION], "tools": TOOLS, "stream": stream}
    message = message_of(ask(serving, episode, requests.CHAT, body), stream)
    arguments = [json.loads(call["function"]["arguments"]) for call in message["tool_calls"]]
    assert arguments == [{"text": text}, {"text": "2nd"}]
    assert (message["content"] or "").strip() == thought.strip()


def test_a_broken_call_is_not_sent(serving: Any) -> None:
    for stream in (False, True):
        _, episode = talk(serving, 'Hm. <tool_call>{"name": "write", "arguments": {"a": <|im_end|>')
        body = {"model": "x", "messages": [QUESTION], "tools": TOOLS, "stream": stream}
        message = message_of(ask(serving, episode, requests.CHAT, body), stream)
        assert not message.get("tool_calls")
        assert message["content"].startswith("Hm. ")


def test_thoughts_that_the_template_drops_stay_in_recorded_tokens(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    serving = make(QWEN, str(tmp_path_factory.mktemp("qwen")))
    turn = f"<think>\nso\n</think>\n\n{call_text('x')}<|im_end|>"
    policy, episode = talk(serving, turn, "ok<|im_end|>")
    body = {"model": "x", "messages": [QUESTION], "tools": TOOLS}
    message = content_of(ask(serving, episode, requests.CHAT, body))["choices"][0]["message"]
    first = context(policy)
    told = {"role": "tool", "content": "done", "tool_call_id": message["tool_calls"][0]["id"]}
    again = body | {"messages": [QUESTION, message, told]}
    assert ask(serving, episode, requests.CHAT, again).status == 200
    assert context(policy).startswith(first + turn)
    assert len(episode.segments()) == 1


@pytest.fixture(scope="module", params=["deepseek_r1", "qwen3"])
def thinking_serving(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Any:
    from transformers import AutoTokenizer

    cfg = Config()
    cfg.model.dtype = "float32"
    cfg.model.path = tiny_qwen.build("qwen2", str(tmp_path_factory.mktemp("model")))
    cfg.agent.reasoning_parser = request.param
    tokenizer = AutoTokenizer.from_pretrained(cfg.model.path, trust_remote_code=False)
    tokenizer.add_tokens(["<think>", "</think>"])
    tokenizer.chat_template = QWEN
    tokenizer.save_pretrained(cfg.model.path)
    return make_serving(cfg)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("thought", ["<think>so</think>\n", ""])
def test_a_tag_inside_of_an_argument_ends_no_thoughts(
    thinking_serving: Any, thought: str, stream: bool
) -> None:
    text = "a </think> b <think>"
    _, episode = talk(thinking_serving, f"{thought}{call_text(text)}<|im_end|>")
    body = {"model": "x", "messages": [QUESTION], "tools": TOOLS, "stream": stream}
    answer = ask(thinking_serving, episode, requests.CHAT, body)
    message = message_of(answer, stream)
    (call,) = message["tool_calls"]
    assert json.loads(call["function"]["arguments"]) == {"text": text}
    assert not (message["content"] or "").strip()
    if thought:
        assert message["reasoning"] == "so"
