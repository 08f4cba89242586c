"""The row of data that an external agent receives with its episode, as JSON holds it."""

import base64
import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from one_step_off.data.messages import openai_messages
from one_step_off.data.samples import Prompt

MAX_DEPTH = 32  # of nested values: deeper ones are text


def episode_row(prompt: Prompt) -> dict[str, Any]:
    """What an agent receives of a row: `json.dumps(..., allow_nan=False)` takes it.

    Returns:
        id: [epoch, row].
        prompt: the prompt as text, as the model would read it.
        messages: the chat in OpenAI's form, as the endpoint takes it; a prompt without a chat is
            one message of the user.
        tools: the row's own tools, where it has any.
        chat_template_kwargs: settings of the chat template, which the endpoint uses, where there
            are any.
        ground_truth, data_source: arguments of the reward function.
        extra: the row's other columns. NaN and infinities are null, bytes are base64, and what
            JSON has no form for is text.
    """
    messages = prompt.messages or [{"role": "user", "content": prompt.text}]
    of_template = {"tools": prompt.tools, "chat_template_kwargs": prompt.chat_template_kwargs}
    return {
        "id": list(prompt.id),
        "prompt": prompt.text,
        "messages": _as_json(openai_messages(messages)),
        "ground_truth": prompt.ground_truth,
        "data_source": prompt.data_source,
        "extra": _as_json(prompt.extra),
        **{name: _as_json(value) for name, value in of_template.items() if value},
    }


def _as_json(value: Any, depth: int = 0) -> Any:
    """A value in types of JSON."""
    if isinstance(value, np.generic):
        value = value.item()
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, bytes):
        return base64.b64encode(value).decode()
    if depth < MAX_DEPTH:
        if isinstance(value, Mapping):
            return {str(name): _as_json(item, depth + 1) for name, item in value.items()}
        if isinstance(value, np.ndarray):
            value = value.tolist()
        if isinstance(value, (list, tuple, set)):
            return [_as_json(item, depth + 1) for item in value]
    return str(value)
