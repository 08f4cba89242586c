"""Files and functions stay short: the sizes that CONTRIBUTING.md promises."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
FOLDERS = ("one_step_off", "agent_loop", "tests", "benchmarks")
MAX_FILE_LINES = 800
MAX_FUNCTION_LINES = 80
FILES = sorted(path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py"))


def function_lengths(source: str) -> list[tuple[str, int]]:
    """The name of each function, and its lines from `def` to the last one."""
    lengths = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            lengths.append((node.name, node.end_lineno - node.lineno + 1))
    return lengths


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_a_file_is_short_and_so_are_its_functions(path: Path) -> None:
    source = path.read_text()
    assert len(source.splitlines()) <= MAX_FILE_LINES
    for name, length in function_lengths(source):
        assert length <= MAX_FUNCTION_LINES, f"{name} has {length} lines"


def test_no_file_has_a_marker_of_a_merge_conflict() -> None:
    texts = [*FILES, *(ROOT / "docs").rglob("*.md"), *ROOT.glob("*.md"), *ROOT.glob("*.cfg")]
    for path in texts:
        for line in path.read_text(encoding="utf-8").splitlines():
            assert not line.startswith(("<" * 7 + " ", ">" * 7 + " ")), path
