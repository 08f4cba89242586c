"""Parses and checks the rows of supervised training, as chats.

Four formats are distinguished by their columns: `messages` (a chat, as in most sets for supervised
fine-tuning), `prompt` and `completion` (texts or messages), `question` and `answer` (GSM8K, and the
generators of word problems), and `problem` and `solution` (MATH).
"""

from typing import Any

from one_step_off.data.answer_masks import ASSISTANT, Chat, Message
from one_step_off.data.rows import BadRow

FORMATS = "messages, prompt+completion, question+answer or problem+solution"


def parse_chat(where: str, columns: Any, instruction: str) -> Chat:
    """The chat of a row.

    Args:
        where: "file:row".
        columns: of the row, or a BadRow.
        instruction: appended to each question of the gsm8k format, as in the prompts of RL.

    Raises:
        BadRow: columns are missing, or there is no answer to learn from.
    """
    if isinstance(columns, BadRow):
        raise columns
    if not isinstance(columns, dict):
        raise BadRow(f"a JSON {type(columns).__name__}, not an object with columns")
    if "messages" in columns:
        messages = _messages(columns, "messages")
    elif columns.keys() >= {"prompt", "completion"}:
        messages = _prompt_and_completion(columns)
    elif columns.keys() >= {"question", "answer"}:
        question = _text(columns, "question") + instruction
        messages = [_message("user", question), _message(ASSISTANT, _text(columns, "answer"))]
    elif columns.keys() >= {"problem", "solution"}:
        question = _text(columns, "problem") + instruction
        messages = [_message("user", question), _message(ASSISTANT, _text(columns, "solution"))]
    else:
        names = ", ".join(map(str, columns))
        raise BadRow(f"found the columns {names}, not {FORMATS}; rename the columns")
    _check(messages)
    tools = columns.get("tools")
    return Chat(where, messages, tools if isinstance(tools, list) and tools else None)


def _message(role: str, content: str) -> Message:
    return {"role": role, "content": content}


def _text(columns: dict[str, Any], name: str) -> str:
    value = columns[name]
    if not isinstance(value, str) or not value.strip():
        raise BadRow(f"column {name!r} holds {value!r:.40}, not a text")
    return value


def _messages(columns: dict[str, Any], name: str) -> list[Message]:
    """The messages in a column, without entries that are null: parquet gives every message all
    entries."""
    messages = columns[name]
    if not isinstance(messages, list) or not messages:
        raise BadRow(f"column {name!r} holds {messages!r:.40}, not a list of chat messages")
    chat = []
    for i, message in enumerate(messages):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise BadRow(f"message {i} of {name!r} is not an object with the text 'role'")
        entries = {key: value for key, value in message.items() if value is not None}
        has_calls = bool(entries.get("tool_calls"))
        if not isinstance(entries.get("content", "" if has_calls else None), str):
            raise BadRow(f"message {i} of {name!r} has no text 'content'")
        chat.append({"content": ""} | entries)
    return chat


def _prompt_and_completion(columns: dict[str, Any]) -> list[Message]:
    if isinstance(columns["prompt"], str):
        prompt = [_message("user", _text(columns, "prompt"))]
    else:
        prompt = _messages(columns, "prompt")
    if isinstance(columns["completion"], str):
        return [*prompt, _message(ASSISTANT, _text(columns, "completion"))]
    return [*prompt, *_messages(columns, "completion")]


def _check(messages: list[Message]) -> None:
    """Raises BadRow: there is no answer, an empty one, or text that is not valid Unicode."""
    answers = 0
    for i, message in enumerate(messages):
        try:
            message["content"].encode()
        except UnicodeEncodeError:
            raise BadRow("its text is not valid Unicode") from None
        if message["role"] != ASSISTANT:
            continue
        if not message["content"].strip() and not message.get("tool_calls"):
            raise BadRow(f"message {i}, an answer of the assistant, is empty")
        answers += 1
    if not answers:
        raise BadRow("none of its messages is of the role assistant: there is no answer to learn")
