"""Function calling: the model asks for tools in the form of its family, reads what they say, and goes on."""

import asyncio
import json
import re
import secrets
from typing import Any

from agent_loop.base import LOOPS, AgentLoop, Generate, Limits, ScoreFunction, Trajectory
from agent_loop.tools import Toolbox
from one_step_off.config.errors import ConfigError, as_config_error
from one_step_off.config.schema import Config
from one_step_off.data.samples import Prompt

Call = tuple[str, Any]
"""Name and arguments; the name is empty where the call cannot be read, and the arguments then say why."""

_TAGGED = re.compile(r"<tool_call>(.*?)(?:</tool_call>|\Z)", re.S)
_BETWEEN = re.compile(r"[; \n\t]*")


def _call(text: str, at: int = 0, alone: bool = False) -> tuple[Call, int]:
    """The call that stands there in JSON, and where it ends; `alone`: nothing may stand behind it."""
    end = len(text)
    try:
        found, end = json.JSONDecoder().raw_decode(text, at)
        arguments = (
            found.get("arguments", found.get("parameters", {})) if isinstance(found, dict) else None
        )
        if isinstance(arguments, str):  # some models write JSON inside of JSON
            arguments = json.loads(arguments)
        if alone and end < len(text):
            raise ValueError("more stands behind it")
    except (ValueError, RecursionError) as e:
        return ("", f"the call is not valid JSON: {e}"), end
    if not isinstance(arguments, dict) or not isinstance(found.get("name"), str):
        return ("", 'a call is {"name": ..., "arguments": {...}}'), end
    return (found["name"], arguments), end


def hermes_calls(text: str) -> list[Call]:
    """Hermes and Qwen: `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, as often as there are calls."""
    return [
        _call(inner.strip(), alone=True)[0]
        for inner in _TAGGED.findall(text.rpartition("</think>")[2])
    ]


def llama_calls(text: str) -> list[Call]:
    """Llama 3: the whole turn is `{"name": ..., "parameters": {...}}`, several of them with `;` or blanks between."""
    text, calls, at = text.strip().removeprefix("<|python_tag|>"), [], 0
    while text.startswith("{", at := _BETWEEN.match(text, at).end()):
        call, at = _call(text, at)
        calls.append(call)
    return calls


FORMATS = {"hermes": hermes_calls, "llama": llama_calls}


@LOOPS.register("tool")
class ToolLoop(AgentLoop):
    """Turns with the tools of `agent.tools` until the model calls none or a limit of `agent` is reached.

    The calls of a turn run at once. What goes wrong in one is told to the model, which may mend it.
    """

    hears = "tool"

    def __init__(
        self,
        cfg: Config,
        tokenizer: Any,
        *,
        format: str = "auto",
        max_calls: int = 8,
        taught: bool = False,
    ) -> None:
        """`format`: hermes, llama, or auto: what the chat template speaks of. `max_calls`: in one turn. `taught`: the
        model knows its tools by training, so that the chat template need not write them into prompts."""
        super().__init__(cfg, tokenizer)
        self.box, self.max_calls, template = (
            Toolbox(cfg.agent),
            max_calls,
            str(tokenizer.chat_template),
        )
        if not self.box.schemas:
            raise ConfigError(
                "agent.loop=tool: agent.tools names none; set it, as agent.tools=calculator"
            )
        if format not in (*FORMATS, "auto"):
            raise ValueError(f"format={format!r}: must be auto, {' or '.join(FORMATS)}")
        llama = "<tool_call>" not in template and (
            "ipython" in template or "python_tag" in template
        )
        self.calls = FORMATS[("llama" if llama else "hermes") if format == "auto" else format]
        if self.calls is hermes_calls and "<tool_call>" in tokenizer.all_special_tokens:
            raise ConfigError(
                "agent.loop=tool: <tool_call> is a special token, which no text shows; take another"
            )
        self.tools = self.box.schemas
        self._frame(("tool", "tool"))  # the answers to two calls in one turn
        if not taught:
            self._require_shown()

    def _require_shown(self) -> None:
        """Raises ConfigError: the chat template passes over the tools. The name asked for stands in no template."""
        mark, (first, *_) = secrets.token_hex(16), self.box.schemas
        marked = [first | {"function": first["function"] | {"name": mark}}]
        with as_config_error(
            "agent.loop: the model's chat template does not take the tools", "take another model"
        ):
            ask = [{"role": "user", "content": "?"}]
            shown = mark in self.tokenizer.apply_chat_template(ask, tools=marked, tokenize=False)
        if not shown:
            mend = "take another model, or, if this one was trained on them, agent.loop_kwargs={tool: {taught: true}}"
            raise ConfigError(
                f"agent.loop: the model's chat template does not write the tools into prompts; {mend}"
            )

    async def run(
        self, prompt: Prompt, generate: Generate, score: ScoreFunction, limits: Limits
    ) -> Trajectory:
        """See `AgentLoop.run`."""
        talk = Trajectory(prompt.ids, limits)
        talk.facts = {"tool_calls": 0, "tool_errors": 0, "used_tools": 0}
        while (said := await talk.say(generate)) and said.finish_reason == "stop":
            calls = self.calls(self.text(said.ids))
            if not calls:
                break
            seconds, more = talk.seconds_left, max(0, len(calls) - self.max_calls)
            answers = await asyncio.gather(
                *(self._answer(call, seconds) for call in calls[: self.max_calls])
            )
            talk.count("tool_calls", len(calls))
            talk.count("tool_errors", sum(not good for _, good in answers) + more)
            talk.facts["used_tools"] = 1
            heard = [{"role": "tool", "content": text} for text, _ in answers]
            if more:  # one answer for them all: a model may write a thousand
                refused = f"error: more than {self.max_calls} calls in one turn; the last {more} were not made"
                heard.append({"role": "tool", "content": refused})
            if not talk.hear("tool", self.turn(heard, said.ids)):
                break
        return talk

    async def _answer(self, call: Call, seconds: float) -> tuple[str, bool]:
        name, arguments = call
        return (
            await self.box.call(name, arguments, seconds)
            if name
            else (f"error: {arguments}", False)
        )
