"""Writes the generated parts of docs/reference/: python docs/make_reference.py

config.md and a page per section in config/ come from the schema. The key tables of from_verl.md and
from_trl.md come from one_step_off/config/other_keys.yaml.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import get_type_hints

from one_step_off.config.loading import KEYS, ConfigKey, entry_keys
from one_step_off.config.schema import Config
from one_step_off.config.unknown_keys import PAGES, table_text

REFERENCE = Path(__file__).parent / "reference"
# Pages with tables of other trainers' keys.
TABLED = [Path(__file__).parents[1] / page for page in PAGES.values()]
TABLE = re.compile(r"(<!-- table: (\w+), ([\w ]+) -->\n\n).*?(\n\n<!-- end of table -->)", re.S)
HEAD = r"""# Configuration reference

<!-- Written by docs/make_reference.py from the schema in one_step_off/config/.
Change it there and run the script again. -->

What does this key mean? `python -m one_step_off.main_ppo --help` prints the same list, and
`--dry-run` prints the resolved config of a run.

A run has one YAML file with sections and keys. Arguments `section.key=value` change single keys.
Every key has a default. A run must set `model.path`, `data.train_files`, and one of
`trainer.total_steps` and `trainer.total_epochs`.

- A mapping replaces the whole default. `section.key.name=value` changes one entry of it.
- `null` means "not set". It is allowed where the type says so or the default is empty.
- `1e-6` and `1_000` are numbers. `010` is 10; `0x10`, `0o10` and `0b10` name their base.
- Where a key takes text, an unquoted `010`, `no` or `1:30` is that text. So are the names in a mapping. Where a key takes
  anything, as in `rollout.engine_kwargs`, an unquoted `yes`, `no`, `on` or `off` is refused: write `true` or `false`, or
  quote the word.
- `${oc.env:NAME}` is the value of an environment variable, `${section.key}` that of another key. `\${` is the text `${`.
  On the command line it must be within single quotes of the shell. Within double quotes of YAML write `\\${`.
- A leading `~` is the home directory in each path, such as `model.path` and `trainer.output_dir`. A path stays as typed,
  with its blanks and commas.
- Files of data, as in `data.train_files`, are separated by commas, or written as a list: `[a.jsonl, b.jsonl]`. If the
  whole text is the name of a file, it is that file. In a list with commas, `\,` is a comma in a name.
"""  # noqa: E501


def _type(key: ConfigKey) -> str:
    """The column "type": the choices of a key, else the kind of its value."""
    if key.metadata["choices"]:
        text = ", ".join(f"`{choice}`" for choice in key.metadata["choices"])
    else:
        text = key.type_text.removeprefix("a ").partition(", as")[0].removesuffix(" or null")
    return f"{text} or `null`" if key.default is None else text


def _default(value: object) -> str:
    """The column "default", as YAML writes the value."""
    if value is None:
        return "`null`"
    if isinstance(value, bool):
        return f"`{str(value).lower()}`"
    if value == "":
        return "empty"
    text = str(value)
    if isinstance(value, (dict, list)):
        text = text.replace("'", "")
    return f"`{text}`"


def _bounds(key: ConfigKey) -> str:
    """The column "bounds": what a number may be."""
    low = key.metadata.get("low")
    high = key.metadata.get("high")
    above = key.metadata.get("above")
    also = key.metadata.get("also")
    if low is not None and low == high:
        return f"only {low:g}"
    bounds = []
    if low is not None:
        bounds.append(f"at least {low:g}")
    if above is not None:
        bounds.append(f"above {above:g}")
    if high is not None:
        bounds.append(f"at most {high:g}")
    if also is not None:
        bounds.append(f"or {also:g}")
    return ", ".join(bounds)


def _entry_table(key: ConfigKey) -> list[str]:
    """The table of what the mapping of a key may hold; [] where that is free."""
    entries = entry_keys(key)
    if not entries:
        return []
    title = f"Entries of `{key.dotted}`:"
    lines = [title, "", "| entry | type | default | bounds | meaning |"]
    lines.append("| --- | --- | --- | --- | --- |")
    return [*lines, *(_row(entry, entry.name) for entry in entries), ""]


def _row(key: ConfigKey, name: str) -> str:
    """The table row of a key."""
    cells = [
        f"`{name}`",
        _type(key),
        _default(key.default),
        _bounds(key),
        key.metadata["help"],
    ]
    escaped = [cell.replace("|", "\\|") for cell in cells]
    return "| " + " | ".join(escaped) + " |"


SECTION_HEAD = """# {section}

<!-- Written by docs/make_reference.py from the schema in one_step_off/config/.
Change it there and run the script again. -->

What does a key of the section `{section}` mean? {description} How values are written is on
[Configuration](../config.md).

| key | type | default | bounds | meaning |
| --- | --- | --- | --- | --- |"""


def _first_sentence(section_class: type) -> str:
    """The first sentence of a section's docstring, in one line."""
    text = " ".join((section_class.__doc__ or "").split())
    return text.partition(". ")[0].rstrip(".") + "."


def _index(sections: dict[str, type]) -> str:
    """The text of config.md: how values are written, and the sections with their keys."""
    lines = [HEAD, "| section | what it sets | keys |", "| --- | --- | --- |"]
    for section, section_class in sections.items():
        names = [f"`{key.dotted}`" for key in KEYS.values() if key.section == section]
        description = _first_sentence(section_class).replace("|", "\\|")
        lines.append(f"| [{section}](config/{section}.md) | {description} | {', '.join(names)} |")
    return "\n".join(lines) + "\n"


def _section_page(section: str, section_class: type) -> str:
    """The text of config/SECTION.md: a table of its keys, and tables of what mappings may hold."""
    description = " ".join((section_class.__doc__ or "").split())
    lines = [SECTION_HEAD.format(section=section, description=description)]
    keys = [key for key in KEYS.values() if key.section == section]
    lines += [_row(key, key.dotted) for key in keys]
    lines.append("")
    for key in keys:
        lines += _entry_table(key)
    return "\n".join(lines).rstrip() + "\n"


def pages() -> dict[Path, str]:
    """The generated pages, with their text."""
    sections = get_type_hints(Config)
    result = {REFERENCE / "config.md": _index(sections)}
    for section, section_class in sections.items():
        page = REFERENCE / "config" / f"{section}.md"
        result[page] = _section_page(section, section_class)
    return result


def with_tables(text: str) -> str:
    """A page with its tables of other trainers' keys replaced by those of other_keys.yaml."""

    def filled(table: re.Match[str]) -> str:
        beginning, trainer, name, end = table.groups()
        return beginning + table_text(trainer, name) + end

    return TABLE.sub(filled, text)


def main() -> None:
    """Write the pages and the tables, and remove the pages of sections that are no more."""
    generated = pages()
    (REFERENCE / "config").mkdir(exist_ok=True)
    for path in (REFERENCE / "config").glob("*.md"):
        if path not in generated:
            path.unlink()
    for path, text in generated.items():
        path.write_text(text, encoding="utf-8")
        print(f"wrote {path}")
    for path in TABLED:
        path.write_text(with_tables(path.read_text(encoding="utf-8")), encoding="utf-8")
        print(f"wrote the tables of {path}")


if __name__ == "__main__":
    main()
