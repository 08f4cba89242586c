"""Request bodies as agents send them, made ready for vLLM's serving classes."""

import json
from typing import Any

from one_step_off.endpoint.http_messages import (
    CHAT,
    COMPLETIONS,
    COUNT_TOKENS,
    GENERATE,
    MESSAGES,
    RESPONSES,
)
from one_step_off.engines.vllm.chat.conversation import (
    ConversationRecord,
    RequestRefused,
    checked_tools,
)
from one_step_off.engines.vllm.chat.parsers import whole_characters

COMPLETION_TOKENS = 16
"""Tokens of a completion whose request names no number: OpenAI's default."""

RENDERED = (CHAT, RESPONSES, MESSAGES, COUNT_TOKENS)
"""The paths whose requests are written by the chat template."""

REFUSED_KEYS = {
    RESPONSES: ("background", "conversation"),
    COMPLETIONS: ("suffix", "echo", "prompt_embeds", "use_beam_search"),
    CHAT: ("echo", "chat_template", "use_beam_search"),
    GENERATE: ("features", "content_parts"),
}
"""Keys by path that the endpoint does not serve, where they hold anything."""

CHANGES_DISTRIBUTION = (
    "changes the distribution that tokens are sampled from, so that the policy cannot be trained "
    "on them; leave it out"
)
MANY_ENTRIES = ("logit_bias", "allowed_token_ids", "bad_words")
"""Such keys, of which each entry would cost time before the engine refuses them."""

MAX_STOP_CHARS = 10_000
MIN_VALUES = 100_000
VALUES_PER_TOKEN = 32
"""JSON values that a request may have at least, and those per token that an episode has room for.
A value in a text is a comma or a bracket."""


class RequestTooLong(RequestRefused):
    """A request is longer than any context."""


class ThreadRefused(RequestRefused):
    """Anthropic's clients can leave the history to the server. Refused in the form in which its SDK
    falls back to whole histories by itself."""


def parse_body(path: str, body: bytes, max_sequence: int) -> dict[str, Any]:
    """The JSON object of a request.

    Args:
        max_sequence: tokens of context and answer together at most.

    Raises:
        RequestRefused: it is none, or it asks for what the endpoint does not serve.
        RequestTooLong: it has more parts than a context of so many tokens has room for.
    """
    values = sum(map(body.count, (b",", b"[", b"{")))
    if values > MIN_VALUES + VALUES_PER_TOKEN * max_sequence:
        raise RequestTooLong(f"{values} JSON values are too many for {max_sequence} tokens")
    try:
        content = json.loads(body)
        if b"\\ud" in body.lower():
            content = json.loads(whole_characters(json.dumps(content, ensure_ascii=False)))
    except (ValueError, RecursionError) as e:
        raise RequestRefused(f"the body is not JSON: {e}") from None
    if not isinstance(content, dict):
        raise RequestRefused("the body must be a JSON object")
    for key in REFUSED_KEYS.get(path, ()):
        if content.get(key):
            raise RequestRefused(f"{key}: this endpoint does not serve it; leave it out")
    _check_sampling(content)
    messages = content.get("messages", [])
    if not isinstance(messages, list):
        raise RequestRefused("messages: must be a list of messages")
    if len(messages) > max_sequence:  # each has a token at least
        raise RequestTooLong(f"{len(messages)} messages are too many for {max_sequence} tokens")
    if content.get("thread") and path == MESSAGES:
        raise ThreadRefused("thread: this endpoint keeps no threads; send the whole history")
    return content


def _check_sampling(content: dict[str, Any]) -> None:
    """Refuse what vLLM's classes would take long to read. Raises RequestRefused."""
    nested = content.get("sampling_params")
    places = [content, nested] if isinstance(nested, dict) else [content]
    for place in places:
        for key in MANY_ENTRIES:
            if place.get(key):
                raise RequestRefused(f"{key}: {CHANGES_DISTRIBUTION}")
        for key in ("stop", "stop_sequences"):
            texts = place.get(key) or ()
            if len(json.dumps(texts, default=str)) > MAX_STOP_CHARS:
                raise RequestRefused(f"{key}: has more than {MAX_STOP_CHARS} characters")


def take_stream(content: dict[str, Any]) -> tuple[bool, bool]:
    """Whether an answer is to be sent as events, and whether with its usage. Takes both out of the
    request: vLLM makes a whole answer.

    Raises:
        RequestRefused: they are of another type.
    """
    stream = content.pop("stream", None)
    options = content.pop("stream_options", None)
    if not isinstance(stream, bool | None):
        raise RequestRefused(f"stream: must be true or false, not {stream!r:.40}")
    if not isinstance(options, dict | None):
        raise RequestRefused(f"stream_options: must be an object, not {options!r:.40}")
    return bool(stream), bool((options or {}).get("include_usage"))


def take_max_tokens(path: str, content: dict[str, Any]) -> int | None:
    """How long an answer the agent asks for; None: as long as there is room. Takes it out of the
    request, because vLLM refuses more than its context length, where the answer is only cut here.

    Raises:
        RequestRefused: it is no positive number.
    """
    place = content
    if path == GENERATE:
        place = content.setdefault("sampling_params", {})
        if not isinstance(place, dict):
            raise RequestRefused(f"sampling_params: must be an object, not {place!r:.40}")
    names = ("max_completion_tokens", "max_output_tokens", "max_tokens")
    asked = [place.pop(name) for name in names if place.get(name) is not None]
    if path == COMPLETIONS and not asked:
        asked = [COMPLETION_TOKENS]
    for number in asked:
        if type(number) is not int or number < 1:
            raise RequestRefused(f"max_tokens: must be a positive number, not {number!r:.40}")
    if path in (MESSAGES, COMPLETIONS, GENERATE):
        place["max_tokens"] = 1  # these APIs need one, or have a default
    return asked[0] if asked else None


def prepare(
    path: str,
    content: dict[str, Any],
    model: str,
    record: ConversationRecord,
    settings: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """The request as vLLM receives it.

    Any model name is the policy. A forced tool call is a free one and a strict tool is a plain one,
    because vLLM would constrain the sampling, and the policy could not be trained on it.

    Args:
        model: the name under which vLLM serves the policy.
        record: of the episode, for `previous_response_id`.
        settings: of the chat template, of the run and the row; the request's take precedence.

    Raises:
        RequestRefused: the previous response is unknown, or a message or tool cannot be used.
    """
    content = content | {"model": model}
    own_settings = content.get("chat_template_kwargs")
    if path in RENDERED and settings and isinstance(own_settings, dict | None):
        content["chat_template_kwargs"] = settings | (own_settings or {})
    if path == CHAT:
        content["tools"] = checked_tools(content.get("tools"))
    content["tools"] = [_plain_tool(tool) for tool in content.get("tools") or ()]
    if not content["tools"]:
        del content["tools"]
        content.pop("tool_choice", None)
    if _forces_a_call(content.get("tool_choice")):
        content["tool_choice"] = {"type": "auto"} if path.startswith(MESSAGES) else "auto"
    if path == MESSAGES and content.get("thinking"):
        content["thinking"] = _without_budget(content["thinking"])
    if path == RESPONSES:
        content = _with_history(content, record)
        if isinstance(content.get("input"), list):
            content["input"] = [_whole_item(item) for item in content["input"]]
        content["store"] = False
    return content


def _without_budget(thinking: Any) -> Any:
    """A setting of thoughts without the number of their tokens: the engine would force their end,
    and vLLM compares the number with `max_tokens`, which is taken out."""
    if isinstance(thinking, dict) and thinking.get("type") == "enabled":
        return {"type": "adaptive"}
    return thinking


def _whole_item(item: Any) -> Any:
    """An item of the Responses API with one part in each of its lists of texts: of what the
    assistant said or thought vLLM reads the first part alone, and what was said must have one."""
    if not isinstance(item, dict):
        return item
    if item.get("type") == "reasoning":
        kinds = {"content": "reasoning_text", "summary": "summary_text"}
        return item | {k: _one_part(item[k], kind) for k, kind in kinds.items() if item.get(k)}
    is_said = item.get("type", "message") == "message" and item.get("role") == "assistant"
    if is_said and isinstance(item.get("content"), list):
        return item | {"content": _one_part(item["content"], "output_text", annotations=[])}
    return item


def _one_part(parts: Any, kind: str, **more: Any) -> Any:
    """The texts of parts as one part of this type; anything else as it is."""
    if not isinstance(parts, list) or not all(isinstance(part, dict) for part in parts):
        return parts
    texts = [part.get("refusal" if part.get("type") == "refusal" else "text") for part in parts]
    if not all(isinstance(text, str) for text in texts):
        return parts
    return [{"type": kind, "text": "\n".join(filter(None, texts))} | more]


def _plain_tool(tool: Any) -> Any:
    """A tool without `strict`."""
    if not isinstance(tool, dict):
        return tool
    plain = {key: value for key, value in tool.items() if key != "strict"}
    if isinstance(plain.get("function"), dict):
        plain["function"] = _plain_tool(plain["function"])
    return plain


def _forces_a_call(tool_choice: Any) -> bool:
    if isinstance(tool_choice, dict):
        return tool_choice.get("type") not in ("auto", "none")
    return tool_choice not in (None, "auto", "none")


def _with_history(content: dict[str, Any], record: ConversationRecord) -> dict[str, Any]:
    """A request of the Responses API with all items before it, if it names an earlier answer."""
    previous = content.pop("previous_response_id", None)
    if previous is None:
        return content
    if previous not in record.responses:
        raise RequestRefused(
            f"previous_response_id={str(previous)[:80]!r}: this episode has no such answer"
        )
    return content | {"input": [*record.responses[previous], *input_items(content)]}


def input_items(content: dict[str, Any]) -> list[Any]:
    """The input of a request of the Responses API as items."""
    items = content.get("input", [])
    if isinstance(items, str):
        return [{"type": "message", "role": "user", "content": items}]
    return list(items)
