"""Rows of data: read from files, the hub or a generator, parsed and checked.

Nothing is dropped silently: `DataReport` counts and lists every row that was left out. A new data
format is one more parser beside `_parse_question` and `_parse_messages`, and a line in
`_parse_format`.
"""

import functools
import json
import math
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from decimal import Decimal
from typing import Any

import numpy as np

from one_step_off.config.errors import ConfigError, first_line
from one_step_off.config.schema import DataConfig
from one_step_off.config.sections.data import ENVIRONMENT_SOURCE, FILE_ENDINGS, split_files
from one_step_off.data.environment_rows import no_environment
from one_step_off.data.images import BadImage, marked_columns
from one_step_off.data.messages import (
    BadMessage,
    normalized_messages,
    normalized_settings,
    normalized_tools,
    without_nulls,
)
from one_step_off.data.plain_numbers import number_text, plain_number
from one_step_off.data.samples import Prompt
from one_step_off.data.word_problems import GENERATORS, default_test_size

# The hub configuration that is used where the user names none.
HUB_CONFIGS = {"openai/gsm8k": "main", "gsm8k": "main"}
MAX_LISTED_ROWS = 5
FORMATS = (
    "prompt+ground_truth, question+answer, problem+answer, problem+solution or prompt+reward_model"
)
_UTF8_BOM = b"\xef\xbb\xbf"
_NO_IDS = np.zeros(0, np.int32)


CHAT_COLUMNS = ("prompt", "messages", "completion", "tools", "chat_template_kwargs")
"""What a chat template receives of a row."""

MEDIA_COLUMNS = ("images", "videos", "audios")

ReadTasks = Callable[[str], list[dict[str, Any]]]
"""The tasks of the run's environment for a split, as columns."""


TRUTH_OF_VERL = "'ground_truth' in column 'reward_model'"


class BadRow(Exception):
    """Why one row cannot be used."""


@dataclass(frozen=True)
class Row(Prompt):
    """One usable row: a prompt that is not yet tokenized.

    The row number in its `id` counts all rows of all files as they were written, bad rows included,
    from 0. `messages` is the chat, or the one question of the gsm8k format with `data.instruction`.
    `chat`: the row was written as chat messages.
    """

    chat: bool = False


@dataclass
class DataReport:
    """What became of the rows of one data set.

    Attributes:
        name: of the set, for messages.
        rows: how many were read.
        bad: (location, reason) of each malformed row.
        overlong: (location, tokens) of each row that is too long.
        notes: further lines for the user.
        limit: the key that bounds their length.
    """

    name: str
    rows: int = 0
    bad: list[tuple[str, str]] = field(default_factory=list)
    overlong: list[tuple[str, int]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    limit: str = "data.max_prompt_length"

    def skip(self, location: str, reason: str, cfg: DataConfig) -> None:
        """Note a bad row. Raises ConfigError: `data.bad_rows` is "fail"."""
        if cfg.bad_rows == "fail":
            raise ConfigError(
                f"data row {location}: {reason}; fix the row, or set data.bad_rows=skip"
            )
        self.bad.append((location, reason))

    def lines(self) -> list[str]:
        """For the user: one line of counts, then one line for each listed row, then the notes."""
        used = self.rows - len(self.bad) - len(self.overlong)
        counts = [f"{self.name}: {self.rows} rows, {used} used"]
        if self.bad:
            counts.append(f"{len(self.bad)} malformed skipped")
        if self.overlong:
            counts.append(f"{len(self.overlong)} over {self.limit} skipped")
        overlong = [(location, f"{tokens} tokens") for location, tokens in self.overlong]
        notes = [f"  {note}" for note in self.notes]
        return [", ".join(counts), *_listed(self.bad), *_listed(overlong), *notes]


def _listed(skipped: list[tuple[str, str]]) -> list[str]:
    """A line for each of the first skipped rows, and one for the number of the others."""
    lines = [f"  skipped {location}: {reason}" for location, reason in skipped[:MAX_LISTED_ROWS]]
    if len(skipped) > MAX_LISTED_ROWS:
        lines.append(f"  ... and {len(skipped) - MAX_LISTED_ROWS} more like these")
    return lines


# --- reading ---


def _read_file(path: str) -> Iterator[tuple[int, Any]]:
    """Numbered rows of a .parquet or .jsonl file, or of a .json file with a list or JSON lines.

    JSON is not read by the `datasets` library: it rejects a whole file for one bad line, and does
    not say which.
    """
    import pyarrow.parquet as pq

    if path.endswith(".parquet"):
        yield from _table_rows(pq.read_table(path).to_pylist())
        return
    with open(path, "rb") as file:
        data = file.read().removeprefix(_UTF8_BOM)
    if path.endswith(".json") and data.lstrip()[:1] == b"[":
        yield from enumerate(json.loads(data.decode()), 1)
        return
    # Split bytes at newlines only: str.splitlines would also cut at U+2028 inside a string.
    for number, line in enumerate(data.split(b"\n"), 1):
        if line.strip():
            yield number, _parse_json_line(line)


def _table_rows(rows: list[dict[str, Any]]) -> Iterator[tuple[int, Any]]:
    """Numbered rows of an Arrow table, whose chats lack the nulls that the table put there: in a
    table every message has the entries of all messages, and every call the arguments of all calls.
    """
    for number, row in enumerate(rows, 1):
        chat = {name: without_nulls(row[name]) for name in CHAT_COLUMNS if name in row}
        yield number, row | chat


def _parse_json_line(line: bytes) -> Any:
    """The content of a line, or a BadRow."""
    try:
        return json.loads(line.decode())  # given bytes, json would also accept UTF-16
    except (ValueError, RecursionError) as error:
        return BadRow(f"not valid JSON: {error}")


def _read_generator(name: str, split: str, cfg: DataConfig, seed: int) -> Iterator[tuple[int, Any]]:
    """Numbered rows of a generator."""
    if split == "train":
        size = cfg.generator_size
    else:
        size = default_test_size(name) if cfg.val_size < 0 else cfg.val_size
    return enumerate(GENERATORS[name](split, size, seed), 1)


def _read_hub(source: str, split: str) -> Iterator[tuple[int, Any]]:
    """Numbered rows of a hub data set, named as `owner/name[:config]`."""
    import datasets  # takes a second to import, which files and generators need not wait for

    name, _, config = source.partition(":")
    rows = datasets.load_dataset(name, config or HUB_CONFIGS.get(name), split=split)
    return _table_rows(rows.to_list())


def read_source(
    source: str,
    split: str,
    cfg: DataConfig,
    seed: int,
    read_tasks: ReadTasks = no_environment,
) -> list[tuple[str, Any]]:
    """All rows of one file, generator, environment or hub set.

    Returns:
        (location, columns) of each row. In place of the columns there may be anything that stands
        there, or a BadRow where it cannot be read.

    Raises:
        ConfigError: the source cannot be read, or has no rows.
    """
    location = f"{source}[{split}]"
    kind, _, generator = source.partition(":")
    try:
        if source.endswith(FILE_ENDINGS):
            location = source
            fix = "check the path, or fix the file"
            rows = list(_read_file(source))
        elif kind == "generator":
            key = "generator_size" if split == "train" else "val_size"
            fix = f"change data.{key}={getattr(cfg, key)}"
            rows = list(_read_generator(generator, split, cfg, seed))
        elif source == ENVIRONMENT_SOURCE:
            fix = "change agent.environment"
            rows = list(enumerate(read_tasks(split), 1))
        else:
            fix = (
                "check the id and the network, run `hf auth login` for gated data, "
                "or give a local .jsonl file"
            )
            rows = list(_read_hub(source, split))
    except ConfigError:
        raise
    except Exception as error:  # many libraries may raise here
        raise ConfigError(
            f"data source {location}: cannot be read: "
            f"{type(error).__name__}: {first_line(error)}; {fix}"
        ) from error
    if not rows:
        raise ConfigError(f"data source {location}: holds no rows; give another")
    return [(f"{location}:{number}", columns) for number, columns in rows]


# --- parsing ---


def final_number(answer: str) -> str:
    """The number after the last `####` of a GSM8K answer, without commas and `$`: "1,234" ->
    "1234". Commas may only group thousands.

    Raises BadRow: there is no such marker, or no number after it.
    """
    _, marker, rest = answer.rpartition("####")
    if not marker:
        raise BadRow(
            "the answer has no '#### NUMBER'; if it is the plain answer, name its column "
            "ground_truth"
        )
    number = rest.strip().strip("$").removesuffix(".")
    if plain_number(number) is None:
        raise BadRow(f"after '####' comes {rest.strip()[:40]!r}, not a number")
    return number.replace(",", "").replace("$", "")


def checked_columns(columns: Any) -> dict[str, Any]:
    """The columns of a row. Raises BadRow: they are none."""
    if isinstance(columns, BadRow):
        raise columns
    if not isinstance(columns, dict):
        raise BadRow(f"a JSON {type(columns).__name__}, not an object with columns")
    return columns


def text_column(columns: dict[str, Any], name: str) -> str:
    """The text in a column. Raises BadRow: it holds none."""
    value = columns.get(name)
    if not isinstance(value, str) or not value.strip():
        raise BadRow(f"column {name!r} holds {value!r:.40}, not a text")
    return value


def _parse_question(columns: dict[str, Any], instruction: str) -> dict[str, Any]:
    """The gsm8k format: columns question and answer. The answer ends in "#### NUMBER", or is a
    number alone."""
    content = text_column(columns, "question") + instruction
    answer = columns["answer"]
    if isinstance(answer, str) and plain_number(answer.strip()) is None:
        truth = final_number(text_column(columns, "answer"))
    else:
        truth = _truth_text(answer, "column 'answer'").strip()
    return {"messages": [{"role": "user", "content": content}], "ground_truth": truth}


def _parse_messages(columns: dict[str, Any]) -> dict[str, Any]:
    """The format of verl: columns prompt (chat messages) and reward_model (with ground_truth)."""
    prompt = columns.get("prompt")
    if not isinstance(prompt, list) or not prompt:
        raise BadRow(f"column 'prompt' holds {prompt!r:.40}, not a list of chat messages")
    messages = chat_messages(prompt, "prompt")
    if not any(message["content"].strip() or message.get("tool_calls") for message in messages):
        raise BadRow("all messages of 'prompt' are empty")
    reward_model = columns.get("reward_model")
    truth = reward_model.get("ground_truth") if isinstance(reward_model, dict) else None
    return {"messages": messages, "ground_truth": _truth_text(truth, TRUTH_OF_VERL), "chat": True}


def chat_messages(messages: list[Any], name: str) -> list[dict[str, Any]]:
    """The messages of a column as the chat template receives them. Raises BadRow: one cannot be
    used, or has nothing to say."""
    try:
        normalized = normalized_messages(messages, name)
    except BadMessage as error:
        raise BadRow(str(error)) from None
    for i, message in enumerate(messages):
        if message.get("content") is None and not (
            normalized[i].keys() & {"tool_calls", "reasoning"}
        ):
            raise BadRow(f"message {i} of {name!r} has no text 'content'")
    return normalized


def _parse_prompt(columns: dict[str, Any]) -> dict[str, Any]:
    """The plain format: columns prompt (a text, or chat messages) and ground_truth."""
    truth = _truth_text(columns["ground_truth"], "column 'ground_truth'")
    if isinstance(columns["prompt"], list):
        return _parse_messages(columns | {"reward_model": {"ground_truth": truth}})
    content = text_column(columns, "prompt")
    if _is_json_of_a_chat(content):
        raise BadRow("column 'prompt' holds chat messages as JSON text; make them a list")
    return {"messages": [{"role": "user", "content": content}], "ground_truth": truth}


def _is_json_of_a_chat(text: str) -> bool:
    """Whether a text is what a table without lists makes of chat messages."""
    try:
        messages = json.loads(text)
    except (ValueError, RecursionError):
        return False
    if not isinstance(messages, list) or not messages:
        return False
    return all(isinstance(message, dict) and "role" in message for message in messages)


def _parse_problem(columns: dict[str, Any], instruction: str) -> dict[str, Any]:
    """A question in one column, and the plain answer in another: question with ground_truth; or
    problem with answer, ground_truth, or the last \\boxed{...} of its solution."""
    name = "question" if "question" in columns else "problem"
    content = text_column(columns, name) + instruction
    for truth_name in ("ground_truth", "answer"):
        if truth_name in columns:
            truth = _truth_text(columns[truth_name], f"column {truth_name!r}")
            break
    else:
        truth = last_boxed(text_column(columns, "solution")) or ""
        if not truth.strip():
            raise BadRow("the solution has no \\boxed{ANSWER}")
    return {"messages": [{"role": "user", "content": content}], "ground_truth": truth.strip()}


def last_boxed(text: str) -> str | None:
    """The content of the last `\\boxed{...}`; None where there is none, or it is not closed."""
    _, marker, rest = text.rpartition("\\boxed{")
    if not marker:
        return None
    depth = 1
    for i, letter in enumerate(rest):
        depth += {"{": 1, "}": -1}.get(letter, 0)
        if depth == 0:
            return rest[:i]
    return None


def template_fields(columns: dict[str, Any]) -> dict[str, Any]:
    """The row's own tools and settings for the chat template. Raises BadRow: they are malformed, or
    the row has images."""
    for name in MEDIA_COLUMNS:
        if columns.get(name) and f"<{name[:-1]}>" in str(columns.get("prompt")):
            raise BadRow(f"column {name!r}: only text can be trained on")
    try:
        return {
            "tools": normalized_tools(columns.get("tools")),
            "chat_template_kwargs": normalized_settings(
                columns.get("chat_template_kwargs"), "chat_template_kwargs"
            ),
        }
    except BadMessage as error:
        raise BadRow(f"column {error}") from None


def _truth_text(truth: Any, place: str) -> str:
    """The ground truth as text. Raises BadRow: it is none, or one that no answer can equal."""
    is_number = isinstance(truth, (int, float, Decimal, np.number)) and not isinstance(truth, bool)
    if is_number and math.isfinite(truth):
        return number_text(truth)
    # Of a missing value a table of numbers makes NaN, and a table of texts its name.
    if is_number or (isinstance(truth, str) and truth.strip().lower() == "nan"):
        raise BadRow(f"{place} holds {truth}, which no answer can equal")
    if isinstance(truth, str) and truth.strip():
        return truth
    raise BadRow(f"{place} holds {truth!r:.40}, not a text or a number")


def _extra_columns(columns: dict[str, Any], is_chat: bool) -> dict[str, Any]:
    """The columns that a Row has no field for, and the entries of `extra_info`, which take
    precedence.
    """
    known = ["data_source", "agent_loop"]
    if is_chat or columns.keys() >= {"prompt", "ground_truth"}:
        known += ["prompt", "reward_model", "ground_truth"]
    extra_info = columns.get("extra_info")
    if isinstance(extra_info, dict) or extra_info is None:
        known.append("extra_info")
    extra = {name: value for name, value in columns.items() if name not in known}
    if isinstance(extra_info, dict):
        extra |= extra_info
    return extra


def check_unicode(*values: Any) -> None:
    """Raises BadRow: JSON may hold lone surrogates, and one would stop the tokenization of all
    rows.
    """
    try:
        json.dumps(values, ensure_ascii=False, default=str).encode()
    except UnicodeEncodeError:
        raise BadRow("its text is not valid Unicode") from None


def _parse_format(columns: dict[str, Any], instruction: str) -> dict[str, Any]:
    """The prompt and the ground truth, by the first format whose columns are there. Raises
    BadRow."""
    names = columns.keys()
    if names >= {"prompt", "reward_model"}:
        return _parse_messages(columns)
    if names >= {"prompt", "ground_truth"}:
        return _parse_prompt(columns)
    if names >= {"question", "ground_truth"}:
        return _parse_problem(columns, instruction)
    if names >= {"question", "answer"}:
        return _parse_question(columns, instruction)
    if "problem" in names and names & {"answer", "solution", "ground_truth"}:
        return _parse_problem(columns, instruction)
    found = ", ".join(map(str, columns))
    raise BadRow(f"found the columns {found}, not {FORMATS}; rename the columns")


def _parse_row(columns: Any, instruction: str) -> dict[str, Any]:
    """The fields of a Row that its columns hold. Raises BadRow."""
    columns = checked_columns(columns)
    # A set converted for RL may keep question and answer beside its messages, which say more.
    fields = _parse_format(columns, instruction)
    fields |= template_fields(columns)
    check_unicode(*fields.values())
    loop = columns.get("agent_loop")
    if not isinstance(loop, str | None):
        raise BadRow(f"column 'agent_loop' holds {loop!r:.40}, not a text")
    fields["agent_loop"] = (loop or "").strip()
    fields["extra"] = _extra_columns(columns, fields.get("chat", False))
    data_source = columns.get("data_source")
    if isinstance(data_source, str) and data_source:
        fields["data_source"] = data_source
    return fields


def _parse_row_with_images(columns: Any, instruction: str, folder: str) -> dict[str, Any]:
    """As `_parse_row`, of a row that may have images. Relative paths begin at `folder`."""
    try:
        rest, images = marked_columns(checked_columns(columns), folder)
    except BadImage as error:
        raise BadRow(str(error)) from None
    return _parse_row(rest, instruction) | {"images": images}


def instruction_of(cfg: DataConfig) -> str:
    """What is appended to each question, apart from it by a blank."""
    starts_with_blank = not cfg.instruction[:1].strip()
    return cfg.instruction if starts_with_blank else f" {cfg.instruction}"


def load_rows(
    spec: str,
    split: str,
    cfg: DataConfig,
    seed: int,
    report: DataReport,
    limit: int = -1,
    read_tasks: ReadTasks = no_environment,
    reads_images: bool = False,
) -> list[Row]:
    """Read and check the rows of data sources.

    Args:
        spec: files, `generator:NAME`, `environment` or hub ids (`owner/name[:config]`),
            comma-separated, see `split_files`.
        split: "train" or "test"; chooses among the rows of generators and hub sets.
        seed: of generators.
        report: receives the counts and the bad rows.
        limit: only the first `limit` rows are read; -1: all.
        read_tasks: gives the rows of the source `environment`.
        reads_images: the model reads images.

    Raises:
        ConfigError: a source cannot be read, is empty or has only bad rows; or it has a bad row and
            `data.bad_rows` is "fail".
    """
    sources = split_files(spec)
    if not sources:
        raise ConfigError(
            f"data: {spec!r} names no data; give a file, a hub id or generator:word_problems"
        )
    instruction = instruction_of(cfg)
    rows: list[Row] = []
    for source in sources:
        raw_rows = read_source(source, split, cfg, seed, read_tasks)
        if limit >= 0:
            raw_rows = raw_rows[: max(0, limit - report.rows)]
        rows += _parse_source(source, raw_rows, instruction, cfg, report, reads_images)
    return rows


def _parse_source(
    source: str,
    raw_rows: list[tuple[str, Any]],
    instruction: str,
    cfg: DataConfig,
    report: DataReport,
    reads_images: bool,
) -> list[Row]:
    """The usable rows of one source. Raises ConfigError: there are bad rows and no good one."""
    rows: list[Row] = []
    parse = _parse_row
    if reads_images:
        folder = os.path.dirname(source) if source.endswith(FILE_ENDINGS) else ""
        parse = functools.partial(_parse_row_with_images, folder=folder)
    first_bad = len(report.bad)
    for location, columns in raw_rows:
        index = report.rows
        report.rows += 1
        try:
            fields = {"data_source": source, "where": location} | parse(columns, instruction)
        except BadRow as error:
            report.skip(location, str(error), cfg)
        else:
            rows.append(Row((0, index), _NO_IDS, "", **fields))
    bad = report.bad[first_bad:]
    if bad and not rows:
        location, reason = bad[0]
        raise ConfigError(
            f"data source {source}: all {len(bad)} rows are malformed; fix {location}: {reason}"
        )
    return rows
