"""Whether a sync with `weight_sync.mode=delta` sends what changed or all weights: what takes less
time, as measured in this run.

A delta has few bytes, but both ends work for it. Over a slow network it is the shorter sync; over
NVLink, or between processes on one device, all weights are there before the changes are found.

    delta   find the changes, send them, apply them
    full    send all bytes

The phases of one sync overlap, so their sum says little: a sync counts as long as it took, without
the pause of the engines, which both kinds have.
"""

import statistics
from collections import deque

REMEMBERED_SYNCS = 3
"""Of each kind; their median counts, so that one slow sync changes nothing."""
SHARE_TO_CHANGE = 0.9
"""The other kind must take less than this share of the present one's time. Otherwise kinds of
nearly the same time would be exchanged again and again."""
SHARE_GROWTH = 2.0
"""All weights are tried again when the changed share has grown by this factor since the last full
sync."""


class KindChoice:
    """Chooses the kind of each sync.

    Deltas are sent until both kinds have been measured. The first sync of each kind after groups
    were created does not count: views and buffers are made in it. Then the kind that takes less
    time is sent. The other one is tried again after `full_every` syncs, which for deltas is when a
    full sync is due anyway; and all weights also when the changed share has doubled.

    Attributes:
        sends_full: the kind that was chosen.
    """

    def __init__(self, full_every: int) -> None:
        """`full_every`: weight_sync.full_every."""
        self.full_every = full_every
        self.sends_full = False
        self.begin_groups()

    def begin_groups(self) -> None:
        """Groups were created: their links and buffers are others. The choice stays until both
        kinds are measured again."""
        self.has_begun = {True: False, False: False}
        self.seconds: dict[bool, deque[float]] = {
            is_full: deque(maxlen=REMEMBERED_SYNCS) for is_full in (True, False)
        }
        self.syncs_since = {True: 0, False: 0}
        self.changed_share = 0.0
        self.share_at_full = 0.0

    def wants_full(self) -> bool:
        """Whether the next sync should send all weights."""
        for is_full in (False, True):
            if not self.seconds[is_full]:
                return is_full
        other = not self.sends_full
        if self.syncs_since[other] >= self.full_every:
            return other
        return self.sends_full or self._has_share_grown()

    def note(self, is_full: bool, seconds: float, changed_share: float) -> str:
        """Take what a sync has measured.

        Args:
            is_full: it sent all weights.
            seconds: that it took, without the pause.
            changed_share: of the elements; not read for a full sync, which does not look.

        Returns:
            One line about a change of the choice; empty: it is as before.
        """
        self.syncs_since[is_full] = 0
        self.syncs_since[not is_full] += 1
        if not is_full:
            self.changed_share = changed_share
        if not self.has_begun[is_full]:
            self.has_begun[is_full] = True
            return ""
        is_outdated = is_full != self.sends_full  # measured long ago
        if is_full:
            self.share_at_full = self.changed_share
        elif self._has_share_grown():
            is_outdated = True  # measured when less changed
        if is_outdated:
            self.seconds[is_full].clear()
        self.seconds[is_full].append(seconds)
        return self._choose()

    def _has_share_grown(self) -> bool:
        """Whether much more changes in a step than at the last full sync."""
        return self.changed_share > SHARE_GROWTH * self.share_at_full

    def _choose(self) -> str:
        """Change the kind if the other one takes less time; returns as `note`."""
        if not (self.seconds[True] and self.seconds[False]):
            return ""
        full_s = statistics.median(self.seconds[True])
        delta_s = statistics.median(self.seconds[False])
        present_s, other_s = (full_s, delta_s) if self.sends_full else (delta_s, full_s)
        if other_s >= SHARE_TO_CHANGE * present_s:
            return ""
        self.sends_full = not self.sends_full
        kind = "all weights" if self.sends_full else "what changed"
        return (
            f"weight sync: sends {kind} from now on: all weights take {full_s:.3g} s, "
            f"changes {delta_s:.3g} s ({self.changed_share:.1%} of the elements changed)"
        )
