"""Writes docs/config.md from the schema, and the tables of docs/from_verl.md and docs/from_trl.md from
one_step_off/config/other_keys.yaml: python docs/make_reference.py"""

from __future__ import annotations

import re
from pathlib import Path
from typing import get_type_hints

from one_step_off.config.loading import KEYS, ConfigKey
from one_step_off.config.schema import Config
from one_step_off.config.unknown_keys import PAGES, table_text

PAGE = Path(__file__).parent / "reference" / "config.md"
# Pages with tables of other trainers' keys.
TABLED = [Path(__file__).parents[1] / page for page in PAGES.values()]
TABLE = re.compile(r"(<!-- table: (\w+), ([\w ]+) -->\n\n).*?(\n\n<!-- end of table -->)", re.S)
HEAD = """# Configuration reference

<!-- Made by docs/make_reference.py from one_step_off/config/schema.py: change it there, then run the script again. -->

A run is one YAML file of sections and keys, and arguments `section.key=value` over it. Every key has a default; a
run must at least set `model.path`, `data.train_files`, and one of `trainer.total_steps` and `trainer.total_epochs`.

- A mapping replaces the default as a whole; `section.key.name=value` changes one entry of it.
- `null` means "not set" and is allowed where the type says so or the default is empty. Numbers like `1e-6` are numbers.
- `${oc.env:NAME}` reads an environment variable, `${section.key}` another key.
- A leading `~` in a path of `model.path`, `data.train_files`, `data.val_files`,
  `trainer.output_dir` or `trainer.resume` is the home directory.

`python -m one_step_off.main_ppo --help` prints the same list, and `--dry-run` the resolved config of a run.
"""


def _type(key: ConfigKey) -> str:
    words = ", ".join(f"`{choice}`" for choice in key.meta["choices"] or ())
    return (words or key.kind.removeprefix("a ").partition(", as")[0].removesuffix(" or null")) + (
        " or `null`" if key.default is None else ""
    )


def _default(value: object) -> str:
    if value is None or isinstance(value, bool):
        return f"`{ {None: 'null', True: 'true', False: 'false'}[value] }`"
    if value == "":
        return "empty"
    return (
        "`" + (str(value).replace("'", "") if isinstance(value, (dict, list)) else str(value)) + "`"
    )


def _bounds(key: ConfigKey) -> str:
    low, high, above = (key.meta.get(name) for name in ("low", "high", "above"))
    if low is not None and low == high:
        return f"only {low:g}"
    parts = [
        f"at least {low:g}" if low is not None else "",
        f"above {above:g}" if above is not None else "",
        f"at most {high:g}" if high is not None else "",
    ]
    also = key.meta.get("also")
    return ", ".join(part for part in parts if part) + ("" if also is None else f", or {also:g}")


def page() -> str:
    """The whole text of docs/config.md."""
    lines = [HEAD]
    for section, cls in get_type_hints(Config).items():
        lines += [f"## {section}", "", (cls.__doc__ or "").strip(), ""]
        lines += ["| key | type | default | bounds | meaning |", "| --- | --- | --- | --- | --- |"]
        for key in KEYS.values():
            if key.section == section:
                cells = (
                    f"`{key.dotted}`",
                    _type(key),
                    _default(key.default),
                    _bounds(key),
                    key.meta["help"],
                )
                lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
        lines.append("")
    return "\n".join(lines).rstrip() + "\n"


def with_tables(text: str) -> str:
    """A page with its tables of other trainers' keys as they are to be."""
    return TABLE.sub(lambda m: m[1] + table_text(m[2], m[3]) + m[4], text)


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
    print(f"wrote {PAGE}")
    for path in TABLED:
        path.write_text(with_tables(path.read_text(encoding="utf-8")), encoding="utf-8")
        print(f"wrote the tables of {path}")
