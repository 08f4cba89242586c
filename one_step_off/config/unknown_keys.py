"""What to say of a key that does not exist: ours for a key of verl's or TRL's, or the one that was meant.

The keys of other trainers stand in `other_keys.yaml`, of which docs/make_reference.py also makes the tables of
docs/reference/from_verl.md and docs/reference/from_trl.md.
"""

import functools
import re
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

PAGES = {"verl": "docs/reference/from_verl.md", "TRL": "docs/reference/from_trl.md"}
COMMON = "common"  # names that are of no one trainer


@dataclass(frozen=True)
class Row:
    """One line of a table. `keys`: theirs, each with the value for which the line holds, None for any; `remark`: what the
    page says behind them; `here`: ours, in Markdown."""

    trainer: str
    table: str
    keys: tuple[tuple[str, str | None], ...]
    remark: str
    here: str


@functools.cache
def rows() -> tuple[Row, ...]:
    """All lines of `other_keys.yaml`, in order."""
    content = yaml.safe_load(
        Path(__file__).with_name("other_keys.yaml").read_text(encoding="utf-8")
    )
    found = []
    for trainer, tables in content.items():
        for table, lines in tables.items():
            for left, here in lines.items():
                names, _, remark = left.partition(" (")
                keys = []
                for name in names.split(", "):
                    key, equals, value = name.partition("=")
                    plain = (
                        equals and "(" not in key
                    )  # GRPOTrainer(model=...) is no key with a value
                    keys.append((key, value.strip('"')) if plain else (name, None))
                found.append(Row(trainer, table, tuple(keys), remark.removesuffix(")"), here))
    return tuple(found)


def table_text(trainer: str, table: str) -> str:
    """A table of a page, in Markdown."""
    lines = [f"| {trainer} | here |", "| --- | --- |"]
    for row in rows():
        if (row.trainer, row.table) == (trainer, table):
            quote = '"' if trainer == "TRL" else ""  # as its users write it, in Python
            shown = [
                key if value is None else f"{key}={quote}{value}{quote}" for key, value in row.keys
            ]
            theirs = ", ".join(f"`{key}`" for key in shown)
            lines.append(f"| {theirs}{f' ({row.remark})' if row.remark else ''} | {row.here} |")
    return "\n".join(lines)


def plain(markdown: str, page: str) -> str:
    """Markdown as a line on a terminal: code without its quotes, and of a link its page."""
    linked = re.sub(r"\[[^]]*\]\(#([\w-]+)\)", rf"{page}#\1", markdown)
    linked = re.sub(r"\[[^]]*\]\(\.\./([\w/-]+\.md)\)", r"docs/\1", linked)
    return linked.replace("`", "")


def _of_value(found: list[Row], key: str, value: Any) -> list[Row]:
    """Of several lines for a key those for this value, or all where it is none of theirs."""
    given = str(value).lower()
    exact = [row for row in found if (key, given) in [(k, str(v).lower()) for k, v in row.keys]]
    return exact or found


def theirs(dotted: str, value: Any, exactly: bool) -> str | None:
    """What to do about a key of another trainer, or None if it is none. Not `exactly`: also about the end of one, as
    actor.optim.lr, or with a flat one in a section of ours, as actor.learning_rate."""
    given, last = dotted.lstrip("+~"), dotted.rpartition(".")[2]
    names = dict.fromkeys(key for row in rows() for key, _ in row.keys)  # each once, in order
    matches = [key for key in names if key == given]
    if not exactly:
        matches += [key for key in names if key.endswith(f".{given}")]
        matches += [key for key in names if key == last]
    if not matches:
        return None
    key = matches[0]
    found = _of_value([row for row in rows() if key in [k for k, _ in row.keys]], key, value)
    trainer = found[0].trainer
    page = PAGES.get(trainer, "")
    ways = "; or ".join(plain(row.here, page) for row in found)
    words = (
        f"use {ways}"
        if found[0].here.startswith("`")
        else f"remove it: {ways.removeprefix('no key: ')}"
    )
    return words if trainer == COMMON else f"{words} ({trainer}'s {key}: {page})"


def distance(a: str, b: str) -> int:
    """How many letters must be added, left out, replaced or swapped with their neighbour to make the one of the other."""
    before: list[int] = []
    row = [*range(len(b) + 1)]
    for i, x in enumerate(a, 1):
        before, last, row = row, before, [i]
        for j, y in enumerate(b, 1):
            row.append(min(before[j] + 1, row[j - 1] + 1, before[j - 1] + (x != y)))
            if i > 1 and j > 1 and x == b[j - 2] and a[i - 2] == y:
                row[j] = min(row[j], last[j - 2] + 1)
    return row[-1]


def is_typo(given: str, name: str) -> bool:
    """Whether `given` may be a slip of the pen for `name`: one letter in four is wrong, three at most, and never all."""
    wrong, allowed = distance(given, name), max(1, min(3, len(given) // 4))
    return wrong <= allowed and wrong < len(given)


def leaves(dotted: str, value: Any) -> Iterator[tuple[str, Any]]:
    """A key and its value; of a mapping all that is in it, by dotted names."""
    if isinstance(value, dict) and value:
        for name, inner in value.items():
            yield from leaves(f"{dotted}.{name}", inner)
    else:
        yield dotted, value


def hint(
    dotted: str, value: Any, keys: Collection[str], sections: Collection[str]
) -> tuple[str, str]:
    """The key as it is best shown, and what to say of it. `keys` and `sections` are those that exist. The right name in
    the wrong section is worth more than a name that looks alike; where nothing is close, nothing is suggested."""
    for name, leaf in leaves(dotted, value):
        if found := theirs(name, leaf, exactly=True):
            return name, found
    section, _, name = dotted.lower().partition(".")
    by_parts = ".".join(dotted.split(".")[:2])
    if by_parts in keys:  # and it is no mapping
        return dotted, f"did you mean {by_parts}?"
    same = [key for key in keys if key.partition(".")[2] == (name or section)]
    if same:
        return dotted, f"did you mean {min(same, key=lambda key: distance(dotted, key))}?"
    near = [key for key in keys if is_typo(name or section, key.partition(".")[2])]
    near_sections = [own for own in sections if not name and is_typo(section, own)]
    if own := near_sections or [key for key in near if key.partition(".")[0] == section]:
        return dotted, f"did you mean {min(own, key=lambda key: distance(dotted, key))}?"
    for leaf_name, leaf in leaves(dotted, value):
        if found := theirs(leaf_name, leaf, exactly=False):
            return leaf_name, found
    if near:
        return dotted, f"did you mean {min(near, key=lambda key: distance(dotted, key))}?"
    return dotted, "remove it" if section in sections else f"use {', '.join(sections)}"
