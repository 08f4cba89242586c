"""What the parts of a run report while it runs."""

from collections.abc import Iterable
from typing import Any

Span = tuple[str, str, Any, float, float]
"""(lane, activity, step or version, begin, end), times in seconds since the epoch."""


class RunEvents:
    """Receives what happens in a run. Each part gets it when it is created, and calls it in the
    driver's event loop; no method waits for anything or raises.

    This class keeps nothing: for processes without a run folder, as in checks and benchmarks. The
    `Tracker` of a run writes it all.
    """

    def log(self, line: str) -> None:
        """One line that the user should read."""

    def span(self, role: str, activity: str, step: int, begin: float, end: float) -> None:
        """A role has worked on a step, for its row of metrics and for the timeline. Times in
        seconds of `remote_calls.now`."""

    def trace(self, spans: Iterable[Span]) -> None:
        """Spans for the timeline alone."""
