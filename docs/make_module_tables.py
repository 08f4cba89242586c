"""Writes docs/reference/modules*.md, the tables of modules: python docs/make_module_tables.py

Each row is a module and the first sentence of its docstring. Each page holds some packages.
"""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
REFERENCE = ROOT / "docs" / "reference"
# Page -> its title, its question, and the packages that it lists with the packages inside them.
PAGES = {
    "modules_config": (
        "Modules: config and the command line",
        "Which module reads, describes or checks a config, and which is a command?",
        ["one_step_off", "one_step_off/config"],
    ),
    "modules_training": (
        "Modules: data, algorithms and training",
        "Which module holds a sample, a formula, a reward, a model or a trainer?",
        [
            "one_step_off/data",
            "one_step_off/algorithms",
            "one_step_off/rewards",
            "one_step_off/models",
            "one_step_off/training",
        ],
    ),
    "modules_generation": (
        "Modules: engines, rollout and agents",
        "Which module generates, and which runs an agent?",
        [
            "one_step_off/engines",
            "one_step_off/rollout",
            "one_step_off/endpoint",
            "agent_loop",
        ],
    ),
    "modules_run": (
        "Modules: weight sync, processes and the run",
        "Which module moves weights, starts processes, or writes the files of a run?",
        [
            "one_step_off/weight_sync",
            "one_step_off/cluster",
            "one_step_off/checkpoint",
            "one_step_off/monitoring",
            "one_step_off/runtime",
        ],
    ),
    "modules_tools": (
        "Modules: tools",
        "Which module belongs to the planner, the GPU check, the converter or the viewer?",
        ["one_step_off/tools"],
    ),
}
HEAD = """# {title}

<!-- Written by docs/make_module_tables.py from the docstrings. Run it again after a change. -->

{question} [Architecture](../concepts/architecture.md) says how the packages work together.
"""


def first_sentence(path: Path) -> str:
    """The first sentence of a module's docstring, in one line; "" without one."""
    docstring = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
    paragraph = " ".join(docstring.partition("\n\n")[0].split())
    sentence = re.split(r"(?<=[a-z0-9)`'\"])\.(?: |$)", paragraph)[0]
    return sentence.replace("|", "\\|").rstrip(".:")


def table(folder: Path) -> list[str]:
    """The lines of one package's table; [] for a package without modules."""
    paths = [path for path in sorted(folder.glob("*.py")) if path.name != "__init__.py"]
    if not paths:
        return []
    name = folder.relative_to(ROOT)
    rows = [f"| `{path.name}` | {first_sentence(path)} |" for path in paths]
    return [f"## {name}", "", "| module | what it is for |", "| --- | --- |", *rows, ""]


def packages_of(package: str) -> list[Path]:
    """The folder of a package and those of the packages inside it, in order."""
    folder = ROOT / package
    if package == "one_step_off":  # its packages are listed one by one
        return [folder]
    return [folder, *sorted(path.parent for path in folder.rglob("*/__init__.py"))]


def all_packages() -> set[Path]:
    """The folders of all packages."""
    inits = [*ROOT.glob("one_step_off/**/__init__.py"), *ROOT.glob("agent_loop/**/__init__.py")]
    return {path.parent for path in inits}


def pages() -> dict[Path, str]:
    """The generated pages, with their text.

    Raises:
        ValueError: a package is on no page.
    """
    result = {}
    listed = set()
    for name, (title, question, packages) in PAGES.items():
        lines = [HEAD.format(title=title, question=question)]
        for package in packages:
            folders = packages_of(package)
            listed.update(folders)
            for folder in folders:
                lines += table(folder)
        result[REFERENCE / f"{name}.md"] = "\n".join(lines).rstrip() + "\n"
    missing = sorted(str(folder.relative_to(ROOT)) for folder in all_packages() - listed)
    if missing:
        raise ValueError(f"add to PAGES in docs/make_module_tables.py: {', '.join(missing)}")
    return result


if __name__ == "__main__":
    for page, text in pages().items():
        page.write_text(text, encoding="utf-8")
        print(f"wrote {page}")
