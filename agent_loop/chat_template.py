"""Messages between two turns of the policy, written by the model's own chat template, in tokens."""

import json
import re
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache, partial
from typing import Any

import numpy as np

from one_step_off.config.errors import ConfigError, as_config_error
from one_step_off.data.messages import Message, encodable, render_chat

QUESTION = {"role": "user", "content": "?"}

# Random, so that no message contains them by chance or on purpose.
_TURN_MARK = secrets.token_hex(16)
_TEXT_MARK = secrets.token_hex(16)
_TEXT_MARKS = re.compile(rf"{_TEXT_MARK}(\d+)\.")

_HARMLESS = re.compile(r"[\w.:/-]*")
"""Names and ids that cannot hold the name of a special token."""

Render = Callable[..., str]


@dataclass(frozen=True)
class TemplateFrame:
    """What a chat template writes around the texts of some messages.

    Attributes:
        pieces: the template's text, and in between the numbers of the texts that stand there:
            [text, "0", text, "1", text].
        special_tokens: how many special tokens the template's text has.
    """

    pieces: list[str]
    special_tokens: int


class TurnEncoder:
    """Encodes messages that follow a turn of the policy."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        # Per object, because a cached method would keep the tokenizer alive.
        self.frame: Callable[[str], TemplateFrame] = lru_cache(64)(self._make_frame)

    @cached_property
    def special_ids(self) -> set[int]:
        """The ids of all special tokens."""
        added = self.tokenizer.added_tokens_decoder.items()
        special = {i for i, token in added if token.special}
        return special | set(self.tokenizer.all_special_ids)

    def encode(
        self,
        messages: Sequence[Message],
        turn_ids: np.ndarray,
        calls: Sequence[dict[str, Any]] = (),
        settings: dict[str, Any] | None = None,
    ) -> np.ndarray:
        """What the chat template writes between a turn of the policy and its next turn: the end of
        the turn, the messages, and the cue of the next turn.

        Names of special tokens inside of the messages are plain text: a tool's output must not open
        a turn of its own.

        Args:
            messages: normalized.
            turn_ids: the policy's turn, int32 [R]. The end of the turn is left out if the policy
                has generated it.
            calls: the normalized tool calls of that turn, which the messages answer. Some templates
                look up names and ids in them.
            settings: of the template. It gets no tools: they stand in the prompt, and some
                templates would write them again.

        Returns:
            int32 [T].

        Raises:
            ConfigError: the template does not take such messages.
        """
        messages = encodable(messages)
        calls = encodable(calls)
        marked, texts = _marked(messages)
        frame = self.frame(_key(marked, calls, settings))
        ids = self._tokenize(self._text_after_turn(messages, calls, settings))
        if self._count_special(ids) != frame.special_tokens:
            # A message contains the name of a special token.
            ids = self._tokenize_pieces(texts, frame)
        ended_itself = len(turn_ids) > 0 and int(turn_ids[-1]) in self.special_ids
        if ended_itself and ids and ids[0] in self.special_ids:
            ids = ids[1:]
        return np.asarray(ids, np.int32)

    def check_roles(self, roles: Sequence[str], settings: dict[str, Any] | None = None) -> None:
        """Raises ConfigError: the template does not take messages of these roles in a row."""
        marked, _ = _marked([{"role": role, "content": ""} for role in roles])
        self.frame(_key(marked, (), settings))

    def _make_frame(self, key: str) -> TemplateFrame:
        """The frame of marked messages, with what else the template receives, as JSON.

        Raises:
            ConfigError: the template does not show each message once and in order, so that the
                policy would miss it.
        """
        messages, *rest = json.loads(key)
        text = self._text_after_turn(messages, *rest)
        pieces = _TEXT_MARKS.split(text)
        contents = [_TEXT_MARKS.fullmatch(message["content"]).group(1) for message in messages]
        shown = [number for number in pieces[1::2] if number in contents]
        if shown != contents:
            role = messages[0]["role"]
            missing = f"messages of {role!r}"
            if len(messages) > 1:
                missing = f"{len(messages)} messages in a row of {role!r}"
            raise ConfigError(
                f"agent.loop: the model's chat template does not render {missing}; use another "
                "model"
            )
        return TemplateFrame(pieces, self._count_special(self._tokenize(text)))

    def _text_after_turn(
        self,
        messages: list[Message],
        calls: Sequence[dict[str, Any]],
        settings: dict[str, Any] | None,
    ) -> str:
        """What the template writes after a turn of the policy.

        The template may rewrite earlier turns (drop thoughts, strip blanks), so a mark stands for
        the turn.

        Raises:
            ConfigError: the template does not take such messages.
        """
        render = partial(render_chat, self.tokenizer, settings=settings)
        if calls:
            text = self._text_after_calls(render, messages, calls)
            if text is not None:
                return text
        refused = f"agent.loop: the model's chat template does not accept {messages[0]['role']!r}"
        with as_config_error(refused, "use another model"):
            return _text_after_mark(render, messages, add_generation_prompt=True)

    @staticmethod
    def _text_after_calls(
        render: Render, messages: list[Message], calls: Sequence[dict[str, Any]]
    ) -> str | None:
        """What the template writes after a turn with calls; None: that cannot be told from what it
        makes of the calls, and the turn must be taken for a plain text."""
        chat = [QUESTION, {"role": "assistant", "content": "", "tool_calls": calls}]
        try:
            turn = render(chat)
            whole = render([*chat, *messages], add_generation_prompt=True)
            end_of_turn = _text_after_mark(render, [])
        except Exception:  # templates are programs, and this one takes no calls
            return None
        if not (whole.startswith(turn) and turn.endswith(end_of_turn)):
            return None
        return end_of_turn + whole[len(turn) :]

    def _tokenize_pieces(self, texts: list[str], frame: TemplateFrame) -> list[int]:
        """Tokenize the template's text as it is, and the texts of messages without special
        tokens."""
        ids = []
        for i, piece in enumerate(frame.pieces):
            is_own = i % 2 == 1
            text = texts[int(piece)] if is_own else piece
            ids += self._tokenize(text, split_special_tokens=is_own)
        return ids

    def _tokenize(self, text: str, **options: bool) -> list[int]:
        return self.tokenizer(text, add_special_tokens=False, **options)["input_ids"]

    def _count_special(self, ids: list[int]) -> int:
        return sum(i in self.special_ids for i in ids)


def _key(*arguments: Any) -> str:
    """The arguments of `TurnEncoder._text_after_turn` as text."""
    return json.dumps(arguments, default=str)


def _text_after_mark(render: Render, messages: list[Message], **options: Any) -> str:
    """What a template writes after a turn of plain text. Raises ValueError: it does not show it."""
    text = render([QUESTION, {"role": "assistant", "content": _TURN_MARK}, *messages], **options)
    if text.count(_TURN_MARK) != 1:
        raise ValueError("it does not render the assistant's turn exactly once")
    return text.partition(_TURN_MARK)[2]


def _marked(messages: list[Message]) -> tuple[list[Message], list[str]]:
    """Messages with marks in place of their texts, and these texts. Of names and ids only those are
    replaced that may hold the name of a special token."""
    texts: list[str] = []

    def mark(text: str) -> str:
        texts.append(text)
        return f"{_TEXT_MARK}{len(texts) - 1}."

    marked = []
    for message in messages:
        replaced = message | {"content": mark(message["content"])}
        for key in ("name", "tool_call_id"):
            if not _HARMLESS.fullmatch(message.get(key, "")):
                replaced[key] = mark(message[key])
        marked.append(replaced)
    return marked, texts
