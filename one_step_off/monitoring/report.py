"""A run's folder as one page that opens without a network: python -m one_step_off.report OUTPUT_DIR writes its report.html.

A run writes it at its end. Here the folder becomes one JSON object; the page, `report.html` beside this file, draws it.
What cannot be read is left out: a run may have been killed at any moment, or still be at work.
"""

import contextlib
import io
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from one_step_off.config.schema import ConfigError, as_config_error, first_line
from one_step_off.config.validation import mask_secrets
from one_step_off.monitoring.loggers import STEP, numbered
from one_step_off.monitoring.tracker import Row, speed

# Bytes of the timeline; samples, their texts' letters, and the newest steps that are looked through for them.
MOST_BYTES, SHOWN, LETTERS, NEWEST = 4 << 20, 8, 2000, 8


def text_of(path: Path, most: int = -1) -> str:
    """What stands there, or the middle of it, `most` bytes; empty if nothing does."""
    with open(path, "rb") if path.is_file() else io.BytesIO() as f:
        f.seek(max(0, f.seek(0, io.SEEK_END) - most) // 2 if most > 0 else 0)
        return f.read(most).decode("utf-8", errors="replace")


def objects(*texts: str) -> list[Row]:
    """The JSON objects of these texts, without those that are broken. NaN is None in them, and no number infinite."""
    found, plain = (
        [],
        {
            "parse_constant": lambda _: None,
            "parse_float": lambda x: max(-1e300, min(float(x), 1e300)),
        },
    )
    for text in texts:
        with contextlib.suppress(ValueError, RecursionError):
            found.append(json.loads(text.strip().rstrip(","), **plain))
    return [row for row in found if isinstance(row, dict)]


def longest(folder: Path) -> list[Row]:
    """The longest samples of the newest steps."""
    files = list(numbered(folder, STEP).items())[-NEWEST:]
    rows = [
        row | {"step": step} for step, path in files for row in objects(*text_of(path).split("\n"))
    ]
    found = sorted(
        (row for row in rows if isinstance(row.get("length"), int)), key=lambda row: -row["length"]
    )
    return [
        {k: mask_secrets(v)[:LETTERS] if isinstance(v, str) else v for k, v in row.items()}
        for row in found[:SHOWN]
    ]


def collect(folder: Path, ended: str = "") -> dict[str, Any]:
    """All that the page shows. `ended`: by which error the run ended, if by one."""
    rows, evaluations = (
        objects(*text_of(folder / f"{name}.jsonl").split("\n"))
        for name in ("metrics", "evaluations")
    )
    timeline = text_of(folder / "timeline.json", MOST_BYTES)
    summary, versions = (
        objects(text_of(folder / f"{name}.json")) for name in ("summary", "versions")
    )
    with contextlib.suppress(
        KeyError, TypeError, ZeroDivisionError, IndexError
    ):  # no rows, or of something else
        summary = summary or [speed(rows[1:] or rows)]
    columns = dict.fromkeys(
        k for row in rows for k, v in row.items() if isinstance(v, (int, float))
    )
    found = {
        "columns": {name: [row.get(name) for row in rows] for name in columns},
        "evaluations": evaluations,
    }
    found |= {"events": objects(*timeline.split("\n")), "cut": len(timeline) == MOST_BYTES}
    found |= {
        "config": mask_secrets(text_of(folder / "config.yaml")),
        "versions": versions,
        "summary": summary,
    }
    return found | {
        "samples": longest(folder),
        "name": folder.resolve().name,
        "ended": mask_secrets(ended),
    }


def write(folder: Path, ended: str = "") -> Path:
    """Write `report.html` of a run's folder; returns its path. Raises OSError."""
    data = json.dumps(collect(folder, ended), allow_nan=False).replace(
        "<", "\\u003c"
    )  # no end of the script in it
    path, page = folder / "report.html", Path(__file__).with_suffix(".html").read_text("utf-8")
    path.write_text(page.replace("{{data}}", data), "utf-8")
    return path


@contextlib.contextmanager
def at_the_end(folder: Path, say: Callable[[str], None]) -> Iterator[None]:
    """Write the report once the block has ended, however it did. Where it cannot be written one line says so."""
    try:
        yield
    finally:
        error = sys.exc_info()[1]
        try:
            write(folder, f"{type(error).__name__}: {first_line(error)}" if error else "")
        except Exception as e:  # whatever it is, the run is what counts
            say(f"warning: no report.html: {type(e).__name__}: {first_line(e)}")


def main(argv: list[str]) -> int:
    """Run the command; returns its exit code. Raises ConfigError: no run is there, or nothing can be written."""
    folder = Path(" ".join(argv))
    if not (folder / "config.yaml").is_file():
        raise ConfigError(
            f"{folder}: no run has written config.yaml there; name the trainer.output_dir of one"
        )
    with as_config_error(f"{folder}: no report", "mend it, or copy the run's folder", OSError):
        print(write(folder))
    return 0
