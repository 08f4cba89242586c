"""In which order prompts of several sources follow each other, so that each source keeps its
share."""

from collections.abc import Sequence
from copy import copy
from fractions import Fraction
from math import floor, lcm

MAX_DRAWN = 1 << 16
"""Turns that are drawn to find where the prompts of an epoch end."""


class SourceTurns:
    """Which source the next prompt comes from.

    After any number of prompts the count of each source differs from its share by less than one:
    Tijdeman, The chairman assignment problem (1980). It is exact, on whole numbers.

    Attributes:
        shares: of the sources; they sum to 1.
        counts: how many prompts of each source were drawn.
    """

    def __init__(self, weights: Sequence[float]) -> None:
        """`weights`: above 0, one per source."""
        fractions = [Fraction(repr(float(weight))) for weight in weights]
        total = sum(fractions)
        self.shares = [fraction / total for fraction in fractions]
        self.counts = [0] * len(weights)
        self._parts = max(1, 2 * len(weights) - 2)
        self._period = lcm(*(share.denominator for share in self.shares))
        self._per_period = [int(share * self._period) for share in self.shares]

    def next(self) -> int:
        """The index of the source of the next prompt.

        Of the sources that are at least 1/(2n - 2) behind their share, the one that would first be
        1 - 1/(2n - 2) behind.
        """
        chosen = 0
        parts = self._parts
        prompts = sum(self.counts) + 1
        least_slack: int | None = None
        for i, (share, count) in enumerate(zip(self._per_period, self.counts, strict=True)):
            behind = parts * (share * prompts - count * self._period)
            if behind < self._period and len(self.counts) > 1:
                continue
            slack = (parts - 1) * self._period - behind
            if least_slack is None or slack * self._per_period[chosen] < least_slack * share:
                chosen = i
                least_slack = slack
        self.counts[chosen] += 1
        return chosen

    def prompts_until(self, needed: Sequence[int]) -> int:
        """How many prompts in all, from the first, give each source at least `needed` ones.

        It is the fewest, unless finding that would take more than MAX_DRAWN turns: with a very
        small share. Then it may be more by less than 1 / share.
        """
        turns = copy(self)
        # After a whole period each count is its share exactly, and the order begins again.
        pairs = zip(needed, self._per_period, strict=True)
        whole = max(0, max(count // share for count, share in pairs) - 1)
        turns.counts = [whole * share for share in self._per_period]
        enough = self._surely_enough(needed)
        if enough - sum(turns.counts) > MAX_DRAWN:
            return enough
        while any(count < least for count, least in zip(turns.counts, needed, strict=True)):
            turns.next()
        return sum(turns.counts)

    def _surely_enough(self, needed: Sequence[int]) -> int:
        """Prompts that give each source at least `needed` ones, from how far a source may be
        behind: 1 - 1/(2n - 2). So its share of them must be above `needed` - 1/(2n - 2)."""
        tolerance = Fraction(1, self._parts)
        pairs = zip(needed, self.shares, strict=True)
        return max(floor((count - tolerance) / share) + 1 for count, share in pairs)
