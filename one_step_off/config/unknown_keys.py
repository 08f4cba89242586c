"""What to suggest for an unknown key: what replaced a key of an earlier version, our key for a key
of verl or TRL, or the key that was probably meant.

The keys of other trainers are in `other_keys.yaml`. docs/make_reference.py generates the tables of
docs/reference/from_verl.md and docs/reference/from_trl.md from the same file.
"""

import functools
import re
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from one_step_off.config.sections.rollout import (
    ENGINE_FIELDS_SET_BY_US,
    UNSAFE_ENGINE_FIELDS,
    key_of_vllm_field,
)
from one_step_off.config.text import format_value

PAGES = {"verl": "docs/reference/from_verl.md", "TRL": "docs/reference/from_trl.md"}
REMOVED_KEYS = {
    "pipeline.partial_rollout": (
        "use weight_sync.in_flight=recompute and pipeline.staleness=2 or more; "
        "where it is false or null, remove it"
    ),
    "pipeline.max_carry": (
        "use pipeline.staleness, which is larger by 1; where it is null, remove it"
    ),
    "placement.share_idle_cores": "remove it: rollout and trainer keep to their own cores",
    "rollout.oversample": (
        "remove it: as many prompts are in progress as the KV caches have room for and "
        "pipeline.staleness allows"
    ),
    "trainer.warm_spares": "remove it: a rank that died is started again",
    "weight_sync.receive_ahead": "remove it: weights travel while the replicas pause",
    "weight_sync.receive_ahead_mb": "remove it: weights travel while the replicas pause",
    "weight_sync.sender": "remove it: each rank sends its own shard",
    "weight_sync.canary_overlap": "remove it: the canary is scored before the next prompts",
}
"""Key of an earlier version -> what to write in its place. A config that names one is refused with
this sentence."""

COMMON = "common"  # names that many trainers use
ENGINE_ARGUMENTS = "engine_arguments"
MAX_LONGER = 3  # keys that are suggested for a part of their names
MIN_LETTERS = 4
"""Of a name that is taken for a misspelled one of another section."""

# Where people write arguments of the engine.
ENGINE_SECTIONS = ("", "rollout", "teacher", "vllm", "engine", "engine_kwargs")


@dataclass(frozen=True)
class Row:
    """One line of a table.

    Attributes:
        keys: keys of the other trainer, each with the value for which the line holds; None: any
            value.
        remark: what the page says behind the keys.
        here: our answer, in Markdown.
    """

    trainer: str
    table: str
    keys: tuple[tuple[str, str | None], ...]
    remark: str
    here: str


@functools.cache
def _content() -> dict[str, Any]:
    path = Path(__file__).with_name("other_keys.yaml")
    return yaml.safe_load(path.read_text(encoding="utf-8"))


@functools.cache
def rows() -> tuple[Row, ...]:
    """All lines of `other_keys.yaml`, in order."""
    result = []
    for trainer, tables in _content().items():
        if trainer == ENGINE_ARGUMENTS:
            continue
        for table, lines in tables.items():
            for their_keys, here in lines.items():
                names, _, remark = their_keys.partition(" (")
                keys = tuple(_key_and_value(name) for name in names.split(", "))
                result.append(Row(trainer, table, keys, remark.removesuffix(")"), here))
    return tuple(result)


def _key_and_value(text: str) -> tuple[str, str | None]:
    """ "KEY=VALUE" or "KEY" as a pair; the value is None where there is none."""
    key, equals, value = text.partition("=")
    is_call = "(" in key  # GRPOTrainer(model=...) is not a key with a value
    if equals and not is_call:
        return key, value.strip('"')
    return text, None


def table_text(trainer: str, table: str) -> str:
    """A table of a documentation page, in Markdown."""
    lines = [f"| {trainer} | here |", "| --- | --- |"]
    quote = '"' if trainer == "TRL" else ""  # as its users write it, in Python
    for row in rows():
        if (row.trainer, row.table) != (trainer, table):
            continue
        shown = []
        for key, value in row.keys:
            shown.append(f"`{key}`" if value is None else f"`{key}={quote}{value}{quote}`")
        remark = f" ({row.remark})" if row.remark else ""
        lines.append(f"| {', '.join(shown)}{remark} | {row.here} |")
    return "\n".join(lines)


def markdown_to_text(markdown: str, page: str) -> str:
    """Markdown for a terminal: code without backquotes, and links replaced by the page they lead
    to.
    """
    text = re.sub(r"\[[^]]*\]\(#([\w-]+)\)", rf"{page}#\1", markdown)
    text = re.sub(r"\[[^]]*\]\(\.\./([\w/-]+\.md)\)", r"docs/\1", text)
    return text.replace("`", "")


def _rows_for_value(candidates: list[Row], key: str, value: Any) -> list[Row]:
    """Of several lines for one key, those for this value; all of them where none is."""
    given = str(value).lower()
    exact = []
    for row in candidates:
        if (key, given) in [(name, str(wanted).lower()) for name, wanted in row.keys]:
            exact.append(row)
    return exact or candidates


def _matching_keys(dotted: str, exactly: bool) -> list[str]:
    """The keys of other trainers that `dotted` may be, best first."""
    given = dotted.lstrip("+~")  # verl's prefixes
    names = dict.fromkeys(key for row in rows() for key, _ in row.keys)  # each once, in order
    # An entry of a mapping is answered as the mapping.
    matches = [key for key in names if key == given or given.startswith(f"{key}.")]
    if not exactly:
        last_part = dotted.rpartition(".")[2]
        matches += [key for key in names if key.endswith(f".{given}")]
        matches += [key for key in names if key == last_part]
    return matches


def other_trainer_hint(dotted: str, value: Any, exactly: bool) -> str | None:
    """What to do about a key of another trainer; None if it is not one.

    With `exactly` the whole key must match. Otherwise its end may match too, as in actor.optim.lr,
    or a flat key inside a section of ours, as in actor.learning_rate.
    """
    matches = _matching_keys(dotted, exactly)
    if not matches:
        return None
    key = matches[0]
    candidates = [row for row in rows() if key in [name for name, _ in row.keys]]
    answers = _rows_for_value(candidates, key, value)
    trainer = answers[0].trainer
    page = PAGES.get(trainer, "")
    text = "; or ".join(markdown_to_text(row.here, page) for row in answers)
    has_own_key = answers[0].here.startswith("`")
    advice = f"use {text}" if has_own_key else f"remove it: {text.removeprefix('no key: ')}"
    if trainer == COMMON:
        return advice
    return f"{advice} ({trainer}'s {key}: {page})"


def rows_of_key(trainer: str, key: str, value: Any) -> list[Row]:
    """The lines for a key of this trainer, or one that many use, with this value; [] where there is
    none, or none for this value."""
    candidates = [row for row in rows() if row.trainer in (trainer, COMMON)]
    candidates = [row for row in candidates if key in [name for name, _ in row.keys]]
    exact = _rows_for_value(candidates, key, value)
    wanted = str(value).lower()
    return [row for row in exact if str(dict(row.keys)[key] or value).lower() == wanted]


def engine_argument(dotted: str) -> str:
    """The field of vLLM's engine arguments that a key means, as `rollout.enforce_eager` does; ""
    where it means none, or one that is refused whatever its value."""
    given = dotted.lstrip("+~-").replace("-", "_")
    given = given.removeprefix("actor_rollout_ref.").removeprefix("rollout.engine_kwargs.vllm.")
    section, _, name = given.rpartition(".")
    if section not in ENGINE_SECTIONS:
        return ""
    for candidate in (name, name.removeprefix("vllm_")):
        refused = candidate in (*ENGINE_FIELDS_SET_BY_US, *UNSAFE_ENGINE_FIELDS)
        has_key = key_of_vllm_field(candidate) is not None
        if candidate in _content()[ENGINE_ARGUMENTS].split() and not refused and not has_key:
            return candidate
    return ""


def distance(a: str, b: str) -> int:
    """Edit distance: letters to insert, delete, replace, or swap with their neighbor, to turn `a`
    into `b`.
    """
    previous_row: list[int] = []
    row = [*range(len(b) + 1)]
    for i, letter_a in enumerate(a, 1):
        before_previous = previous_row
        previous_row = row
        row = [i]
        for j, letter_b in enumerate(b, 1):
            deletion = previous_row[j] + 1
            insertion = row[j - 1] + 1
            replacement = previous_row[j - 1] + (letter_a != letter_b)
            cost = min(deletion, insertion, replacement)
            swapped = i > 1 and j > 1 and letter_a == b[j - 2] and a[i - 2] == letter_b
            if swapped:
                cost = min(cost, before_previous[j - 2] + 1)
            row.append(cost)
    return row[-1]


def is_typo(given: str, name: str) -> bool:
    """Whether `given` may be a misspelled `name`: one letter in four differs, three at most, never
    all.
    """
    allowed = max(1, min(3, len(given) // 4))
    if abs(len(given) - len(name)) > allowed:  # a key of 5,000 letters would take minutes
        return False
    difference = distance(given, name)
    return difference <= allowed and difference < len(given)


def is_part(given: str, key: str) -> bool:
    """Whether a name leaves out words, or the ends of words, of a key, as `batch_size` does of
    `data.train_batch_size` and `temp` of `rollout.temperature`."""
    words = iter(key.partition(".")[2].split("_"))
    parts = given.split("_")
    is_long = all(len(part) >= MIN_LETTERS - 1 for part in parts)
    return is_long and all(any(word.startswith(part) for word in words) for part in parts)


def leaves(dotted: str, value: Any) -> Iterator[tuple[str, Any]]:
    """A key and its value; of a mapping all its entries, by dotted names."""
    if isinstance(value, dict) and value:
        for name, inner in value.items():
            yield from leaves(f"{dotted}.{name}", inner)
    else:
        yield dotted, value


def hint(
    dotted: str, value: Any, keys: Collection[str], sections: Collection[str]
) -> tuple[str, str]:
    """The unknown key as it is best shown, and what to suggest.

    The right name in the wrong section is preferred to a name that looks alike. Where nothing is
    close, no key is suggested.

    Args:
        dotted: the unknown key.
        value: its value; a mapping where it stands for several keys.
        keys, sections: those that exist.
    """
    exact = _other_hint(dotted, value, exactly=True)
    if exact:
        return exact
    first_two_parts = ".".join(dotted.split(".")[:2])
    if first_two_parts in keys:  # and its value is not a mapping
        return dotted, f"did you mean {first_two_parts}?"
    section, _, name = dotted.lower().partition(".")
    wanted_name = name or section
    longer = [key for key in keys if key.startswith(f"{section}.") and is_part(name, key)]
    same_name = _keys_named(wanted_name, keys, has_section=bool(name))
    if same_name and ("_" not in name or not longer):
        return dotted, _suggest_closest(dotted, same_name)
    of_engine = _engine_hint(dotted, value)
    if of_engine:
        return of_engine
    similar = [key for key in keys if is_typo(wanted_name, key.partition(".")[2])]
    similar_in_section = [key for key in similar if key.partition(".")[0] == section]
    similar_sections = [known for known in sections if not name and is_typo(section, known)]
    if similar_sections or similar_in_section:
        return dotted, _suggest_closest(dotted, similar_sections or similar_in_section)
    partial = _other_hint(dotted, value, exactly=False)
    if partial:
        return partial
    if longer:
        return dotted, f"did you mean {' or '.join(longer[:MAX_LONGER])}?"
    if similar and len(wanted_name) >= MIN_LETTERS:
        return dotted, _suggest_closest(dotted, similar)
    if section in sections:
        return dotted, "remove it"
    return dotted, f"use {', '.join(sections)}"


def _other_hint(dotted: str, value: Any, exactly: bool) -> tuple[str, str] | None:
    """As `hint`, for a key of another trainer; None: it is none."""
    for name, leaf in leaves(dotted, value):
        found = other_trainer_hint(name, leaf, exactly)
        if found:
            return name, found
    return None


def _engine_hint(dotted: str, value: Any) -> tuple[str, str] | None:
    """As `hint`, for an argument of vLLM's engine; None: it is none."""
    for name, leaf in leaves(dotted, value):
        argument = engine_argument(name)
        if argument:
            owner = "teacher" if name.startswith("teacher.") else "rollout"
            written = "VALUE" if leaf is None else format_value(leaf)
            return name, f"use {owner}.engine_kwargs.{argument}={written} (vLLM's)"
    return None


def _keys_named(name: str, keys: Collection[str], has_section: bool) -> list[str]:
    """The keys of that name in any section. Without a section, sft's keys come only where no other
    section has the name: they stand in for those of data and actor."""
    same_name = [key for key in keys if key.partition(".")[2] == name]
    if has_section:
        return same_name
    return [key for key in same_name if not key.startswith("sft.")] or same_name


def _suggest_closest(dotted: str, names: Collection[str]) -> str:
    closest = min(names, key=lambda name: distance(dotted, name))
    return f"did you mean {closest}?"
