"""Environments for the tests, in a module that imports little: each run of one imports it in a process of its own."""

from __future__ import annotations

import os
import time

import numpy as np

WRONG = {
    "none": (None, 0.0, False),
    "bytes": (b"x", 0.0, False),
    "set": ({1}, 0.0, False),
    "pair": ("x", 0.0),
    "nothing": None,
    "long": ("x" * (1 << 20), 0.0, False),
    "word": ("x", "good", False),
}


class Moody:
    """An environment that does what it is told to."""

    def reset(self, ground_truth: str) -> str:
        assert ground_truth != "bad", "no such row"
        return "?"

    def step(self, action: str) -> tuple[str, float, bool]:
        how = action.strip()
        if how == "sleep":
            time.sleep(60)
        if how == "spin":
            9**9**9**9
        if how == "die":
            os._exit(1)
        if how == "raise":
            raise KeyError("mood")
        if how in WRONG:
            return WRONG[how]
        return how, np.float32("nan" if how == "nan" else 0.5), how == "end"


class Busy(Moody):
    """Works a while before it begins."""

    confined = True

    def reset(self, ground_truth: str) -> str:
        end = time.process_time() + 0.25
        while time.process_time() < end:
            pass
        return "?"

    def step(self, action: str) -> tuple[str, float, bool]:
        return "", 1.0, True


class Runs(Moody):
    """Runs what the model says."""

    confined = True

    def step(self, action: str) -> tuple[str, float, bool]:
        exec(action.strip())
        return "?", 0.5, False


class Unmade(Moody):
    """Cannot be made."""

    confined = True

    def __init__(self) -> None:
        raise OSError("its book is missing")
