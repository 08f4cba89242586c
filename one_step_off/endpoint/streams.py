"""What a client makes of a stream of events."""

import json
from collections.abc import Iterable
from typing import Any

EVENT_PREFIX = "data: "


def _data_of(event: str) -> dict[str, Any] | None:
    """The JSON of a server-sent event; None where it has none, as "[DONE]"."""
    for line in event.splitlines():
        if line.startswith(EVENT_PREFIX + "{"):
            return json.loads(line[len(EVENT_PREFIX) :])
    return None


class StreamedMessage:
    """A chat message, put together from the events of its stream."""

    def __init__(self) -> None:
        self.text = ""
        self.calls: dict[int, dict[str, str]] = {}

    def add(self, event: str) -> None:
        """The next event."""
        data = _data_of(event)
        for choice in (data or {}).get("choices") or ():
            delta = choice.get("delta") or {}
            self.text += delta.get("content") or ""
            for call in delta.get("tool_calls") or ():
                self._add_call(call)

    def _add_call(self, delta: dict[str, Any]) -> None:
        call = self.calls.setdefault(delta.get("index", 0), {"name": "", "arguments": ""})
        function = delta.get("function") or {}
        call["name"] += function.get("name") or ""
        call["arguments"] += function.get("arguments") or ""

    def message(self) -> dict[str, Any]:
        """The message so far."""
        calls = [{"function": call} for call in self.calls.values()]
        return {"role": "assistant", "content": self.text, "tool_calls": calls}


def text_of_stream(events: Iterable[bytes]) -> str:
    """The text of a stream of `/v1/completions`."""
    text = ""
    for event in events:
        for choice in (_data_of(event.decode()) or {}).get("choices") or ():
            text += choice.get("text") or ""
    return text


def event_of_response(event: Any) -> bytes:
    """One event of the Responses API, as it is sent."""
    data = event.model_dump_json(by_alias=True)
    return f"event: {event.type}\ndata: {data}\n\n".encode()
