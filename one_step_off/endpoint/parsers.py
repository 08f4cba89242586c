"""Which of vLLM's parsers read tool calls and thoughts in the policy's turns."""

from typing import Any

from one_step_off.config.errors import key_error
from one_step_off.config.schema import Config
from one_step_off.config.text import did_you_mean

MARKS = (
    ("<function=", "qwen3_coder"),
    ("<tool_call>", "hermes"),
    ("<|python_tag|>", "llama3_json"),
    ("[TOOL_CALLS]", "mistral"),
    ("<|tool_call|>", "granite"),
)
"""What chat templates mention, and vLLM's parser for it; the first that is there."""

DEFAULT_TOOL_PARSER = "hermes"

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
        OWN_HERMES, "one_step_off.endpoint.hermes_parser", "HermesParser"
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

    from one_step_off.endpoint.hermes_parser import outside_calls

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
