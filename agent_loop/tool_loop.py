"""Function calling: the model asks for tools in the form of its family, reads what they say, and goes on."""

from __future__ import annotations

import asyncio
import json
import re
from typing import Any

from agent_loop.base import LOOPS, AgentLoop, Generate, Limits, ScoreFunction, Trajectory
from agent_loop.tools import Toolbox
from one_step_off.config import Config, ConfigError
from one_step_off.samples import Prompt

Call = tuple[str, Any]
"""Name and arguments; the name is empty where the call cannot be read, and the arguments then say why."""

_TAGGED = re.compile(r"<tool_call>(.*?)(?:</tool_call>|\Z)", re.S)


def _call(found: Any) -> Call:
    arguments = found.get("arguments", found.get("parameters", {})) if isinstance(found, dict) else None
    if isinstance(arguments, str):  # some models write JSON inside of JSON
        try:
            arguments = json.loads(arguments)
        except ValueError:
            arguments = None
    if not isinstance(arguments, dict) or not isinstance(found.get("name"), str):
        return "", 'a call is {"name": ..., "arguments": {...}}'
    return found["name"], arguments


def _json(text: str) -> Call:
    try:
        return _call(json.loads(text))
    except (ValueError, RecursionError) as e:
        return "", f"the call is not valid JSON: {e}"


def hermes_calls(text: str) -> list[Call]:
    """Hermes and Qwen: `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, as often as there are calls."""
    return [_json(inner) for inner in _TAGGED.findall(text.rpartition("</think>")[2])]


def llama_calls(text: str) -> list[Call]:
    """Llama 3: the whole turn is `{"name": ..., "parameters": {...}}`, several of them with `;` or blanks between."""
    text, calls, decoder = text.strip().removeprefix("<|python_tag|>"), [], json.JSONDecoder()
    while (text := text.lstrip("; \n\t")).startswith("{"):
        try:
            found, end = decoder.raw_decode(text)
        except (ValueError, RecursionError) as e:
            return [*calls, ("", f"the call is not valid JSON: {e}")]
        calls, text = [*calls, _call(found)], text[end:]
    return calls


FORMATS = {"hermes": hermes_calls, "llama": llama_calls}


@LOOPS.register("tool")
class ToolLoop(AgentLoop):
    """Turns with the tools of `agent.tools` until the model calls none or a limit of `agent` is reached.

    The calls of a turn run at once. What goes wrong in one is told to the model, which may mend it.
    """

    hears = "tool"

    def __init__(self, cfg: Config, tokenizer: Any, *, format: str = "auto", max_calls: int = 8) -> None:
        """`format`: hermes, llama, or auto: what the chat template speaks of. `max_calls`: in one turn."""
        super().__init__(cfg, tokenizer)
        self.box, self.max_calls, template = Toolbox(cfg.agent), max_calls, str(tokenizer.chat_template)
        if not self.box.schemas:
            raise ConfigError("agent.loop=tool: agent.tools names none; set it, as agent.tools=calculator")
        if format not in (*FORMATS, "auto"):
            raise ValueError(f"format={format!r}: must be auto, {' or '.join(FORMATS)}")
        llama = "<tool_call>" not in template and ("ipython" in template or "python_tag" in template)
        self.calls = FORMATS[("llama" if llama else "hermes") if format == "auto" else format]
        if self.calls is hermes_calls and "<tool_call>" in tokenizer.all_special_tokens:
            raise ConfigError(
                "agent.loop=tool: <tool_call> is a special token, which text never shows; take another model"
            )
        self.tools = self.box.schemas

    async def run(self, prompt: Prompt, generate: Generate, score: ScoreFunction, limits: Limits) -> Trajectory:
        """See `AgentLoop.run`."""
        talk = Trajectory(prompt.ids, limits)
        talk.facts = {"tool_calls": 0, "tool_errors": 0, "used_tools": 0}
        while (said := await talk.say(generate)) and said.finish_reason == "stop":
            calls = self.calls(self.text(said.ids))
            if not calls:
                break
            answers = await asyncio.gather(*(self._answer(i, c, talk.seconds_left) for i, c in enumerate(calls)))
            talk.count("tool_calls", len(calls))
            talk.count("tool_errors", sum(not good for _, good in answers))
            talk.facts["used_tools"] = 1
            if not talk.hear("tool", self.turn([{"role": "tool", "content": text} for text, _ in answers], said.ids)):
                break
        return talk

    async def _answer(self, position: int, call: Call, seconds: float) -> tuple[str, bool]:
        name, arguments = call
        if position >= self.max_calls:
            return f"error: more than {self.max_calls} calls in one turn", False
        return await self.box.call(name, arguments, seconds) if name else (f"error: {arguments}", False)
