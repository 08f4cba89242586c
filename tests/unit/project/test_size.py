"""Files and functions stay short: the sizes that CONTRIBUTING.md promises."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
PRODUCT = sorted((*ROOT.glob("one_step_off/**/*.py"), *ROOT.glob("agent_loop/**/*.py")))
ALL = [*PRODUCT, *sorted((*ROOT.glob("tests/*.py"), *ROOT.glob("benchmarks/**/*.py")))]


@pytest.mark.parametrize("path", ALL, ids=lambda path: str(path.relative_to(ROOT)))
def test_a_file_is_short_and_so_are_its_functions(path: Path) -> None:
    source = path.read_text()
    assert len(source.splitlines()) <= 600
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            assert node.end_lineno - node.lineno < 60, (
                f"{node.name} has {node.end_lineno - node.lineno + 1} lines"
            )
