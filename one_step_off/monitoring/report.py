"""A run's folder as one page that needs no network: python -m one_step_off.report OUTPUT_DIR.

A run writes report.html at its end. Here the folder becomes one JSON object; the page,
`report.html` beside this file, draws it. What cannot be read is left out: a run may have been
killed at any moment, or still be running."""

import base64
import contextlib
import json
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from one_step_off.config.errors import ConfigError, as_config_error, first_line
from one_step_off.config.text import mask_secrets
from one_step_off.data.images import media_type
from one_step_off.monitoring.loggers import STEP_PREFIX, sample_files
from one_step_off.monitoring.sample_parts import (
    CONTEXT,
    image_files,
    parts_of_row,
    rows_by_episode,
    segment_of,
    tool_call_texts,
    tool_names,
)
from one_step_off.monitoring.summary import Row, speed_summary

TEMPLATE = Path(__file__).with_suffix(".html")
SCRIPT = Path(__file__).with_suffix(".js")  # it draws the page out of the data
MAX_TIMELINE_BYTES = 4 << 20
SHOWN_SAMPLES = 8
SHOWN_CHARACTERS = 2000  # of each text of a sample
LONG_COLUMNS = ("parts", "tool_calls", "images")  # the response has the texts of the first two
SHOWN_SEGMENTS = 60  # of each episode
SHOWN_PARTS = 120  # of each segment
SHOWN_CALLS = 40  # tool calls of each segment
SHOWN_NAMES = 3  # tools whose names stand beside a segment
SHOWN_IMAGES = 4  # of each sample
MAX_IMAGE_BYTES = 1 << 20
SEARCHED_STEPS = 8  # the newest steps, among which the longest samples are searched
MAX_NUMBER = 1e300  # JSON has no infinity


def read_text(path: Path) -> str:
    """The text of a file; "" where there is none."""
    if not path.is_file():
        return ""
    return path.read_bytes().decode("utf-8", errors="replace")


def read_middle(path: Path, max_bytes: int) -> str:
    """The text in the middle of a file, at most `max_bytes`; "" where there is none."""
    if not path.is_file():
        return ""
    with open(path, "rb") as file:
        size = path.stat().st_size
        file.seek(max(0, size - max_bytes) // 2)
        return file.read(max_bytes).decode("utf-8", errors="replace")


def parse_objects(texts: Iterable[str]) -> list[Row]:
    """The JSON objects of these texts, without those that are broken. NaN becomes None, and no
    number is infinite."""
    objects = []
    for text in texts:
        with contextlib.suppress(ValueError, RecursionError):
            parsed = json.loads(
                text.strip().rstrip(","),
                parse_constant=lambda name: None,
                parse_float=_parse_finite_float,
            )
            objects.append(parsed)
    return [parsed for parsed in objects if isinstance(parsed, dict)]


def _parse_finite_float(text: str) -> float:
    return max(-MAX_NUMBER, min(float(text), MAX_NUMBER))


def read_lines(path: Path) -> list[Row]:
    """The rows of a JSON-lines file."""
    return parse_objects(read_text(path).split("\n"))


def longest_samples(folder: Path) -> list[Row]:
    """The longest samples of the newest steps, without secrets."""
    newest_files = list(sample_files(folder, STEP_PREFIX).items())[-SEARCHED_STEPS:]
    samples = []
    for step, path in newest_files:
        for row in read_lines(path):
            if isinstance(row.get("length"), int):
                samples.append(row | {"step": step})
    samples.sort(key=lambda row: -row["length"])
    return [_shortened(row) | _pictures(folder, row) for row in samples[:SHOWN_SAMPLES]]


def _pictures(folder: Path, row: Row) -> Row:
    """The images of a dumped row as data URLs, without those that are too large for the page; {}
    where it has none."""
    urls = []
    for name in image_files(row)[:SHOWN_IMAGES]:
        with contextlib.suppress(OSError):
            image = (folder / name).read_bytes()
            if len(image) <= MAX_IMAGE_BYTES:
                data = base64.b64encode(image).decode()
                urls.append(f"data:{media_type(image)};base64,{data}")
    return {"images": urls} if urls else {}


def _shortened(row: Row) -> Row:
    shortened = {}
    for name, value in row.items():
        if isinstance(value, str):
            shortened[name] = mask_secrets(value)[:SHOWN_CHARACTERS]
        elif name not in LONG_COLUMNS:
            shortened[name] = value
    return shortened


def chosen_episodes(folder: Path) -> list[Row]:
    """The episodes that the page draws, without secrets: of the newest step with samples of several
    turns the one with the highest reward, the lowest, and the most segments."""
    newest_files = list(sample_files(folder, STEP_PREFIX).items())[-SEARCHED_STEPS:]
    for step, path in reversed(newest_files):
        episodes = []
        for rows in rows_by_episode(read_lines(path)):
            is_scored = isinstance(rows[0].get("reward"), (int, float))
            if is_scored and any(parts_of_row(row) for row in rows):
                episodes.append(rows)
        if episodes:
            return [_drawn_episode(rows, step, why) for rows, why in _choose(episodes)]
    return []


def _choose(episodes: list[list[Row]]) -> list[tuple[list[Row], str]]:
    """The episodes to draw, each once, with the reason: "highest reward", for example."""
    # Of those with one reward the one with the most segments shows most.
    highest = max(episodes, key=lambda rows: (rows[0]["reward"], len(rows)))
    lowest = min(episodes, key=lambda rows: (rows[0]["reward"], -len(rows)))
    largest = max(episodes, key=len)
    candidates = [(highest, "highest reward"), (lowest, "lowest reward")]
    if len(largest) > 1:
        candidates.append((largest, "most segments"))
    reasons: dict[int, list[str]] = {}
    chosen: dict[int, list[Row]] = {}
    for rows, reason in candidates:
        chosen[id(rows)] = rows
        reasons.setdefault(id(rows), []).append(reason)
    return [(rows, ", ".join(reasons[key])) for key, rows in chosen.items()]


def _drawn_episode(rows: list[Row], step: int, why: str) -> Row:
    shown = ("prompt_id", "index", "reward", "reward_parts", "ground_truth", "error")
    episode = _shortened({name: rows[0][name] for name in shown if name in rows[0]})
    segments = [_drawn_segment(row) for row in rows[:SHOWN_SEGMENTS]]
    return episode | {
        "step": step,
        "why": why,
        "segments": segments,
        "omitted": len(rows) - len(segments),
    }


def _drawn_segment(row: Row) -> Row:
    index, parent = segment_of(row)
    parts = parts_of_row(row)
    calls = tool_call_texts(row)
    context = {
        "kind": CONTEXT,
        "tokens": row.get("prompt_length"),
        "text": str(row.get("prompt")),
        "versions": [],
    }
    drawn = []
    for part in [context, *parts[:SHOWN_PARTS]]:
        drawn.append(part | {"text": _middle_left_out(mask_secrets(part["text"]))})
    return {
        "index": index,
        "parent": parent,
        "parts": drawn,
        "omitted_parts": max(0, len(parts) - SHOWN_PARTS),
        "call_names": tool_names(row)[:SHOWN_NAMES],
        "calls": [_middle_left_out(mask_secrets(call)) for call in calls[:SHOWN_CALLS]],
        "omitted_calls": max(0, len(calls) - SHOWN_CALLS),
        "finish_reason": row.get("finish_reason"),
    }


def _middle_left_out(text: str) -> str:
    """The text, without its middle where it is too long: both ends say where it belongs."""
    if len(text) <= SHOWN_CHARACTERS:
        return text
    half = SHOWN_CHARACTERS // 2
    left_out = len(text) - 2 * half
    return f"{text[:half]} [... {left_out:,} characters ...] {text[-half:]}"


def collect(folder: Path, error: str = "") -> dict[str, Any]:
    """All that the page shows. `error`: by which error the run ended, if by one."""
    rows = read_lines(folder / "metrics.jsonl")
    timeline = read_middle(folder / "timeline.json", MAX_TIMELINE_BYTES)
    return {
        "columns": _columns(rows),
        "evaluations": read_lines(folder / "evaluations.jsonl"),
        "events": parse_objects(timeline.split("\n")),
        "cut": len(timeline) == MAX_TIMELINE_BYTES,
        "config": mask_secrets(read_text(folder / "config.yaml")),
        "versions": parse_objects([read_text(folder / "versions.json")]),
        "summary": _summary(folder, rows),
        "samples": longest_samples(folder),
        "episodes": chosen_episodes(folder),
        "name": folder.resolve().name,
        "ended": mask_secrets(error),
    }


def _columns(rows: list[Row]) -> dict[str, list[Any]]:
    """Metric name -> its value in each row."""
    names: dict[str, None] = {}  # in the order of their first appearance
    for row in rows:
        for name, value in row.items():
            if isinstance(value, (int, float)):
                names[name] = None
    return {name: [row.get(name) for row in rows] for name in names}


def _summary(folder: Path, rows: list[Row]) -> list[Row]:
    """The run's summary; before its end the speed by the rows so far. [] without rows of a run."""
    summary = parse_objects([read_text(folder / "summary.json")])
    if summary:
        return summary
    try:
        return [speed_summary(rows[1:] or rows)]
    except (KeyError, TypeError, ZeroDivisionError, IndexError):  # no rows, or not those of a run
        return []


def write(folder: Path, error: str = "") -> Path:
    """Write `report.html` of a run's folder; returns its path. Raises OSError."""
    # "<" is escaped, or a sample could end the script that holds the data.
    data = json.dumps(collect(folder, error), allow_nan=False).replace("<", "\\u003c")
    page = TEMPLATE.read_text("utf-8").replace("{{script}}", SCRIPT.read_text("utf-8"))
    # In one move: the run may write its own meanwhile.
    new = folder / f".report.{os.getpid()}.html"
    try:
        new.write_text(page.replace("{{data}}", data), "utf-8")
        return new.replace(folder / "report.html")
    finally:
        new.unlink(missing_ok=True)


@contextlib.contextmanager
def at_the_end(folder: Path, print_line: Callable[[str], None]) -> Iterator[None]:
    """Write the report once the block has ended, however it did. If that fails, one line says
    so."""
    try:
        yield
    finally:
        error = sys.exc_info()[1]
        try:
            write(folder, f"{type(error).__name__}: {first_line(error)}" if error else "")
        except Exception as failure:  # a report that fails must not end the run
            reason = f"{type(failure).__name__}: {first_line(failure)}"
            print_line(f"warning: no report.html: {reason}")


USAGE = """usage: python -m one_step_off.report OUTPUT_DIR
Writes report.html of a run into its folder, and prints its path."""


def main(argv: list[str]) -> int:
    """Run the command; returns its exit code. Raises ConfigError: no run is there, or nothing can
    be written."""
    if argv in (["--help"], ["-h"]):
        print(USAGE)
        return 0
    folder = Path(" ".join(argv))
    if not (folder / "config.yaml").is_file():
        raise ConfigError(
            f"{folder}: no run has written config.yaml there; name the trainer.output_dir of one"
        )
    with as_config_error(
        f"{folder}: no report", "free disk space, or copy the run's folder", OSError
    ):
        print(write(folder))
    return 0
