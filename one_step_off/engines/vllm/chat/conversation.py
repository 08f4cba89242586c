"""What an episode's agent and the policy have said to each other, as messages, so that a later
request can be continued from the recorded tokens; and the request that is being served.

Clients send back what they received with changes that mean nothing: other null fields, other blanks
in the arguments of a call, no thoughts. So messages are compared in a plain form.
"""

import asyncio
import hashlib
import json
from collections.abc import Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

from agent_loop.episode import Episode, Turn
from one_step_off.data.messages import (
    THOUGHT_PARTS,
    BadMessage,
    Message,
    normalized_messages,
    normalized_tools,
)

MAX_RESPONSE_BYTES = 32 << 20
UNCOMPARED_PARTS = (*THOUGHT_PARTS, "thinking")


class RequestRefused(Exception):
    """A request asks for what the endpoint does not do. The message says why, in one line."""


@dataclass(frozen=True)
class PlainMessage:
    """A message in the form in which messages are compared.

    Attributes:
        calls: (name, arguments) of each tool call; arguments as sorted JSON, or as they are where
            they are no JSON.
        others: what else the chat template may write, as sorted JSON. Clients change ids and leave
            out thoughts, so these are not compared; nor is what only the assistant's messages have.
        message: as the chat template receives it.
    """

    role: str
    text: str
    calls: tuple[tuple[str, str], ...] = ()
    others: str = ""
    message: Message = field(default_factory=dict, compare=False)

    def joined(self, other: "PlainMessage") -> "PlainMessage":
        """This message followed by another of the same role."""
        text = "\n".join(part for part in (self.text, other.text) if part)
        calls = [*self.message.get("tool_calls", ()), *other.message.get("tool_calls", ())]
        message = self.message | other.message | ({"tool_calls": calls} if calls else {})
        return PlainMessage(self.role, text, self.calls + other.calls, message=message)

    def digest(self, before: bytes) -> bytes:
        """A digest of the messages with the digest `before`, and this one."""
        content = json.dumps([self.role, self.text, self.calls, self.others]).encode()
        return hashlib.sha256(before + content).digest()


def checked_messages(messages: Sequence[Any]) -> list[Message]:
    """The messages of a request as the chat template receives them. The policy may have written
    them: arguments that are no JSON object are taken for {}, as vLLM does.

    Raises:
        RequestRefused: names the message and the key that cannot be used.
    """
    try:
        return normalized_messages(messages, "messages", empty_for_broken_arguments=True)
    except BadMessage as error:
        raise RequestRefused(str(error)) from None


def checked_tools(tools: Any) -> list[dict[str, Any]] | None:
    """The tools of a request as the chat template receives them. Raises RequestRefused."""
    try:
        return normalized_tools(tools)
    except BadMessage as error:
        raise RequestRefused(str(error)) from None


def plain_messages(messages: Sequence[dict[str, Any]]) -> list[PlainMessage]:
    """Chat messages in their plain form. Consecutive messages of the assistant are one: some APIs
    send a text and each call as items of their own.

    Raises:
        RequestRefused: a message has a part that is no text, or is malformed.
    """
    plain: list[PlainMessage] = []
    for given, message in zip(messages, checked_messages(messages), strict=True):
        one = _plain_message(given, message)
        if plain and one.role == plain[-1].role == "assistant":
            plain[-1] = plain[-1].joined(one)
        else:
            plain.append(one)
    return plain


def _plain_message(given: dict[str, Any], message: Message) -> PlainMessage:
    """`message`: the given one, normalized."""
    role = message["role"]
    if role != "assistant":
        uncompared = ("role", "content", "tool_call_id")
        others = {k: v for k, v in message.items() if k not in uncompared and v is not None}
        shown = json.dumps(others, sort_keys=True, default=str) if others else ""
        return PlainMessage(role, message["content"], others=shown, message=message)
    calls = []
    raw_calls = given.get("tool_calls") or ()
    for raw, call in zip(raw_calls, message.get("tool_calls", ()), strict=False):
        arguments = (raw.get("function") or {}).get("arguments")
        calls.append((call["function"]["name"], _plain_arguments(arguments)))
    # Streams and whole answers differ in the blanks around a call, and some clients strip texts.
    text = _text_without_thoughts(given.get("content"), message)
    return PlainMessage(role, text.strip(), tuple(calls), message=message)


def _text_without_thoughts(content: Any, message: Message) -> str:
    """The text of an answer, which clients send back with or without its thoughts."""
    if not content or isinstance(content, str):
        return message["content"]
    parts = [p for p in content if isinstance(p, str) or p.get("type") not in UNCOMPARED_PARTS]
    (plain,) = checked_messages([{"role": "assistant", "content": parts}])
    return plain["content"]


def _plain_arguments(arguments: Any) -> str:
    if not arguments:  # of a call that was cut off; clients make {} of it
        return "{}"
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except (ValueError, RecursionError):
            return arguments.strip()
    return json.dumps(arguments, sort_keys=True)


class ConversationRecord:
    """The turns of one episode by the messages, or the text, that led to them."""

    def __init__(self) -> None:
        self.reading = asyncio.Lock()
        """Held while a request is read: no episode has more than one of the threads."""
        self.by_messages: dict[bytes, Turn] = {}
        self.by_text: dict[tuple[int, bytes], tuple[Turn, str]] = {}
        """(characters, digest) of prompt and answer -> the turn and its answer. Texts grow with
        every turn."""
        self.responses: dict[str, list[Any]] = {}
        """Id of an answer of the Responses API -> all items up to it, for `previous_response_id`;
        the newest ones."""
        self._request_bytes: dict[str, int] = {}

    @staticmethod
    def _digests(settings: str, messages: Sequence[PlainMessage]) -> list[bytes]:
        digests = [hashlib.sha256(settings.encode()).digest()]
        for message in messages:
            digests.append(message.digest(digests[-1]))
        return digests

    def add(
        self,
        settings: str,
        messages: Sequence[PlainMessage],
        answer: Sequence[PlainMessage],
        turn: Turn,
    ) -> None:
        """Record the policy's answer to these messages.

        Args:
            settings: what else the chat template was given, its tools above all.
        """
        self.by_messages[self._digests(settings, [*messages, *answer])[-1]] = turn

    def find(
        self, settings: str, messages: Sequence[PlainMessage]
    ) -> tuple[Turn, PlainMessage, list[PlainMessage]] | None:
        """The latest turn that these messages contain unchanged, with all that came before it, its
        message here, and the messages after it; None where there is none, or where a message of the
        assistant comes after it that the policy did not write."""
        digests = self._digests(settings, messages)
        for position in range(len(messages), 0, -1):
            turn = self.by_messages.get(digests[position])
            if turn is None:
                continue
            new = list(messages[position:])
            if not new or any(message.role == "assistant" for message in new):
                return None
            return turn, messages[position - 1], new
        return None

    def add_response(self, id: str, items: list[Any], request_bytes: int) -> None:
        """Record all items up to an answer of the Responses API. The oldest answers go where their
        requests, which may each hold the whole history, are too large together."""
        self.responses[id] = items
        self._request_bytes[id] = request_bytes
        while sum(self._request_bytes.values()) > MAX_RESPONSE_BYTES and len(self.responses) > 1:
            oldest = next(iter(self.responses))
            del self.responses[oldest], self._request_bytes[oldest]

    def add_text(self, prompt: str, answer: str, turn: Turn) -> None:
        """Record the policy's answer to a prompt in plain text."""
        text = prompt + answer
        digest = hashlib.sha256(_encoded(text)).digest()
        self.by_text[len(text), digest] = (turn, answer)

    def find_text(self, prompt: str) -> tuple[Turn, str, str] | None:
        """The latest turn whose prompt and answer this prompt begins with, its answer as the client
        received it, and the text after it."""
        found = None
        digest = hashlib.sha256()
        before = 0
        for length in sorted({length for length, _ in self.by_text if length <= len(prompt)}):
            digest.update(_encoded(prompt[before:length]))
            before = length
            known = self.by_text.get((length, digest.digest()))
            if known is not None:
                turn, answer = known
                found = turn, answer, length
        return found and (*found[:2], prompt[found[2] :])


def _encoded(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")


@dataclass
class Call:
    """One request, and what its parts leave for one another on the way through vLLM's classes.

    Attributes:
        record: of the episode.
        max_tokens: of the answer, as the agent asked; None: as many as there is room for.
        body_bytes: of the request.
        stream: whether the answer is sent as events.
        with_usage: whether these end with the usage.
        items: of a request of the Responses API, all up to the answer.
        settings: what the chat template was given besides the messages.
        given: the messages of a chat request, as the client sent them.
        messages: that were rendered; None where the request has no messages.
        text: that was the prompt; None where it was no text.
        answer: the policy's answer as chat messages, as the client receives it.
        answer_text: the same, of a request in plain text.
        turns: of the policy, that this request made.
        error: why the policy made none.
    """

    episode: Episode
    record: ConversationRecord
    max_tokens: int | None = None
    body_bytes: int = 0
    stream: bool = False
    with_usage: bool = False
    items: list[Any] = field(default_factory=list)
    settings: str = ""
    given: list[Any] | None = None
    messages: list[PlainMessage] | None = None
    text: str | None = None
    answer: list[PlainMessage] = field(default_factory=list)
    answer_text: str | None = None
    turns: list[Turn] = field(default_factory=list)
    error: BaseException | None = None

    def remember(self) -> None:
        """Record the turn under what led to it."""
        for turn in self.turns:
            if self.messages is not None and self.answer:
                self.record.add(self.settings, self.messages, self.answer, turn)
                turn.tool_calls = [
                    {"name": name, "arguments": arguments}
                    for message in self.answer
                    for name, arguments in message.calls
                ]
            elif self.text is not None and self.answer_text is not None:
                self.record.add_text(self.text, self.answer_text, turn)


CURRENT_CALL: ContextVar[Call] = ContextVar("CURRENT_CALL")
"""The request that the running task serves: vLLM's classes do not pass it on."""
