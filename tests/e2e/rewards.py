"""Reward functions for runs of random models.

The module imports no package, because every reward worker imports it in its own process.
"""

from __future__ import annotations

import time

LETTER_SHARE = f"{__name__}:letter_share"
EVEN_AND_SHORT = f"{__name__}:even_and_short"
AFTER_A_MOMENT = f"{__name__}:after_a_moment"
MOMENT_S = 0.05


def letter_share(response: str, **_: object) -> float:
    """The share of letters in the response. It differs from sample to sample, so advantages are
    not zero."""
    letters = sum(character.isalpha() for character in response)
    return letters / max(1, len(response))


def after_a_moment(response: str, **_: object) -> float:
    """As `letter_share`, but steps take time and no core: a process that starts meanwhile has
    it."""
    time.sleep(MOMENT_S)
    return letter_share(response)


def even_and_short(response: str, **_: object) -> dict[str, float]:
    """A reward in two parts. Both differ from sample to sample."""
    is_even = len(response) % 2 == 0
    return {"even": float(is_even), "short": -0.01 * len(response)}
