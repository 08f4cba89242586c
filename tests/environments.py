"""Environments for the tests. The module imports little, because each run of an environment imports
it in its own process."""

from __future__ import annotations

import os
import time
from typing import Any

import numpy as np

WRONG_RESULTS = {
    "none": (None, 0.0, False),
    "bytes": (b"x", 0.0, False),
    "set": ({1}, 0.0, False),
    "pair": ("x", 0.0),
    "nothing": None,
    "long": ("x" * (1 << 20), 0.0, False),
    "word": ("x", "good", False),
}
"""What `step` must not return, by the action that asks for it."""


class Moody:
    """An environment that does what the action asks for."""

    def reset(self, ground_truth: str) -> str:
        assert ground_truth != "bad", "no such row"
        return "?"

    def step(self, action: str) -> Any:
        """Returns (observation, reward, whether it ends), or what the action asks for."""
        request = action.strip()
        if request == "sleep":
            time.sleep(60)
        if request == "spin":
            9**9**9**9
        if request == "die":
            os._exit(1)
        if request == "raise":
            raise KeyError("mood")
        if request in WRONG_RESULTS:
            return WRONG_RESULTS[request]
        reward = np.float32(0.5)
        if request == "nan":
            reward = np.float32("nan")
        return request, reward, request == "end"


class Busy(Moody):
    """An environment whose reset takes a quarter of a second of CPU time."""

    confined = True

    def reset(self, ground_truth: str) -> str:
        end = time.process_time() + 0.25
        while time.process_time() < end:
            pass
        return "?"

    def step(self, action: str) -> tuple[str, float, bool]:
        return "", 1.0, True


class Runs(Moody):
    """An environment that runs the action as Python."""

    confined = True

    def step(self, action: str) -> tuple[str, float, bool]:
        exec(action.strip())
        return "?", 0.5, False


class Unmade(Moody):
    """An environment whose constructor fails."""

    confined = True

    def __init__(self) -> None:
        raise OSError("its book is missing")
