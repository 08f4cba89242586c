"""Milliseconds per 1,000 trajectories of 1,024 tokens for every advantage estimator, on one core.

    python -m benchmarks.estimators --out DIR [--repeats N]

Writes result.json and result.md into DIR. Each figure is the median of the repeats.
"""

from __future__ import annotations

import dataclasses
import statistics
import time
from pathlib import Path

import numpy as np

from benchmarks.common.command_line import Parser
from benchmarks.common.report import markdown_table, write_results
from one_step_off.algorithms.advantages import (
    ADVANTAGE_ESTIMATORS,
    Trajectories,
    estimate_advantages,
)


def random_trajectories(count: int = 1000, tokens: int = 1024, group: int = 8) -> Trajectories:
    """Random trajectories of up to `tokens` tokens, a tenth of them made by tools.

    Args:
        count: trajectories.
        tokens: of the longest one.
        group: trajectories per prompt.
    """
    rng = np.random.default_rng(0)
    lengths = rng.integers(tokens // 2, tokens + 1, count)
    lengths[0] = tokens

    def per_token(low: float, high: float) -> list[np.ndarray]:
        return [rng.uniform(low, high, length).astype(np.float32) for length in lengths]

    rewards = rng.integers(0, 2, count).astype(float)
    masks = [rng.random(length) < 0.9 for length in lengths]
    return Trajectories(
        rewards,
        [row // group for row in range(count)],
        masks,
        values=per_token(-1, 1),
        log_probs=per_token(-3, 0),
        prob_squares=per_token(0.3, 1),
        parts={"a": rewards, "b": rng.random(count)},
        baselines=rng.random(count),
        token_rewards=per_token(-0.1, 0.1),
    )


def measure(repeats: int) -> dict[str, float]:
    """Estimator -> milliseconds."""
    trajectories = random_trajectories()
    result = {}
    for name in ADVANTAGE_ESTIMATORS:
        seconds = []
        for _ in range(repeats):
            # A copy without the intermediate results that the last repeat cached.
            fresh = dataclasses.replace(trajectories)
            begin = time.perf_counter()
            estimate_advantages(name, fresh)
            seconds.append(time.perf_counter() - begin)
        result[name] = 1000 * statistics.median(seconds)
    return result


def main() -> None:
    """Measure and write the results."""
    parser = Parser(__doc__)
    parser.add_argument("--out", type=Path, required=True, help="folder for the results")
    parser.add_argument("--repeats", type=int, default=5)
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    milliseconds = measure(args.repeats)
    rows = [[f"`{name}`", f"{value:.1f}"] for name, value in milliseconds.items()]
    markdown = "\n".join(markdown_table(["estimator", "ms"], rows)) + "\n"
    write_results(args.out, {"ms": milliseconds, "repeats": args.repeats}, markdown)


if __name__ == "__main__":
    main()
