"""Milliseconds per 1,000 trajectories of 1,024 tokens for every advantage estimator, on one core.

    python -m benchmarks.estimators --out DIR [--repeats N]

Writes result.json and result.md into DIR. Each figure is the median of the repeats.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
import time
from pathlib import Path

import numpy as np

from one_step_off.algorithms.advantages import (
    ADVANTAGE_ESTIMATORS,
    Trajectories,
    estimate_advantages,
)


def trajectories(count: int = 1000, tokens: int = 1024, group: int = 8) -> Trajectories:
    """Random ones of up to `tokens` tokens, a tenth of them made by tools."""
    rng = np.random.default_rng(0)
    lengths = rng.integers(tokens // 2, tokens + 1, count)
    lengths[0] = tokens

    def column(low: float, high: float) -> list[np.ndarray]:
        return [rng.uniform(low, high, n).astype(np.float32) for n in lengths]

    rewards, masks = rng.integers(0, 2, count).astype(float), [rng.random(n) < 0.9 for n in lengths]
    more = {"values": column(-1, 1), "log_probs": column(-3, 0), "prob_squares": column(0.3, 1)}
    more |= {"parts": {"a": rewards, "b": rng.random(count)}, "baselines": rng.random(count)}
    return Trajectories(
        rewards, [i // group for i in range(count)], masks, token_rewards=column(-0.1, 0.1), **more
    )


def measure(repeats: int) -> dict[str, float]:
    """Estimator -> milliseconds."""
    given, result = trajectories(), {}
    for name in ADVANTAGE_ESTIMATORS:
        seconds = []
        for _ in range(repeats):
            fresh = dataclasses.replace(given)  # without what the last round had worked out
            begin = time.perf_counter()
            estimate_advantages(name, fresh)
            seconds.append(time.perf_counter() - begin)
        result[name] = 1000 * statistics.median(seconds)
    return result


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--repeats", type=int, default=5)
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    found = measure(args.repeats)
    (args.out / "result.json").write_text(
        json.dumps({"ms": found, "repeats": args.repeats}, indent=2) + "\n"
    )
    rows = [f"| `{name}` | {ms:.1f} |" for name, ms in found.items()]
    (args.out / "result.md").write_text(
        "\n".join(["| estimator | ms |", "| --- | --- |", *rows]) + "\n"
    )
