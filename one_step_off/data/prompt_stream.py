"""Prompts: read from files, the hub or a generator, checked, tokenised, filtered, and drawn in a resumable order.

Nothing is dropped in silence: `Report` counts and names every row that was left out.
"""

import hashlib
import json
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np

from one_step_off.config.schema import (
    Config,
    ConfigError,
    DataConfig,
    first_line,
    located_config_error,
)
from one_step_off.config.validation import FILE_ENDINGS
from one_step_off.data.evaluation import MAIN_SET, set_epoch
from one_step_off.data.plain_numbers import plain_number
from one_step_off.data.samples import Prompt, PromptId
from one_step_off.data.word_problems import GENERATORS, default_test_size

HUB_CONFIGS = {"openai/gsm8k": "main", "gsm8k": "main"}
_NAMED, NO_IDS = 5, np.zeros(0, np.int32)


class BadRow(Exception):
    """Why one row cannot be used."""


@dataclass(frozen=True)
class Row(Prompt):
    """One usable row, a prompt that is not yet tokenised. The row in its `id` is its place in the data as it was
    written, bad rows included and all files in a row, from 0. `messages` is the `chat`, or the one question of the
    gsm8k format with `data.instruction`."""

    chat: bool = False


@dataclass
class Report:
    """What became of the rows of one set. `bad` holds (where, reason), `overlong` holds (where, tokens)."""

    name: str
    rows: int = 0
    bad: list[tuple[str, str]] = field(default_factory=list)
    overlong: list[tuple[str, int]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def skip(self, where: str, reason: str, cfg: DataConfig) -> None:
        """Note a bad row, or with `data.bad_rows=fail` raise ConfigError."""
        if cfg.bad_rows == "fail":
            raise ConfigError(
                f"data row {where}: {reason}; mend the row, or set data.bad_rows=skip"
            )
        self.bad.append((where, reason))

    def lines(self) -> list[str]:
        """For people: one line of counts, one line for each named row, the notes."""
        over = f"{len(self.overlong)} over data.max_prompt_length skipped"
        skipped = [f"{len(self.bad)} malformed skipped"] * bool(self.bad) + [over] * bool(
            self.overlong
        )
        used = self.rows - len(self.bad) - len(self.overlong)
        out = [", ".join([f"{self.name}: {self.rows} rows, {used} used", *skipped])]
        for rows in (self.bad, [(where, f"{tokens} tokens") for where, tokens in self.overlong]):
            out += [f"  skipped {where}: {why}" for where, why in rows[:_NAMED]]
            out += [f"  ... and {len(rows) - _NAMED} more like these"] * (len(rows) > _NAMED)
        return out + [f"  {note}" for note in self.notes]


ToolsOf = Callable[[str], list[dict[str, Any]] | None]
"""The JSON schemas of the tools of an agent loop ("": of `agent.loop`), for the chat template; None: it has none."""


def _read_file(path: str) -> Iterator[tuple[int, Any]]:
    """Numbered rows of a .parquet or .jsonl file, or of a .json file that holds a list or JSON lines. JSON is not read
    by the `datasets` library: it gives up a whole file for one bad line, and does not name it."""
    import pyarrow.parquet as pq

    if path.endswith(".parquet"):
        yield from enumerate(pq.read_table(path).to_pylist(), 1)
        return
    with open(path, "rb") as f:
        data = f.read().removeprefix(b"\xef\xbb\xbf")
    if path.endswith(".json") and data.lstrip()[:1] == b"[":
        yield from enumerate(json.loads(data.decode()), 1)
        return
    # Split bytes at newlines only: str.splitlines would also cut at U+2028 inside a string.
    for number, line in enumerate(data.split(b"\n"), 1):
        if line.strip():
            try:
                yield number, json.loads(line.decode())  # bytes might also be taken for UTF-16
            except (ValueError, RecursionError) as e:
                yield number, BadRow(f"not valid JSON: {e}")


def _read(source: str, split: str, cfg: DataConfig, seed: int) -> list[tuple[str, Any]]:
    """All rows of one file, generator or hub set: where each stands, and its columns, or whatever else stands there (a
    BadRow where it cannot be read). Raises ConfigError if it cannot be read or has none."""
    name, _, part = source.partition(":")
    where = f"{source}[{split}]"
    try:
        if source.endswith(FILE_ENDINGS):
            where, mend = source, "check the path, or mend the file"
            rows = _read_file(source)
        elif name == "generator":
            key, size = (
                ("generator_size", cfg.generator_size)
                if split == "train"
                else ("val_size", cfg.val_size)
            )
            mend = f"change data.{key}={size}"
            rows = enumerate(
                GENERATORS[part](split, default_test_size(part) if size < 0 else size, seed), 1
            )
        else:
            import datasets  # takes a second, which files and generators need not wait for

            mend = "check the id and the network, run `hf auth login` for gated data, or give a local .jsonl file"
            rows = enumerate(
                datasets.load_dataset(name, part or HUB_CONFIGS.get(name), split=split).to_list(), 1
            )
        found = [(f"{where}:{number}", row) for number, row in rows]
    except Exception as e:  # of many libraries
        raise ConfigError(
            f"data source {where}: cannot be read: {type(e).__name__}: {first_line(e)}; {mend}"
        ) from e
    if not found:
        raise ConfigError(f"data source {where}: holds no rows; give another")
    return found


def _text(columns: dict[str, Any], name: str) -> str:
    value = columns.get(name)
    if not isinstance(value, str) or not value.strip():
        raise BadRow(f"column {name!r} holds {value!r:.40}, not a text")
    return value


def final_number(answer: str) -> str:
    """The number after the last `####` of a GSM8K answer, without commas and `$`: "1,234" -> "1234". Raises BadRow: no
    such marker, or no number after it."""
    _, marker, rest = answer.rpartition("####")
    if not marker:
        raise BadRow("the answer has no '#### NUMBER'")
    number = rest.strip().replace("$", "").removesuffix(".")
    if plain_number(number) is None:
        raise BadRow(f"after '####' stands {rest.strip()[:40]!r}, not a number")
    return number.replace(",", "")


def _messages_row(columns: dict[str, Any]) -> dict[str, Any]:
    prompt, model = (columns.get(name) for name in ("prompt", "reward_model"))
    if not isinstance(prompt, list) or not prompt:
        raise BadRow(f"column 'prompt' holds {prompt!r:.40}, not a list of chat messages")
    for i, message in enumerate(prompt):
        if not isinstance(message, dict) or not all(
            isinstance(message.get(k), str) for k in ("role", "content")
        ):
            raise BadRow(
                f"message {i} of 'prompt' is not an object with the texts 'role' and 'content'"
            )
    if not any(m["content"].strip() for m in prompt):
        raise BadRow("all messages of 'prompt' are empty")
    truth = model.get("ground_truth") if isinstance(model, dict) else None
    if (
        isinstance(truth, bool)
        or not isinstance(truth, (str, int, float))
        or not str(truth).strip()
    ):
        raise BadRow("column 'reward_model' has no 'ground_truth' that is text or a number")
    messages = [{k: m[k] for k in ("role", "content")} for m in prompt]
    return {"messages": messages, "ground_truth": str(truth), "chat": True}


def _other_columns(columns: dict[str, Any], chat: bool) -> dict[str, Any]:
    """What a row holds besides what a Row has fields for: the entries of `extra_info`, where it is a mapping, and each
    column that no other argument of a reward function stands for. An entry of `extra_info` wins over a column."""
    known = ["data_source", "agent_loop", *(("prompt", "reward_model") if chat else ())]
    extra = columns.get("extra_info")
    if isinstance(extra, dict) or extra is None:
        known.append("extra_info")
    return {name: value for name, value in columns.items() if name not in known} | (
        extra if isinstance(extra, dict) else {}
    )


def _parsed(columns: Any, instruction: str) -> dict[str, Any]:
    """The fields of a Row that its columns hold. Raises BadRow."""
    if isinstance(columns, BadRow):
        raise columns
    if not isinstance(columns, dict):
        raise BadRow(f"a JSON {type(columns).__name__}, not an object with columns")
    # A set converted for RL may keep question and answer beside its messages: those are the more specific.
    if columns.keys() >= {"prompt", "reward_model"}:
        fields = _messages_row(columns)
    elif columns.keys() >= {"question", "answer"}:
        question = [{"role": "user", "content": _text(columns, "question") + instruction}]
        fields = {"messages": question, "ground_truth": final_number(_text(columns, "answer"))}
    else:
        there = ", ".join(map(str, columns))
        raise BadRow(
            f"found the columns {there}, not question+answer or prompt+reward_model; rename the columns"
        )
    try:  # JSON may hold lone surrogates, and one would stop the tokenisation of all rows
        "".join(
            [fields["ground_truth"], *(m["role"] + m["content"] for m in fields["messages"])]
        ).encode()
    except UnicodeEncodeError:
        raise BadRow("its text is not valid Unicode") from None
    named, loop = columns.get("data_source"), columns.get("agent_loop")
    if not isinstance(loop, str | None):
        raise BadRow(f"column 'agent_loop' holds {loop!r:.40}, not a text")
    fields["agent_loop"] = (loop or "").strip()
    fields["extra"] = _other_columns(columns, fields.get("chat", False))
    return fields | ({"data_source": named} if isinstance(named, str) and named else {})


def load_rows(
    spec: str, split: str, cfg: DataConfig, seed: int, report: Report, limit: int = -1
) -> list[Row]:
    """Read and check the rows of `spec`: files, `generator:NAME` or hub ids (`owner/name[:config]`), comma-separated.

    `split` ("train" or "test") chooses among the rows of generators and hub sets; a file holds what it holds. `seed` is
    for generators. Only the first `limit` rows are looked at (-1: all). `report` receives counts and bad rows. Raises
    ConfigError: a source cannot be read or is empty, has only bad rows, or has one bad row and
    `data.bad_rows` is "fail".
    """
    instruction = f" {cfg.instruction}" if cfg.instruction[:1].strip() else cfg.instruction
    sources = [s.strip() for s in spec.split(",") if s.strip()]
    if not sources:
        raise ConfigError(
            f"data: {spec!r} names nothing; give a file, a hub id or generator:word_problems"
        )
    rows: list[Row] = []
    for source in sources:
        raw, good, bad = _read(source, split, cfg, seed), len(rows), len(report.bad)
        for where, columns in raw if limit < 0 else raw[: max(0, limit - report.rows)]:
            index, report.rows = report.rows, report.rows + 1
            try:
                own = {"data_source": source, "where": where} | _parsed(columns, instruction)
                rows.append(Row((0, index), NO_IDS, "", **own))
            except BadRow as e:
                report.skip(where, str(e), cfg)
        if good == len(rows) and report.bad[bad:]:
            (where, reason), count = report.bad[bad], len(report.bad) - bad
            raise ConfigError(
                f"data source {source}: all {count} rows are malformed; mend {where}: {reason}"
            )
    return rows


def _tokenise(texts: list[str], tokenizer: Any, templated: bool) -> list[list[int]]:
    """Token ids of each text. Templates write their own special tokens; plain text gets BOS where the model has it. We
    add BOS ourselves: `add_special_tokens` could also end the prompt with EOS, and doubles a BOS that is there."""
    ids = tokenizer(texts, add_special_tokens=False)["input_ids"] if texts else []
    bos = getattr(tokenizer, "bos_token_id", None)
    if templated or bos is None or tokenizer("a")["input_ids"][:1] != [bos]:
        return ids
    return [one if one[:1] == [bos] else [bos, *one] for one in ids]


def tokenize_rows(
    rows: Sequence[Row],
    tokenizer: Any,
    cfg: DataConfig,
    epoch: int,
    report: Report,
    tools_of: ToolsOf = lambda _: None,
) -> list[Prompt]:
    """Tokenise all rows at once and keep those of at most `data.max_prompt_length` tokens.

    Prompt ids are (epoch, row). With a chat template the prompt ends with its generation prompt; without, it is
    the question with `data.instruction`, or the messages joined by newlines. `report` receives what was left out.
    Raises ConfigError: the template that the config asks for does not exist; a prompt is too long or refused by the
    template and the config says fail; no prompt is left.
    """
    has_template, wish = bool(getattr(tokenizer, "chat_template", None)), cfg.chat_template
    if not has_template and (wish == "always" or (wish == "auto" and any(r.chat for r in rows))):
        mend = "use a chat model, or data.chat_template=never to join the messages as plain text"
        raise ConfigError(
            f"data.chat_template={wish}: the tokenizer has no chat template, and rows need one; {mend}"
        )
    templated = has_template and wish != "never"
    template = (
        tokenizer.apply_chat_template
        if templated
        else lambda said, **_: "\n".join(m["content"] for m in said)
    )
    prompts, pairs = [], []
    for row in rows:
        with located_config_error(f"data row {row.where}, column agent_loop={row.agent_loop!r}: "):
            tools = tools_of(row.agent_loop)
        own: dict[str, Any] = {"tools": tools} if tools else {}
        try:
            pairs.append(
                (row, template(row.messages, tokenize=False, add_generation_prompt=True, **own))
            )
        except (
            Exception
        ) as e:  # templates are programs of the model's author, and refuse roles in their own ways
            report.skip(
                row.where, f"the chat template of model.path refuses it: {first_line(e)}", cfg
            )
    for (row, text), ids in zip(
        pairs, _tokenise([text for _, text in pairs], tokenizer, templated), strict=True
    ):
        if len(ids) <= cfg.max_prompt_length:
            prompts.append(
                replace(row, id=(epoch, row.id[1]), ids=np.asarray(ids, dtype=np.int32), text=text)
            )
        elif cfg.overlong_prompts == "fail":
            more = f"more than data.max_prompt_length={cfg.max_prompt_length}; raise that"
            raise ConfigError(
                f"data row {row.where}: {len(ids)} tokens, {more}, or set data.overlong_prompts=skip"
            )
        else:
            report.overlong.append((row.where, len(ids)))
    if not prompts:
        shown = report.lines()
        raise ConfigError(
            f"{shown[0]}: no prompt is left; mend the rows{';'.join(['', *shown[1:2]])}"
        )
    return prompts


class PromptStream:
    """Prompts in a fixed order, forever, from a position that can be saved.

        stream = PromptStream(prompts, batch_size=64, shuffle=True, seed=0, steps=200)
        for step in range(stream.total_steps):
            batch = stream.next_batch()

    Each epoch is one permutation of all prompts, by (seed, epoch). Batches are always full, of any size: one that
    reaches the end of an epoch goes on in the next. A prompt's id is (epoch, row), so it is unique in the whole run;
    `prompts`, kept in the data's own order, carry their row in `id[1]`, and the epoch in it is replaced.

    `total_steps` is `steps`, or, where that is 0, the fewest that see every prompt `epochs` times; the stream itself does
    not end there, and the last of these steps may take some of the next epoch to be full.
    """

    def __init__(
        self,
        prompts: Sequence[Prompt],
        batch_size: int,
        shuffle: bool,
        seed: int,
        steps: int = 0,
        epochs: int = 0,
    ) -> None:
        self.prompts, self._batch_size, self._shuffle, self._seed = (
            list(prompts),
            batch_size,
            shuffle,
            seed,
        )
        self._go_to(0, 0)
        self.total_steps = steps or math.ceil(len(self.prompts) * epochs / batch_size)

    def __len__(self) -> int:
        """Prompts in one epoch."""
        return len(self.prompts)

    def next_batch(self, size: int | None = None) -> list[Prompt]:
        """The next `size` prompts (None: `batch_size`), with ids (epoch, row)."""
        batch: list[Prompt] = []
        while (missing := (self._batch_size if size is None else size) - len(batch)) > 0:
            part = self._order[self._offset : self._offset + missing]
            batch += [
                replace(self.prompts[i], id=(self._epoch, self.prompts[i].id[1])) for i in part
            ]
            self._offset += len(part)
            if self._offset == len(self.prompts):
                self._go_to(self._epoch + 1, 0)
        return batch

    def state_dict(self) -> dict[str, Any]:
        """The position, and a digest of data and order by which another stream is recognised. JSON-compatible."""
        return {"epoch": self._epoch, "offset": self._offset, "digest": self._digest(self._order)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go to a saved position. The batch size may differ from the saved stream's; data, seed and order may not.
        Raises ConfigError: this stream would not continue the saved one. It stays where it was."""
        if state["digest"] != self._digest(self._order_of(state["epoch"])):
            same = "data.train_files, tokenizer, data.max_prompt_length, data.instruction, data.shuffle, trainer.seed"
            raise ConfigError(
                f"data: the checkpoint has other prompts or another order; resume with the same {same}"
            )
        self._go_to(state["epoch"], state["offset"])

    def _go_to(self, epoch: int, offset: int) -> None:
        self._epoch, self._offset, self._order = epoch, offset, self._order_of(epoch)

    def _order_of(self, epoch: int) -> np.ndarray:
        """Positions of one epoch: int64 [prompts]."""
        if not self._shuffle:
            return np.arange(len(self.prompts))
        return np.random.default_rng([self._seed, epoch]).permutation(len(self.prompts))

    @cached_property
    def _data_digest(self) -> str:
        data = hashlib.sha256()
        for p in self.prompts:
            row = f"{p.id[1]} {len(p.ids)} {p.ground_truth}{p.agent_loop and f' {p.agent_loop}'}\n"
            data.update(row.encode() + p.ids.tobytes())
        return data.hexdigest()

    def _digest(self, order: np.ndarray) -> str:
        # The order is part of it, because numpy does not promise the same permutations in all its versions.
        return hashlib.sha256(
            self._data_digest.encode() + order.astype(np.int64).tobytes()
        ).hexdigest()


@dataclass
class RunData:
    """What a run trains and is evaluated on. `val` holds the prompts of all held-out sets, None without one."""

    stream: PromptStream
    val: list[Prompt] | None
    reports: list[Report]
    val_names: list[str]

    def lines(self) -> list[str]:
        """The reports, for people."""
        return [line for report in self.reports for line in report.lines()]

    def find(self, id: PromptId) -> Prompt | None:
        """The prompt of an id, of any epoch: a prompt's row does not change from one to the next."""
        return self._known.get(id) or self._known.get(id[1])

    @cached_property
    def _known(self) -> dict[PromptId | int, Prompt]:
        return {p.id[1]: p for p in self.stream.prompts} | {p.id: p for p in self.val or ()}


def load_run_data(cfg: Config, tokenizer: Any, tools_of: ToolsOf = lambda _: None) -> RunData:
    """Read, check and tokenise both sets of a run. Held-out prompts have ids (-1, row), those of the second set (-2,
    row), and so on. Generated held-out problems do not depend on `trainer.seed`, so that runs with other seeds are
    evaluated alike. Raises ConfigError: see `load_rows` and `encode`."""
    report, t, steps = Report("training data"), cfg.trainer, cfg.trainer.total_steps or 0
    rows = load_rows(cfg.data.train_files, "train", cfg.data, t.seed, report)
    prompts = tokenize_rows(rows, tokenizer, cfg.data, 0, report, tools_of)
    stream = PromptStream(
        prompts, cfg.data.train_batch_size, cfg.data.shuffle, t.seed, steps, t.total_epochs or 0
    )
    reports, val, known = [report], [], {p.text for p in prompts}
    sets = (
        {MAIN_SET: cfg.data.val_files} if cfg.data.val_files.strip() else {}
    ) | cfg.data.val_sets
    for index, (name, files) in enumerate(sets.items() if cfg.data.val_size else ()):
        held_out = Report("held-out data" if name == MAIN_SET else f"held-out data {name}")
        reports.append(held_out)
        val_rows = load_rows(files, "test", cfg.data, 0, held_out, cfg.data.val_size)
        mine = tokenize_rows(val_rows, tokenizer, cfg.data, set_epoch(index), held_out, tools_of)
        if shared := sum(p.text in known for p in mine):
            held_out.notes += [
                f"warning: {shared} of the {len(mine)} held-out prompts are also in the training data"
            ]
        val += mine
    return RunData(stream, val or None, reports, list(sets))
