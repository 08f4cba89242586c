"""Prompts: read from files, the hub or a generator, checked, tokenised, filtered, and drawn in a resumable order.

Nothing is dropped in silence: `Report` counts and names every row that was left out.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np

from one_step_off.config import Config, ConfigError, DataConfig
from one_step_off.samples import Prompt
from one_step_off.word_problems import GENERATORS, default_test_size

FILE_ENDINGS = (".jsonl", ".json", ".parquet")
HUB_CONFIGS = {"openai/gsm8k": "main", "gsm8k": "main"}
COLUMNS = {"gsm8k": ("question", "answer"), "messages": ("prompt", "reward_model")}
VAL_EPOCH = -1
_NAMED = 5
_NUMBER = re.compile(r"[-+]?(?:[0-9][0-9,]*(?:\.[0-9]+)?|\.[0-9]+)(?:/[0-9]+)?")


class BadRow(Exception):
    """Why one row cannot be used."""


@dataclass(frozen=True)
class Row:
    """One usable row, not yet tokenised.

    `index` is its place in the data as it was written, bad rows included and all files in a row, from 0: filters do
    not move it. `where` is "file:row" for people, from 1. `messages` is the chat; `question` is the text of the gsm8k
    format without `data.instruction`, or None in the messages format.
    """

    index: int
    where: str
    question: str | None
    messages: list[dict[str, str]]
    ground_truth: str
    data_source: str
    extra: dict[str, Any] = field(default_factory=dict)


@dataclass
class Report:
    """What became of the rows of one set. `bad` holds (where, reason), `overlong` holds (where, tokens)."""

    name: str
    rows: int = 0
    bad: list[tuple[str, str]] = field(default_factory=list)
    overlong: list[tuple[str, int]] = field(default_factory=list)
    max_prompt_length: int = 0
    notes: list[str] = field(default_factory=list)

    @property
    def used(self) -> int:
        """Rows that became prompts."""
        return self.rows - len(self.bad) - len(self.overlong)

    def lines(self) -> list[str]:
        """For people: one line of counts, one line for each named row, the notes."""
        head = f"{self.name}: {self.rows} rows, {self.used} used"
        if self.bad:
            head += f", {len(self.bad)} malformed skipped"
        if self.overlong:
            head += f", {len(self.overlong)} over {self.max_prompt_length} tokens skipped (data.max_prompt_length)"
        out = [head]
        out += _some([f"  skipped {where}: {reason}" for where, reason in self.bad])
        out += _some([f"  skipped {where}: {tokens} tokens" for where, tokens in self.overlong])
        return out + [f"  {note}" for note in self.notes]


def _some(lines: list[str]) -> list[str]:
    return lines if len(lines) <= _NAMED else [*lines[:_NAMED], f"  ... and {len(lines) - _NAMED} more like these"]


# --- reading ----------------------------------------------------------------------------------------------------

RawRow = tuple[str, dict[str, Any] | BadRow]
"""Where it stands, and its columns or why it has none."""


def _read_json(path: str) -> list[RawRow]:
    """Rows of a .jsonl file, or of a .json file that holds a list or JSON lines."""
    with open(path, "rb") as f:
        data = f.read().removeprefix(b"\xef\xbb\xbf")
    if path.endswith(".json") and data.lstrip()[:1] == b"[":
        try:
            values: list[Any] = json.loads(data)
        except ValueError as e:
            raise ConfigError(f"data file {path}: not valid JSON: {e}; mend the file") from e
        return [(f"{path}:{i}", _as_columns(v)) for i, v in enumerate(values, 1)]
    rows: list[RawRow] = []
    # Split bytes at newlines only: str.splitlines would also cut at U+2028 inside a string.
    for number, line in enumerate(data.split(b"\n"), 1):
        if not line.strip():
            continue
        try:
            rows.append((f"{path}:{number}", _as_columns(json.loads(line))))
        except (ValueError, RecursionError) as e:
            rows.append((f"{path}:{number}", BadRow(f"not valid JSON: {e}")))
    return rows


def _as_columns(value: Any) -> dict[str, Any] | BadRow:
    return value if isinstance(value, dict) else BadRow(f"a JSON {type(value).__name__}, not an object with columns")


def _read_parquet(path: str) -> list[RawRow]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        columns = pq.read_table(path).to_pylist()
    except (pa.ArrowException, OSError, ValueError) as e:
        raise ConfigError(f"data file {path}: cannot be read as parquet: {_first_line(e)}; mend the file") from e
    return [(f"{path}:{i}", row) for i, row in enumerate(columns, 1)]


def _read_file(path: str) -> list[RawRow]:
    if not os.path.isfile(path):
        raise ConfigError(f"data file {path}: no such file (working directory {os.getcwd()}); check the path")
    try:
        rows = _read_parquet(path) if path.endswith(".parquet") else _read_json(path)
    except OSError as e:
        raise ConfigError(f"data file {path}: cannot be read: {_first_line(e)}; check its permissions") from e
    if not rows:
        raise ConfigError(f"data file {path}: holds no rows; write at least one")
    return rows


def _read_hub(spec: str, split: str) -> list[RawRow]:
    """Rows of a hub data set, `owner/name` or `owner/name:config`."""
    if os.path.exists(spec) or not re.fullmatch(r"[\w.-]+(/[\w.-]+)?(:[\w.-]+)?", spec):
        raise ConfigError(
            f"data source {spec!r}: neither a {', '.join(FILE_ENDINGS)} file, nor generator:NAME, "
            "nor a hub id as openai/gsm8k"
        )
    import datasets

    name, _, config = spec.partition(":")
    try:
        rows = datasets.load_dataset(name, config or HUB_CONFIGS.get(name), split=split).to_list()
    except Exception as e:  # the hub client raises errors of many libraries
        raise ConfigError(
            f"data source {spec!r} (split {split}): cannot be had from the Hugging Face hub: {type(e).__name__}: "
            f"{_first_line(e)}; check the id and the network, run `hf auth login` for gated data, "
            "or give a local .jsonl or .parquet file"
        ) from e
    if not rows:
        raise ConfigError(f"data source {spec!r}: split {split} holds no rows; use another")
    return [(f"{spec}[{split}]:{i}", row) for i, row in enumerate(rows, 1)]


def _read_generator(spec: str, split: str, cfg: DataConfig, seed: int) -> list[RawRow]:
    name = spec.removeprefix("generator:")
    if name not in GENERATORS:
        raise ConfigError(f"data source {spec!r}: no such generator; use one of {', '.join(sorted(GENERATORS))}")
    size = cfg.generator_size
    if split == "test":
        size = default_test_size(name) if cfg.val_size < 0 else cfg.val_size
    try:
        rows = GENERATORS[name](split, size, seed)
    except ValueError as e:
        key = "data.val_size" if split == "test" else "data.generator_size"
        raise ConfigError(f"data source {spec!r}, {key}={size}: {_first_line(e)}") from e
    return [(f"{spec}[{split}]:{i}", dict(row)) for i, row in enumerate(rows, 1)]


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


# --- rows -------------------------------------------------------------------------------------------------------


def _format_of(source: str, rows: Sequence[RawRow], wanted: str) -> str:
    """The format of a source, by the columns that its rows have."""
    found: dict[str, None] = {}
    for _, columns in rows:
        if isinstance(columns, dict):
            found.update(dict.fromkeys(columns))
    if not found:
        where, reason = rows[0]
        raise ConfigError(f"data source {source}: all {len(rows)} rows are malformed; the first, {where}: {reason}")
    # A set converted for RL may keep question and answer beside its messages: those are the more specific.
    for name in ("messages", "gsm8k") if wanted == "auto" else (wanted,):
        if all(c in found for c in COLUMNS[name]):
            return name
    needed = " or ".join("+".join(COLUMNS[n]) for n in (("gsm8k", "messages") if wanted == "auto" else (wanted,)))
    raise ConfigError(
        f"data source {source}: found the columns {', '.join(map(str, found))}; data.format={wanted} needs {needed}; "
        "rename the columns"
    )


def _text(columns: dict[str, Any], name: str) -> str:
    if columns.get(name) is None:
        raise BadRow(f"column {name!r} is missing")
    value = columns[name]
    if not isinstance(value, str):
        raise BadRow(f"column {name!r} is {type(value).__name__}, not text")
    if not value.strip():
        raise BadRow(f"column {name!r} is empty")
    _require_unicode(value, f"column {name!r}")
    return value


def _require_unicode(text: str, what: str) -> None:
    """Refuse lone surrogates: JSON may hold them, and one would stop the tokenisation of all rows."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise BadRow(f"{what} is not valid Unicode") from None


def final_number(answer: str) -> str:
    """The number after the last `####` of a GSM8K answer, without commas and `$`: "1,234" -> "1234".

    Raises:
        BadRow: no such marker, or no number after it.
    """
    _, marker, rest = answer.rpartition("####")
    if not marker:
        raise BadRow("the answer has no '#### NUMBER'")
    number = rest.strip().replace("$", "").removesuffix(".")
    if not _NUMBER.fullmatch(number):
        raise BadRow(f"after '####' stands {rest.strip()[:40]!r}, not a number")
    return number.replace(",", "")


def _gsm8k_row(columns: dict[str, Any], instruction: str) -> dict[str, Any]:
    question = _text(columns, "question")
    truth = final_number(_text(columns, "answer"))
    return {
        "question": question,
        "messages": [{"role": "user", "content": question + instruction}],
        "ground_truth": truth,
    }


def _messages_row(columns: dict[str, Any], instruction: str) -> dict[str, Any]:
    prompt = columns.get("prompt")
    if prompt is None:
        raise BadRow("column 'prompt' is missing")
    if not isinstance(prompt, list) or not prompt:
        raise BadRow(f"column 'prompt' is {type(prompt).__name__ if prompt else 'empty'}, not a list of chat messages")
    for i, message in enumerate(prompt):
        texts = [message.get(k) for k in ("role", "content")] if isinstance(message, dict) else [None]
        if not all(isinstance(t, str) for t in texts):
            raise BadRow(f"message {i} of 'prompt' is not an object with the texts 'role' and 'content'")
        _require_unicode(message["content"], f"message {i} of 'prompt'")
    if not any(m["content"].strip() for m in prompt):
        raise BadRow("all messages of 'prompt' are empty")
    model = columns.get("reward_model")
    truth = model.get("ground_truth") if isinstance(model, dict) else None
    if isinstance(truth, bool) or not isinstance(truth, (str, int, float)) or not str(truth).strip():
        raise BadRow("column 'reward_model' has no 'ground_truth' that is text or a number")
    extra = columns.get("extra_info")
    messages = [{"role": m["role"], "content": m["content"]} for m in prompt]
    return {
        "question": None,
        "messages": messages,
        "ground_truth": str(truth),
        "extra": extra if isinstance(extra, dict) else {},
    }


_PARSERS: dict[str, Callable[[dict[str, Any], str], dict[str, Any]]] = {"gsm8k": _gsm8k_row, "messages": _messages_row}


def load_rows(
    spec: str, split: str, cfg: DataConfig, seed: int, report: Report | None = None, limit: int = -1
) -> list[Row]:
    """Read and check the rows of `spec`: files, `generator:NAME` or hub ids (`owner/name[:config]`), comma-separated.

    `split` ("train" or "test") chooses among the rows of generators and hub sets; a file holds what it holds. `seed`
    is for generators. Only the first `limit` rows are looked at (-1: all). `report` receives counts and bad rows.

    Raises:
        ConfigError: a source cannot be read or is empty, lacks columns, has only bad rows, or has one bad row and
            `data.bad_rows` is "fail".
    """
    report = report if report is not None else Report(split)
    instruction = cfg.instruction
    if instruction and not instruction[0].isspace():
        instruction = " " + instruction
    sources = [s.strip() for s in spec.split(",") if s.strip()]
    if not sources:
        raise ConfigError(f"data source {spec!r}: names nothing; give a file, a hub id or generator:word_problems")
    rows: list[Row] = []
    for source in sources:
        if source.startswith("generator:"):
            raw = _read_generator(source, split, cfg, seed)
        elif source.endswith(FILE_ENDINGS):
            raw = _read_file(source)
        else:
            raw = _read_hub(source, split)
        kind = _format_of(source, raw, cfg.format)
        for where, columns in raw if limit < 0 else raw[: max(0, limit - report.rows)]:
            index, report.rows = report.rows, report.rows + 1
            try:
                if isinstance(columns, BadRow):
                    raise columns
                source_name = columns.get("data_source")
                source_name = source_name if isinstance(source_name, str) and source_name else source
                rows.append(Row(index, where, data_source=source_name, **_PARSERS[kind](columns, instruction)))
            except BadRow as e:
                if cfg.bad_rows == "fail":
                    raise ConfigError(f"data row {where}: {e}; mend the row, or set data.bad_rows=skip") from None
                report.bad.append((where, str(e)))
    if not rows and report.rows:
        where, reason = report.bad[0]
        raise ConfigError(f"data source {spec}: all {report.rows} rows are malformed; the first, {where}: {reason}")
    return rows


# --- tokenising -------------------------------------------------------------------------------------------------


def _prompt_texts(rows: Sequence[Row], tokenizer: Any, cfg: DataConfig, report: Report) -> Iterator[tuple[Row, str]]:
    """Each row with the text that its prompt is tokenised from. Rows that the chat template refuses are bad rows."""
    template = getattr(tokenizer, "chat_template", None)
    if cfg.chat_template == "always" and not template:
        raise ConfigError("data.chat_template=always: the tokenizer has no chat template; use never, or a chat model")
    if cfg.chat_template == "never" or not template:
        if cfg.chat_template == "auto" and any(r.question is None for r in rows):
            raise ConfigError(
                "data.chat_template=auto: the rows are chat messages, but the tokenizer has no chat template; "
                "use a chat model, or data.chat_template=never to join the messages as plain text"
            )
        yield from ((r, "\n".join(m["content"] for m in r.messages)) for r in rows)
        return
    for row in rows:
        try:
            yield row, tokenizer.apply_chat_template(row.messages, tokenize=False, add_generation_prompt=True)
        except Exception as e:  # templates are programs of the model's author, and refuse roles in their own ways
            reason = f"the chat template refuses it: {_first_line(e)}"
            if cfg.bad_rows == "fail":
                raise ConfigError(f"data row {row.where}: {reason}; mend the row, or set data.bad_rows=skip") from e
            report.bad.append((row.where, reason))


def _tokenise(texts: list[str], tokenizer: Any, templated: bool) -> list[list[int]]:
    """Token ids of each text. Templates write their own special tokens; plain text gets BOS where the model has it.

    We add BOS ourselves: `add_special_tokens` could also end the prompt with EOS, and doubles a BOS that is there.
    """
    ids = tokenizer(texts, add_special_tokens=False)["input_ids"]
    bos = getattr(tokenizer, "bos_token_id", None)
    if templated or bos is None or tokenizer("a")["input_ids"][:1] != [bos]:
        return ids
    return [one if one[:1] == [bos] else [bos, *one] for one in ids]


def encode(
    rows: Sequence[Row], tokenizer: Any, cfg: DataConfig, epoch: int, report: Report | None = None
) -> list[Prompt]:
    """Tokenise all rows at once and keep those of at most `data.max_prompt_length` tokens.

    Prompt ids are (epoch, row.index). With a chat template the prompt ends with its generation prompt; without, it is
    the question with `data.instruction`, or the messages joined by newlines. `report` receives what was left out.

    Raises:
        ConfigError: the template that the config asks for does not exist; a prompt is too long or refused by the
            template and the config says fail; no prompt is left.
    """
    report = report if report is not None else Report("data", rows=len(rows))
    report.max_prompt_length = cfg.max_prompt_length
    pairs = list(_prompt_texts(rows, tokenizer, cfg, report))
    templated = cfg.chat_template != "never" and bool(getattr(tokenizer, "chat_template", None))
    prompts = []
    all_ids = _tokenise([text for _, text in pairs], tokenizer, templated) if pairs else []
    for (row, text), ids in zip(pairs, all_ids, strict=True):
        if len(ids) > cfg.max_prompt_length:
            if cfg.overlong_prompts == "fail":
                raise ConfigError(
                    f"data row {row.where}: {len(ids)} tokens, more than data.max_prompt_length={cfg.max_prompt_length}; "
                    "raise that, or set data.overlong_prompts=skip"
                )
            report.overlong.append((row.where, len(ids)))
            continue
        array = np.asarray(ids, dtype=np.int32)
        prompts.append(Prompt((epoch, row.index), array, text, row.ground_truth, row.data_source, row.extra))
    if rows and not prompts:
        shown = report.lines()
        raise ConfigError(f"{shown[0]}: no prompt is left; {shown[1].strip() if len(shown) > 1 else 'check the data'}")
    return prompts


# --- the stream -------------------------------------------------------------------------------------------------


class PromptStream:
    """Prompts in a fixed order, forever, from a position that can be saved.

        stream = PromptStream(prompts, batch_size=64, shuffle=True, seed=0, total_steps=200)
        for step in range(stream.total_steps):
            batch = stream.next_batch()

    Each epoch is one permutation of all prompts, by (seed, epoch). Batches are always full: one that reaches the end
    of an epoch goes on in the next, so no prompt is dropped and an epoch needs not be a whole number of batches. A
    batch may be larger than the data. A prompt's id is (epoch, row), so it is unique in the whole run.

    `total_epochs=E` is turned into the fewest steps that see every prompt E times: ceil(E * prompts / batch_size);
    `surplus` prompts of the last batch then belong to epoch E, one more than asked for.

    Attributes:
        total_steps: steps of the run. The stream itself does not end there.
        surplus: prompts that the last step takes beyond `total_epochs`; 0 with `total_steps`.
    """

    def __init__(
        self,
        prompts: Sequence[Prompt],
        batch_size: int,
        shuffle: bool,
        seed: int,
        total_steps: int | None = None,
        total_epochs: int | None = None,
    ) -> None:
        """`prompts` carry their row in `id[1]`; the epoch in it is replaced.

        Raises:
            ConfigError: no prompts, or not exactly one of total_steps and total_epochs.
        """
        if not prompts:
            raise ConfigError("data.train_files: no prompts to train on; check the data")
        if (total_steps is None) == (total_epochs is None):
            raise ConfigError(
                f"trainer.total_steps={total_steps}, trainer.total_epochs={total_epochs}: set exactly one of them"
            )
        self._prompts = list(prompts)
        self._batch_size = batch_size
        self._shuffle = shuffle
        self._seed = seed
        self._epoch = 0
        self._offset = 0
        self._order = self._order_of(0)
        self._data_digest = ""
        wanted = len(self._prompts) * (total_epochs or 0)
        self.total_steps: int = total_steps if total_steps is not None else math.ceil(wanted / batch_size)
        self.surplus: int = 0 if total_steps is not None else self.total_steps * batch_size - wanted

    def __len__(self) -> int:
        """Prompts in one epoch."""
        return len(self._prompts)

    @property
    def position(self) -> tuple[int, int]:
        """(epoch, offset in that epoch) of the next prompt; offset is less than the number of prompts."""
        return self._epoch, self._offset

    def first_rows(self, count: int) -> list[Prompt]:
        """The first `count` prompts in the data's own order (fewer if there are fewer); moves nothing."""
        return self._prompts[:count]

    def next_batch(self) -> list[Prompt]:
        """The next `batch_size` prompts, with ids (epoch, row)."""
        batch: list[Prompt] = []
        while len(batch) < self._batch_size:
            part = self._order[self._offset : self._offset + self._batch_size - len(batch)]
            batch += [replace(self._prompts[i], id=(self._epoch, self._prompts[i].id[1])) for i in part]
            self._offset += len(part)
            if self._offset == len(self._prompts):
                self._epoch, self._offset = self._epoch + 1, 0
                self._order = self._order_of(self._epoch)
        return batch

    def state_dict(self) -> dict[str, Any]:
        """The position, and a digest of data and order by which another stream is recognised. JSON-compatible."""
        return {"epoch": self._epoch, "offset": self._offset, "digest": self._digest(self._order)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go to a saved position. The batch size may differ from the saved stream's; data, seed and order may not.

        Raises:
            ConfigError: this stream would not continue the saved one. It stays where it was.
        """
        epoch, offset = int(state["epoch"]), int(state["offset"])
        order = self._order_of(epoch)
        if state["digest"] != self._digest(order):
            raise ConfigError(
                "data: the checkpoint was made with other prompts or another order; resume with the same "
                "data.train_files, tokenizer, data.max_prompt_length, data.instruction, data.shuffle and trainer.seed"
            )
        self._epoch, self._offset, self._order = epoch, offset, order

    def _order_of(self, epoch: int) -> np.ndarray:
        """Positions of one epoch: int64 [prompts]."""
        if not self._shuffle:
            return np.arange(len(self._prompts))
        return np.random.default_rng([self._seed, epoch]).permutation(len(self._prompts))

    def _digest(self, order: np.ndarray) -> str:
        if not self._data_digest:
            data = hashlib.sha256()
            for p in self._prompts:
                data.update(f"{p.id[1]} {len(p.ids)} {p.ground_truth}\n".encode())
                data.update(p.ids.tobytes())
            self._data_digest = data.hexdigest()
        # The order is part of it, because numpy does not promise the same permutations in all its versions.
        return hashlib.sha256(self._data_digest.encode() + order.astype(np.int64).tobytes()).hexdigest()


# --- all together -----------------------------------------------------------------------------------------------


class Data(NamedTuple):
    """What a run trains and is evaluated on. `val` is None without a held-out set."""

    stream: PromptStream
    val: list[Prompt] | None
    reports: list[Report]

    def lines(self) -> list[str]:
        """The reports, for people."""
        return [line for report in self.reports for line in report.lines()]


def build(cfg: Config, tokenizer: Any) -> Data:
    """Read, check and tokenise both sets of a run.

    Held-out prompts have ids (-1, row). Generated held-out problems do not depend on `trainer.seed`, so that runs
    with other seeds are evaluated alike.

    Raises:
        ConfigError: see `load_rows`, `encode` and `PromptStream`.
    """
    if not cfg.data.train_files.strip():
        raise ConfigError("data.train_files='': nothing to train on; give a file, a hub id or generator:word_problems")
    report = Report("training data")
    rows = load_rows(cfg.data.train_files, "train", cfg.data, cfg.trainer.seed, report)
    prompts = encode(rows, tokenizer, cfg.data, 0, report)
    stream = PromptStream(
        prompts,
        cfg.data.train_batch_size,
        cfg.data.shuffle,
        cfg.trainer.seed,
        total_steps=cfg.trainer.total_steps,
        total_epochs=cfg.trainer.total_epochs,
    )
    if stream.surplus:
        report.notes.append(
            f"trainer.total_epochs={cfg.trainer.total_epochs}: {stream.total_steps} steps; the last one also takes "
            f"{stream.surplus} prompts of the epoch after, to be full"
        )
    reports = [report]
    val = None
    if cfg.data.val_files.strip() and cfg.data.val_size != 0:
        held_out = Report("held-out data")
        reports.append(held_out)
        val_rows = load_rows(cfg.data.val_files, "test", cfg.data, 0, held_out, cfg.data.val_size)
        val = encode(val_rows, tokenizer, cfg.data, VAL_EPOCH, held_out)
        known = {p.text for p in prompts}
        shared = sum(p.text in known for p in val)
        if shared:
            held_out.notes.append(f"warning: {shared} of the {len(val)} held-out prompts are also in the training data")
    return Data(stream, val, reports)
