"""vLLM's parsers of Hermes calls and of thoughts, with the project's own reading of calls.

vLLM looks for the closing tag of a call before it reads the JSON, so a tag inside of an argument
ends the call, or begins another one. Its parsers of thoughts take tags inside of an argument for
their own.
"""

import json
import secrets
from typing import Any

from vllm.entrypoints.generate.base.protocol import (
    ExtractedToolCallInformation,
    FunctionCall,
    ToolCall,
)
from vllm.tool_parsers.hermes_tool_parser import Hermes2ProToolParser

from agent_loop.tool_loop import THOUGHTS_BEGIN, THOUGHTS_END, scan_hermes

# Random, so that no turn contains them.
_MARKS = {tag: secrets.token_hex(16) for tag in (THOUGHTS_BEGIN, THOUGHTS_END)}


class HermesParser(Hermes2ProToolParser):
    """Calls as `agent_loop.tool_loop` reads them. A turn with a broken call is text, as in vLLM."""

    def extract_tool_calls(self, model_output: str, request: Any) -> ExtractedToolCallInformation:
        """See `ToolParser`."""
        found = scan_hermes(model_output).found
        if not found or any(not name for _, (name, _) in found):
            return ExtractedToolCallInformation(
                tools_called=False, tool_calls=[], content=model_output
            )
        calls = [
            ToolCall(function=FunctionCall(name=name, arguments=_text(arguments)))
            for _, (name, arguments) in found
        ]
        content = model_output[: found[0][0]] or None
        return ExtractedToolCallInformation(tools_called=True, tool_calls=calls, content=content)


def _text(arguments: dict[str, Any]) -> str:
    return json.dumps(arguments, ensure_ascii=False)


def outside_calls(parser_class: type) -> type:
    """A parser of thoughts that takes no tag inside of a call's JSON for the end of thoughts."""

    class OutsideCalls(parser_class):
        def extract_reasoning(self, model_output: str, request: Any) -> tuple[str | None, ...]:
            hidden = _hide_tags(model_output)
            has_tags = any(tag in hidden for tag in _MARKS)
            if hidden != model_output and not has_tags:  # no thoughts, and calls with tags
                return None, model_output
            return tuple(map(_show_tags, super().extract_reasoning(hidden, request)))

    return OutsideCalls


def _hide_tags(text: str) -> str:
    """The text with marks for the tags of thoughts inside of calls."""
    pieces = []
    shown = 0
    for begin, end in scan_hermes(text).json:
        inner = text[begin:end]
        for tag, mark in _MARKS.items():
            inner = inner.replace(tag, mark)
        pieces += [text[shown:begin], inner]
        shown = end
    return "".join([*pieces, text[shown:]])


def _show_tags(text: str | None) -> str | None:
    if text is None:
        return None
    for tag, mark in _MARKS.items():
        text = text.replace(mark, tag)
    return text
