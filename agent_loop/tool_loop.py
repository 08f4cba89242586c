"""Function calling: the model calls tools in the format of its family, and reads their output."""

import asyncio
import json
import re
import secrets
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from agent_loop.base import LOOPS, AgentLoop, Generate, Limits, ScoreFunction, Trajectory
from agent_loop.chat_template import QUESTION
from agent_loop.tools import Toolbox
from one_step_off.config.errors import ConfigError, as_config_error
from one_step_off.config.schema import Config
from one_step_off.data.messages import Message, render_chat
from one_step_off.data.samples import Prompt

Call = tuple[str, Any]
"""Name and arguments. The name is empty where the call cannot be read; then the arguments say
why."""

THOUGHTS_BEGIN = "<think>"
THOUGHTS_END = "</think>"
CALL_BEGIN = "<tool_call>"
CALL_END = "</tool_call>"

MAX_TOKEN_OF_JSON = 6
"""Characters of `\\u12ab`; `false` has five."""

FIRST_PIECE = 4096
"""Characters among which a call is searched for first."""

_TAG = re.compile(f"{CALL_BEGIN}|{THOUGHTS_END}")
_TAG_OF_CALL = re.compile(f"{CALL_BEGIN}|{CALL_END}")
_TAG_AMONG_THOUGHTS = re.compile(f"{CALL_BEGIN}|{CALL_END}|{THOUGHTS_END}")
_BLANKS = re.compile(r"\s*")
_SEPARATORS = re.compile(r"[; \n\t]*")


def parse_call(text: str, start: int) -> tuple[Call, int]:
    """The call in JSON that begins at `start`, and where the JSON ends: at `start` where there is
    none, and at the end of the text where it is cut off.

    It is read from a piece of the text, which grows until it holds the call: an error counts the
    lines before it, and a turn may have a broken call in every token.
    """
    size = FIRST_PIECE
    while True:
        piece = text[start : start + size]
        call, end = _call_at_start(piece)
        if end < len(piece) or start + size >= len(text):
            return call, start + end
        size *= 8


def _call_at_start(text: str) -> tuple[Call, int]:
    """The call in JSON that a text begins with, and where the JSON ends, see `parse_call`."""
    end = 0
    try:
        parsed, end = json.JSONDecoder().raw_decode(text)
        arguments = None
        if isinstance(parsed, dict):
            arguments = parsed.get("arguments", parsed.get("parameters"))
            if arguments is None:
                arguments = {}
        if isinstance(arguments, str):  # some models write JSON inside of JSON
            arguments = json.loads(arguments)
    except (ValueError, RecursionError) as e:
        if _is_cut_off(e, text):
            end = len(text)
        return ("", f"the call is not valid JSON: {e}"), end
    if not isinstance(arguments, dict) or not isinstance(parsed.get("name"), str):
        return ("", 'a call is {"name": ..., "arguments": {...}}'), end
    return (parsed["name"], arguments), end


def _is_cut_off(error: Exception, text: str) -> bool:
    """Whether JSON is wrong because its text ends too early."""
    if not isinstance(error, json.JSONDecodeError):
        return False
    in_string = error.msg.startswith("Unterminated string")
    return error.doc is text and (in_string or len(text) - error.pos <= MAX_TOKEN_OF_JSON)


def hermes_calls(text: str) -> list[Call]:
    """The calls in a turn of Hermes or Qwen: `<tool_call>{"name": ..., "arguments":
    {...}}</tool_call>`, any number of times, after the thoughts."""
    return [call for _, call in scan_hermes(text).found]


@dataclass
class HermesScan:
    """What a turn of Hermes holds.

    Attributes:
        found: the position of its tag, and the call, of each call.
        thinks: the turn ends among its thoughts.
        json: (begin, end) of the JSON of all calls, those among thoughts too.
    """

    found: list[tuple[int, Call]] = field(default_factory=list)
    thinks: bool = False
    json: list[tuple[int, int]] = field(default_factory=list)


def scan_hermes(text: str) -> HermesScan:
    """The calls in a turn, and where they stand.

    A tag inside of a call's JSON is text. The first `</think>` elsewhere ends the thoughts, whose
    calls are none; later ones are text, too.
    """
    scan = HermesScan(thinks=text.lstrip().startswith(THOUGHTS_BEGIN))
    has_thought = False  # where the prompt began the thoughts, the turn has their end alone
    position = 0
    while tag := _TAG.search(text, position):
        position = tag.end()
        if tag.group() == CALL_BEGIN:
            call, position = _tagged_call(text, position, scan.thinks)
            scan.found.append((tag.start(), call))
            if call[0]:
                scan.json.append((tag.end(), position))
        elif not has_thought:
            scan.found.clear()
            has_thought = True
            scan.thinks = False
    return scan


def _tagged_call(text: str, start: int, thinks: bool) -> tuple[Call, int]:
    """The call behind a tag that ends at `start`, and where the search for tags continues.

    Args:
        thinks: the tag stands among thoughts, which may mention it without a call.
    """
    begin = _BLANKS.match(text, start).end()
    call, end = parse_call(text, begin)
    if not call[0] and (end == begin or thinks):
        end = start  # no JSON, or thoughts that begin like it
    behind = _BLANKS.match(text, end).end()
    if end > start and text.startswith(CALL_END, behind):
        return call, behind + len(CALL_END)
    if end > start and behind == len(text):
        return call, behind
    if call[0]:
        call = ("", "the call is not valid JSON: there is text behind it")
    # The next tag, and not all that is behind it: a turn may consist of tags alone.
    tag = (_TAG_AMONG_THOUGHTS if thinks else _TAG_OF_CALL).search(text, end)
    is_closed = tag is not None and tag.group() == CALL_END
    return call, tag.end() if is_closed else end


def llama_calls(text: str) -> list[Call]:
    """The calls in a turn of Llama 3: the whole turn is `{"name": ..., "parameters": {...}}`,
    several of them with `;` or blanks between."""
    text = text.strip().removeprefix("<|python_tag|>")
    calls = []
    start = _SEPARATORS.match(text).end()
    while text.startswith("{", start):
        call, end = parse_call(text, start)
        calls.append(call)
        if end == start:
            break
        start = _SEPARATORS.match(text, end).end()
    return calls


FORMATS: dict[str, Callable[[str], list[Call]]] = {"hermes": hermes_calls, "llama": llama_calls}


def detect_format(chat_template: str) -> str:
    """The form of calls that a chat template mentions."""
    mentions_llama = "ipython" in chat_template or "python_tag" in chat_template
    if mentions_llama and "<tool_call>" not in chat_template:
        return "llama"
    return "hermes"


@LOOPS.register("tool")
class ToolLoop(AgentLoop):
    """Turns with the tools of `agent.tools`, until the model calls none or a limit is reached.

    The calls of a turn run at once. The model receives errors as answers, and may correct its call.
    """

    observation_role = "tool"

    def __init__(
        self,
        cfg: Config,
        tokenizer: Any,
        *,
        format: str = "auto",
        max_calls: int = 8,
        taught: bool = False,
    ) -> None:
        """
        Args:
            format: of the calls: hermes, llama, or auto: the one that the chat template mentions.
            max_calls: calls in one turn.
            taught: the model knows its tools by training, so the chat template need not write them
                into prompts.
        """
        super().__init__(cfg, tokenizer)
        self.toolbox = Toolbox(cfg.agent)
        self.max_calls = max_calls
        if not self.toolbox.schemas:
            raise ConfigError(
                "agent.loop=tool: agent.tools is empty; set it, for example agent.tools=calculator"
            )
        if format == "auto":
            format = detect_format(str(tokenizer.chat_template))
        if format not in FORMATS:
            raise ValueError(f"format={format!r}: must be auto, {' or '.join(FORMATS)}")
        self.parse_calls = FORMATS[format]
        if format == "hermes" and "<tool_call>" in tokenizer.all_special_tokens:
            raise ConfigError(
                "agent.loop=tool: <tool_call> is a special token, which decoding leaves out; "
                "use another model"
            )
        self.tools = self.toolbox.schemas
        # The answers to two calls in one turn.
        self.turn_encoder.check_roles(("tool", "tool"), cfg.data.chat_template_kwargs)
        if not taught:
            self._require_tools_in_prompts()

    def _require_tools_in_prompts(self) -> None:
        """Raises ConfigError: the chat template does not write the tools into prompts."""
        name = secrets.token_hex(16)  # of a tool; no template contains it by itself
        schema = self.toolbox.schemas[0]
        renamed = schema | {"function": schema["function"] | {"name": name}}
        refused = "agent.loop: the model's chat template does not accept the tools"
        with as_config_error(refused, "use another model"):
            settings = self.cfg.data.chat_template_kwargs
            text = render_chat(self.tokenizer, [QUESTION], [renamed], settings)
        if name not in text:
            raise ConfigError(
                "agent.loop: the model's chat template does not write the tools into prompts; "
                "take another model, or, if this one was trained on them, "
                "agent.loop_kwargs={tool: {taught: true}}"
            )

    async def run(
        self, prompt: Prompt, generate: Generate, score: ScoreFunction, limits: Limits
    ) -> Trajectory:
        """See `AgentLoop.run`."""
        trajectory = Trajectory(prompt.ids, limits)
        trajectory.facts = {"tool_calls": 0, "tool_errors": 0, "used_tools": 0}
        while turn := await trajectory.generate(generate):
            if turn.finish_reason != "stop":
                break
            calls = self.parse_calls(self.text(turn.ids))
            if not calls:
                break
            made = self._made_calls(calls, trajectory)
            answers = await self._answers(calls, made, trajectory)
            named = [call for call in made if call]
            if not trajectory.observe("tool", self.encode_messages(answers, turn.ids, named)):
                break
        return trajectory

    def _made_calls(self, calls: list[Call], trajectory: Trajectory) -> list[dict[str, Any]]:
        """The calls of one turn that are made, as the chat template reads them; {} in the place of
        one that cannot be read. Their ids count the calls of the trajectory; some templates want
        nine letters and digits."""
        first = int(trajectory.facts["tool_calls"])
        made: list[dict[str, Any]] = []
        for number, (name, arguments) in enumerate(calls[: self.max_calls], first):
            call = {}
            if name:
                function = {"name": name, "arguments": arguments}
                call = {"id": f"call{number:05d}", "type": "function", "function": function}
            made.append(call)
        return made

    async def _answers(
        self, calls: list[Call], made: list[dict[str, Any]], trajectory: Trajectory
    ) -> list[Message]:
        """Make the calls of one turn, at once; returns the messages with their answers. `made`: see
        `_made_calls`."""
        seconds = trajectory.seconds_left
        refused = len(calls) - len(made)
        answers = await asyncio.gather(
            *(self._answer(call, seconds) for call in calls[: len(made)])
        )
        failed = sum(not succeeded for _, succeeded in answers)
        trajectory.count("tool_calls", len(calls))
        trajectory.count("tool_errors", failed + refused)
        trajectory.facts["used_tools"] = 1
        messages: list[Message] = []
        for (text, _), call in zip(answers, made, strict=True):
            message = {"role": "tool", "content": text}
            if call:
                message |= {"tool_call_id": call["id"], "name": call["function"]["name"]}
            messages.append(message)
        if refused:  # one answer for them all, because a model may write a thousand
            text = (
                f"error: more than {self.max_calls} calls in one turn; "
                f"the last {refused} were not made"
            )
            messages.append({"role": "tool", "content": text})
        return messages

    async def _answer(self, call: Call, seconds: float) -> tuple[str, bool]:
        """The answer to one call, and whether the call succeeded."""
        name, arguments = call
        if not name:
            return f"error: {arguments}", False
        return await self.toolbox.call(name, arguments, seconds)
