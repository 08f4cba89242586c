"""The lines of the console, gpu_report.md and gpu_report.json."""

import json
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from one_step_off.tools.gpu_check.check import NO_TIME, Check, Figures, Result, Status
from one_step_off.tools.gpu_check.machine import Facts

REPORT = "gpu_report.md"
DATA = "gpu_report.json"
FIGURES_IN_LINE = 4
"""Figures of a check that its line shows; the report has all."""

CHARS_IN_LINE = 200
"""Of a check's line; the report has everything."""


def line(result: Result) -> str:
    """A check's line: PASS|FAIL|SKIP, name, seconds, and its reason or first figures."""
    shown = result.reason
    if not shown:
        first = list(result.figures.items())[:FIGURES_IN_LINE]
        shown = ", ".join(f"{name} {_text(value)}" for name, value in first)
    text = f"{result.status.value} {result.name} {result.seconds:.1f} s — {shown}"
    return text if len(text) <= CHARS_IN_LINE else f"{text[: CHARS_IN_LINE - 3]}..."


def summary(results: Sequence[Result]) -> str:
    """How many passed, failed and were skipped, and how many of these for want of time."""
    counts = Counter(result.status for result in results)
    text = ", ".join(f"{counts[status]} {status.value}" for status in Status)
    late = sum(result.reason.startswith(NO_TIME) for result in results)
    return f"{text} ({late} not run: {NO_TIME})" if late else text


def write(
    folder: Path, facts: Facts, checks: Sequence[Check], results: Sequence[Result], seconds: float
) -> Path:
    """Write both files into `folder`; returns the path of the Markdown one."""
    data = {
        "seconds": seconds,
        "facts": facts,
        "results": [result.to_json() for result in results],
    }
    (folder / DATA).write_text(json.dumps(data, indent=1) + "\n")
    path = folder / REPORT
    path.write_text(_page(facts, checks, results, seconds), encoding="utf-8")
    return path


def _page(facts: Facts, checks: Sequence[Check], results: Sequence[Result], seconds: float) -> str:
    when = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime())
    titles = {check.name: check.title for check in checks}
    lines = ["# GPU report", "", f"{summary(results)}, in {seconds:.0f} s. {when}", ""]
    lines += ["| check | what it shows | result | seconds | |", "| --- | --- | --- | --- | --- |"]
    for result in results:
        reason = result.reason.replace("|", "\\|")
        cells = [result.name, titles[result.name], result.status.value, f"{result.seconds:.1f}"]
        lines.append(f"| {' | '.join([*cells, reason])} |")
    lines += ["", "## Figures", ""]
    for result in results:
        if result.figures:
            lines += [f"### {result.name}", "", *_figure_lines(result.figures), ""]
    failed = [result for result in results if result.status is Status.FAIL]
    if failed:
        lines += ["## Output of the failed checks", ""]
    for result in failed:
        lines += [f"### {result.name}: {result.reason}", "", "```text", result.log, "```", ""]
    lines += ["## Machine", ""]
    for title, text in facts.items():
        lines += _fact_lines(title, text)
    return "\n".join(lines).rstrip() + "\n"


def _figure_lines(figures: Figures) -> list[str]:
    lines = []
    for name, value in figures.items():
        if isinstance(value, list):
            lines += [f"- {name}:", "", "```text", *map(str, value), "```", ""]
        else:
            lines.append(f"- {name}: {_text(value)}")
    return lines


def _fact_lines(title: str, text: str) -> list[str]:
    if "\n" not in text:
        return [f"- {title}: {text}"]
    return ["", f"{title}:", "", "```text", text, "```", ""]


def _text(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
