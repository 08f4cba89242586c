"""Environments for the tests.

The module imports little, because each run of an environment imports it in a process of its own.
"""

from __future__ import annotations

import os
import time

import numpy as np

UNUSABLE_ANSWERS = {
    "none": (None, 0.0, False),
    "bytes": (b"x", 0.0, False),
    "set": ({1}, 0.0, False),
    "pair": ("x", 0.0),
    "nothing": None,
    "long": ("x" * (1 << 20), 0.0, False),
    "word": ("x", "good", False),
}


class Moody:
    """Does what the action says."""

    def reset(self, ground_truth: str) -> str:
        assert ground_truth != "bad", "no such row"
        return "?"

    def step(self, action: str) -> tuple[str, float, bool]:
        action = action.strip()
        if action == "sleep":
            time.sleep(60)
        if action == "spin":
            9**9**9**9
        if action == "die":
            os._exit(1)
        if action == "raise":
            raise KeyError("mood")
        if action in UNUSABLE_ANSWERS:
            return UNUSABLE_ANSWERS[action]
        reward = np.float32("nan" if action == "nan" else 0.5)
        return action, reward, action == "end"


class Busy(Moody):
    """Computes for a quarter of a second before it begins."""

    confined = True

    def reset(self, ground_truth: str) -> str:
        end = time.process_time() + 0.25
        while time.process_time() < end:
            pass
        return "?"

    def step(self, action: str) -> tuple[str, float, bool]:
        return "", 1.0, True


class Runs(Moody):
    """Runs the action as code."""

    confined = True

    def step(self, action: str) -> tuple[str, float, bool]:
        exec(action.strip())
        return "?", 0.5, False


class Unmade(Moody):
    """Its constructor raises."""

    confined = True

    def __init__(self) -> None:
        raise OSError("its book is missing")
