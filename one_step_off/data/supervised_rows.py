"""Parses and checks the rows of supervised training, as chats.

Four formats are distinguished by their columns: `messages` (a chat, as in most sets for supervised
fine-tuning), `prompt` and `completion` (texts or messages), `question` and `answer` (GSM8K, and the
generators of word problems), and `problem` and `solution` (MATH).
"""

from typing import Any

from one_step_off.data.answer_masks import Chat
from one_step_off.data.messages import ASSISTANT, Message
from one_step_off.data.rows import BadRow, chat_messages, check_unicode, template_fields

FORMATS = "messages, prompt+completion, question+answer or problem+solution"

TRAINED_KEYS = ("train", "trainable", "training", "loss")
"""Truth values of an answer by which other sets say whether it is trained on."""


def parse_chat(
    where: str, columns: Any, instruction: str, settings: dict[str, Any] | None = None
) -> Chat:
    """The chat of a row.

    Args:
        where: "file:row".
        columns: of the row, or a BadRow.
        instruction: appended to each question of the gsm8k format, as in the prompts of RL.
        settings: of the chat template; the row's own take precedence.

    Raises:
        BadRow: columns are missing or malformed, or there is no answer to learn from.
    """
    if isinstance(columns, BadRow):
        raise columns
    if not isinstance(columns, dict):
        raise BadRow(f"a JSON {type(columns).__name__}, not an object with columns")
    context = 0  # messages that are no part of a completion
    name = "messages"
    if "messages" in columns:
        raw = _list(columns, "messages")
    elif columns.keys() >= {"prompt", "completion"}:
        prompt = _list(columns, "prompt", "user")
        context = len(prompt)
        name = "prompt+completion"
        raw = prompt + _list(columns, "completion", ASSISTANT)
    elif columns.keys() >= {"question", "answer"}:
        question = _text(columns, "question") + instruction
        raw = [_message("user", question), _message(ASSISTANT, _text(columns, "answer"))]
    elif columns.keys() >= {"problem", "solution"}:
        question = _text(columns, "problem") + instruction
        raw = [_message("user", question), _message(ASSISTANT, _text(columns, "solution"))]
    else:
        names = ", ".join(map(str, columns))
        raise BadRow(f"found the columns {names}, not {FORMATS}; rename the columns")
    messages = chat_messages(raw, name)
    fields = template_fields(columns)
    check_unicode(messages, *fields.values())
    fields["chat_template_kwargs"] = (settings or {}) | fields["chat_template_kwargs"]
    return Chat(where, messages, **fields, untrained=_untrained(messages, raw, context))


def _message(role: str, content: str) -> Message:
    return {"role": role, "content": content}


def _text(columns: dict[str, Any], name: str) -> str:
    value = columns[name]
    if not isinstance(value, str) or not value.strip():
        raise BadRow(f"column {name!r} holds {value!r:.40}, not a text")
    return value


def _list(columns: dict[str, Any], name: str, role_of_text: str = "") -> list[Any]:
    """The messages in a column, as they stand there. A text is one message of `role_of_text`."""
    messages = columns[name]
    if role_of_text and isinstance(messages, str):
        return [_message(role_of_text, _text(columns, name))]
    if not isinstance(messages, list) or not messages:
        raise BadRow(f"column {name!r} holds {messages!r:.40}, not a list of chat messages")
    return messages


def _untrained(messages: list[Message], raw: list[Any], context: int) -> frozenset[int]:
    """The numbers of the answers that are not trained on: those of a prompt, and those with weight
    0, as OpenAI's sets mark them, or with a false entry of `TRAINED_KEYS`.

    Args:
        raw: the messages as they stand in the row.
        context: how many of them are a prompt.

    Raises:
        BadRow: there is no answer to learn, an empty one, or a weight of another kind.
    """
    answers = [i for i, message in enumerate(messages) if message["role"] == ASSISTANT]
    trained = []
    for i in answers:
        weight = raw[i].get("weight")
        if weight not in (None, 0, 1):
            raise BadRow(f"message {i}: weight: is {weight!r:.40}, not 0 or 1")
        if i < context or weight == 0 or any(raw[i].get(key) is False for key in TRAINED_KEYS):
            continue
        if not messages[i]["content"].strip() and not messages[i].get("tool_calls"):
            raise BadRow(f"message {i}, an answer of the assistant, is empty")
        trained.append(i)
    if not answers:
        raise BadRow("none of its messages is of the role assistant: there is no answer to learn")
    if not trained:
        raise BadRow("none of its answers is to be trained on: there is no answer to learn")
    return frozenset(answers) - frozenset(trained)
