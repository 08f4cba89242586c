"""What an external agent receives of a row."""

import datetime
import json

import numpy as np

from agent_loop.episode import episode_row
from one_step_off.data.messages import normalized_messages
from one_step_off.data.samples import Prompt


def row_of(**fields) -> dict:
    row = episode_row(Prompt((2, 7), np.arange(3), "What is 1 + 1?", "2", **fields))
    return json.loads(json.dumps(row, allow_nan=False))


def test_a_row_has_its_chat_and_the_arguments_of_the_reward_function():
    messages = [{"role": "system", "content": "Add."}, {"role": "user", "content": "1 + 1"}]
    row = row_of(messages=messages, data_source="sums", extra={"level": 3})
    assert row == {
        "id": [2, 7],
        "prompt": "What is 1 + 1?",
        "messages": messages,
        "ground_truth": "2",
        "data_source": "sums",
        "extra": {"level": 3},
    }


def test_a_prompt_without_a_chat_is_a_message_of_the_user():
    assert row_of()["messages"] == [{"role": "user", "content": "What is 1 + 1?"}]


def test_values_that_json_does_not_know_are_sent_in_a_form_that_it_does():
    day = datetime.date(2026, 11, 23)
    endless: list = []
    endless.append(endless)
    extra = {
        "numbers": np.array([[1, 2]]),
        "number": np.float32(0.5),
        "nan": float("nan"),
        "bytes": b"\x00\xff",
        "day": day,
        5: (True, None),
        "endless": endless,
    }
    row = row_of(extra=extra)["extra"]
    assert row["numbers"] == [[1, 2]]
    assert row["number"] == 0.5
    assert row["nan"] is None
    assert row["bytes"] == "AP8="
    assert row["day"] == "2026-11-23"
    assert row["5"] == [True, None]


def test_a_row_with_calls_has_the_form_that_openais_clients_send():
    call = {"type": "function", "function": {"name": "f", "arguments": {"a": "é"}}}
    chat = [{"role": "user", "content": "?"}, {"role": "assistant", "tool_calls": [call]}]
    tools = [{"type": "function", "function": {"name": "f"}}]
    settings = {"enable_thinking": False}
    messages = normalized_messages(chat, "prompt")
    row = row_of(messages=messages, tools=tools, chat_template_kwargs=settings)
    sent = row["messages"][1]["tool_calls"][0]
    assert sent["function"] == {"name": "f", "arguments": '{"a": "é"}'}
    assert normalized_messages(row["messages"], "messages")[1]["tool_calls"][0] == call | {"id": ""}
    assert (row["tools"], row["chat_template_kwargs"]) == (tools, settings)
