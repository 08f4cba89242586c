"""The recipes of examples/ are short, as the pages show them, and know nothing of training."""

from __future__ import annotations

import ast
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
RECIPES = sorted((ROOT / "examples" / "agents").glob("*.py"))
ENVIRONMENTS = sorted((ROOT / "examples" / "environments").glob("*.py"))
ADAPTERS = sorted((ROOT / "agent_loop" / "adapters").glob("*_agent.py"))
PAGES = (
    "agent_recipes.md",
    "agent_recipes_frameworks.md",
    "environments_by_name.md",
    "environments_openenv.md",
)
MAX_LINES = 30
OURS = {"one_step_off", "agent_loop", "benchmarks", "tests"}
PACKAGES_OF_ADAPTERS = {"aiohttp", "verifiers"}


def name_of(path: Path) -> str:
    return path.name


def imported(path: Path) -> set[str]:
    """The top names of all modules that a file imports."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names.add((node.module or "").partition(".")[0])
    return names


@pytest.mark.parametrize("path", RECIPES, ids=name_of)
def test_a_recipe_has_at_most_30_lines(path):
    lines = [line for line in path.read_text().splitlines() if line.strip()]
    assert len(lines) <= MAX_LINES


@pytest.mark.parametrize("path", [*RECIPES, *ENVIRONMENTS], ids=name_of)
def test_a_page_shows_it_as_it_is(path):
    pages = [(ROOT / "docs" / "tutorials" / name).read_text() for name in PAGES]
    shown = f"```python\n# {path.relative_to(ROOT)}\n{path.read_text()}```"
    assert any(shown in page for page in pages), f"a page must show {path.name} as it is"


@pytest.mark.parametrize("path", [*RECIPES, *ENVIRONMENTS], ids=name_of)
def test_it_imports_nothing_of_ours(path):
    assert imported(path) & OURS == set()


@pytest.mark.parametrize("path", ADAPTERS, ids=name_of)
def test_an_adapter_runs_where_only_its_project_is(path):
    allowed = PACKAGES_OF_ADAPTERS | set(sys.stdlib_module_names)
    assert imported(path) <= allowed
