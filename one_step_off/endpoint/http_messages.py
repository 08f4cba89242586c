"""The HTTP messages of the endpoint: routes of requests, answers, errors, and answers as events.

An answer is whole before its first byte is sent. So an agent never holds half of a turn, a weight
sync in mid-turn only makes it wait, and a request that a client repeats gets the answer that was
made for it. Streams are written from whole answers, so that both say the same, and all that the
policy writes is parsed once.

The SDKs of OpenAI and Anthropic repeat a request after 408, 409, 429 and every status from 500
on. So what no repetition helps against has another status, or has the header
"x-should-retry: false". The JSON of events is ASCII: many clients end a line at every character at
which Python's `splitlines` does.
"""

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

from agent_loop.episode import Turn

NO_RETRY = {"x-should-retry": "false"}
RETRY_SOON = {"Retry-After": "1"}
STATUS_OVER = 410

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
RESPONSES = "/v1/responses"
MESSAGES = "/v1/messages"
COUNT_TOKENS = "/v1/messages/count_tokens"
GENERATE = "/inference/v1/generate"
POLICY_PATHS = (CHAT, COMPLETIONS, RESPONSES, MESSAGES, COUNT_TOKENS, GENERATE)
"""Answered by `Serving.answer`."""

MODELS = "/v1/models"
NEXT = "/v1/episodes/next"

INTERNAL = ("return", "lost")
"""Names of the routes that only the gateway may use."""

GATEWAY = "x-ose-gateway"
"""Header of the gateway's requests: the service key."""

ANSWER = "x-ose-answer"
"""Header of the answers that the gateway gets: the number of a cached answer."""

_EPISODE_PATH = re.compile(r"/v1/episodes/([A-Za-z0-9_-]{1,80})(?:/(reward|end|return|lost))?")
_EPISODE_METHODS = {"": "GET", "reward": "POST", "end": "POST", "return": "POST", "lost": "POST"}
KEY_CHARS = 200

PIECE_CHARS = 2048
"""Characters of a text in one event: some clients read lines of at most 64 KiB."""

DONE = b"data: [DONE]\n\n"

Content = dict[str, Any]
"""The JSON of an answer, or of a part of it."""


@dataclass
class Answer:
    """One HTTP response.

    Attributes:
        status: of HTTP.
        content_type: "application/json" or "text/event-stream".
        chunks: the body, in the pieces in which it is sent.
        turns: of the policy, that it holds. The server marks them as delivered once the client has
            received the whole body.
    """

    status: int
    content_type: str
    chunks: list[bytes]
    turns: list[Turn] = field(default_factory=list)


def json_answer(status: int, content: Any) -> Answer:
    """An answer in JSON."""
    return Answer(status, "application/json", [json.dumps(content).encode()])


def error_answer(path: str, status: int, code: str, message: str, reason: str = "") -> Answer:
    """An error in the form of the API that `path` belongs to.

    Args:
        code: its name, for programs: as "episode_over".
        message: one line, for people.
        reason: which of several causes it has, as "turns"; "": it has one.
    """
    if path.startswith(MESSAGES):
        error: dict[str, Any] = {"type": code, "message": message}
        if reason:
            error["code"] = reason
        return json_answer(status, {"type": "error", "error": error})
    error = {"message": message, "type": code, "param": None, "code": reason or code}
    return json_answer(status, {"error": error})


class Refused(Exception):
    """A request gets an error.

    Attributes:
        answer: the error.
        headers: of the answer.
        close: whether the connection ends with it: the rest of the request is unread.
    """

    def __init__(
        self,
        status: int,
        code: str,
        message: str,
        path: str = "",
        headers: Mapping[str, str] | None = None,
        close: bool = False,
        reason: str = "",
    ) -> None:
        """
        Args:
            code: its name, for programs.
            message: one line, for people.
            path: of the request; the error has the form of its API.
            reason: of an episode that is over.
        """
        super().__init__(message)
        self.answer: Answer = error_answer(path, status, code, message, reason)
        self.headers = dict(headers or {})
        self.close = close


def unknown_key(path: str, has_key: bool) -> Refused:
    """No key, or one that the run has not given out."""
    problem = "this key is not known" if has_key else "no key"
    message = (
        f"{problem}: send the episode's key as 'Authorization: Bearer KEY' or 'x-api-key: KEY'"
    )
    # The body is left unread: a client without a key cannot make the server read one.
    return Refused(401, "unknown_key", message, path, close=True)


def episode_over(path: str, reason: str, message: str) -> Refused:
    """The episode takes no more requests."""
    return Refused(STATUS_OVER, "episode_over", message, path, NO_RETRY, close=True, reason=reason)


def replica_gone(path: str) -> Refused:
    """The process that knew the episode has ended, and the episode with it."""
    message = (
        "this episode is over: its replica was restarted; the run repeats its prompt with another "
        "episode"
    )
    return episode_over(path, "replica", message)


@dataclass(frozen=True)
class Route:
    """What a request asks for.

    Attributes:
        name: one of "policy", "models", "next", "state", "reward", "end", "return",
            "lost".
        path: without the query.
        key: of the episode, or the service key; "": none was sent.
    """

    name: str
    path: str
    key: str


def route_of(request: web.BaseRequest) -> Route:
    """The route of a request.

    Raises:
        Refused: 404: there is no such path. 405: not with this method.
    """
    # The path is compared as it was sent: with no decoding there is nothing to traverse.
    path = request.raw_path.partition("?")[0]
    if path in POLICY_PATHS:
        name, method, key = "policy", "POST", sent_key(request)
    elif path in (MODELS, NEXT):
        name, method, key = path.rpartition("/")[2], "GET", sent_key(request)
    else:
        match = _EPISODE_PATH.fullmatch(path)
        if match is None:
            message = f"{path[:100]!r}: there is no such path"
            if path.startswith("/v1/v1/"):
                message += "; the base URL has /v1 already, and Anthropic's has none"
            raise Refused(404, "not_found", message, path)
        key, action = match[1], match[2] or ""
        name, method = action or "state", _EPISODE_METHODS[action]
    if request.method != method:
        message = f"{request.method[:20]} {path[:40]}: this path takes {method}"
        raise Refused(405, "method_not_allowed", message, path, headers={"Allow": method})
    return Route(name, path, key)


def sent_key(request: web.BaseRequest) -> str:
    """The key in "Authorization: Bearer KEY", or in "x-api-key"; "": there is none."""
    scheme, _, key = request.headers.get("Authorization", "").partition(" ")
    if scheme.lower() == "bearer" and key.strip():
        return key.strip()[:KEY_CHARS]
    return request.headers.get("x-api-key", "").strip()[:KEY_CHARS]


def is_streamed(body: bytes) -> bool:
    """Whether a request asks for its answer as events."""
    if b'"stream"' not in body:
        return False
    try:
        content = json.loads(body)
    except (ValueError, RecursionError):
        return False
    return isinstance(content, dict) and content.get("stream") is True


def error_event(path: str, error: bytes) -> bytes:
    """An error as an event of the API of `path`.

    Args:
        error: the body that it would have had as an answer, in one line of JSON.
    """
    if path.startswith(MESSAGES) or path == RESPONSES:
        return b"event: error\ndata: " + error + b"\n\n"
    return b"data: " + error + b"\n\n"


def chat_events(answer: Content, with_usage: bool) -> list[bytes]:
    """The stream of an answer of `/v1/chat/completions`."""
    (choice,) = answer["choices"]
    message = choice["message"]
    content = message.get("content")
    deltas: list[Content] = [{"role": "assistant", "content": None if content is None else ""}]
    deltas += [{"reasoning": piece} for piece in _pieces(message.get("reasoning"))]
    deltas += [{"content": piece} for piece in _pieces(content)]
    for index, call in enumerate(message.get("tool_calls") or ()):
        function = {"name": call["function"]["name"], "arguments": ""}
        begin = {"index": index, "id": call["id"], "type": "function", "function": function}
        deltas.append({"tool_calls": [begin]})
        for piece in _pieces(call["function"]["arguments"]):
            deltas.append({"tool_calls": [{"index": index, "function": {"arguments": piece}}]})
    return _chunks("chat.completion.chunk", answer, [{"delta": d} for d in deltas], with_usage)


def completion_events(answer: Content, with_usage: bool) -> list[bytes]:
    """The stream of an answer of `/v1/completions`."""
    (choice,) = answer["choices"]
    pieces = [{"text": piece} for piece in _pieces(choice["text"])] or [{"text": ""}]
    return _chunks("text_completion", answer, pieces, with_usage)


def _chunks(kind: str, answer: Content, pieces: list[Content], with_usage: bool) -> list[bytes]:
    """Events of OpenAI's older APIs.

    Args:
        pieces: what each event adds to the only choice. The first one has all log-probs.
    """
    (choice,) = answer["choices"]
    head = {key: answer.get(key) for key in ("id", "created", "model", "system_fingerprint")}
    head["object"] = kind
    first = {key: choice[key] for key in ("logprobs", "token_ids") if choice.get(key) is not None}
    end = {key: choice.get(key) for key in ("finish_reason", "stop_reason")}
    empty = {"delta": {}} if "delta" in pieces[0] else {"text": ""}
    choices = [{"index": 0, "finish_reason": None} | piece for piece in pieces]
    choices[0] |= first
    choices.append({"index": 0} | empty | end)
    chunks = [head | {"choices": [own]} for own in choices]
    if answer.get("prompt_token_ids") is not None:
        chunks[0]["prompt_token_ids"] = answer["prompt_token_ids"]
    if with_usage:
        chunks.append(head | {"choices": [], "usage": answer["usage"]})
    return [*map(_event, chunks), DONE]


def token_events(answer: Content, with_usage: bool) -> list[bytes]:
    """The stream of an answer of `/inference/v1/generate`."""
    return [_event(answer), DONE]


def message_events(answer: Content, with_usage: bool) -> list[bytes]:
    """The stream of an answer of `/v1/messages`, which always has the usage."""
    begin = answer | {"content": [], "stop_reason": None, "stop_sequence": None}
    begin["usage"] = answer["usage"] | {"output_tokens": 0}
    events: list[Content] = [{"type": "message_start", "message": begin}]
    for index, block in enumerate(answer["content"]):
        empty, deltas = _parts_of_block(block)
        events.append({"type": "content_block_start", "index": index, "content_block": empty})
        for delta in deltas:
            events.append({"type": "content_block_delta", "index": index, "delta": delta})
        events.append({"type": "content_block_stop", "index": index})
    end = {key: answer.get(key) for key in ("stop_reason", "stop_sequence")}
    events.append({"type": "message_delta", "delta": end, "usage": answer["usage"]})
    events.append({"type": "message_stop"})
    return [_event(event, event["type"]) for event in events]


def _parts_of_block(block: Content) -> tuple[Content, list[Content]]:
    """A block of Anthropic's API without its content, and the deltas that make up the content."""
    if block["type"] == "tool_use":
        text = json.dumps(block["input"], ensure_ascii=False)
        deltas = [{"type": "input_json_delta", "partial_json": piece} for piece in _pieces(text)]
        return block | {"input": {}}, deltas
    kind = block["type"]  # "text" or "thinking"
    deltas = [{"type": f"{kind}_delta", kind: piece} for piece in _pieces(block[kind])]
    if kind == "text":
        return block | {"text": ""}, deltas
    signature = {"type": "signature_delta", "signature": block.get("signature", "")}
    return block | {"thinking": "", "signature": ""}, [*deltas, signature]


def response_events(answer: Content, with_usage: bool) -> list[bytes]:
    """The stream of an answer of `/v1/responses`, which always has the usage."""
    begin = answer | {"status": "in_progress", "output": [], "usage": None}
    events: list[Content] = [
        {"type": "response.created", "response": begin},
        {"type": "response.in_progress", "response": begin},
    ]
    for index, item in enumerate(answer["output"]):
        place = {"output_index": index, "item_id": item.get("id") or ""}
        empty = item | {"status": "in_progress"}
        empty |= {key: type(item[key])() for key in ("content", "arguments") if item.get(key)}
        events.append({"type": "response.output_item.added", "output_index": index, "item": empty})
        events += [place | event for event in _events_of_item(item)]
        events.append({"type": "response.output_item.done", "output_index": index, "item": item})
    events.append({"type": "response.completed", "response": answer})
    numbered = [event | {"sequence_number": number} for number, event in enumerate(events)]
    return [_event(event, event["type"]) for event in numbered]


def _events_of_item(item: Content) -> Iterator[Content]:
    """What makes up the content of one item of the Responses API."""
    if item["type"] == "function_call":
        name = "response.function_call_arguments"
        for piece in _pieces(item["arguments"]):
            yield {"type": f"{name}.delta", "delta": piece}
        yield {"type": f"{name}.done", "arguments": item["arguments"], "name": item["name"]}
    for index, part in enumerate(item.get("content") or ()):
        place = {"content_index": index}
        text = {"text": part["text"]}
        more = {"logprobs": part.get("logprobs") or []} if part["type"] == "output_text" else {}
        name = f"response.{part['type']}"  # "output_text" or "reasoning_text"
        yield {"type": "response.content_part.added", "part": part | {"text": ""}} | place
        for piece in _pieces(part["text"]):
            yield {"type": f"{name}.delta", "delta": piece} | place | more
            more = {"logprobs": []} if more else {}
        yield {"type": f"{name}.done"} | text | place | more
        yield {"type": "response.content_part.done", "part": part} | place


def _pieces(text: str | None) -> list[str]:
    """A text in parts of at most `PIECE_CHARS` characters; []: it is empty."""
    text = text or ""
    return [text[begin : begin + PIECE_CHARS] for begin in range(0, len(text), PIECE_CHARS)]


def _event(data: Content, name: str = "") -> bytes:
    head = f"event: {name}\n" if name else ""
    return f"{head}data: {json.dumps(data, allow_nan=False)}\n\n".encode()
