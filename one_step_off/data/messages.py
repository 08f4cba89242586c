"""Chat messages, tools and settings in the one form in which chat templates receive them, wherever
they come from: rows of data, requests of agents, or agent loops.

It is the form that vLLM's server gives to templates, so that a model sees the same text in training
as where it is served: contents are text, arguments of calls are objects, and thoughts are in
`reasoning` and in `reasoning_content`. What cannot be carried over is refused by its place.
"""

import json
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from one_step_off.config.sections.data import TEMPLATE_ARGUMENTS

Message = dict[str, Any]
"""{"role": ..., "content": text}, and what else the message has."""

Tool = dict[str, Any]
"""{"type": "function", "function": {"name": ..., "description": ..., "parameters": ...}}"""

ASSISTANT = "assistant"
TOOL = "tool"

TEXT_OF_PART = {
    "text": "text",
    "input_text": "text",
    "output_text": "text",
    "refusal": "refusal",
    "thinking": "thinking",
    "tool_reference": "name",
}
"""The parts of a content that are text: type -> the entry with the text."""

THOUGHT_PARTS = ("reasoning", "reasoning_text")
"""The parts that are thoughts of the assistant, with their text in `text`."""

ROLE_OF_KEY = {
    "tool_calls": (ASSISTANT,),
    "function_call": (ASSISTANT,),
    "reasoning": (ASSISTANT,),
    "reasoning_content": (ASSISTANT,),
    "tool_call_id": (TOOL, "ipython"),
}
"""Keys that only messages of these roles have."""

MEDIA_KEYS = ("audio", "images", "image", "videos", "video")
NOT_CARRIED = "only text can be trained on; send text, or leave it out"

_BILLING_HEADER = "x-anthropic-billing-header"


class BadMessage(ValueError):
    """Why a message, a tool or a setting cannot be used, with its place."""


def normalized_messages(
    messages: Sequence[Any], name: str, empty_for_broken_arguments: bool = False
) -> list[Message]:
    """Messages as a chat template receives them. Their normalized form is the same.

    Args:
        name: of the list, for messages of errors.
        empty_for_broken_arguments: arguments that are no JSON object become {}, as in vLLM.

    Raises:
        BadMessage: a message is malformed, or has what is no text.
    """
    normalized = []
    for i, message in enumerate(messages):
        place = f"message {i} of {name!r}"
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise BadMessage(f"{place} is not an object with the text 'role'")
        try:
            normalized.append(_normalized(message, empty_for_broken_arguments))
        except BadMessage as error:
            raise BadMessage(f"{place}: {error}") from None
    return normalized


def _normalized(message: Mapping[str, Any], empty_for_broken_arguments: bool) -> Message:
    entries = {key: value for key, value in message.items() if value is not None}
    _check_keys(entries)
    role = entries.pop("role")
    if role == "function":  # the old name, which has a name in place of an id
        role = TOOL
    content, thoughts = _text_and_thoughts(entries.pop("content", None), role)
    normalized: Message = {"role": role, "content": content}
    calls = normalized_calls(entries, empty_for_broken_arguments)
    reasoning = entries.pop("reasoning", None)
    old_reasoning = entries.pop("reasoning_content", None)
    reasoning = next((r for r in (reasoning, old_reasoning, thoughts) if r is not None), None)
    for key in ("tool_calls", "function_call", "weight"):
        entries.pop(key, None)
    if calls:
        normalized["tool_calls"] = calls
    if role == ASSISTANT and reasoning is not None:
        normalized |= {"reasoning": reasoning, "reasoning_content": reasoning}
    if role == "developer":
        entries["tools"] = normalized_tools(entries.get("tools"))
    return normalized | entries


def _check_keys(entries: dict[str, Any]) -> None:
    """Raises BadMessage: a key has a wrong type, is no text, or belongs to another role. Empty keys
    of other roles are taken out: tables have every key in every row."""
    for key in ("name", "tool_call_id", "reasoning", "reasoning_content"):
        if not isinstance(entries.get(key, ""), str):
            raise BadMessage(f"{key}: holds {entries[key]!r:.40}, not a text")
    for key, roles in ROLE_OF_KEY.items():
        if key not in entries or entries["role"] in roles:
            continue
        if entries.pop(key):
            raise BadMessage(f"{key}: only a message of the role {roles[0]!r} has one")
    for key in MEDIA_KEYS:
        if entries.get(key):
            raise BadMessage(f"{key}: {NOT_CARRIED}")


# --- contents ---


def _text_and_thoughts(content: Any, role: str) -> tuple[str, str | None]:
    """The text of a content, and the thoughts among its parts; None: it has none."""
    if content is None:
        return "", None
    parts = [content] if isinstance(content, str) else content
    if not isinstance(parts, (list, tuple)):
        raise BadMessage(f"content: holds {content!r:.40}, not a text or a list of parts")
    texts = []
    thoughts = []
    for j, part in enumerate(parts):
        is_thought = isinstance(part, Mapping) and part.get("type") in THOUGHT_PARTS
        text = _text_of_part(part, f"content[{j}]", is_thought and role == ASSISTANT)
        if text is not None and role == "system" and text.startswith(_BILLING_HEADER):
            # Its first line changes in every request of Claude Code; vLLM leaves it out, too.
            text = text.partition("\n")[2]
        if not text:
            continue
        (thoughts if is_thought else texts).append(text)
    return "\n".join(texts), "\n".join(thoughts) if thoughts else None


def _text_of_part(part: Any, place: str, is_thought: bool) -> str | None:
    """The text of a part; None: it is null."""
    if isinstance(part, str):
        return part
    if not isinstance(part, Mapping):
        raise BadMessage(f"{place}: holds {part!r:.40}, not a part with a type")
    kind = part.get("type")
    if kind not in TEXT_OF_PART and not is_thought:
        raise BadMessage(f"{place}: has a part of type {kind!r}: {NOT_CARRIED}")
    key = TEXT_OF_PART.get(kind, "text")
    text = part.get(key)
    if not isinstance(text, str | None):
        raise BadMessage(f"{place}.{key}: holds {text!r:.40}, not a text")
    return text


# --- calls ---


def normalized_calls(
    message: Mapping[str, Any], empty_for_broken_arguments: bool
) -> list[dict[str, Any]]:
    """The tool calls of a message, with objects as arguments. A `function_call`, the old form, is
    one, too.

    Raises:
        BadMessage: a call has no name, or its arguments are no JSON object.
    """
    calls = message.get("tool_calls") or []
    place = "tool_calls"
    if not calls and message.get("function_call"):
        calls = [{"type": "function", "function": message["function_call"]}]
        place = "function_call"
    if not isinstance(calls, (list, tuple)):
        raise BadMessage(f"{place}: holds {calls!r:.40}, not a list of calls")
    normalized = []
    for k, call in enumerate(calls):
        here = f"{place}[{k}]" if place == "tool_calls" else place
        normalized.append(_normalized_call(call, here, empty_for_broken_arguments))
    return normalized


def _normalized_call(call: Any, place: str, empty_for_broken_arguments: bool) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping):
        raise BadMessage(f"{place}: is not an object with the object 'function'")
    if (call.get("type") or "function") != "function":
        raise BadMessage(f"{place}.type: is {call['type']!r:.40}; only functions can be called")
    if not isinstance(function.get("name"), str) or not function["name"]:
        raise BadMessage(f"{place}.function.name: holds {function.get('name')!r:.40}, not a name")
    arguments = _arguments(function.get("arguments"))
    if arguments is None:
        if not empty_for_broken_arguments:
            raise BadMessage(
                f"{place}.function.arguments: holds {function['arguments']!r:.40}, "
                "not a JSON object"
            )
        arguments = {}
    own = {"name": function["name"], "arguments": arguments}
    kept = {key: call[key] for key in ("id", "type") if call.get(key) is not None}
    return kept | {"function": own | _others(function, own)} | _others(call, ("id", "type"))


def _others(entries: Mapping[str, Any], known: Collection[str]) -> dict[str, Any]:
    """The entries of other keys that hold anything."""
    known = {*known, "function"}
    return {key: value for key, value in entries.items() if key not in known and value is not None}


def _arguments(arguments: Any) -> dict[str, Any] | None:
    """Arguments as an object; None: they are none."""
    if arguments is None or arguments == "":
        return {}
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except (ValueError, RecursionError):
            return None
    return dict(arguments) if isinstance(arguments, Mapping) else None


def openai_messages(messages: Sequence[Message]) -> list[Message]:
    """Normalized messages in the form of OpenAI's API: arguments are JSON text, calls have ids."""
    chat = []
    for message in messages:
        calls = []
        for call in message.get("tool_calls", ()):
            arguments = json.dumps(call["function"]["arguments"], ensure_ascii=False, default=str)
            function = call["function"] | {"arguments": arguments}
            calls.append({"id": "", "type": "function"} | call | {"function": function})
        chat.append(message | {"tool_calls": calls} if calls else message)
    return chat


# --- tools and settings ---


def normalized_tools(tools: Any) -> list[Tool] | None:
    """Tools as vLLM gives them to chat templates; None: there are none.

    Args:
        tools: a list, or its JSON text, of tools in OpenAI's form, or in the flat one:
            `{"name": ..., "parameters": ...}`.

    Raises:
        BadMessage: they are no list of functions with names.
    """
    tools = _parsed(tools, "tools", "list of tools")
    if not tools:
        return None
    if not isinstance(tools, (list, tuple)):
        raise BadMessage(f"tools: holds {tools!r:.40}, not a list of tools")
    return [_normalized_tool(tool, f"tools[{i}]") for i, tool in enumerate(tools)]


def _normalized_tool(tool: Any, place: str) -> Tool:
    tool = _parsed(tool, place, "tool")
    if not isinstance(tool, Mapping):
        raise BadMessage(f"{place}: holds {tool!r:.40}, not an object")
    if (tool.get("type") or "function") != "function":
        raise BadMessage(f"{place}.type: is {tool['type']!r:.40}; only functions are rendered")
    function = tool.get("function", tool)
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise BadMessage(f"{place}: has no function with a text 'name'")
    parameters = _parsed(function.get("parameters"), f"{place}.parameters", "JSON schema")
    if not isinstance(parameters, Mapping | None):
        raise BadMessage(f"{place}.parameters: holds {parameters!r:.40}, not a JSON schema")
    # A missing description is null, as vLLM writes it.
    own = {"name": function["name"], "description": function.get("description")}
    own["parameters"] = parameters
    own |= _others(function, ("type", *own))
    outer = {} if function is tool else _others(tool, ("type",))
    return {"type": "function", "function": own} | outer


def normalized_settings(settings: Any, name: str) -> dict[str, Any]:
    """Settings of the chat template, such as {"enable_thinking": False}: a mapping or its JSON
    text. Raises BadMessage: it is none, or sets what the program itself sets."""
    settings = _parsed(settings, name, "mapping of settings")
    if settings is None:
        return {}
    if not isinstance(settings, Mapping):
        raise BadMessage(f"{name}: holds {settings!r:.40}, not a mapping of settings")
    for key in TEMPLATE_ARGUMENTS:
        if key in settings:
            raise BadMessage(f"{name}.{key}: is set by the program; remove it")
    return {str(key): value for key, value in settings.items() if value is not None}


def _parsed(value: Any, place: str, what: str) -> Any:
    """The value, read from JSON where it is text; None where that is empty."""
    if not isinstance(value, str):
        return value
    if not value.strip():
        return None
    try:
        return json.loads(value)
    except (ValueError, RecursionError) as error:
        raise BadMessage(f"{place}: is no {what} in JSON: {error}") from None


def without_nulls(value: Any) -> Any:
    """A value of a table without entries that are null: tables give every object the entries of
    all others."""
    if isinstance(value, Mapping):
        return {key: without_nulls(item) for key, item in value.items() if item is not None}
    if isinstance(value, (list, tuple)):
        return [without_nulls(item) for item in value]
    return value


def encodable(value: Any) -> Any:
    """A value without lone surrogates in its texts, which cannot be tokenized."""
    if isinstance(value, str):
        return value.encode("utf-8", "replace").decode()
    if isinstance(value, Mapping):
        return {encodable(key): encodable(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [encodable(item) for item in value]
    return value


# --- rendering ---


def render_chat(
    tokenizer: Any,
    messages: Sequence[Message],
    tools: Sequence[Tool] | None = None,
    settings: Mapping[str, Any] | None = None,
    **options: Any,
) -> str:
    """The text of a chat by the tokenizer's own template. Raises what the template raises.

    Args:
        messages, tools, settings: normalized.
        options: further arguments of `apply_chat_template`, such as add_generation_prompt.
    """
    own_tools = list(tools) if tools else None
    template = tokenizer.get_chat_template(tools=own_tools)
    chat = messages_for(template, messages)
    arguments = {**(settings or {}), **options}
    if own_tools:
        arguments["tools"] = own_tools
    return tokenizer.apply_chat_template(chat, tokenize=False, **arguments)


def knows_developer(template: str) -> bool:
    """Whether a chat template knows the role developer, by vLLM's rule."""
    return '"developer"' in template or "'developer'" in template


def messages_for(template: str, messages: Sequence[Message]) -> list[Message]:
    """The messages for a template that may not know the role developer. As in vLLM, such messages
    are then the system's, and all of these are one at the beginning."""
    chat = list(messages)
    if knows_developer(template) or all(message["role"] != "developer" for message in chat):
        return chat
    for i, message in enumerate(chat):
        if message["role"] == "developer":
            without_tools = {key: value for key, value in message.items() if key != "tools"}
            chat[i] = without_tools | {"role": "system"}
    systems = [message for message in chat if message["role"] == "system"]
    if len(systems) == 1 and chat[0] is systems[0]:
        return chat
    content = "\n\n".join(message["content"] for message in systems if message["content"])
    others = [message for message in chat if message["role"] != "system"]
    return [{"role": "system", "content": content}, *others]
