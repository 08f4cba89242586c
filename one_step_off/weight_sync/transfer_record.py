"""What one endpoint of the weight stream measures during one sync."""

import time
from dataclasses import dataclass, field
from typing import Any

MAX_SPANS = 200
"""Spans of one endpoint in one sync; a timeline with more shows nothing."""

WIRE_LANE = " wire"
"""Suffix of the timeline's lane for what happens on the wire's thread."""


@dataclass
class TransferRecord:
    """Seconds per phase, bytes on the wire, and spans for the timeline."""

    phase_seconds: dict[str, float] = field(default_factory=dict)
    bucket_wire: list[list[float]] = field(default_factory=list)
    """[index of the bucket, seconds on the wire] of each bucket."""
    spans: list[list[Any]] = field(default_factory=list)
    """[lane, phase, begin, end], by `time.time`."""
    wire_bytes: int = 0
    changed_words: int = 0
    """16-bit words that differ from the last sync (deltas)."""

    def add_phase(self, name: str, seconds: float) -> None:
        """Note a phase that has just ended."""
        self.phase_seconds[name] = self.phase_seconds.get(name, 0.0) + seconds
        self._add_span("", name, seconds)

    def add_wire_span(self, seconds: float) -> None:
        """Note a message that has just left the wire's thread."""
        self._add_span(WIRE_LANE, "wire", seconds)

    def report(self) -> dict[str, Any]:
        """Seconds per phase, "bytes", "bucket_wire" and "spans"."""
        return {
            **self.phase_seconds,
            "bytes": float(self.wire_bytes),
            "bucket_wire": self.bucket_wire,
            "spans": self.spans,
        }

    def _add_span(self, lane: str, name: str, seconds: float) -> None:
        if len(self.spans) < MAX_SPANS:
            end = time.time()
            self.spans.append([lane, name, end - seconds, end])
