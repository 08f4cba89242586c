"""The policy may write anything: each API delivers it to the real packages, whole and as a stream,
and takes it back."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import openai
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agent_loop.episode import Episode
from agent_loop.trajectory import Generated
from one_step_off.config.schema import Config
from one_step_off.endpoint import http_messages
from one_step_off.endpoint.http_messages import Answer
from one_step_off.engines.vllm.chat import requests
from one_step_off.engines.vllm.chat.parsers import whole_characters
from one_step_off.models import tiny_qwen
from tests.unit.endpoint.scripted_policy import PROMPT, ScriptedPolicy, make_serving
from tests.unit.endpoint.simulated_agents import TOOL_SCHEMA
from tests.unit.endpoint.stand_ins import LIMITS, Endpoint, endpoint

CHAT_TOOLS = [{"type": "function", "function": {"name": "calculator", "parameters": TOOL_SCHEMA}}]
RESPONSES_TOOLS = [{"type": "function", "name": "calculator", "parameters": TOOL_SCHEMA}]
MESSAGES_TOOLS = [{"name": "calculator", "input_schema": TOOL_SCHEMA}]
QUESTION = [{"role": "user", "content": "What is 3 * 4?"}]
MAX_TOKENS = 400
HERMES = pytest.mark.parametrize("serving", ["hermes"], indirect=True)
PATHS = (requests.CHAT, requests.COMPLETIONS, requests.RESPONSES, requests.MESSAGES)


def call_of(arguments: str, name: str = '"calculator"') -> str:
    return f'<tool_call>{{"name": {name}, "arguments": {arguments}}}</tool_call>'


ARGUMENTS = (
    '{"expression": "3*4"}',
    '"x"',
    '"{\\"expression\\": \\"3*4\\"}"',
    "[1]",
    "5",
    "null",
    "true",
    '""',
    '{"expression": "\\ud83d"}',
    '{"\\udc00": ["\\ud83d\\ude00", "\\udfff"]}',
    '{"x": NaN, "y": [Infinity, -Infinity]}',
    '{"x": 1e999}',
    '{"x": ' + "9" * 30 + "}",
    '{"x": 1, "x": 2}',
    '{"x": ' + "[" * 60 + "]" * 60 + "}",
    '{"a": "\u2028\u2029\x85\x0b\x0c\x1c"}',
    '{"a": "</tool_call>"}',
    '{"a": ',
    "",
)
TEXTS = (
    " a\u2028b\u2029c\x85d\x0be\x0cf\x1cg\x1dh\x1ei\r\nj\rk\x00l\x7f",
    "",
    "<think>",
    "</think>",
    "<think><think>x</think>",
    "<tool_call>",
    "</tool_call>",
    "<tool_call><tool_call>",
    "<tool_call>5</tool_call>",
    '<tool_call>{"name": "calculator"}</tool_call>',
    call_of("{}", "5"),
    call_of("{}", '""'),
    call_of("{}", '"no_such_tool"'),
    call_of("{}", '"\\ud83d"'),
    call_of("{}") * 3,
    '<tool_call>{"a":' * 30,
    "data: [DONE]\n\nevent: error\n\n",
    "\ufeff\ufffe\U0010ffff\u202e",
    *map(call_of, ARGUMENTS),
)
PARTS = st.one_of(st.sampled_from(TEXTS), st.text(max_size=20), st.sampled_from(ARGUMENTS))


@dataclass
class Policy:
    """Says `ids` in each turn."""

    ids: list[int]
    finish_reason: str = "stop"
    contexts: list[np.ndarray] = field(default_factory=list)

    async def generate(self, ids: np.ndarray, max_tokens: int, stop: tuple = ()) -> Generated:
        self.contexts.append(ids)
        count = len(self.ids)
        log_probs = np.full(count, -1.0, np.float32)
        versions = np.ones(count, np.int32)
        return Generated(np.array(self.ids, np.int32), log_probs, versions, 0, self.finish_reason)


@pytest.fixture(scope="module", params=["hermes", "qwen3_coder", "pythonic"])
def serving(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    cfg = Config()
    cfg.model.dtype = "float32"
    cfg.model.path = tiny_qwen.build("qwen2", str(tmp_path_factory.mktemp("model")))
    cfg.agent.tool_parser = request.param
    if request.param == "hermes":
        cfg.agent.reasoning_parser = "qwen3"
    return make_serving(cfg)


def ids_of(serving: Any, text: str, more: list[int]) -> list[int]:
    """The tokens of a text, ones that need be no text, and the end of the turn."""
    tokenizer = serving.chat.renderer.tokenizer
    ids = tokenizer.encode(text.encode(errors="replace").decode(), add_special_tokens=False)
    return [*ids, *(token % len(tokenizer) for token in more)][:MAX_TOKENS] + [
        tokenizer.eos_token_id
    ]


def body_of(path: str, stream: bool) -> dict[str, Any]:
    bodies: dict[str, dict[str, Any]] = {
        requests.CHAT: {"messages": QUESTION, "tools": CHAT_TOOLS},
        requests.COMPLETIONS: {"prompt": "?", "max_tokens": 1000},
        requests.RESPONSES: {"input": "?", "tools": RESPONSES_TOOLS},
        requests.MESSAGES: {"messages": QUESTION, "tools": MESSAGES_TOOLS, "max_tokens": 1000},
    }
    return bodies[path] | {"model": "x", "stream": stream}


def ask(serving: Any, ids: list[int], path: str, stream: bool) -> tuple[Answer, Episode]:
    """An answer to a first request, and its episode."""
    policy = ScriptedPolicy(serving.chat.renderer.tokenizer)
    policy.generate = Policy(ids).generate
    episode = policy.episode()
    body = json.dumps(body_of(path, stream)).encode()
    return asyncio.run(serving.answer(episode, path, body)), episode


def no_constant(name: str) -> None:
    raise AssertionError(f"{name} is no JSON")


def strict_json(data: str) -> Any:
    data.encode()  # no half of a surrogate pair is hidden in it
    value = json.loads(data, parse_constant=no_constant)
    json.dumps(value, ensure_ascii=False).encode()
    return value


def strict_events(answer: Answer) -> list[dict[str, Any]]:
    """The events of a stream. Fails where any line of any client is no field of an event."""
    text = b"".join(answer.chunks).decode("ascii")
    found = []
    for block in text.removesuffix("\n\n").split("\n\n"):
        lines = block.splitlines()
        name = lines.pop(0).removeprefix("event: ") if lines[0].startswith("event: ") else ""
        (line,) = lines
        assert line.startswith("data: ")
        if line == "data: [DONE]":
            continue
        found.append(strict_json(line.removeprefix("data: ")))
        assert not name or found[-1]["type"] == name
        assert "error" not in found[-1]
    return found


def assembled(path: str, found: list[dict[str, Any]]) -> Any:
    """What a client makes of the events, as the whole answer has it."""
    if path == requests.RESPONSES:
        output: list[dict[str, Any]] = []
        for event in found:
            _add_response_event(output, event)
        assert output == found[-1]["response"]["output"]
        return output
    if path == requests.MESSAGES:
        return list(_blocks(found))
    choices = [choice for event in found for choice in event["choices"]]
    if path == requests.COMPLETIONS:
        return "".join(choice["text"] for choice in choices)
    message: dict[str, Any] = {"content": None, "reasoning": None, "tool_calls": []}
    for delta in (choice["delta"] for choice in choices):
        for key in ("content", "reasoning"):
            if delta.get(key) is not None:
                message[key] = (message[key] or "") + delta[key]
        for piece in delta.get("tool_calls") or ():
            if "id" in piece:
                message["tool_calls"].append(dict(piece["function"]))
            else:
                message["tool_calls"][piece["index"]]["arguments"] += piece["function"]["arguments"]
    return message


def _add_response_event(output: list[dict[str, Any]], event: dict[str, Any]) -> None:
    kind = event["type"]
    if kind == "response.output_item.added":
        output.append(event["item"] | {"status": event["item"]["status"] and "completed"})
    if kind == "response.content_part.added":
        output[-1]["content"].append(event["part"])
    if kind in ("response.output_text.delta", "response.reasoning_text.delta"):
        output[-1]["content"][-1]["text"] += event["delta"]
    if kind == "response.function_call_arguments.delta":
        output[-1]["arguments"] += event["delta"]
    if kind == "response.output_item.done":
        assert output[-1] | {"status": None} == event["item"] | {"status": None}
        output[-1] = event["item"]


def _blocks(found: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    block: dict[str, Any] = {}
    text = ""
    for event in found:
        if event["type"] == "content_block_start":
            block, text = event["content_block"], ""
        if event["type"] == "content_block_delta":
            delta = event["delta"]
            text += delta.get("text") or delta.get("thinking") or delta.get("partial_json") or ""
        if event["type"] == "content_block_stop":
            kind = block["type"]
            key = {"tool_use": "input"}.get(kind, kind)
            yield {"type": kind, key: strict_json(text) if kind == "tool_use" else text} | (
                {"name": block["name"]} if kind == "tool_use" else {}
            )


def whole(path: str, answer: dict[str, Any]) -> Any:
    """The same of a whole answer."""
    if path == requests.RESPONSES:
        return answer["output"]
    if path == requests.MESSAGES:
        unsigned = ("id", "signature")
        return [{k: v for k, v in b.items() if k not in unsigned} for b in answer["content"]]
    (choice,) = answer["choices"]
    if path == requests.COMPLETIONS:
        return choice["text"]
    message = {key: choice["message"].get(key) for key in ("content", "reasoning")}
    calls = [call["function"] for call in choice["message"].get("tool_calls") or ()]
    return message | {"tool_calls": calls}


def without_ids(output: Any) -> Any:
    names = ("id", "call_id")
    if isinstance(output, list):
        return [{k: v for k, v in item.items() if k not in names} for item in output]
    return output


def assert_delivered(serving: Any, ids: list[int], path: str) -> Any:
    answer, episode = ask(serving, ids, path, stream=False)
    assert answer.status == 200, answer.chunks
    content = strict_json(b"".join(answer.chunks).decode("ascii"))
    streamed, _ = ask(serving, ids, path, stream=True)
    assert streamed.status == 200, streamed.chunks
    said = whole(path, content)
    assert without_ids(assembled(path, strict_events(streamed))) == without_ids(said)
    assert answer.turns == episode.turns_done
    return said


@pytest.mark.parametrize("path", PATHS)
def test_each_text_is_delivered(serving: Any, path: str, monkeypatch: Any) -> None:
    monkeypatch.setattr(http_messages, "PIECE_CHARS", 3)
    for text in TEXTS:
        said = assert_delivered(serving, ids_of(serving, text, []), path)
        if path == requests.MESSAGES:
            assert said, "some clients read the first block"
            assert all(isinstance(b["input"], dict) for b in said if b["type"] == "tool_use")


@settings(max_examples=60)
@given(
    path=st.sampled_from(PATHS),
    parts=st.lists(PARTS, max_size=6),
    more=st.lists(st.integers(0, 10**6), max_size=30),
)
def test_any_tokens_are_delivered(
    serving: Any, path: str, parts: list[str], more: list[int]
) -> None:
    assert_delivered(serving, ids_of(serving, "".join(parts), more), path)


@HERMES
@pytest.mark.parametrize(
    ("arguments", "held"),
    [
        ('{"expression": "1"}', {"expression": "1"}),
        ('"{\\"expression\\": \\"1\\"}"', {"expression": "1"}),
        ("null", {}),
        ("{}", {}),
        ('{"expression": "\\ud83d"}', {"expression": "\ufffd"}),
        ('"x"', None),
        ("[1]", None),
        ("5", None),
        ('{"x": NaN}', None),
    ],
)
def test_arguments_that_are_no_object_are_text_where_the_api_has_objects(
    serving: Any, arguments: str, held: dict[str, Any] | None
) -> None:
    text = "</think>" + call_of(arguments)
    ids = ids_of(serving, text, [])
    answer, episode = ask(serving, ids, requests.MESSAGES, stream=False)
    content = strict_json(b"".join(answer.chunks).decode())
    blocks = content["content"]
    if held is None:
        assert [block["type"] for block in blocks] == ["text"]
        assert call_of(arguments) in blocks[0]["text"]
        assert content["stop_reason"] == "end_turn"
        assert episode.turns_done[0].tool_calls == []
    else:
        (block,) = blocks
        assert (block["input"], content["stop_reason"]) == (held, "tool_use")


def test_halves_of_surrogate_pairs_become_replacement_characters() -> None:
    assert whole_characters("a\ud83dx\udc00\ud83d\ude00") == "a\ufffdx\ufffd\U0001f600"
    body = b'{"messages": [{"role": "user", "content": "a\\uD83D \\ud83d\\ude00"}]}'
    content = requests.parse_body(requests.CHAT, body, 100)
    assert content["messages"][0]["content"] == "a\ufffd \U0001f600"


# --- the real packages ----------------------------------------------------------------------------


async def chat_with_openai(url: str, key: str, stream: bool) -> None:
    async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0) as client:
        messages: list[Any] = list(QUESTION)
        for _ in range(2):
            settings: Any = {"model": "x", "messages": messages, "tools": CHAT_TOOLS}
            if stream:
                chunks = await client.chat.completions.create(**settings, stream=True)
                found = [chunk.model_dump(exclude_unset=True) async for chunk in chunks]
                message = assembled(requests.CHAT, found)
                calls = [
                    {"id": f"call_{i}", "type": "function", "function": function}
                    for i, function in enumerate(message["tool_calls"])
                ]
                message = {"role": "assistant", "content": message["content"]}
            else:
                answer = await client.chat.completions.create(**settings)
                message = answer.choices[0].message.model_dump(exclude_none=True)
                calls = message.get("tool_calls") or []
            if calls:
                message["tool_calls"] = calls
            results = [{"role": "tool", "tool_call_id": c["id"], "content": "12"} for c in calls]
            messages += [message, *(results or [{"role": "user", "content": "And?"}])]


async def respond_with_openai(url: str, key: str, stream: bool) -> None:
    async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0) as client:
        items: list[Any] = list(QUESTION)
        for _ in range(2):
            settings: Any = {"model": "x", "input": items, "tools": RESPONSES_TOOLS}
            if stream:
                async with client.responses.stream(**settings) as running:
                    response = await running.get_final_response()
            else:
                response = await client.responses.create(**settings)
            items += [
                {k: v for k, v in item.to_dict().items() if k != "parsed_arguments"}
                for item in response.output
            ]
            calls = [item for item in response.output if item.type == "function_call"]
            results = [
                {"type": "function_call_output", "call_id": c.call_id, "output": "12"}
                for c in calls
            ]
            items += results or [{"role": "user", "content": "And?"}]


async def complete_with_openai(url: str, key: str, stream: bool) -> None:
    async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0) as client:
        prompt = "?"
        for _ in range(2):
            settings: Any = {"model": "x", "prompt": prompt, "max_tokens": 1000}
            if stream:
                chunks = await client.completions.create(**settings, stream=True)
                prompt += "".join([chunk.choices[0].text async for chunk in chunks])
            else:
                prompt += (await client.completions.create(**settings)).choices[0].text
            prompt += "\nAnd?"


async def message_with_anthropic(url: str, key: str, stream: bool) -> None:
    import anthropic  # for seconds, which each worker would spend on its list of tests

    async with anthropic.AsyncAnthropic(base_url=url, api_key=key, max_retries=0) as client:
        messages: list[Any] = list(QUESTION)
        for _ in range(2):
            settings: Any = {"model": "x", "messages": messages, "tools": MESSAGES_TOOLS}
            settings["max_tokens"] = 1000
            if stream:
                async with client.messages.stream(**settings) as running:
                    message = await running.get_final_message()
            else:
                message = await client.messages.create(**settings)
            content = [block.to_dict() for block in message.content]
            results = [
                {"type": "tool_result", "tool_use_id": block["id"], "content": "12"}
                for block in content
                if block["type"] == "tool_use"
            ]
            messages.append({"role": "assistant", "content": content})
            messages.append({"role": "user", "content": results or "And?"})


CLIENTS = {
    "chat": chat_with_openai,
    "responses": respond_with_openai,
    "completions": complete_with_openai,
    "messages": message_with_anthropic,
}


def random_texts(seed: int) -> list[str]:
    rng = random.Random(seed)
    return ["".join(rng.choices(TEXTS, k=rng.randrange(1, 4))) for _ in range(6)]


@HERMES
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("name", CLIENTS)
def test_the_real_packages_take_each_text_and_send_it_back(
    serving: Any, name: str, stream: bool, monkeypatch: Any
) -> None:
    monkeypatch.setattr(http_messages, "PIECE_CHARS", 5)

    async def check(running: Endpoint, text: str) -> None:
        more = [random.Random(text).randrange(10**6) for _ in range(10)]
        policy = Policy(ids_of(serving, text, more))
        episode = running.replicas[0].open(PROMPT, policy.generate, LIMITS)
        await CLIENTS[name](running.url, episode.key, stream)
        assert episode.turns == len(episode.turns_done) == 2
        if name != "completions":  # a text may have several tokenizations
            assert len(episode.segments()) == 1, "what it said was rendered anew"
        samples = episode.samples(PROMPT, 0)
        assert sum(int(sample.loss_mask.sum()) for sample in samples) == 2 * len(policy.ids)

    async def main() -> None:
        async with endpoint() as running:
            running.replicas[0].serving = serving
            for text in [*TEXTS, *random_texts(len(name))]:
                await check(running, text)

    asyncio.run(main())
