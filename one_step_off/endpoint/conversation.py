"""What an episode's agent and the policy have said to each other, as messages, so that a later
request can be continued from the recorded tokens.

Clients send back what they received with changes that mean nothing: other null fields, other blanks
in the arguments of a call, no thoughts. So messages are compared in a plain form.
"""

import asyncio
import hashlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from agent_loop.episode import Turn

TEXT_PARTS = ("text", "input_text", "output_text", "refusal")
MOST_RESPONSE_BYTES = 32 << 20
THOUGHT_PARTS = ("thinking", "reasoning", "reasoning_text", "redacted_thinking")


class RequestRefused(Exception):
    """A request asks for what the endpoint does not do. The message says why, in one line."""


@dataclass(frozen=True)
class PlainMessage:
    """A message in the form in which messages are compared.

    Attributes:
        calls: (name, arguments) of each tool call; arguments as sorted JSON, or as they are where
            they are no JSON.
    """

    role: str
    text: str
    calls: tuple[tuple[str, str], ...] = ()

    def joined(self, other: "PlainMessage") -> "PlainMessage":
        """This message followed by another of the same role."""
        text = "\n".join(part for part in (self.text, other.text) if part)
        return PlainMessage(self.role, text, self.calls + other.calls)

    def digest(self, before: bytes) -> bytes:
        """A digest of the messages with the digest `before`, and this one."""
        content = json.dumps([self.role, self.text, self.calls]).encode()
        return hashlib.sha256(before + content).digest()


def plain_messages(messages: Iterable[dict[str, Any]]) -> list[PlainMessage]:
    """Chat messages in their plain form. Consecutive messages of the assistant are one: some APIs
    send a text and each call as items of their own.

    Raises:
        RequestRefused: a message has a part that is no text.
    """
    plain: list[PlainMessage] = []
    for position, message in enumerate(messages):
        one = _plain_message(position, message)
        if plain and one.role == plain[-1].role == "assistant":
            plain[-1] = plain[-1].joined(one)
        else:
            plain.append(one)
    return plain


def _plain_message(position: int, message: dict[str, Any]) -> PlainMessage:
    role = str(message.get("role", ""))
    text = _text_of(position, message.get("content"))
    if role != "assistant":
        return PlainMessage(role, text)
    calls = []
    for call in message.get("tool_calls") or ():
        function = call.get("function") or {}
        calls.append((str(function.get("name")), _plain_arguments(function.get("arguments"))))
    # Streams and whole answers differ in the blanks around a call, and some clients strip texts.
    return PlainMessage(role, text.strip(), tuple(calls))


def _text_of(position: int, content: Any) -> str:
    """The text of a message's content.

    Raises:
        RequestRefused: it has a part that is no text.
    """
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    texts = []
    for part in content:
        if isinstance(part, str):
            texts.append(part)
            continue
        kind = part.get("type", "text")
        if kind in THOUGHT_PARTS:
            continue
        if kind not in TEXT_PARTS:
            raise RequestRefused(
                f"message {position} has a part of type {kind!r}: this endpoint trains on text "
                "alone; send the content as text"
            )
        texts.append(str(part.get("text") or part.get("refusal") or ""))
    return "\n".join(texts)


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
    ) -> tuple[Turn, list[PlainMessage]] | None:
        """The latest turn that these messages contain unchanged, with all that came before it, and
        the messages after it; None where there is none, or where a message of the assistant comes
        after it that the policy did not write."""
        digests = self._digests(settings, messages)
        for position in range(len(messages), 0, -1):
            turn = self.by_messages.get(digests[position])
            if turn is None:
                continue
            new = list(messages[position:])
            if not new or any(message.role == "assistant" for message in new):
                return None
            return turn, new
        return None

    def add_response(self, id: str, items: list[Any], request_bytes: int) -> None:
        """Record all items up to an answer of the Responses API. The oldest answers go where their
        requests, which may each hold the whole history, are too large together."""
        self.responses[id] = items
        self._request_bytes[id] = request_bytes
        while sum(self._request_bytes.values()) > MOST_RESPONSE_BYTES and len(self.responses) > 1:
            oldest = next(iter(self.responses))
            del self.responses[oldest], self._request_bytes[oldest]

    def add_text(self, prompt: str, answer: str, turn: Turn) -> None:
        """Record the policy's answer to a prompt in plain text."""
        text = prompt + answer
        self.by_text[len(text), _text_digest(text)] = (turn, answer)

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


def _text_digest(text: str) -> bytes:
    return hashlib.sha256(_encoded(text)).digest()
