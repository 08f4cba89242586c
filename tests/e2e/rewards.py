"""Reward functions for runs of random models.

The module imports nothing, because every reward worker imports it in its own process.
"""

from __future__ import annotations

LETTER_SHARE = f"{__name__}:letter_share"
EVEN_AND_SHORT = f"{__name__}:even_and_short"


def letter_share(response: str, **_: object) -> float:
    """The share of letters in the response. It differs from sample to sample, so advantages are
    not zero."""
    letters = sum(character.isalpha() for character in response)
    return letters / max(1, len(response))


def even_and_short(response: str, **_: object) -> dict[str, float]:
    """A reward in two parts. Both differ from sample to sample."""
    is_even = len(response) % 2 == 0
    return {"even": float(is_even), "short": -0.01 * len(response)}
