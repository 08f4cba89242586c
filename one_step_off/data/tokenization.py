"""From rows to prompts: chat template, token ids, and the limit on their number."""

import re
import secrets
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any

import numpy as np

from one_step_off.config.errors import ConfigError, first_line, located_config_error
from one_step_off.config.schema import DataConfig
from one_step_off.data.images import BadImage, ImageTokens, messages_with_parts
from one_step_off.data.messages import render_chat
from one_step_off.data.rows import DataReport, Row
from one_step_off.data.samples import Prompt

QUESTION = [{"role": "user", "content": "?"}]

ToolsOfLoop = Callable[[str], list[dict[str, Any]] | None]
"""The JSON schemas of the tools of an agent loop, for the chat template; None: it has none.

The argument is the name of the loop; "" means `agent.loop`."""


def no_tools(loop: str) -> None:
    """A `ToolsOfLoop` for runs without tools."""


def tokenize_rows(
    rows: Sequence[Row],
    tokenizer: Any,
    cfg: DataConfig,
    epoch: int,
    report: DataReport,
    tools_of_loop: ToolsOfLoop = no_tools,
    images: ImageTokens | None = None,
) -> list[Prompt]:
    """Tokenize all rows at once and keep those of at most `data.max_prompt_length` tokens, the
    tokens of images included.

    With a chat template the prompt ends with its generation prompt. Without one it is the question
    with `data.instruction`, or the messages joined by newlines.

    Args:
        epoch: the prompt ids are (epoch, row).
        report: receives what was left out.
        images: the tokens of a model that reads images; None: it does not.

    Raises:
        ConfigError: the chat template that the config asks for does not exist; a prompt is too long
            or refused by the template and the config says fail; no prompt is left.
    """
    templated = _uses_template(rows, tokenizer, cfg)
    texts_by_row = _prompt_texts(rows, tokenizer, templated, cfg, report, tools_of_loop)
    ids_of_texts = _token_ids([text for _, text in texts_by_row], tokenizer, templated)
    prompts = []
    for (row, text), ids in zip(texts_by_row, ids_of_texts, strict=True):
        if images is not None:
            try:
                ids = with_image_tokens(ids, row.images, images)
            except BadImage as error:
                report.skip(row.where, str(error), cfg)
                continue
        if len(ids) <= cfg.max_prompt_length:
            ids_array = np.asarray(ids, dtype=np.int32)
            prompts.append(replace(row, id=(epoch, row.id[1]), ids=ids_array, text=text))
        else:
            _skip_overlong(row, len(ids), cfg, report)
    if not prompts:
        counts, *skipped_rows = report.lines()
        example = f";{skipped_rows[0]}" if skipped_rows else ""
        raise ConfigError(f"{counts}: no prompt is left; fix the rows{example}")
    return prompts


def _uses_template(rows: Sequence[Row], tokenizer: Any, cfg: DataConfig) -> bool:
    """Whether prompts are made by the tokenizer's chat template. Raises ConfigError: it is needed
    and missing.
    """
    has_template = bool(getattr(tokenizer, "chat_template", None))
    setting = cfg.chat_template
    is_needed = setting == "always" or (setting == "auto" and any(row.chat for row in rows))
    if is_needed and not has_template:
        fix = "use a chat model, or data.chat_template=never to join the messages as plain text"
        raise ConfigError(
            f"data.chat_template={setting}: the tokenizer has no chat template, and rows need one; "
            f"{fix}"
        )
    return has_template and setting != "never"


def _prompt_texts(
    rows: Sequence[Row],
    tokenizer: Any,
    templated: bool,
    cfg: DataConfig,
    report: DataReport,
    tools_of_loop: ToolsOfLoop,
) -> list[tuple[Row, str]]:
    """Each row and the text of its prompt, without the rows that the template refuses. A row has
    the config's settings of the template, too, from now on."""
    texts_by_row = []
    notes = TemplateNotes(tokenizer, cfg.chat_template_kwargs) if templated else None
    for row in rows:
        with located_config_error(f"data row {row.where}, column agent_loop={row.agent_loop!r}: "):
            loop_tools = tools_of_loop(row.agent_loop)
        needed = needs_template(row)
        if notes is None and needed:
            report.skip(row.where, f"it has {needed}, which need a chat template", cfg)
            continue
        if notes is None:
            texts_by_row.append((row, "\n".join(message["content"] for message in row.messages)))
            continue
        row = replace(row, chat_template_kwargs=cfg.chat_template_kwargs | row.chat_template_kwargs)
        tools = row.tools or loop_tools
        try:
            text = render_chat(
                tokenizer,
                messages_with_parts(row.messages) if row.images else row.messages,
                tools,
                row.chat_template_kwargs,
                add_generation_prompt=True,
            )
        except Exception as error:  # templates are programs, and refuse roles in their own ways
            reason = f"the chat template of model.path refuses it: {first_line(error)}"
            report.skip(row.where, reason, cfg)
        else:
            notes.add(row, loop_tools)
            texts_by_row.append((row, text))
    if notes is not None:
        report.notes += notes.take_lines()
    return texts_by_row


def needs_template(row: Any) -> str:
    """What a row has that only a chat template can write; "": nothing."""
    named = {
        "images": getattr(row, "images", ()),  # rows with answers have none
        "tools": row.tools,
        "settings of a chat template": row.chat_template_kwargs,
        "tool calls": any(message.get("tool_calls") for message in row.messages),
        "thoughts": any(message.get("reasoning") for message in row.messages),
    }
    return next((name for name, value in named.items() if value), "")


def with_image_tokens(ids: list[int], images: Sequence[bytes], tokens: ImageTokens) -> list[int]:
    """The token ids of a prompt with as many tokens for each image as it has parts, in place of the
    one that the chat template wrote. Raises BadImage: an image cannot be read, or the template
    wrote another number of them."""
    places = ids.count(tokens.token_id)
    if places != len(images):
        raise BadImage(f"it has {len(images)} images, and its text has {places} image tokens")
    counts = iter([tokens.count(image) for image in images])
    expanded: list[int] = []
    for token in ids:
        expanded += [token] * (next(counts) if token == tokens.token_id else 1)
    return expanded


class TemplateNotes:
    """Counts the rows of which the chat template does not write everything. An engine's server
    would not either, so they are used."""

    def __init__(self, tokenizer: Any, settings: dict[str, Any]) -> None:
        """`settings`: of the config."""
        self.tokenizer = tokenizer
        self.template = tokenizer.get_chat_template()
        self.rows: dict[str, list[str]] = {}
        """What holds for rows -> these rows."""
        self.unread = [
            f"data.chat_template_kwargs.{name}"
            for name in settings
            if not re.search(rf"\b{re.escape(name)}\b", self.template)
        ]

    def add(self, row: Any, loop_tools: list[dict[str, Any]] | None = None) -> None:
        """Note what there is about a row that the template has rendered: it has `where`,
        `messages`, `tools` and `chat_template_kwargs`."""
        facts = []
        if row.tools and not self._writes_tools:
            facts.append("have tools, which the chat template of model.path does not write")
        if any(message.get("tool_calls") for message in row.messages) and not self._writes_calls:
            facts.append("have tool calls, which the chat template of model.path does not write")
        if row.tools and loop_tools:
            known = {tool["function"]["name"] for tool in loop_tools}
            own = {tool["function"]["name"] for tool in row.tools}
            facts += [f"have the tool {name!r}, not in agent.tools" for name in sorted(own - known)]
        for fact in facts:
            self.rows.setdefault(fact, []).append(row.where)

    def take_lines(self) -> list[str]:
        """For the user, of the rows since the last call."""
        unread = [f"warning: {key}: the chat template does not read it" for key in self.unread]
        noted = []
        for fact, rows in self.rows.items():
            noted.append(f"warning: {len(rows)} rows {fact} (the first: {rows[0]})")
        self.rows = {}
        return unread + noted

    @cached_property
    def _writes_tools(self) -> bool:
        name = secrets.token_hex(16)  # no template contains it by itself
        function = {"name": name, "description": "?", "parameters": {"type": "object"}}
        return self._shows(name, QUESTION, [{"type": "function", "function": function}])

    @cached_property
    def _writes_calls(self) -> bool:
        name = secrets.token_hex(16)
        call = {"id": name, "type": "function", "function": {"name": name, "arguments": {}}}
        turn = {"role": "assistant", "content": "", "tool_calls": [call]}
        return self._shows(name, [*QUESTION, turn], None)

    def _shows(
        self, name: str, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None
    ) -> bool:
        try:
            return name in render_chat(self.tokenizer, messages, tools)
        except Exception:  # it writes tools or calls only where something else is there, too
            return True


def _token_ids(texts: list[str], tokenizer: Any, templated: bool) -> list[list[int]]:
    """Token ids of each text.

    Templates write their own special tokens. Plain text gets BOS where the model has it. It is
    added here, because `add_special_tokens` could also end the prompt with EOS, and doubles a BOS
    that is already there.
    """
    if not texts:
        return []
    ids_of_texts = tokenizer(texts, add_special_tokens=False)["input_ids"]
    if templated:
        return ids_of_texts
    return _with_bos(ids_of_texts, tokenizer)


def plain_token_ids(texts: list[str], tokenizer: Any) -> list[list[int]]:
    """Token ids of texts that were made without a chat template."""
    return _token_ids(texts, tokenizer, templated=False)


def _with_bos(ids_of_texts: list[list[int]], tokenizer: Any) -> list[list[int]]:
    """The token ids, with BOS in front where the model has it and they lack it."""
    bos = getattr(tokenizer, "bos_token_id", None)
    if bos is None:
        return ids_of_texts
    model_uses_bos = tokenizer("a")["input_ids"][:1] == [bos]
    if not model_uses_bos:
        return ids_of_texts
    return [ids if ids[:1] == [bos] else [bos, *ids] for ids in ids_of_texts]


def _skip_overlong(row: Row, tokens: int, cfg: DataConfig, report: DataReport) -> None:
    """Note a prompt that is too long. Raises ConfigError: `data.overlong_prompts` is "fail"."""
    if cfg.overlong_prompts == "fail":
        problem = f"more than data.max_prompt_length={cfg.max_prompt_length}"
        raise ConfigError(
            f"data row {row.where}: {tokens} tokens, {problem}; "
            "raise that, or set data.overlong_prompts=skip"
        )
    report.overlong.append((row.where, tokens))
