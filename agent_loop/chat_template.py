"""Messages between two turns of the policy, written by the model's own chat template, in tokens."""

import re
import secrets
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

import numpy as np

from one_step_off.config.errors import ConfigError, as_config_error

Message = dict[str, str]
"""{"role": ..., "content": ...}"""

# Random, so that no message contains them by chance or on purpose.
_TURN_MARK = secrets.token_hex(16)
_CONTENT_MARK = secrets.token_hex(16)


@dataclass(frozen=True)
class TemplateFrame:
    """What a chat template writes around the contents of some messages.

    Attributes:
        pieces: the template's text, and in between the numbers of the messages whose contents stand
            there: [text, "0", text, "1", text].
        special_tokens: how many special tokens the template's text has.
    """

    pieces: list[str]
    special_tokens: int


class TurnEncoder:
    """Encodes messages that follow a turn of the policy."""

    def __init__(self, tokenizer: Any, template_kwargs: dict[str, Any] | None = None) -> None:
        """`template_kwargs`: further arguments of the chat template, as {"enable_thinking":
        False}."""
        self.tokenizer = tokenizer
        self.template_kwargs = template_kwargs or {}
        # Per object, because a cached method would keep the tokenizer alive.
        self.frame: Callable[[tuple[str, ...]], TemplateFrame] = lru_cache(64)(self._make_frame)

    @cached_property
    def special_ids(self) -> set[int]:
        """The ids of all special tokens."""
        added = self.tokenizer.added_tokens_decoder.items()
        special = {i for i, token in added if token.special}
        return special | set(self.tokenizer.all_special_ids)

    def encode(self, messages: list[Message], turn_ids: np.ndarray) -> np.ndarray:
        """What the chat template writes between a turn of the policy and its next turn: the end of
        the turn, the messages, and the cue of the next turn.

        Names of special tokens inside of the messages are plain text: a tool's output must not open
        a turn of its own.

        Args:
            turn_ids: the policy's turn, int32 [R]. The end of the turn is left out if the policy
                has generated it.

        Returns:
            int32 [T].

        Raises:
            ConfigError: the template does not take such messages.
        """
        messages = [message | {"content": _encodable(message["content"])} for message in messages]
        frame = self.frame(tuple(message["role"] for message in messages))
        ids = self._tokenize(self._text_after_turn(messages))
        if self._count_special(ids) != frame.special_tokens:
            # A message contains the name of a special token.
            ids = self._tokenize_pieces(messages, frame)
        ended_itself = len(turn_ids) > 0 and int(turn_ids[-1]) in self.special_ids
        if ended_itself and ids and ids[0] in self.special_ids:
            ids = ids[1:]
        return np.asarray(ids, np.int32)

    def _make_frame(self, roles: tuple[str, ...]) -> TemplateFrame:
        """The frame of messages of these roles.

        Raises:
            ConfigError: the template does not show each message once and in order, so that the
                policy would miss it.
        """
        marked = [{"role": role, "content": f"{_CONTENT_MARK}{i}."} for i, role in enumerate(roles)]
        text = self._text_after_turn(marked)
        pieces = re.split(rf"{_CONTENT_MARK}(\d+)\.", text)
        shown = pieces[1::2]
        if shown != [str(i) for i in range(len(roles))]:
            missing = f"messages of {roles[0]!r}"
            if len(roles) > 1:
                missing = f"{len(roles)} messages in a row of {roles[0]!r}"
            raise ConfigError(
                f"agent.loop: the model's chat template does not render {missing}; use another "
                "model"
            )
        return TemplateFrame(pieces, self._count_special(self._tokenize(text)))

    def _text_after_turn(self, messages: list[Message]) -> str:
        """What the template writes after a turn of the policy.

        The template may rewrite earlier turns (drop thoughts, strip blanks), so a mark stands for
        the turn.

        Raises:
            ConfigError: the template does not take such messages.
        """
        before = [
            {"role": "user", "content": "?"},
            {"role": "assistant", "content": _TURN_MARK},
        ]
        refused = f"agent.loop: the model's chat template does not accept {messages[0]['role']!r}"
        with as_config_error(refused, "use another model"):
            text = self.tokenizer.apply_chat_template(
                before + messages,
                **(self.template_kwargs | {"tokenize": False, "add_generation_prompt": True}),
            )
            if text.count(_TURN_MARK) != 1:
                raise ValueError("it does not render the assistant's turn exactly once")
        return text.partition(_TURN_MARK)[2]

    def _tokenize_pieces(self, messages: list[Message], frame: TemplateFrame) -> list[int]:
        """Tokenize the template's text as it is, and the contents without special tokens."""
        ids = []
        for i, piece in enumerate(frame.pieces):
            is_content = i % 2 == 1
            text = messages[int(piece)]["content"] if is_content else piece
            ids += self._tokenize(text, split_special_tokens=is_content)
        return ids

    def _tokenize(self, text: str, **options: bool) -> list[int]:
        return self.tokenizer(text, add_special_tokens=False, **options)["input_ids"]

    def _count_special(self, ids: list[int]) -> int:
        return sum(i in self.special_ids for i in ids)


def _encodable(text: str) -> str:
    """The text without lone surrogates, which cannot be tokenized."""
    return text.encode("utf-8", "replace").decode()
