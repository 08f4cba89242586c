"""Chats as token ids, with a mask of the tokens that the assistant wrote. A mask is proved for each
row, or the row is refused.

Where the answers stand in the text of a chat is known in one of two ways:

- The template marks them (`{% generation %}`).
- Else each answer begins where the prompt of its turn ends, which is the chat before it with the
  generation prompt: what the engine is given in a rollout. And it ends where the chat up to it
  ends. Both must be a prefix of the whole text. Some templates rewrite earlier turns (Qwen3 removes
  their thoughts), and then they are not.

The text before each border must also have the tokens with which the whole begins. Else a token lies
across the border, and the engine would see others than the trainer.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from one_step_off.config.errors import first_line
from one_step_off.data.messages import ASSISTANT, Message, messages_for, render_chat
from one_step_off.data.rows import BadRow

SHOWN_CHARACTERS = 20
MARKED = re.compile(r"\{%-?\s*generation\s*-?%\}")
TEMPLATE = "the chat template of model.path"


@dataclass(frozen=True)
class Chat:
    """One row before it is tokenized.

    Attributes:
        where: "file:row", for messages.
        messages: normalized.
        tools: for the template; None: none.
        chat_template_kwargs: settings of the template.
        untrained: the numbers of the answers that are context only.
    """

    where: str
    messages: list[Message]
    tools: list[dict[str, Any]] | None = None
    chat_template_kwargs: dict[str, Any] = field(default_factory=dict)
    untrained: frozenset[int] = frozenset()


@dataclass(frozen=True)
class RenderedChat:
    """The text of a chat, and the characters (begin, end) of each answer in it."""

    text: str
    spans: list[tuple[int, int]]


@dataclass(frozen=True)
class MaskedTokens:
    """A tokenized row: int32 [L], and bool [L], True where a token belongs to an answer."""

    ids: np.ndarray
    is_answer: np.ndarray


class ChatRenderer:
    """Renders chats by a tokenizer's template, and finds the answers.

    Attributes:
        marked: whether the template marks the answers itself.
    """

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self.template = tokenizer.get_chat_template()
        self.marked = bool(MARKED.search(self.template))

    def render(self, chat: Chat) -> RenderedChat:
        """The text of a chat and its answers. Raises BadRow: the template refuses it, or where the
        answers are is not certain."""
        try:
            return self._by_markers(chat) if self.marked else self._by_prefixes(chat)
        except BadRow:
            raise
        except Exception as error:  # templates are programs, and refuse chats in their own ways
            raise BadRow(f"{TEMPLATE} refuses it: {first_line(error)}") from error

    def _by_markers(self, chat: Chat) -> RenderedChat:
        from transformers.utils.chat_template_utils import render_jinja_template

        rendered: Any = render_jinja_template(
            [messages_for(self.template, chat.messages)],
            tools=chat.tools,
            chat_template=self.template,
            return_assistant_tokens_mask=True,
            **(self.tokenizer.special_tokens_map | chat.chat_template_kwargs),
        )
        texts, spans = rendered
        kept = self._trained_spans(chat, spans[0])
        marked = [(begin, end) for begin, end in kept if begin < end]
        if not marked:
            raise BadRow(f"{TEMPLATE} marks no answer in it")
        answers = "".join(texts[0][begin:end] for begin, end in marked)
        for i, message in enumerate(chat.messages):
            is_trained = message["role"] == ASSISTANT and i not in chat.untrained
            if is_trained and not _is_written(message, answers):
                raise BadRow(f"message {i}: {TEMPLATE} does not write its tool calls")
        return RenderedChat(texts[0], marked)

    @staticmethod
    def _trained_spans(chat: Chat, spans: list[tuple[int, int]]) -> list[tuple[int, int]]:
        """The marked spans without those of untrained answers. Raises BadRow: which these are is
        not certain."""
        if not chat.untrained:
            return spans
        answers = [i for i, message in enumerate(chat.messages) if message["role"] == ASSISTANT]
        if len(answers) != len(spans):
            raise BadRow(
                f"message {min(chat.untrained)} has weight 0, and {TEMPLATE} marks "
                f"{len(spans)} texts for {len(answers)} answers"
            )
        return [span for i, span in zip(answers, spans, strict=True) if i not in chat.untrained]

    def _by_prefixes(self, chat: Chat) -> RenderedChat:
        whole = self._text(chat, chat.messages)
        spans = []
        for i, message in enumerate(chat.messages):
            if message["role"] != ASSISTANT or i in chat.untrained:
                continue
            if i == 0:
                raise BadRow("its first message is an answer: nothing stands before it")
            prompt = self._text(chat, chat.messages[:i], add_generation_prompt=True)
            ended = self._text(chat, chat.messages[: i + 1])
            if not (ended.startswith(prompt) and whole.startswith(ended)):
                raise BadRow(
                    f"message {i}: {TEMPLATE} writes the turns before it otherwise once others "
                    "follow, so it is not certain which tokens are answers; give one answer per "
                    "row, or a template with {% generation %}"
                )
            if _is_written(message, ended[len(prompt) :]):
                spans.append((len(prompt), len(ended)))
        if not spans:
            raise BadRow(f"{TEMPLATE} does not write the tool calls of its answers")
        return RenderedChat(whole, spans)

    def _text(self, chat: Chat, messages: list[Message], **options: Any) -> str:
        settings = chat.chat_template_kwargs
        return render_chat(self.tokenizer, messages, chat.tools, settings, **options)


def _is_written(answer: Message, text: str) -> bool:
    """Whether a template has written an answer into `text`. Of one that only calls tools, some
    write nothing but the end of the turn, which is nothing to learn."""
    if answer["content"].strip():
        return True
    for call in answer["tool_calls"]:
        # Some templates write the id alone, which holds the name.
        if call["function"]["name"] not in text and (call.get("id") or "\0") not in text:
            return False
    return True


def mask_answers(
    chats: Sequence[RenderedChat], tokenizer: Any, special_ids: frozenset[int]
) -> list[MaskedTokens | BadRow]:
    """Tokenize chats and mask their answers; a BadRow in the place of one whose mask is not
    certain.

    What the template writes after an answer's last special token (its end of turn), such as a line
    break, is no part of the answer: generation ends with that token.

    Args:
        special_ids: see `special_ids_of`.
    """
    texts = []
    for chat in chats:
        borders = sorted({border for span in chat.spans for border in span} - {len(chat.text)})
        texts += [chat.text, *(chat.text[:border] for border in borders)]
    if not texts:
        return []
    encoded = dict(zip(texts, tokenizer(texts, add_special_tokens=False)["input_ids"], strict=True))
    masked: list[MaskedTokens | BadRow] = []
    for chat in chats:
        try:
            masked.append(_masked(chat, encoded, tokenizer, special_ids))
        except BadRow as error:
            masked.append(error)
    return masked


def special_ids_of(tokenizer: Any) -> frozenset[int]:
    """The ids of the tokens that are no text, such as the ends of turns."""
    added = getattr(tokenizer, "added_tokens_decoder", {})
    marked = {token_id for token_id, token in added.items() if getattr(token, "special", False)}
    return frozenset(marked | set(tokenizer.all_special_ids))


def _masked(
    chat: RenderedChat, encoded: dict[str, list[int]], tokenizer: Any, special_ids: frozenset[int]
) -> MaskedTokens:
    ids = encoded[chat.text]
    is_answer = np.zeros(len(ids), bool)
    for begin, end in chat.spans:
        first = _token_at(chat.text, begin, encoded)
        last = _token_at(chat.text, end, encoded)
        if first == 0:
            raise BadRow("its first token belongs to an answer: nothing stands before it")
        last = _end_of_turn(ids, first, last, tokenizer, special_ids)
        if first == last:
            raise BadRow("an answer has no tokens")
        is_answer[first:last] = True
    return MaskedTokens(np.asarray(ids, np.int32), is_answer)


def _token_at(text: str, border: int, encoded: dict[str, list[int]]) -> int:
    """The index of the first token behind a border, in characters. Raises BadRow: a token lies
    across it."""
    before = encoded[text[:border]]
    if encoded[text][: len(before)] != before:
        left = text[max(0, border - SHOWN_CHARACTERS) : border]
        right = text[border : border + SHOWN_CHARACTERS]
        raise BadRow(
            f"a token lies across the border of an answer, at {left!r} and {right!r}; "
            "remove blanks and line breaks from the ends of the answer"
        )
    return len(before)


def _end_of_turn(
    ids: list[int], first: int, last: int, tokenizer: Any, special_ids: frozenset[int]
) -> int:
    """The end of an answer: after its last special token, where only blanks follow that."""
    for position in range(last - 1, first - 1, -1):
        if ids[position] in special_ids:
            rest = tokenizer.decode(ids[position + 1 : last])
            return last if rest.strip() else position + 1
    return last
