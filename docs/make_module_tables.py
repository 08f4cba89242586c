"""Writes the tables of modules in docs/concepts/architecture.md: python docs/make_module_tables.py

Each row is a module and the first sentence of its docstring.
"""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "concepts" / "architecture.md"
BEGIN = "<!-- modules: written by docs/make_module_tables.py from the docstrings -->"
END = "<!-- end of modules -->"


def first_sentence(path: Path) -> str:
    """The first sentence of a module's docstring, in one line; "" without one."""
    docstring = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
    paragraph = " ".join(docstring.partition("\n\n")[0].split())
    sentence = re.split(r"(?<=[a-z0-9)`'\"])\.(?: |$)", paragraph)[0]
    return sentence.replace("|", "\\|").rstrip(".:")


def table(folder: Path) -> list[str]:
    """The lines of one package's table."""
    lines = [f"`{folder.relative_to(ROOT)}/`", "", "| module | what it is for |", "| --- | --- |"]
    for path in sorted(folder.glob("*.py")):
        if path.name != "__init__.py":
            lines.append(f"| `{path.name}` | {first_sentence(path)} |")
    return [*lines, ""]


def packages_of(folder: Path) -> list[Path]:
    """The folders of its packages, in order."""
    return sorted(path.parent for path in folder.rglob("*/__init__.py") if path.parent != folder)


def module_tables() -> str:
    """All tables: the top level, each package, agent_loop and its packages."""
    product = ROOT / "one_step_off"
    loops = ROOT / "agent_loop"
    lines = []
    for folder in [product, *packages_of(product), loops, *packages_of(loops)]:
        lines += table(folder)
    return "\n".join(lines).rstrip()


def with_tables(page: str) -> str:
    """The page with tables of the modules as they are now."""
    before, _, rest = page.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n\n{module_tables()}\n\n{END}{after}"


if __name__ == "__main__":
    PAGE.write_text(with_tables(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
    print(f"wrote the module tables of {PAGE}")
