"""What each API answers: the fields that clients read, refusals, and limits."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from agent_loop.base import Limits
from agent_loop.episode import Episode
from one_step_off.config.errors import ConfigError
from one_step_off.config.schema import Config
from one_step_off.endpoint.http_messages import Answer
from one_step_off.engines.vllm.chat import requests
from one_step_off.engines.vllm.chat.parsers import check_parsers
from one_step_off.models import tiny_qwen
from tests.unit.endpoint.scripted_policy import PROMPT, ScriptedPolicy, make_serving
from tests.unit.endpoint.simulated_agents import TOOL_SCHEMA, events_of

CALL = '<tool_call>{"name": "calculator", "arguments": {"expression": "3*4"}}</tool_call>'
TWO_CALLS = f"{CALL}\n{CALL}<|im_end|>"
QUESTION = [{"role": "user", "content": "What is 3 * 4?"}]
TOOLS = [{"type": "function", "function": {"name": "calculator", "parameters": TOOL_SCHEMA}}]


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> str:
    return tiny_qwen.build("qwen2", str(tmp_path_factory.mktemp("model")))


@pytest.fixture(scope="module")
def serving(model_path: str) -> Any:
    cfg = Config()
    cfg.model.dtype = "float32"
    cfg.model.path = model_path
    return make_serving(cfg)


def episode_with(serving: Any, *texts: str, limits: Limits | None = None) -> Episode:
    tokenizer = serving.chat.renderer.tokenizer
    return ScriptedPolicy(tokenizer, texts=list(texts)).episode(limits)


def ask(serving: Any, episode: Episode, path: str, body: dict[str, Any] | bytes) -> Answer:
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    answer = asyncio.run(serving.answer(episode, path, data))
    for turn in answer.turns:
        turn.delivered = True
    return answer


def content_of(answer: Answer) -> dict[str, Any]:
    return json.loads(b"".join(answer.chunks))


def error_of(answer: Answer) -> str:
    return content_of(answer)["error"]["message"]


def test_a_chat_has_what_clients_read(serving: Any) -> None:
    episode = episode_with(serving, TWO_CALLS)
    body = {"model": "gpt-5", "messages": QUESTION, "tools": TOOLS, "tool_choice": "required"}
    content = content_of(ask(serving, episode, requests.CHAT, body))
    (choice,) = content["choices"]
    calls = choice["message"]["tool_calls"]
    assert [call["function"]["name"] for call in calls] == ["calculator", "calculator"]
    assert json.loads(calls[0]["function"]["arguments"]) == {"expression": "3*4"}
    assert calls[0]["id"] != calls[1]["id"]
    assert choice["finish_reason"] == "tool_calls"
    usage = content["usage"]
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"] > 0
    (turn,) = episode.turns_done
    assert turn.tool_calls[1] == {"name": "calculator", "arguments": '{"expression": "3*4"}'}


def test_a_stream_of_a_chat_ends_with_its_usage(serving: Any) -> None:
    episode = episode_with(serving, " #### 12<|im_end|>")
    options = {"include_usage": True}
    body = {"model": "x", "messages": QUESTION, "stream": True, "stream_options": options}
    answer = ask(serving, episode, requests.CHAT, body)
    events = events_of(answer)
    text = "".join(c["delta"].get("content") or "" for e in events for c in e["choices"])
    assert answer.content_type == "text/event-stream"
    assert text == " #### 12"
    assert events[-1]["choices"] == []
    assert events[-1]["usage"]["completion_tokens"] == len(episode.turns_done[0].generated.ids)
    assert answer.chunks[-1] == b"data: [DONE]\n\n"


def test_log_probs_are_those_of_the_sampled_tokens(serving: Any) -> None:
    episode = episode_with(serving, " 12<|im_end|>")
    body = {"model": "x", "messages": QUESTION, "logprobs": True}
    rows = content_of(ask(serving, episode, requests.CHAT, body))["choices"][0]["logprobs"]
    recorded = episode.turns_done[0].generated.log_probs
    assert [row["logprob"] for row in rows["content"]] == pytest.approx(recorded.tolist())


def test_the_end_of_a_turn_is_no_text_and_a_stop_text_cuts_it(serving: Any) -> None:
    episode = episode_with(serving, " 12 Observation: 13<|im_end|>", " 12<|im_end|>")
    body = {"model": "x", "messages": QUESTION, "stop": ["Observation:", "never"]}
    first = content_of(ask(serving, episode, requests.CHAT, body))["choices"][0]
    assert first["message"]["content"] == " 12 "
    assert first["stop_reason"] == "Observation:"
    second = content_of(ask(serving, episode, requests.CHAT, body))["choices"][0]
    assert second["message"]["content"] == " 12"


def test_a_response_of_the_responses_api(serving: Any) -> None:
    episode = episode_with(serving, TWO_CALLS)
    tool = {"type": "function", "name": "calculator", "parameters": TOOL_SCHEMA, "strict": True}
    body = {"model": "x", "input": "What is 3 * 4?", "tools": [tool], "store": True, "include": []}
    content = content_of(ask(serving, episode, requests.RESPONSES, body))
    assert [item["type"] for item in content["output"]] == ["function_call", "function_call"]
    assert content["status"] == "completed"
    assert content["usage"]["output_tokens"] > 0


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (requests.CHAT, {"messages": QUESTION, "max_tokens": 3}),
        (requests.CHAT, {"messages": QUESTION, "max_completion_tokens": 3}),
        (requests.RESPONSES, {"input": "?", "max_output_tokens": 3}),
        (requests.MESSAGES, {"messages": QUESTION, "max_tokens": 3}),
        (requests.COMPLETIONS, {"prompt": "?", "max_tokens": 3}),
        (requests.GENERATE, {"token_ids": [4, 5], "sampling_params": {"max_tokens": 3}}),
    ],
)
def test_an_answer_has_no_more_tokens_than_the_agent_asked_for(
    serving: Any, path: str, body: dict[str, Any]
) -> None:
    episode = episode_with(serving, " one two three four", " one two three four")
    assert ask(serving, episode, path, {"model": "x"} | body).status == 200
    (turn,) = episode.turns_done
    assert len(turn.generated.ids) == 3
    (sample,) = episode.samples(PROMPT, 0)
    assert sample.finish_reason == "turn_length"


def test_a_number_of_tokens_that_is_none_is_refused(serving: Any) -> None:
    body = {"model": "x", "messages": QUESTION, "max_tokens": 0}
    assert "max_tokens" in error_of(ask(serving, episode_with(serving), requests.CHAT, body))


def test_an_unknown_previous_response_is_refused(serving: Any) -> None:
    body = {"model": "x", "input": "go on", "previous_response_id": "resp_1"}
    answer = ask(serving, episode_with(serving, "12"), requests.RESPONSES, body)
    assert answer.status == 400
    assert "previous_response_id='resp_1'" in error_of(answer)


def test_a_message_of_anthropics_api(serving: Any) -> None:
    episode = episode_with(serving, f"So: {CALL}<|im_end|>")
    tool = {"name": "calculator", "input_schema": TOOL_SCHEMA}
    body = {
        "model": "claude",
        "max_tokens": 32_000,
        "messages": QUESTION,
        "tools": [tool],
        "tool_choice": {"type": "any"},
    }
    content = content_of(ask(serving, episode, requests.MESSAGES, body))
    assert [block["type"] for block in content["content"]] == ["text", "tool_use"]
    assert content["content"][1]["input"] == {"expression": "3*4"}
    assert content["stop_reason"] == "tool_use"
    assert content["usage"]["output_tokens"] > 0


def test_a_budget_of_thoughts_is_no_reason_to_refuse(serving: Any) -> None:
    episode = episode_with(serving, " 12<|im_end|>")
    thinking = {"type": "enabled", "budget_tokens": 1024}
    body = {"model": "x", "max_tokens": 4096, "messages": QUESTION, "thinking": thinking}
    assert ask(serving, episode, requests.MESSAGES, body).status == 200
    assert len(episode.turns_done) == 1


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ([], ""),
        ([{"type": "refusal", "refusal": "No."}], "No."),
        (
            [{"type": "output_text", "text": t, "annotations": []} for t in ("one", "two")],
            "one\ntwo",
        ),
    ],
)
def test_all_that_the_assistant_said_is_read_from_the_responses_api(
    serving: Any, content: list[dict[str, Any]], said: str
) -> None:
    episode = episode_with(serving, " 12<|im_end|>")
    spoken = {"type": "message", "role": "assistant", "id": "m", "status": "completed"}
    question = {"role": "user", "content": "?"}
    items = [question, spoken | {"content": content}, question]
    answer = ask(serving, episode, requests.RESPONSES, {"model": "x", "input": items})
    assert answer.status == 200, error_of(answer)
    (turn,) = episode.turns_done
    context = serving.chat.renderer.tokenizer.decode(turn.context_ids)
    assert context == f"Question: ?\nAnswer: {said}<|im_end|>\nQuestion: ?\nAnswer:"


@pytest.mark.parametrize("params", [None, 5, [], "x"])
def test_sampling_settings_that_are_no_object_are_refused(serving: Any, params: Any) -> None:
    body = {"model": "x", "token_ids": [10], "sampling_params": params}
    answer = ask(serving, episode_with(serving), requests.GENERATE, body)
    assert answer.status == 400
    assert "sampling_params" in error_of(answer)


def test_threads_are_refused_so_that_anthropics_client_sends_whole_histories(serving: Any) -> None:
    body = {"model": "c", "max_tokens": 9, "messages": QUESTION, "thread": {"type": "create"}}
    answer = ask(serving, episode_with(serving, "12"), requests.MESSAGES, body)
    assert answer.status == 400
    details = content_of(answer)["error"]["details"]
    assert details == {"error_code": "thread_unsupported_request", "unsupported": ["thread"]}


def test_tokens_are_counted_without_a_turn(serving: Any) -> None:
    episode = episode_with(serving)
    body = {"model": "c", "messages": QUESTION}
    content = content_of(ask(serving, episode, requests.COUNT_TOKENS, body))
    assert content["input_tokens"] > 0
    assert episode.turns_begun == 0


REFUSALS = {
    "response_format": {"response_format": {"type": "json_object"}},
    "logit_bias": {"logit_bias": {"5": 1.0}},
    "n > 1": {"n": 2},
    "more than one log-prob": {"logprobs": True, "top_logprobs": 5},
    "allowed_token_ids": {"allowed_token_ids": [1]},
    "min_tokens": {"min_tokens": 3},
    "stop": {"stop": ["a"] * 1000},
    "chat_template": {"chat_template": "{{ messages }}"},
}


@pytest.mark.parametrize("name", REFUSALS)
@pytest.mark.parametrize("stream", [False, True])
def test_what_would_change_the_distribution_is_refused_by_name(
    serving: Any, name: str, stream: bool
) -> None:
    episode = episode_with(serving, "12")
    body = {"model": "x", "messages": QUESTION, "stream": stream} | REFUSALS[name]
    answer = ask(serving, episode, requests.CHAT, body)
    assert answer.status == 400
    assert name in error_of(answer)
    assert episode.turns_begun == 0
    assert episode.refusal == error_of(answer), "for the message where the agent fails"


def test_the_runs_sampling_settings_hold_whatever_an_agent_asks_for(serving: Any) -> None:
    episode = episode_with(serving, " 12<|im_end|>")
    body = {"model": "x", "messages": QUESTION, "temperature": 0.0, "top_p": 0.1, "seed": 3}
    assert ask(serving, episode, requests.CHAT, body).status == 200


@pytest.mark.parametrize("kind", ["image_url", "input_audio", "file"])
def test_images_and_other_parts_are_refused_by_name(serving: Any, kind: str) -> None:
    part = {"type": kind, kind: {"url": "data:", "data": "", "format": "wav", "file_data": ""}}
    messages = [{"role": "user", "content": [part]}]
    answer = ask(
        serving, episode_with(serving), requests.CHAT, {"model": "x", "messages": messages}
    )
    assert answer.status == 400
    assert kind in error_of(answer)


@pytest.mark.parametrize(
    ("body", "says"),
    [
        (b"{", "not JSON"),
        (b"[]", "JSON object"),
        (b'{"a": ' * 100_000, "not JSON"),
        (b'{"model": "x"}', "messages: Field required"),
        (b'{"messages": 5}', "messages"),
        (b'{"messages": [{"role": 5}]}', ""),
        (b"\xff\xfe", "not JSON"),
    ],
)
def test_a_bad_body_is_refused_in_one_line(serving: Any, body: bytes, says: str) -> None:
    answer = ask(serving, episode_with(serving), requests.CHAT, body)
    assert answer.status == 400
    assert says in error_of(answer)
    assert "\n" not in error_of(answer)


def test_a_limit_is_named_and_is_no_error_that_clients_try_again(serving: Any) -> None:
    limits = Limits(tokens=100, turns=1)
    episode = episode_with(serving, " 1<|im_end|>", " 2", limits=limits)
    body = {"model": "x", "messages": QUESTION}
    assert ask(serving, episode, requests.CHAT, body).status == 200
    for stream in (False, True):
        answer = ask(serving, episode, requests.CHAT, body | {"stream": stream})
        assert answer.status == 403
        assert content_of(answer)["error"]["code"] == "episode_turns"
        assert "agent.max_turns=1" in error_of(answer)
    assert episode.limit_reached == "turns"


def body_of(path: str, text: str, stream: bool) -> dict[str, Any]:
    bodies: dict[str, dict[str, Any]] = {
        requests.CHAT: {"messages": [{"role": "user", "content": text}]},
        requests.MESSAGES: {"messages": [{"role": "user", "content": text}], "max_tokens": 50},
        requests.RESPONSES: {"input": text},
        requests.COMPLETIONS: {"prompt": text, "max_tokens": 50},
    }
    return bodies[path] | {"model": "x", "stream": stream}


def reason_and_text(path: str, answer: Answer, stream: bool) -> tuple[str, str]:
    """Why an answer ended, in the words of its API, and its text."""
    if stream:
        events = events_of(answer)
        if path in (requests.CHAT, requests.COMPLETIONS):
            choices = [choice for event in events for choice in event["choices"]]
            texts = [c.get("text") or c.get("delta", {}).get("content") or "" for c in choices]
            return choices[-1]["finish_reason"], "".join(texts)
        if path == requests.MESSAGES:
            (delta,) = [event["delta"] for event in events if event["type"] == "message_delta"]
            texts = [event["delta"].get("text", "") for event in events if "delta" in event]
            return delta["stop_reason"], "".join(texts)
        content = events[-1]["response"]
    else:
        content = content_of(answer)
    if path == requests.RESPONSES:
        parts = [part for item in content["output"] for part in item["content"]]
        details = content["incomplete_details"] or {}
        reason = f"{content['status']} {details.get('reason', '')}"
        return reason, "".join(part["text"] for part in parts)
    if path == requests.MESSAGES:
        return content["stop_reason"], "".join(part["text"] for part in content["content"])
    (choice,) = content["choices"]
    text = choice["text"] if path == requests.COMPLETIONS else choice["message"]["content"]
    return choice["finish_reason"], text or ""


@pytest.mark.parametrize("words", [40, 450, 5000])  # for the segment; the sequence; the engine
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("path", "reason"),
    [
        (requests.CHAT, "length"),
        (requests.COMPLETIONS, "length"),
        (requests.MESSAGES, "max_tokens"),
        (requests.RESPONSES, "incomplete max_output_tokens"),
    ],
)
def test_where_no_room_is_left_the_answer_is_empty_and_cut_at_its_length(
    serving: Any, path: str, reason: str, stream: bool, words: int
) -> None:
    """An error would end most agents, and their episodes have met a limit of the run."""
    episode = episode_with(serving, " 1<|im_end|>", " 2", limits=Limits(tokens=60, turns=5))
    episode.max_sequence = 400
    first = "What is 3 * 4?"
    answer = ask(serving, episode, path, body_of(path, first, False))
    assert reason_and_text(path, answer, False)[1] == " 1"
    assert len(episode.turns_done) == 1
    continued = body_of(path, "So 12 * 13. " * words, stream)
    if path in (requests.CHAT, requests.MESSAGES):
        said = {"role": "assistant", "content": " 1"}
        continued["messages"] = [{"role": "user", "content": first}, said, *continued["messages"]]
    if path == requests.COMPLETIONS:
        continued["prompt"] = first + " 1<|im_end|>" + continued["prompt"]
    if path == requests.RESPONSES:
        continued["previous_response_id"] = content_of(answer)["id"]
    answer = ask(serving, episode, path, continued)
    assert answer.status == 200, answer.chunks
    assert reason_and_text(path, answer, stream) == (reason, "")
    assert answer.turns == []
    assert episode.limit_reached == "length"
    assert "data.max_prompt_length" in episode.no_room
    (sample,) = episode.samples(PROMPT, 0)
    assert sample.finish_reason == "length"
    shorter = ask(serving, episode, path, body_of(path, "And 3 * 4?", stream))
    assert shorter.status == 200
    assert episode.limit_reached == ""
    assert len(episode.turns_done) == 2


def test_a_context_in_tokens_without_room_gets_an_empty_answer(serving: Any) -> None:
    episode = episode_with(serving, limits=Limits(tokens=60, turns=5))
    episode.max_sequence = 400
    for length in (400, 900, 5000):
        body = {"token_ids": [9] * length, "sampling_params": {}}
        answer = ask(serving, episode, requests.GENERATE, body)
        assert answer.status == 200, answer.chunks
        (choice,) = content_of(answer)["choices"]
        assert choice["token_ids"] == []
        assert choice["finish_reason"] == "length"
    assert episode.turns_done == []


def test_an_episode_that_has_ended_takes_no_more_turns(serving: Any) -> None:
    episode = episode_with(serving, " 1<|im_end|>")
    episode.end()
    answer = ask(serving, episode, requests.CHAT, body_of(requests.CHAT, "What?", stream=False))
    assert answer.status == 410
    assert content_of(answer)["error"]["code"] == "ended"


def test_an_agent_that_asks_again_without_room_comes_to_an_end(serving: Any) -> None:
    episode = episode_with(serving, limits=Limits(tokens=60, turns=3))
    episode.max_sequence = 400
    body = body_of(requests.CHAT, "So 12 * 13. " * 450, stream=False)
    statuses = [ask(serving, episode, requests.CHAT, body).status for _ in range(4)]
    assert statuses == [200, 200, 200, 403]


def test_a_failure_of_the_engine_reaches_the_agent_as_a_failure(serving: Any) -> None:
    episode = episode_with(serving)

    async def fail(*_: Any) -> None:
        raise RuntimeError("the engine died")

    episode.generate = fail
    for stream in (False, True):
        body = {"model": "x", "messages": QUESTION, "stream": stream}
        assert ask(serving, episode, requests.CHAT, body).status == 500
    assert episode.turns_done == []


def test_a_turn_that_is_canceled_is_no_answer(serving: Any) -> None:
    """vLLM's classes make an answer of it, in a stream and of other errors."""
    episode = episode_with(serving)

    async def cancel(*_: Any) -> None:
        raise asyncio.CancelledError

    episode.generate = cancel
    for stream in (False, True):
        body = {"model": "x", "messages": QUESTION, "stream": stream}
        with pytest.raises(asyncio.CancelledError):
            ask(serving, episode, requests.CHAT, body)
    assert episode.turns_done == []


@pytest.mark.parametrize(
    ("key", "name"), [("tool_parser", "hermess"), ("reasoning_parser", "qwen4")]
)
def test_a_parser_that_vllm_has_not_is_refused(key: str, name: str) -> None:
    cfg = Config()
    setattr(cfg.agent, key, name)
    with pytest.raises(ConfigError, match=f"agent.{key}={name}"):
        check_parsers(cfg)


def test_thoughts_are_parsed_where_a_parser_is_named(model_path: str) -> None:
    cfg = Config()
    cfg.model.path = model_path
    cfg.agent.reasoning_parser = "qwen3"
    serving = make_serving(cfg)
    episode = episode_with(serving, "hm</think> 12<|im_end|>", " 13<|im_end|>")
    body = {"model": "x", "messages": QUESTION}
    message = content_of(ask(serving, episode, requests.CHAT, body))["choices"][0]["message"]
    assert message["reasoning"].strip() == "hm"
    assert message["content"].strip() == "12"
    answered = {"role": "assistant", "content": message["content"]}  # without the thoughts
    again = [*QUESTION, answered, {"role": "user", "content": "And?"}]
    ask(serving, episode, requests.CHAT, {"model": "x", "messages": again})
    assert len(episode.segments()) == 1
    samples = episode.samples(PROMPT, 0)
    assert "hm" in serving.chat.renderer.tokenizer.decode(samples[0].response_ids)


def contexts_after(serving: Any, answer: str, change: Any) -> tuple[Episode, str]:
    """An episode in which the agent changes what the policy said, and then asks again; and the text
    of the last context."""
    episode = episode_with(serving, answer, " ok<|im_end|>")
    body = {"model": "x", "messages": QUESTION, "tools": TOOLS}
    message = content_of(ask(serving, episode, requests.CHAT, body))["choices"][0]["message"]
    new = {"role": "user", "content": "And?"}
    messages = [*QUESTION, *change(message), new]
    assert ask(serving, episode, requests.CHAT, body | {"messages": messages}).status == 200
    context = episode.turns_done[-1].context_ids
    return episode, serving.chat.renderer.tokenizer.decode(context)


def with_arguments(message: dict[str, Any], arguments: str) -> list[dict[str, Any]]:
    (call,) = message["tool_calls"]
    function = call["function"] | {"arguments": arguments}
    result = {"role": "tool", "tool_call_id": call["id"], "content": "12"}
    return [message | {"tool_calls": [call | {"function": function}]}, result]


def test_other_blanks_in_what_the_policy_said_are_no_edit(serving: Any) -> None:
    stripped = lambda message: [message | {"content": message["content"].strip()}]  # noqa: E731
    episode, context = contexts_after(serving, "  so be it \n<|im_end|>", stripped)
    assert len(episode.segments()) == 1
    assert "  so be it \n" in context
    spaced = lambda message: with_arguments(message, '{ "expression":"3*4" }')  # noqa: E731
    episode, _ = contexts_after(serving, f" {CALL}<|im_end|>", spaced)
    assert len(episode.segments()) == 1


def test_an_edited_call_begins_a_new_segment(serving: Any) -> None:
    edited = lambda message: with_arguments(message, '{"expression": "3*5"}')  # noqa: E731
    episode, _ = contexts_after(serving, f" {CALL}<|im_end|>", edited)
    assert len(episode.segments()) == 2


def test_an_edited_answer_is_what_the_policy_sees(serving: Any) -> None:
    edited = lambda message: [message | {"content": "Fourteen."}]  # noqa: E731
    episode, context = contexts_after(serving, " Thirteen.<|im_end|>", edited)
    assert len(episode.segments()) == 2
    assert "Fourteen." in context
    assert "Thirteen." not in context


def test_a_message_put_into_the_policys_mouth_is_rendered_with_the_others(serving: Any) -> None:
    """It stands behind a turn that is known; its context is the template's all the same."""
    invented = {"role": "assistant", "content": "Wait."}
    between = {"role": "user", "content": "Hm."}
    episode, context = contexts_after(
        serving, " 13<|im_end|>", lambda message: [message, between, invented]
    )
    messages = [*QUESTION, {"role": "assistant", "content": " 13"}, between, invented]
    messages.append({"role": "user", "content": "And?"})
    tokenizer = serving.chat.renderer.tokenizer
    rendered = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert context == rendered


@pytest.mark.parametrize("change", ["tools", "template"])
def test_other_tools_or_settings_of_the_template_begin_a_new_segment(
    serving: Any, change: str
) -> None:
    episode = episode_with(serving, " 13<|im_end|>", " ok<|im_end|>")
    body = {"model": "x", "messages": QUESTION, "tools": TOOLS}
    message = content_of(ask(serving, episode, requests.CHAT, body))["choices"][0]["message"]
    again = body | {"messages": [*QUESTION, message, {"role": "user", "content": "And?"}]}
    if change == "tools":
        again["tools"] = [*TOOLS, {"type": "function", "function": {"name": "other"}}]
    else:
        again["chat_template_kwargs"] = {"enable_thinking": False}
    assert ask(serving, episode, requests.CHAT, again).status == 200
    (_, second) = episode.turns_done
    assert second.parent is None


@pytest.mark.parametrize(
    ("path", "body", "says"),
    [
        (requests.COMPLETIONS, {"prompt": [10, 999_999]}, "999999"),
        (requests.GENERATE, {"token_ids": [10, 999_999], "sampling_params": {}}, "999999"),
        (requests.GENERATE, {"token_ids": [10, -1], "sampling_params": {}}, ""),
        (requests.GENERATE, {"token_ids": [], "sampling_params": {}}, ""),
        (requests.COMPLETIONS, {"prompt": []}, ""),
        (requests.COMPLETIONS, {"prompt": ""}, ""),
        (requests.COMPLETIONS, {"prompt": ["a", "b"]}, ""),
        (requests.CHAT, {"messages": QUESTION, "stop": ["\ud800"]}, ""),
        (requests.CHAT, {"messages": []}, ""),
        (requests.CHAT, {"messages": [{"role": "user", "content": "\ud800"}]}, ""),
    ],
)
def test_content_that_the_engine_would_fail_on_never_reaches_it(
    serving: Any, path: str, body: dict[str, Any], says: str
) -> None:
    """A failure of the engine ends the run; one agent's request must not cause it."""
    episode = episode_with(serving, " 12<|im_end|>")
    contexts: list[np.ndarray] = []
    generate = episode.generate

    async def recording(ids: np.ndarray, most: int, stop: tuple[str, ...] = ()) -> Any:
        contexts.append(ids)
        return await generate(ids, most, stop)

    episode.generate = recording
    answer = ask(serving, episode, path, {"model": "x"} | body)
    assert says in b"".join(answer.chunks).decode()
    if answer.status == 200:  # what can be encoded in some way may be served
        (context,) = contexts
        assert len(context) > 0
        assert context.max() < serving.chat.model_config.get_vocab_size()
    else:
        assert answer.status == 400
        assert contexts == []


def test_tokens_that_only_the_model_has_are_sampled_and_continued(tmp_path: Path) -> None:
    """Models are padded to more tokens than their tokenizers have, and the policy may sample any of
    them."""
    cfg = Config()
    cfg.model.path = tiny_qwen.build("qwen2", str(tmp_path), vocab_size=400)
    serving = make_serving(cfg)
    vocabulary_size = serving.chat.model_config.get_vocab_size()
    assert vocabulary_size > len(serving.chat.renderer.tokenizer)
    episode = episode_with(serving, " 12<|im_end|>", " 13<|im_end|>")
    generate = episode.generate

    async def sampling_padding(ids: np.ndarray, most: int, stop: tuple[str, ...] = ()) -> Any:
        generated = await generate(ids, most, stop)
        generated.ids[0] = vocabulary_size - 1
        return generated

    episode.generate = sampling_padding
    body = {"model": "x", "messages": QUESTION}
    message = content_of(ask(serving, episode, requests.CHAT, body))["choices"][0]["message"]
    again = [*QUESTION, message, {"role": "user", "content": "And?"}]
    assert ask(serving, episode, requests.CHAT, body | {"messages": again}).status == 200
    assert len(episode.segments()) == 1
