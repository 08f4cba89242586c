"""Helpers for lists of many small arrays."""

import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np


def split_by_lengths(flat: np.ndarray, lengths: list[int]) -> list[np.ndarray]:
    """The consecutive parts of `flat` that have these lengths, as views."""
    ends = itertools.accumulate(lengths)
    return [flat[end - length : end] for end, length in zip(ends, lengths, strict=True)]


CHUNK = 256


def chunks(items: Any) -> Iterator[Any]:
    """A list or array in slices of at most CHUNK items.

    Numpy calls on one small array after another are slow. One call on all arrays at once needs a
    large block of fresh memory, which may cost more than the work itself. Chunks avoid both.
    """
    return (items[i : i + CHUNK] for i in range(0, len(items), CHUNK))
