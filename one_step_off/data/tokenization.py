"""From rows to prompts: chat template, token ids, and the limit on their number."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from one_step_off.config.errors import ConfigError, first_line, located_config_error
from one_step_off.config.schema import DataConfig
from one_step_off.data.rows import DataReport, Row
from one_step_off.data.samples import Prompt

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
) -> list[Prompt]:
    """Tokenize all rows at once and keep those of at most `data.max_prompt_length` tokens.

    With a chat template the prompt ends with its generation prompt. Without one it is the question
    with `data.instruction`, or the messages joined by newlines.

    Args:
        epoch: the prompt ids are (epoch, row).
        report: receives what was left out.

    Raises:
        ConfigError: the chat template that the config asks for does not exist; a prompt is too long
            or refused by the template and the config says fail; no prompt is left.
    """
    templated = _uses_template(rows, tokenizer, cfg)
    texts_by_row = _prompt_texts(rows, tokenizer, templated, cfg, report, tools_of_loop)
    ids_of_texts = _token_ids([text for _, text in texts_by_row], tokenizer, templated)
    prompts = []
    for (row, text), ids in zip(texts_by_row, ids_of_texts, strict=True):
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
    """The text of each row's prompt, without the rows that the template refuses."""
    texts_by_row = []
    for row in rows:
        with located_config_error(f"data row {row.where}, column agent_loop={row.agent_loop!r}: "):
            tools = tools_of_loop(row.agent_loop)
        if not templated:
            texts_by_row.append((row, "\n".join(message["content"] for message in row.messages)))
            continue
        tool_arguments: dict[str, Any] = {"tools": tools} if tools else {}
        try:
            text = tokenizer.apply_chat_template(
                row.messages, tokenize=False, add_generation_prompt=True, **tool_arguments
            )
        except Exception as error:  # templates are programs, and refuse roles in their own ways
            reason = f"the chat template of model.path refuses it: {first_line(error)}"
            report.skip(row.where, reason, cfg)
        else:
            texts_by_row.append((row, text))
    return texts_by_row


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
