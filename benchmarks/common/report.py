"""Parts of reports: medians with their range, Markdown tables, result files, plots."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

BLUE = "#4878cf"
ORANGE = "#ee854a"
GREEN = "#6acc64"
GREY = "#8c8c8c"
RED = "#c44e52"


def spread(values: Sequence[float], name: str = "runs") -> dict[str, Any]:
    """Median, smallest and largest value, and under `name` all values."""
    return {
        "median": statistics.median(values),
        "min": min(values),
        "max": max(values),
        name: list(values),
    }


def with_range(numbers: dict[str, Any], form: str) -> str:
    """A cell like "2 (1 to 3)" from what `spread` returns. `form`: a format like "{:.3f}"."""
    median, smallest, largest = (form.format(numbers[key]) for key in ("median", "min", "max"))
    return f"{median} ({smallest} to {largest})"


def markdown_table(headings: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """The lines of a table in Markdown."""
    lines = [_table_row(headings), "|" + " --- |" * len(headings)]
    return lines + [_table_row(row) for row in rows]


def _table_row(cells: Sequence[str]) -> str:
    return "|" + "".join(f" {cell} |" if cell else " |" for cell in cells)


def row_not_run(name: str, reason: str, columns: int) -> str:
    """A row of a Markdown table with `columns` columns, for an arm without figures."""
    return f"| {name} | {reason} |" + " |" * (columns - 2)


def write_results(out: Path, result: dict[str, Any], markdown: str, indent: int = 2) -> None:
    """Write result.json and result.md."""
    (out / "result.json").write_text(json.dumps(result, indent=indent) + "\n")
    (out / "result.md").write_text(markdown)


def pyplot() -> Any:
    """matplotlib.pyplot, drawing into files without a display."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as module

    return module


def save_figure(figure: Any, path: Path, dpi: int = 130) -> None:
    """Write a figure as a PNG file and free it."""
    figure.savefig(path, dpi=dpi, bbox_inches="tight")
    pyplot().close(figure)
