"""Which of vLLM's parsers read tool calls and thoughts in the policy's turns."""

import contextlib
import json
import logging
from typing import Any

from pydantic_core import from_json

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


def check_parsers(cfg: Config) -> None:
    """Check `agent.tool_parser` and `agent.reasoning_parser`.

    Raises:
        ConfigError: vLLM has no such parser.
    """
    # vLLM is slow to import, so only where a parser is named.
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

    ToolParserManager.register_lazy_module(
        OWN_HERMES, "one_step_off.engines.vllm.chat.hermes_parser", "HermesParser"
    )
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

    from one_step_off.engines.vllm.chat.hermes_parser import outside_calls

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
