"""The data of supervised steps: rows with answers, tokenized and masked, as a stream.

`SupervisedRow`s flow through the same `PromptStream` as prompts do, and become `Sample`s for the
trainers: what stands before the first answer is the prompt.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from one_step_off.config.errors import ConfigError
from one_step_off.config.lengths import longest_row
from one_step_off.config.schema import Config
from one_step_off.config.sections.data import split_files
from one_step_off.data.answer_masks import (
    Chat,
    ChatRenderer,
    MaskedTokens,
    RenderedChat,
    mask_answers,
    special_ids_of,
)
from one_step_off.data.evaluation import MAIN_SET, set_epoch
from one_step_off.data.messages import ASSISTANT, Message
from one_step_off.data.prompt_stream import PromptStream
from one_step_off.data.rows import (
    BadRow,
    DataReport,
    chat_messages,
    check_unicode,
    checked_columns,
    instruction_of,
    read_source,
    template_fields,
    text_column,
)
from one_step_off.data.run_data import HELD_OUT_SEED, RunData
from one_step_off.data.samples import PolicyVersion, Prompt, Sample
from one_step_off.data.tokenization import TemplateNotes, needs_template, plain_token_ids

TOKENIZED_ROWS = 1000
"""Rows that are tokenized at once: each needs its text several times."""


@dataclass(frozen=True)
class SupervisedRow(Prompt):
    """One row with answers. `ids` are those of the whole row, without what follows its last answer.

    Attributes:
        is_answer: bool [L], True for the tokens of answers.
    """

    is_answer: np.ndarray = field(default_factory=lambda: np.zeros(0, bool))

    def sample(self, stamp: PolicyVersion) -> Sample:
        """The row as the trainers take it. `stamp`: of the weights that are trained."""
        first = int(self.is_answer.argmax())
        attempt, version = stamp
        length = len(self.ids) - first
        return Sample(
            prompt_id=self.id,
            index=0,
            prompt_ids=self.ids[:first],
            response_ids=self.ids[first:],
            log_probs=np.zeros(length, np.float32),
            loss_mask=self.is_answer[first:],
            versions=np.full(length, version, np.int32),
            attempt=attempt,
        )


def load_supervised_data(cfg: Config, tokenizer: Any, stop_ids: frozenset[int]) -> RunData:
    """Read, check, tokenize and mask the training and held-out rows of supervised steps.

    Args:
        cfg: of `supervised_config`.
        stop_ids: the tokens at which the engine ends a response.

    Raises:
        ConfigError: a source cannot be read, or no row of it can be used; or a row cannot and the
            config says fail.
    """
    loader = _Loader(cfg, tokenizer, stop_ids)
    report = DataReport("training data", limit="sft.max_length")
    rows = loader.load(cfg.sft.train_files, "train", cfg.trainer.seed, 0, report)
    stream = PromptStream(
        rows,
        cfg.data.train_batch_size,
        cfg.data.shuffle,
        cfg.trainer.seed,
        cfg.trainer.total_steps or 0,
        cfg.trainer.total_epochs or 0,
    )
    reports = [report]
    held_out: list[SupervisedRow] = []
    has_held_out_set = bool(cfg.sft.val_files.strip(" ,")) and cfg.data.val_size != 0
    if has_held_out_set:
        val_report = DataReport("held-out data", limit="sft.max_length")
        held_out = loader.load(cfg.sft.val_files, "test", HELD_OUT_SEED, set_epoch(0), val_report)
        reports.append(val_report)
    names = [MAIN_SET] if has_held_out_set else []
    return RunData(stream, list(held_out) or None, reports, names)


class _Loader:
    """Reads one set of rows after the other."""

    def __init__(self, cfg: Config, tokenizer: Any, stop_ids: frozenset[int]) -> None:
        self.cfg = cfg
        self.tokenizer = tokenizer
        self.stop_ids = stop_ids
        self.special_ids = special_ids_of(tokenizer)
        self.max_length = longest_row(cfg)
        has_template = bool(getattr(tokenizer, "chat_template", None))
        setting = cfg.data.chat_template
        if setting == "always" and not has_template:
            raise ConfigError(
                "data.chat_template=always: the tokenizer has no chat template; use a chat model"
            )
        self.renderer = None
        if has_template and setting != "never":
            self.renderer = ChatRenderer(tokenizer)
            self.notes = TemplateNotes(tokenizer, cfg.data.chat_template_kwargs)

    def load(
        self, files: str, split: str, seed: int, epoch: int, report: DataReport
    ) -> list[SupervisedRow]:
        """The usable rows of some sources. Raises ConfigError: see `load_supervised_data`."""
        chats = self._read(files, split, seed, report)
        rows: list[SupervisedRow] = []
        cut = 0
        unended = 0
        for begin in range(0, len(chats), TOKENIZED_ROWS):
            numbered = chats[begin : begin + TOKENIZED_ROWS]
            for index, text, chat, tokens in self._tokenize(numbered, report):
                length = int(np.flatnonzero(tokens.is_answer)[-1]) + 1
                kept = self._within_limit(chat, tokens, length, report)
                if kept is None:
                    continue
                is_cut = length > self.max_length
                cut += is_cut
                unended += not is_cut and int(kept.ids[-1]) not in self.stop_ids
                rows.append(
                    SupervisedRow(
                        id=(epoch, index),
                        ids=kept.ids,
                        text=text,
                        ground_truth="",
                        where=chat.where,
                        messages=chat.messages,
                        tools=chat.tools,
                        chat_template_kwargs=chat.chat_template_kwargs,
                        is_answer=kept.is_answer,
                    )
                )
        if not rows:
            counts, *skipped_rows = report.lines()
            example = f";{skipped_rows[0]}" if skipped_rows else ""
            raise ConfigError(f"{counts}: no row is left; fix the rows{example}")
        self._add_notes(rows, cut, unended, report)
        if self.renderer is not None:
            report.notes += self.notes.take_lines()
        return rows

    def _read(
        self, files: str, split: str, seed: int, report: DataReport
    ) -> list[tuple[int, Chat]]:
        """The chats of the well-formed rows, with their numbers."""
        data = self.cfg.data
        instruction = instruction_of(data)
        chats = []
        for source in split_files(files):
            raw_rows = read_source(source, split, data, seed)
            if split == "test" and data.val_size >= 0:
                raw_rows = raw_rows[: max(0, data.val_size - report.rows)]
            for location, columns in raw_rows:
                index = report.rows
                report.rows += 1
                try:
                    chat = parse_chat(location, columns, instruction, data.chat_template_kwargs)
                    chats.append((index, chat))
                except BadRow as error:
                    report.skip(location, str(error), data)
        return chats

    def _tokenize(
        self, numbered: Sequence[tuple[int, Chat]], report: DataReport
    ) -> Iterator[tuple[int, str, Chat, MaskedTokens]]:
        """The rows whose answers are certain: number, text, chat and tokens."""
        if self.renderer is None:
            for index, chat in numbered:
                try:
                    text, tokens = self._without_template(chat)
                except BadRow as error:
                    report.skip(chat.where, str(error), self.cfg.data)
                else:
                    yield index, text, chat, tokens
            return
        rendered: list[RenderedChat] = []
        kept: list[tuple[int, Chat]] = []
        for index, chat in numbered:
            try:
                rendered.append(self.renderer.render(chat))
                kept.append((index, chat))
                self.notes.add(chat)
            except BadRow as error:
                report.skip(chat.where, str(error), self.cfg.data)
        masked = mask_answers(rendered, self.tokenizer, self.special_ids)
        for (index, chat), text, tokens in zip(kept, rendered, masked, strict=True):
            if isinstance(tokens, BadRow):
                report.skip(chat.where, str(tokens), self.cfg.data)
            else:
                yield index, text.text, chat, tokens

    def _without_template(self, chat: Chat) -> tuple[str, MaskedTokens]:
        """A question and its answer without a chat template: the tokens of the prompt, as in RL,
        then those of a blank and the answer, and the end token."""
        needed = needs_template(chat)
        if needed:
            raise BadRow(f"it has {needed}, which need a chat template; use a chat model")
        *prompt, answer = chat.messages
        if answer["role"] != "assistant" or any(m["role"] == "assistant" for m in prompt):
            raise BadRow(
                "has several answers, or one that is not last, which needs a chat template; use a "
                "chat model"
            )
        if not prompt:
            raise BadRow("nothing stands before its answer")
        question = "\n".join(message["content"] for message in prompt)
        content = answer["content"]
        continuation = content if content[:1].isspace() else f" {content}"
        prompt_ids = plain_token_ids([question], self.tokenizer)[0]
        answer_ids = self.tokenizer(continuation, add_special_tokens=False)["input_ids"]
        if self.tokenizer.eos_token_id is not None:
            answer_ids = [*answer_ids, self.tokenizer.eos_token_id]
        is_answer = np.repeat([False, True], [len(prompt_ids), len(answer_ids)])
        ids = np.asarray([*prompt_ids, *answer_ids], np.int32)
        return question + continuation, MaskedTokens(ids, is_answer)

    def _within_limit(
        self, chat: Chat, tokens: MaskedTokens, length: int, report: DataReport
    ) -> MaskedTokens | None:
        """A row of at most `sft.max_length` tokens, without what follows its last answer; None: it
        is left out. `length`: its tokens up to the end of that answer. Raises ConfigError: it is
        too long, and sft.overlong is "fail"."""
        overlong = self.cfg.sft.overlong
        if length > self.max_length:
            if overlong == "fail":
                raise ConfigError(
                    f"data row {chat.where}: {length} tokens, more than "
                    f"sft.max_length={self.max_length}; raise that, or set sft.overlong to skip or "
                    "cut"
                )
            answer_begins = int(tokens.is_answer.argmax())
            if overlong == "skip" or answer_begins >= self.max_length:
                report.overlong.append((chat.where, length))
                return None
        is_answer = tokens.is_answer[: self.max_length]
        end = int(np.flatnonzero(is_answer)[-1]) + 1
        return MaskedTokens(tokens.ids[:end], is_answer[:end])

    def _add_notes(
        self, rows: list[SupervisedRow], cut: int, unended: int, report: DataReport
    ) -> None:
        if cut:
            report.notes.append(
                f"{cut} of {len(rows)} rows are cut at sft.max_length={self.max_length} tokens "
                "(sft.overlong=cut)"
            )
        if unended:
            last = self.tokenizer.convert_ids_to_tokens(int(rows[0].ids[-1]))
            stops = ", ".join(self.tokenizer.convert_ids_to_tokens(sorted(self.stop_ids)))
            report.notes.append(
                f"warning: {unended} of {len(rows)} rows do not end with a token at which "
                f"generation ends ({stops or 'none'}), as the first one ends with {last!r}: the "
                "model will not learn to stop; use a tokenizer whose eos_token ends the turns of "
                "its chat template"
            )


FORMATS = "messages, prompt+completion, question+answer or problem+solution"

TRAINED_KEYS = ("train", "trainable", "training", "loss")
"""Truth values of an answer by which other sets say whether it is trained on."""


def parse_chat(where: str, columns: Any, instruction: str, settings: dict[str, Any]) -> Chat:
    """The chat of a row.

    Args:
        where: "file:row".
        columns: of the row, or a BadRow.
        instruction: appended to each question of the gsm8k format, as in the prompts of RL.
        settings: of the chat template; the row's own take precedence.

    Raises:
        BadRow: columns are missing or malformed, or there is no answer to learn from.
    """
    columns = checked_columns(columns)
    context = 0  # messages that are no part of a completion
    name = "messages"
    if "messages" in columns:
        raw = _list(columns, "messages")
    elif columns.keys() >= {"prompt", "completion"}:
        prompt = _list(columns, "prompt", "user")
        context = len(prompt)
        name = "prompt+completion"
        raw = prompt + _list(columns, "completion", ASSISTANT)
    elif columns.keys() >= {"question", "answer"}:
        question = text_column(columns, "question") + instruction
        raw = [_message("user", question), _message(ASSISTANT, text_column(columns, "answer"))]
    elif columns.keys() >= {"problem", "solution"}:
        question = text_column(columns, "problem") + instruction
        raw = [_message("user", question), _message(ASSISTANT, text_column(columns, "solution"))]
    else:
        names = ", ".join(map(str, columns))
        raise BadRow(f"found the columns {names}, not {FORMATS}; rename the columns")
    messages = chat_messages(raw, name)
    fields = template_fields(columns)
    check_unicode(messages, *fields.values())
    fields["chat_template_kwargs"] = settings | fields["chat_template_kwargs"]
    return Chat(where, messages, **fields, untrained=_untrained(messages, raw, context))


def _message(role: str, content: str) -> Message:
    return {"role": role, "content": content}


def _list(columns: dict[str, Any], name: str, role_of_text: str = "") -> list[Any]:
    """The messages in a column, as they stand there. A text is one message of `role_of_text`."""
    messages = columns[name]
    if role_of_text and isinstance(messages, str):
        return [_message(role_of_text, text_column(columns, name))]
    if not isinstance(messages, list) or not messages:
        raise BadRow(f"column {name!r} holds {messages!r:.40}, not a list of chat messages")
    return messages


def _untrained(messages: list[Message], raw: list[Any], context: int) -> frozenset[int]:
    """The numbers of the answers that are not trained on: those of a prompt, and those with weight
    0, as OpenAI's sets mark them, or with a false entry of `TRAINED_KEYS`.

    Args:
        raw: the messages as they stand in the row.
        context: how many of them are a prompt.

    Raises:
        BadRow: there is no answer to learn, an empty one, or a weight of another kind.
    """
    answers = [i for i, message in enumerate(messages) if message["role"] == ASSISTANT]
    trained = []
    for i in answers:
        weight = raw[i].get("weight")
        if weight not in (None, 0, 1):
            raise BadRow(f"message {i}: weight: is {weight!r:.40}, not 0 or 1")
        if i < context or weight == 0 or any(raw[i].get(key) is False for key in TRAINED_KEYS):
            continue
        if not messages[i]["content"].strip() and not messages[i].get("tool_calls"):
            raise BadRow(f"message {i}, an answer of the assistant, is empty")
        trained.append(i)
    if not answers:
        raise BadRow("none of its messages is of the role assistant: there is no answer to learn")
    if not trained:
        raise BadRow("none of its answers is to be trained on: there is no answer to learn")
    return frozenset(answers) - frozenset(trained)
