"""Which of vLLM's parsers read tool calls and thoughts in the policy's turns.

Hermes calls are read as `agent_loop.tool_loop` reads them. vLLM looks for the closing tag of a call
before it reads the JSON, so a tag inside of an argument ends the call, or begins another one. Its
parsers of thoughts take tags inside of an argument for their own.

vLLM is slow to import, so functions import it where they need it: the driver checks the names of
parsers.
"""

import contextlib
import json
import logging
import secrets
from typing import Any

from pydantic_core import from_json

from agent_loop.tool_loop import THOUGHTS_BEGIN, THOUGHTS_END, scan_hermes
from one_step_off.config.errors import key_error
from one_step_off.config.schema import Config
from one_step_off.config.text import did_you_mean

log = logging.getLogger(__name__)

MARKS = (
    ("<function=", "qwen3_coder"),
    ("<tool_call>", "hermes"),
    ("<|python_tag|>", "llama3_json"),
    ("[TOOL_CALLS]", "mistral"),
    ("<|tool_call|>", "granite"),
)
"""What chat templates mention, and vLLM's parser for it; the first that is there."""

DEFAULT_TOOL_PARSER = "hermes"

MAX_TAG_CHARS = 64
"""Characters of the tags and blanks around the thoughts of a turn."""
HERMES_PARSERS = ("hermes", "qwen3_json")
"""vLLM's names of the parser that `hermes_parser` replaces."""

OWN_HERMES = "hermes_by_json"

_HIDDEN_TAGS = {tag: secrets.token_hex(16) for tag in (THOUGHTS_BEGIN, THOUGHTS_END)}
"""Tags of thoughts, and what stands for them inside of calls: random, so that no turn has it."""


def check_parsers(cfg: Config) -> None:
    """Check `agent.tool_parser` and `agent.reasoning_parser`.

    Raises:
        ConfigError: vLLM has no such parser.
    """
    if cfg.agent.tool_parser not in ("auto", "none"):
        from vllm.tool_parsers import ToolParserManager

        known = ToolParserManager.list_registered()
        _check(cfg, "agent.tool_parser", cfg.agent.tool_parser, known)
    if cfg.agent.reasoning_parser:
        from vllm.reasoning import ReasoningParserManager

        known = ReasoningParserManager.list_registered()
        _check(cfg, "agent.reasoning_parser", cfg.agent.reasoning_parser, known)


def tool_parser_name(cfg: Config, tokenizer: Any) -> str | None:
    """vLLM's name of the parser of tool calls; None: there is none."""
    name = cfg.agent.tool_parser
    if name == "none":
        return None
    if name == "auto":
        name = parser_of_template(str(tokenizer.chat_template))
    if name not in HERMES_PARSERS:
        return name
    from vllm.tool_parsers import ToolParserManager

    ToolParserManager.register_module(OWN_HERMES, module=hermes_parser())
    return OWN_HERMES


def reasoning_parser_name(cfg: Config, tool_parser: str | None) -> str:
    """vLLM's name of the parser of thoughts; "": there is none.

    Args:
        tool_parser: of `tool_parser_name`.
    """
    name = cfg.agent.reasoning_parser
    if not name or tool_parser != OWN_HERMES:
        return name
    from vllm.reasoning import ReasoningParserManager

    own = f"{name}_outside_calls"
    parser_class = outside_calls(ReasoningParserManager.get_reasoning_parser(name))
    ReasoningParserManager.register_module(own, module=parser_class)
    return own


def _check(cfg: Config, key: str, name: str, known: list[str]) -> None:
    if name not in known:
        listed = f"use {', '.join(sorted(known))}"
        raise key_error(cfg, key, f"vLLM has no such parser; {did_you_mean(name, known, listed)}")


def parser_of_template(chat_template: str) -> str:
    """The parser of the calls that a chat template mentions."""
    for mark, parser in MARKS:
        if mark in chat_template:
            return parser
    return DEFAULT_TOOL_PARSER


def hermes_parser() -> type:
    """vLLM's parser of Hermes calls with this project's reading of calls. A turn with a broken call
    is text, as in vLLM."""
    from vllm.entrypoints.generate.base.protocol import (
        ExtractedToolCallInformation,
        FunctionCall,
        ToolCall,
    )
    from vllm.tool_parsers.hermes_tool_parser import Hermes2ProToolParser

    class HermesParser(Hermes2ProToolParser):
        def extract_tool_calls(
            self, model_output: str, request: Any
        ) -> ExtractedToolCallInformation:
            found = scan_hermes(model_output).found
            if not found or any(not name for _, (name, _) in found):
                return ExtractedToolCallInformation(
                    tools_called=False, tool_calls=[], content=model_output
                )
            calls = []
            for _, (name, arguments) in found:
                text = json.dumps(arguments, ensure_ascii=False)
                calls.append(ToolCall(function=FunctionCall(name=name, arguments=text)))
            content = model_output[: found[0][0]] or None
            return ExtractedToolCallInformation(
                tools_called=True, tool_calls=calls, content=content
            )

    return HermesParser


def outside_calls(parser_class: type) -> type:
    """A parser of thoughts that takes no tag inside of a call's JSON for the end of thoughts."""

    class OutsideCalls(parser_class):
        def extract_reasoning(self, model_output: str, request: Any) -> tuple[str | None, ...]:
            hidden = _hide_tags(model_output)
            has_tags = any(tag in hidden for tag in _HIDDEN_TAGS)
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
        for tag, mark in _HIDDEN_TAGS.items():
            inner = inner.replace(tag, mark)
        pieces += [text[shown:begin], inner]
        shown = end
    return "".join([*pieces, text[shown:]])


def _show_tags(text: str | None) -> str | None:
    if text is None:
        return None
    for tag, mark in _HIDDEN_TAGS.items():
        text = text.replace(mark, tag)
    return text


def careful_parser(parser: Any, only_objects: bool = False) -> Any:
    """A vLLM parser that reads any text. What it cannot read, or what the API cannot hold, is
    delivered as text.

    Args:
        parser: vLLM's; None: there is none.
        only_objects: whether the arguments of a call must be a JSON object.
    """
    if parser is None:
        return None
    parse = parser.parse

    def careful(text: str, request: Any, enable_auto_tools: bool = False, **more: Any) -> Any:
        try:
            thoughts, content, calls = parse(text, request, enable_auto_tools, **more)
            for call in calls or ():
                call.name = whole_characters(call.name)
                call.arguments = _plain_json(call.arguments, only_objects)
        except Exception as error:
            log.debug("a turn with a call that cannot be read", exc_info=error)
            return _without_calls(parser, text, request)
        return thoughts, content, calls

    parser.parse = careful
    return parser


def _without_calls(parser: Any, text: str, request: Any) -> tuple[str | None, str, None]:
    """The thoughts of a turn and all that comes after them. Where a parser leaves out some of it,
    all is text."""
    try:
        thoughts, content = parser.extract_reasoning(text, request)
    except Exception:
        return None, text, None
    if thoughts:
        before, _, tag = text.removesuffix(content or "").partition(thoughts)
        if len(before) + len(tag) <= MAX_TAG_CHARS:
            return thoughts, content or "", None
    return None, text, None


def _plain_json(arguments: str | None, only_objects: bool) -> str:
    """The arguments of a call as JSON in whole characters.

    Raises:
        ValueError: they must be an object that all clients can read, and are none.
    """
    text = arguments or "{}"
    if "\\ud" in text.lower():
        with contextlib.suppress(ValueError, RecursionError):
            text = json.dumps(json.loads(text), ensure_ascii=False)
    text = whole_characters(text)
    if not only_objects:
        return text
    value = from_json(text, allow_inf_nan=False)
    if isinstance(value, str):  # some models write JSON inside of JSON
        value = from_json(value, allow_inf_nan=False)
    if value is None:
        value = {}
    if not isinstance(value, dict):
        raise ValueError("the arguments of a call are no JSON object")
    return json.dumps(value, ensure_ascii=False, allow_nan=False)


def whole_characters(text: str) -> str:
    """A text in which U+FFFD stands for each half of a surrogate pair, which is no character:
    clients could neither write it nor send it back."""
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
