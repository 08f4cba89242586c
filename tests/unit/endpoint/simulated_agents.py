"""Agents that converse at random with the policy, one for each API of the endpoint.

Each keeps its history as its API has it: it reads answers as a client does, whole or as a stream,
and adds what a client would send next. At times it edits, drops or compacts what was said.
"""

from __future__ import annotations

import json
import random
from typing import Any

from one_step_off.endpoint.http_messages import Answer
from one_step_off.engines.vllm.chat import requests

TOOL_SCHEMA = {
    "type": "object",
    "properties": {"expression": {"type": "string"}},
    "required": ["expression"],
}
WORDS = ("12 * 13", "so", " and  then", "Was?", "十二", "<|im_end|>", "\n\n", "{}", "…")


def events_of(answer: Answer) -> list[dict[str, Any]]:
    """The JSON of the events of a stream."""
    lines = b"".join(answer.chunks).decode().splitlines()
    return [json.loads(line[6:]) for line in lines if line.startswith("data: {")]


class SimulatedAgent:
    """One conversation. Subclasses speak one API."""

    path = ""
    has_tools = True

    def __init__(self, seed: int, edits: bool) -> None:
        """`edits`: change what was said, at times."""
        self.rng = random.Random(seed)
        self.edits = edits
        self.edited = False
        self.streams = self.rng.random() < 0.5
        self.uses_tools = self.has_tools and self.rng.random() < 0.7
        self.history: list[dict[str, Any]] = []
        self.begin()

    def words(self) -> str:
        return " ".join(self.rng.choices(WORDS, k=self.rng.randrange(1, 5)))

    def begin(self) -> None:
        self.history.append({"role": "user", "content": self.words()})

    def body(self) -> bytes:
        content: dict[str, Any] = {"model": "any", "stream": self.streams} | self.content()
        return json.dumps(content).encode()

    def content(self) -> dict[str, Any]:
        """The request but for the model."""
        raise NotImplementedError

    def receive(self, answer: Answer) -> None:
        """Read the answer, and add what comes next."""
        assert answer.status == 200, answer.chunks
        self.hear(answer)
        if self.edits and self.rng.random() < 0.25:
            self.edit()

    def hear(self, answer: Answer) -> None:
        raise NotImplementedError

    def edit(self) -> None:
        """Change the history so that it is another one."""
        self.edited = True
        if self.rng.random() < 0.5 and len(self.history) > 2:
            del self.history[1 : self.rng.randrange(2, len(self.history))]
        self.history[0]["content"] = "Summary: " + self.words()
        self.history.append({"role": "user", "content": self.words()})


class ChatAgent(SimulatedAgent):
    """`/v1/chat/completions`."""

    path = requests.CHAT

    def content(self) -> dict[str, Any]:
        content: dict[str, Any] = {"messages": self.history, "max_completion_tokens": 40}
        if self.uses_tools:
            function = {"name": "calculator", "parameters": TOOL_SCHEMA, "strict": True}
            content["tools"] = [{"type": "function", "function": function}]
        return content

    def hear(self, answer: Answer) -> None:
        message = self.streamed(answer) if self.streams else self.whole(answer)
        self.history.append(message)
        for call in message.get("tool_calls") or ():
            result = {"role": "tool", "tool_call_id": call["id"], "content": self.words()}
            self.history.append(result)
        if not message.get("tool_calls"):
            self.history.append({"role": "user", "content": self.words()})

    def whole(self, answer: Answer) -> dict[str, Any]:
        message = json.loads(answer.chunks[0])["choices"][0]["message"]
        return message | {"audio": None, "function_call": None}

    def streamed(self, answer: Answer) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": None}
        calls: dict[int, dict[str, Any]] = {}
        for event in events_of(answer):
            for choice in event["choices"]:
                delta = choice["delta"]
                if delta.get("content"):
                    message["content"] = (message["content"] or "") + delta["content"]
                for piece in delta.get("tool_calls") or ():
                    call = calls.setdefault(
                        piece["index"], {"type": "function", "function": {"arguments": ""}}
                    )
                    call["id"] = piece.get("id") or call.get("id")
                    function = piece.get("function") or {}
                    if function.get("name"):
                        call["function"]["name"] = function["name"]
                    call["function"]["arguments"] += function.get("arguments") or ""
        if calls:
            message["tool_calls"] = list(calls.values())
        return message


class ResponsesAgent(SimulatedAgent):
    """`/v1/responses`, with whole histories or with the id of the last answer."""

    path = requests.RESPONSES

    def begin(self) -> None:
        super().begin()
        self.by_id = self.rng.random() < 0.5 and not self.edits
        self.previous: str | None = None
        self.sent = 0

    def content(self) -> dict[str, Any]:
        content: dict[str, Any] = {
            "input": self.history,
            "instructions": "Be exact.",
            "max_output_tokens": 40,
        }
        if self.by_id and self.previous:
            content["input"] = self.history[self.sent :]
            content["previous_response_id"] = self.previous
        if self.uses_tools:
            tool = {"type": "function", "name": "calculator", "parameters": TOOL_SCHEMA}
            content["tools"] = [tool | {"strict": True}]
        return content

    def hear(self, answer: Answer) -> None:
        if self.streams:
            (response,) = [
                e["response"] for e in events_of(answer) if e["type"] == "response.completed"
            ]
        else:
            response = json.loads(answer.chunks[0])
        self.previous = response["id"]
        calls = []
        for item in response["output"]:
            self.history.append({key: value for key, value in item.items() if value is not None})
            if item["type"] == "function_call":
                calls.append(item["call_id"])
        self.sent = len(self.history)
        for call_id in calls:
            output = {"type": "function_call_output", "call_id": call_id, "output": self.words()}
            self.history.append(output)
        if not calls:
            self.history.append({"role": "user", "content": self.words()})

    def edit(self) -> None:
        self.edited = True
        self.history = [{"role": "user", "content": "Summary: " + self.words()}]


class MessagesAgent(SimulatedAgent):
    """`/v1/messages`."""

    path = requests.MESSAGES

    def content(self) -> dict[str, Any]:
        content: dict[str, Any] = {
            "messages": self.history,
            "system": [{"type": "text", "text": "Be exact."}],
            "max_tokens": 40,
        }
        if self.uses_tools:
            content["tools"] = [{"name": "calculator", "input_schema": TOOL_SCHEMA}]
        return content

    def hear(self, answer: Answer) -> None:
        blocks = self.streamed(answer) if self.streams else json.loads(answer.chunks[0])["content"]
        self.history.append({"role": "assistant", "content": blocks})
        results = []
        for block in blocks:
            if block["type"] == "tool_use":
                results.append(
                    {"type": "tool_result", "tool_use_id": block["id"], "content": self.words()}
                )
        self.history.append({"role": "user", "content": results or self.words()})

    def streamed(self, answer: Answer) -> list[dict[str, Any]]:
        blocks: list[dict[str, Any]] = []
        for event in events_of(answer):
            if event["type"] == "content_block_start":
                blocks.append(dict(event["content_block"]) | {"json": ""})
            if event["type"] == "content_block_delta":
                delta = event["delta"]
                if delta["type"] == "text_delta":
                    blocks[-1]["text"] = blocks[-1].get("text", "") + delta["text"]
                else:
                    blocks[-1]["json"] += delta["partial_json"]
        for block in blocks:
            text = block.pop("json")
            if block["type"] == "tool_use":
                block["input"] = self.arguments(text)
        return blocks or [{"type": "text", "text": ""}]

    def arguments(self, text: str) -> Any:
        """The arguments of a call. Of one that was cut off, a client keeps what it likes."""
        try:
            return json.loads(text or "{}")
        except ValueError:
            self.edited = True
            return {}

    def edit(self) -> None:
        self.edited = True
        self.history = [{"role": "user", "content": "Summary: " + self.words()}]


class TextAgent(SimulatedAgent):
    """`/v1/completions`."""

    path = requests.COMPLETIONS
    has_tools = False

    def begin(self) -> None:
        self.prompt = "Question: " + self.words()
        self.template = self.rng.random() < 0.3
        self.stops = [" so", "12"] if self.rng.random() < 0.3 else []
        self.sent: list[str] = []

    def content(self) -> dict[str, Any]:
        self.sent.append(self.prompt)
        return {"prompt": self.prompt, "max_tokens": 40, "stop": self.stops}

    def hear(self, answer: Answer) -> None:
        if self.streams:
            self.prompt += "".join(
                e["choices"][0]["text"] for e in events_of(answer) if e["choices"]
            )
        else:
            self.prompt += json.loads(answer.chunks[0])["choices"][0]["text"]
        # What the client did not receive of a turn is not in its next prompt: another context.
        self.edited = True
        self.prompt += "<|im_end|>\n" if self.template else "\n"
        self.prompt += self.words()

    def edit(self) -> None:
        self.edited = True
        self.prompt = "Summary: " + self.words()


class TokensAgent(SimulatedAgent):
    """`/inference/v1/generate`."""

    path = requests.GENERATE
    has_tools = False

    def begin(self) -> None:
        self.streams = False
        self.ids = [self.rng.randrange(10, 200) for _ in range(5)]

    def content(self) -> dict[str, Any]:
        return {"token_ids": self.ids, "sampling_params": {"max_tokens": 40}}

    def hear(self, answer: Answer) -> None:
        self.ids = self.ids + json.loads(answer.chunks[0])["choices"][0]["token_ids"]
        self.ids += [self.rng.randrange(10, 200) for _ in range(3)]

    def edit(self) -> None:
        self.edited = True
        self.ids = self.ids[1:]


AGENTS = (ChatAgent, ResponsesAgent, MessagesAgent, TextAgent, TokensAgent)
