"""Read a run's samples: python -m one_step_off.view OUTPUT_DIR [--step N | --val V] [--best K] [--worst K] [--longest K].

Without a choice it shows the 3 best, the 3 worst and the longest sample of the last step.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from one_step_off.config import ConfigError
from one_step_off.loggers import SAMPLES, step_file, val_file

DEFAULT = {"best": 3, "worst": 3, "longest": 1}


def find_file(folder: str, step: int | None, val: int | None) -> Path:
    """The samples of a step (counted from 0, as in metrics.jsonl), of an evaluation, or of the last step.

    Raises:
        ConfigError: no such folder or file; says what there is.
    """
    root = Path(folder)
    if not root.is_dir():
        raise ConfigError(f"{folder}: no such folder; give the trainer.output_dir of a run")
    steps, vals = _numbers(root, "step_"), _numbers(root, "val_v")
    if val is not None:
        if val not in vals:
            raise ConfigError(f"--val {val}: {folder} has no evaluation of that version; {_there('there are', vals)}")
        return root / SAMPLES / val_file(val)
    if not steps:
        raise ConfigError(f"{folder}: holds no samples of any step; a run writes them with logging.sample_dump=true")
    if step is not None and step not in steps:
        raise ConfigError(f"--step {step}: {folder} has no samples of that step; {_there('there are', steps)}")
    return root / SAMPLES / step_file(steps[-1] if step is None else step)


def _numbers(root: Path, prefix: str) -> list[int]:
    stems = (path.stem.removeprefix(prefix) for path in (root / SAMPLES).glob(f"{prefix}*.jsonl"))
    return sorted(int(stem) for stem in stems if stem.isdecimal())


def _there(words: str, numbers: list[int]) -> str:
    if not numbers:
        return "there are none"
    whole = numbers == list(range(numbers[0], numbers[-1] + 1))
    if whole or len(numbers) > 12:
        return f"{words} {numbers[0]} to {numbers[-1]}"
    return f"{words} {', '.join(map(str, numbers))}"


def read(path: Path) -> list[dict[str, Any]]:
    """The samples of one file. Raises ConfigError naming the line that cannot be read."""
    rows = []
    try:
        with open(path, encoding="utf-8") as f:
            for number, line in enumerate(f, 1):
                try:
                    row = json.loads(line)
                    rows.append({**row, "reward": math.nan if row["reward"] is None else float(row["reward"])})
                    row["response"], row["length"]
                except (ValueError, KeyError, TypeError):
                    raise ConfigError(f"{path}:{number}: not a sample of this program; was the file changed?") from None
    except (OSError, UnicodeDecodeError) as e:
        raise ConfigError(f"{path}: cannot be read: {e}") from None
    if not rows:
        raise ConfigError(f"{path}: holds no samples")
    return rows


def choose(rows: list[dict[str, Any]], wanted: dict[str, int]) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """(title, samples) of each choice. Ties go to other prompts first, so that one easy prompt does not fill the list."""
    orders = {
        "best": lambda r: (math.isnan(r["reward"]), -r["reward"], r.get("index", 0)),
        "worst": lambda r: (math.isnan(r["reward"]), r["reward"], r.get("index", 0)),
        "longest": lambda r: (-r["length"], r.get("index", 0)),
    }
    for name, count in wanted.items():
        if count:
            yield name, sorted(rows, key=orders[name])[:count]


def head(row: dict[str, Any]) -> str:
    """One line about a sample."""
    made_by = "+".join(f"v{v}" for v in row.get("versions", [])) or "v?"
    end = {"length": "cut at the limit", "stop": "ended by itself"}.get(row.get("finish_reason"), "end unknown")
    parts = [
        f"reward {row['reward']:.3g}",
        f"{row['length']} tokens",
        end,
        f"made by {made_by}",
        f"prompt {tuple(row.get('prompt_id', ()))} sample {row.get('index')}",
    ]
    if row.get("ground_truth") is not None:
        parts.append(f"ground truth {row['ground_truth']}")
    return "  ".join(parts)


def _safe(text: Any) -> str:
    """Without control characters: a model's output must not steer the terminal."""
    return "".join(c if c in "\n\t" or c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in str(text))


def show(path: Path, rows: list[dict[str, Any]], wanted: dict[str, int]) -> None:
    """Print to stdout: framed on a terminal, plain otherwise."""
    rewards = [r["reward"] for r in rows if not math.isnan(r["reward"])]
    mean = sum(rewards) / len(rewards) if rewards else math.nan
    lengths = [r["length"] for r in rows]
    print(f"{path}: {len(rows)} samples, reward {mean:.3f}, length {sum(lengths) / len(rows):.1f} (max {max(lengths)})")
    framed = sys.stdout.isatty()
    for name, chosen in choose(rows, wanted):
        for place, row in enumerate(chosen, 1):
            title = f"{name} {place} of {len(chosen)}"
            (_framed if framed else _plain)(title, head(row), _safe(row.get("prompt")), _safe(row["response"]))


def _plain(title: str, about: str, prompt: str, response: str) -> None:
    print(f"\n--- {title}: {_safe(about)}\nprompt:\n{_indented(prompt)}\nresponse:\n{_indented(response)}")


def _indented(text: str) -> str:
    return "\n".join("  | " + line for line in text.split("\n"))


def _framed(title: str, about: str, prompt: str, response: str) -> None:
    from rich.console import Console, Group
    from rich.panel import Panel
    from rich.rule import Rule
    from rich.text import Text

    body = Group(Text(_safe(about), style="dim"), Rule(style="dim"), Text(prompt, style="cyan"), Text(response))
    Console(highlight=False).print(Panel(body, title=title, title_align="left"))


def main(argv: list[str]) -> int:
    """Run the command; returns its exit code (2: bad input)."""
    parser = argparse.ArgumentParser(prog="python -m one_step_off.view", description=__doc__.split("\n\n")[1])
    parser.add_argument("folder", metavar="OUTPUT_DIR", help="trainer.output_dir of a run")
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--step", type=int, help="step, counted from 0 as in metrics.jsonl (default: the last)")
    which.add_argument("--val", type=int, metavar="V", help="the evaluation of weight version V instead")
    for name, count in DEFAULT.items():
        parser.add_argument(f"--{name}", type=int, metavar="K", help=f"how many of the {name} (default {count})")
    args = parser.parse_args(argv)
    given = {name: getattr(args, name) for name in DEFAULT if getattr(args, name) is not None}
    try:
        if any(count < 0 for count in given.values()):
            raise ConfigError("--best, --worst and --longest: must be at least 0")
        path = find_file(args.folder, args.step, args.val)
        show(path, read(path), given or DEFAULT)
    except ConfigError as e:
        print(f"error: {e}", file=sys.stderr)
        return 2
    except BrokenPipeError:  # as in: | head
        sys.stderr.close()
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
