"""Read a run's samples: python -m one_step_off.view OUTPUT_DIR [--step N | --val V] [--best K] ...

Without a choice it shows the 3 best, the 3 worst and the longest sample of the last step.
"""

import argparse
import json
import math
from pathlib import Path
from typing import Any

from one_step_off.config.errors import ConfigError
from one_step_off.monitoring.loggers import EVALUATION_PREFIX, STEP_PREFIX, sample_files
from one_step_off.monitoring.summary import parts_text

Row = dict[str, Any]
DEFAULT_COUNTS = {"best": 3, "worst": 3, "longest": 1}
# Of samples with the same reward those with the lowest index come first: each of another prompt, so
# that one easy prompt does not fill the list. Samples that were not scored come last.
SORT_KEYS = {
    "best": lambda row: (math.isnan(row["reward"]), -row["reward"], row.get("index", 0)),
    "worst": lambda row: (
        math.isnan(row["reward"]),
        row["reward"],
        "error" not in row,
        row.get("index", 0),
    ),
    "longest": lambda row: (-row["length"], row.get("index", 0)),
}
FINISH_REASONS = {
    "length": "cut at the limit",
    "stop": "ended with EOS",
    "turn_length": "cut at agent.max_turn_tokens",
    "turns": "ended by agent.max_turns",
    "time": "ended by agent.timeout_s",
    "room": "no more would fit",
}


def find_file(folder: str, step: int | None, val: int | None) -> Path:
    """The samples of a step (counted from 0, as in metrics.jsonl), of an evaluation, or of the last
    step.

    Raises:
        ConfigError: there are none; says which there are.
    """
    if val is None:
        prefix, number, option = STEP_PREFIX, step, "--step"
    else:
        prefix, number, option = EVALUATION_PREFIX, val, "--val"
    files = sample_files(Path(folder), prefix)
    if number is None and files:
        number = max(files)
    if number in files:
        return files[number]
    known = "there are none"
    if files:
        known = f"there are {len(files)}, from {min(files)} to {max(files)}"
    wanted = "LAST" if number is None else number
    fix = "give the trainer.output_dir of a run with logging.sample_dump=true"
    raise ConfigError(f"{folder}: no samples of {option} {wanted}: {known}; {fix}")


def read_rows(path: Path) -> list[Row]:
    """The samples of one file. Raises ConfigError naming the line that cannot be read."""
    rows: list[Row] = []
    try:
        for line in path.read_text(encoding="utf-8").removesuffix("\n").split("\n"):
            rows.append(_parse_row(line))
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        reason = f"{type(error).__name__}: {error}"
        raise ConfigError(
            f"{path}:{len(rows) + 1}: not a sample of this program ({reason}); "
            "was the file changed?"
        ) from None
    return rows


def _parse_row(line: str) -> Row:
    """One sample, with a NaN for a missing reward. Raises an error of any kind if it is not one."""
    row = json.loads(line)
    for required in ("response", "length"):
        row[required]
    parts = row.get("reward_parts") or {}
    row["reward_parts"] = {name: float(part) for name, part in parts.items()}
    row["reward"] = math.nan if row["reward"] is None else float(row["reward"])
    return row


def part_means(rows: list[Row]) -> dict[str, float]:
    """The mean of each part of the rewards, over the samples that have it."""
    values: dict[str, list[float]] = {}
    for row in rows:
        for name, part in (row.get("reward_parts") or {}).items():
            values.setdefault(name, []).append(part)
    return {name: sum(parts) / len(parts) for name, parts in values.items()}


def describe_sample(row: Row) -> str:
    """One line about a sample."""
    versions = "+".join(f"v{version}" for version in row.get("versions", ()))
    text = "  ".join(
        (
            f"reward {row['reward']:.3g}{parts_text(row.get('reward_parts') or {}, '.3g')}",
            f"{row['length']} tokens",
            FINISH_REASONS.get(row.get("finish_reason"), "end unknown"),
            f"made by {versions or 'v?'}",
            f"prompt {tuple(row.get('prompt_id', ()))} sample {row.get('index')}",
        )
    )
    if row.get("ground_truth") is not None:
        text += f"  ground truth {row['ground_truth']}"
    if "dropped" in row:
        text += "  dropped"
    if "error" in row:
        text += f"  error: {row['error']}"
    return text


def describe_file(path: Path, rows: list[Row]) -> str:
    """One line about all samples of a file."""
    rewards = [row["reward"] for row in rows if not math.isnan(row["reward"])]
    lengths = [row["length"] for row in rows]
    mean_reward = sum(rewards) / len(rewards) if rewards else math.nan
    mean_length = sum(lengths) / len(lengths)
    return (
        f"{path}: {len(rows)} samples, reward {mean_reward:.3f}{parts_text(part_means(rows))}, "
        f"length {mean_length:.1f} (max {max(lengths)})"
    )


def show(path: Path, rows: list[Row], counts: dict[str, int]) -> None:
    """Print to stdout, in colors on a terminal. `counts`: how many of the best, worst and
    longest."""
    from rich.console import Console

    console = Console(highlight=False)
    _print_safely(console, describe_file(path, rows))
    for name, count in counts.items():
        chosen = sorted(rows, key=SORT_KEYS[name])[:count]
        for position, row in enumerate(chosen, 1):
            title = f"{name} {position} of {len(chosen)}: {describe_sample(row)}"
            _print_safely(console, f"\n--- {title}", "bold")
            _print_text(console, row, "prompt", "cyan")
            _print_text(console, row, "response", "")


def _print_text(console: Any, row: Row, column: str, style: str) -> None:
    """Print one text of a sample, each of its lines indented."""
    lines = str(row.get(column)).split("\n")
    _print_safely(console, f"{column}:")
    _print_safely(console, "\n".join("  | " + line for line in lines), style)


def _print_safely(console: Any, text: str, style: str = "") -> None:
    """Print without control characters: what a model wrote must not steer the terminal."""
    from rich.text import Text

    safe = "".join(
        character if character in "\n\t" or character.isprintable() else "\N{REPLACEMENT CHARACTER}"
        for character in text
    )
    console.print(Text(safe, style), soft_wrap=True)


def main(argv: list[str]) -> int:
    """Run the command; returns its exit code. Raises ConfigError: bad input."""
    description = __doc__.split("\n\n")[1]
    parser = argparse.ArgumentParser(prog="python -m one_step_off.view", description=description)
    parser.add_argument("folder", metavar="OUTPUT_DIR", help="trainer.output_dir of a run")
    which = parser.add_mutually_exclusive_group()
    which.add_argument(
        "--step", type=int, help="step, counted from 0 as in metrics.jsonl (default: the last)"
    )
    which.add_argument(
        "--val", type=int, metavar="V", help="the evaluation of weight version V instead"
    )
    for name, count in DEFAULT_COUNTS.items():
        help_text = f"how many of the {name} (default {count})"
        parser.add_argument(f"--{name}", type=int, metavar="K", help=help_text)
    arguments = parser.parse_args(argv)
    counts = {}
    for name in DEFAULT_COUNTS:
        count = getattr(arguments, name)
        if count is not None:
            counts[name] = count
    if any(count < 0 for count in counts.values()):
        raise ConfigError("--best, --worst and --longest: must be at least 0")
    path = find_file(arguments.folder, arguments.step, arguments.val)
    show(path, read_rows(path), counts or DEFAULT_COUNTS)
    return 0
