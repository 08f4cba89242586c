"""Functions for peers, in a module that imports next to nothing: each peer's process imports it."""

from __future__ import annotations

import os
import time


def dies() -> None:
    os._exit(5)


def hangs() -> None:
    time.sleep(60)


def raises() -> None:
    raise ValueError("no")
