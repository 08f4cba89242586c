"""How rewards are compared: up to the rounding of sums.

A reward is often a sum of parts, and 0.1 + 0.2 + 0.3 differs from 0.3 + 0.2 + 0.1 in its last bit.
Such a difference says nothing of the responses, so every comparison of rewards is made here.
"""

import numpy as np

ROUNDING = 1e-12
"""The largest difference of equal rewards, relative to the larger one, or to 1 if that is larger:
parts of about 1 may cancel each other."""


def differences(x: np.ndarray, y: np.ndarray | float) -> np.ndarray:
    """x - y, with exact zeros where they are equal."""
    result = np.asarray(x - y)
    size = np.maximum(np.maximum(np.abs(x), np.abs(y)), 1.0)
    result[np.abs(result) <= ROUNDING * size] = 0.0
    return result


def all_equal(x: np.ndarray) -> bool:
    """Whether all values are equal, as a single one and none are."""
    if len(x) < 2:
        return True
    lowest = x.min()
    highest = x.max()
    return bool(highest - lowest <= ROUNDING * max(1.0, abs(lowest), abs(highest)))


def reaches(reward: float, threshold: float) -> bool:
    """Whether a reward is at least the threshold."""
    return reward >= threshold - ROUNDING * max(1.0, abs(threshold))
