"""A run's folder as one page that opens without a network: python -m one_step_off.report OUTPUT_DIR writes its report.html.

A run writes it at its end. Here the folder becomes one JSON object; the page, `report.html` beside this file, draws it.
What cannot be read is left out: a run may have been killed at any moment, or still be at work.
"""

import contextlib
import json
import math
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from one_step_off.config import ConfigError, first_line
from one_step_off.config_checks import masked
from one_step_off.loggers import STEP, numbered
from one_step_off.tracking import Row, speed

MOST_EVENTS, MOST_SAMPLES = 20_000, 8
SAMPLE_BYTES, LETTERS = 50_000_000, 2000  # of samples that are looked through, newest first; of each text that is shown


def text_of(path: Path) -> str:
    """What stands there; empty if nothing does."""
    return path.read_text("utf-8", errors="replace") if path.is_file() else ""


def objects(*texts: str) -> list[Row]:
    """The JSON objects of these texts, without those that are broken; NaN and infinity are None in them."""
    found, plain = [], {"parse_constant": lambda _: None, "parse_float": lambda x: _finite(float(x))}
    for text in texts:
        with contextlib.suppress(ValueError, RecursionError):
            found.append(json.loads(text.strip().rstrip(","), **plain))
    return [row for row in found if isinstance(row, dict)]


def _finite(number: float) -> float | None:
    return number if math.isfinite(number) else None


def longest(folder: Path) -> list[Row]:
    """The longest samples of the newest steps."""
    found, left = [], SAMPLE_BYTES
    for step, path in reversed(numbered(folder, STEP).items()):
        left -= path.stat().st_size
        if left >= 0 or not found:
            rows = objects(*text_of(path).split("\n"))
            found += [row | {"step": step} for row in rows if isinstance(row.get("length"), int)]
            found = sorted(found, key=lambda row: -row["length"])[:MOST_SAMPLES]
    return [{k: masked(v)[:LETTERS] if isinstance(v, str) else v for k, v in row.items()} for row in found]


def collect(folder: Path, ended: str = "") -> dict[str, Any]:
    """All that the page shows. `ended`: by which error the run ended, if by one."""
    names = "metrics.jsonl", "timeline.json", "evaluations.jsonl"
    rows, events, evaluations = (objects(*text_of(folder / name).split("\n")) for name in names)
    summary, versions = (objects(text_of(folder / f"{name}.json")) for name in ("summary", "versions"))
    left_out = max(0, len(events) - MOST_EVENTS)
    columns = dict.fromkeys(k for row in rows for k, v in row.items() if isinstance(v, (int, float)))
    found = {"columns": {name: [row.get(name) for row in rows] for name in columns}, "evaluations": evaluations}
    found |= {"events": events[left_out // 2 :][:MOST_EVENTS], "left_out": left_out, "samples": longest(folder)}
    found |= {"config": masked(text_of(folder / "config.yaml")), "versions": versions, "ended": masked(ended)}
    found |= {"whole": bool(summary), "failed": (folder / "error.log").exists(), "name": folder.resolve().name}
    with contextlib.suppress(KeyError, TypeError, ZeroDivisionError, IndexError):  # none, or rows of something else
        summary = summary or [speed(rows[1:] or rows)]
    return found | {"summary": summary, "written": time.strftime("%Y-%m-%d %H:%M")}


def write(folder: Path, ended: str = "") -> Path:
    """Write `report.html` of a run's folder; returns its path. Raises OSError."""
    data = json.dumps(collect(folder, ended), allow_nan=False).replace("<", "\\u003c")  # no end of the script in it
    path, page = folder / "report.html", Path(__file__).with_suffix(".html").read_text("utf-8")
    path.write_text(page.replace("{{data}}", data), "utf-8")
    return path


@contextlib.contextmanager
def at_the_end(folder: Path, say: Callable[[str], None]) -> Iterator[None]:
    """Write the report once the block has ended, however it did. Where it cannot be written one line says so."""
    ended = ""
    try:
        yield
    except BaseException as e:
        ended = f"{type(e).__name__}: {first_line(e)}"
        raise
    finally:
        try:
            write(folder, ended)
        except Exception as e:  # whatever it is, the run is what counts
            say(f"warning: no report.html: {type(e).__name__}: {first_line(e)}")


def main(argv: list[str]) -> int:
    """Run the command; returns its exit code. Raises ConfigError: no run is there, or nothing can be written."""
    folder = Path(argv[0] if argv else "")
    if len(argv) != 1 or not any((folder / name).is_file() for name in ("config.yaml", "metrics.jsonl")):
        raise ConfigError(
            f"{' '.join(argv) or 'no folder'}: no run has written there; give the trainer.output_dir of one"
        )
    try:
        print(write(folder))
    except OSError as e:
        raise ConfigError(f"{e.filename or folder}: {e.strerror}; mend it, or copy the run's folder") from e
    return 0


if __name__ == "__main__":
    from one_step_off.main_ppo import exit_code

    sys.exit(exit_code(main, sys.argv[1:]))
