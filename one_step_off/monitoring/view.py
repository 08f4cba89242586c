"""Read a run's samples: python -m one_step_off.view OUTPUT_DIR [--step N | --val V] [--best K] [--worst K] [--longest K].

Without a choice it shows the 3 best, the 3 worst and the longest sample of the last step.
"""

import argparse
import json
import math
from pathlib import Path
from typing import Any

from one_step_off.config.errors import ConfigError
from one_step_off.monitoring.console import parts_text
from one_step_off.monitoring.loggers import STEP, VAL, numbered

DEFAULT = {"best": 3, "worst": 3, "longest": 1}
# Ties go to other prompts first, so that one easy prompt does not fill the list. What was not scored comes last.
_ORDERS = {
    "best": lambda r: (math.isnan(r["reward"]), -r["reward"], r.get("index", 0)),
    "worst": lambda r: (math.isnan(r["reward"]), r["reward"], "error" not in r, r.get("index", 0)),
    "longest": lambda r: (-r["length"], r.get("index", 0)),
}
_ENDS = {
    "length": "cut at the limit",
    "stop": "ended by itself",
    "turn_length": "cut at agent.max_turn_tokens",
}
_ENDS |= {
    "turns": "ended by agent.max_turns",
    "time": "ended by agent.timeout_s",
    "room": "no more would fit",
}


def find_file(folder: str, step: int | None, val: int | None) -> Path:
    """The samples of a step (counted from 0, as in metrics.jsonl), of an evaluation, or of the last step. Raises
    ConfigError: none are there; says what there is."""
    kind, number, option = (STEP, step, "--step") if val is None else (VAL, val, "--val")
    there = numbered(Path(folder), kind)
    number = max(there, default="LAST") if number is None else number
    if number not in there:
        known = (
            f"there are {len(there)}, from {min(there)} to {max(there)}"
            if there
            else "there are none"
        )
        mend = "give the trainer.output_dir of a run with logging.sample_dump=true"
        raise ConfigError(f"{folder}: no samples of {option} {number}: {known}; {mend}")
    return there[number]


def read(path: Path) -> list[dict[str, Any]]:
    """The samples of one file. Raises ConfigError naming the line that cannot be read."""
    rows: list[dict[str, Any]] = []
    try:
        for line in path.read_text(encoding="utf-8").removesuffix("\n").split("\n"):
            row = json.loads(line)
            row["response"], row["length"]
            row["reward_parts"] = {
                name: float(part) for name, part in (row.get("reward_parts") or {}).items()
            }
            rows.append(
                row | {"reward": math.nan if row["reward"] is None else float(row["reward"])}
            )
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as e:
        why = f"not a sample of this program ({type(e).__name__}: {e}); was the file changed?"
        raise ConfigError(f"{path}:{len(rows) + 1}: {why}") from None
    return rows


def part_means(rows: list[dict[str, Any]]) -> dict[str, float]:
    """The mean of each part of the rewards, over the samples that have it."""
    own = [row.get("reward_parts") or {} for row in rows]
    values = {
        name: [parts[name] for parts in own if name in parts]
        for name in dict.fromkeys(n for p in own for n in p)
    }
    return {name: sum(found) / len(found) for name, found in values.items()}


def head(row: dict[str, Any]) -> str:
    """One line about a sample."""
    end, truth = _ENDS.get(row.get("finish_reason"), "end unknown"), row.get("ground_truth")
    made = "+".join(f"v{v}" for v in row.get("versions", ())) or "v?"
    parts = parts_text(row.get("reward_parts") or {}, ".3g")
    text = f"reward {row['reward']:.3g}{parts}  {row['length']} tokens  {end}  made by {made}  "
    text += f"prompt {tuple(row.get('prompt_id', ()))} sample {row.get('index')}"
    text += "" if truth is None else f"  ground truth {truth}"
    return (
        text
        + "  dropped" * ("dropped" in row)
        + (f"  error: {row['error']}" if "error" in row else "")
    )


def show(path: Path, rows: list[dict[str, Any]], wanted: dict[str, int]) -> None:
    """Print to stdout, in colours on a terminal."""
    from rich.console import Console
    from rich.text import Text

    console = Console(highlight=False)

    def say(text: str, style: str = "") -> None:
        # A model's output must not steer the terminal.
        safe = "".join(
            c if c in "\n\t" or c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in text
        )
        console.print(Text(safe, style), soft_wrap=True)

    rewards, lengths = (
        [r["reward"] for r in rows if not math.isnan(r["reward"])],
        [r["length"] for r in rows],
    )
    mean = sum(rewards) / len(rewards) if rewards else math.nan
    parts = parts_text(part_means(rows))
    say(
        f"{path}: {len(rows)} samples, reward {mean:.3f}{parts}, length {sum(lengths) / len(rows):.1f} (max {max(lengths)})"
    )
    for name, count in wanted.items():
        chosen = sorted(rows, key=_ORDERS[name])[:count]
        for place, row in enumerate(chosen, 1):
            say(f"\n--- {name} {place} of {len(chosen)}: {head(row)}", "bold")
            for part, style in (("prompt", "cyan"), ("response", "")):
                say(f"{part}:")
                say("\n".join("  | " + line for line in str(row.get(part)).split("\n")), style)


def main(argv: list[str]) -> int:
    """Run the command; returns its exit code. Raises ConfigError: bad input."""
    parser = argparse.ArgumentParser(
        prog="python -m one_step_off.view", description=__doc__.split("\n\n")[1]
    )
    parser.add_argument("folder", metavar="OUTPUT_DIR", help="trainer.output_dir of a run")
    which = parser.add_mutually_exclusive_group()
    which.add_argument(
        "--step", type=int, help="step, counted from 0 as in metrics.jsonl (default: the last)"
    )
    which.add_argument(
        "--val", type=int, metavar="V", help="the evaluation of weight version V instead"
    )
    for name, count in DEFAULT.items():
        parser.add_argument(
            f"--{name}", type=int, metavar="K", help=f"how many of the {name} (default {count})"
        )
    args = parser.parse_args(argv)
    given = {name: getattr(args, name) for name in DEFAULT if getattr(args, name) is not None}
    if any(count < 0 for count in given.values()):
        raise ConfigError("--best, --worst and --longest: must be at least 0")
    path = find_file(args.folder, args.step, args.val)
    show(path, read(path), given or DEFAULT)
    return 0
