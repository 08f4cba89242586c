"""The program stays small: the sizes that CONTRIBUTING.md promises."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PRODUCT = sorted((*ROOT.glob("one_step_off/**/*.py"), *ROOT.glob("agent_loop/**/*.py")))
ALL = [*PRODUCT, *sorted((*ROOT.glob("tests/*.py"), *ROOT.glob("benchmarks/*.py")))]


def code_lines(source: str) -> int:
    """Lines that are neither blank nor a comment nor part of a docstring."""
    lines = source.splitlines()
    for node in ast.walk(ast.parse(source)):
        # A string that stands alone: a docstring, or the text below a name that a type has.
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            lines[node.lineno - 1 : node.end_lineno] = [""] * (node.end_lineno - node.lineno + 1)
    return sum(bool(line.strip()) and not line.strip().startswith("#") for line in lines)


def test_what_counts_as_code() -> None:
    assert code_lines('"""Doc\n\nof three."""\n\n# why\nx = """\ntext"""  # y\ndef f():\n    """Doc."""\n') == 3


def test_the_product_is_small() -> None:
    assert sum(code_lines(path.read_text()) for path in PRODUCT) < 8000


@pytest.mark.parametrize("path", ALL, ids=lambda path: str(path.relative_to(ROOT)))
def test_a_file_is_short_and_so_are_its_functions(path: Path) -> None:
    source = path.read_text()
    assert len(source.splitlines()) <= 600
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            assert node.end_lineno - node.lineno < 60, f"{node.name} has {node.end_lineno - node.lineno + 1} lines"
