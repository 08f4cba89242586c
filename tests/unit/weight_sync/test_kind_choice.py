"""Full syncs or deltas, by what they took in this run."""

from __future__ import annotations

import asyncio
import math
from types import SimpleNamespace
from typing import Any

import pytest

from one_step_off.weight_sync import coordinator
from one_step_off.weight_sync.coordinator import WeightSync
from one_step_off.weight_sync.kind_choice import KindChoice
from tests.unit.stand_ins import ActorMethod, RecordedEvents
from tests.unit.weight_sync.test_coordinator import SCORES, SENT, connected_sync

EVERY = 10


class Syncs:
    """Syncs as a `WeightSender` makes them, whose seconds and changed share are given."""

    def __init__(self, full_s: float, delta_s: float, share: float = 0.05) -> None:
        self.full_s = full_s
        self.delta_s = delta_s
        self.share = share
        self.choice = KindChoice(EVERY)
        self.deltas_since_full: int | None = None
        self.kinds = ""
        self.lines: list[str] = []

    def run(self, count: int) -> str:
        """F or d of each of these syncs."""
        for _ in range(count):
            is_full = self.choice.wants_full() or self.deltas_since_full in (None, EVERY - 1)
            self.deltas_since_full = 0 if is_full else self.deltas_since_full + 1
            seconds = self.full_s if is_full else self.delta_s
            share = math.nan if is_full else self.share
            line = self.choice.note(is_full, seconds, share)
            self.kinds += "F" if is_full else "d"
            self.lines += [line] if line else []
        return self.kinds[-count:]


def test_over_a_slow_link_deltas_stay():
    syncs = Syncs(full_s=9.0, delta_s=1.0)
    assert syncs.run(24) == "Fdd" + "Fddddddddd" + "Fddddddddd" + "F"
    assert not syncs.lines


def test_over_a_fast_link_all_weights_are_sent_and_deltas_are_tried_again_rarely():
    syncs = Syncs(full_s=0.2, delta_s=1.0)
    assert syncs.run(4) == "FddF"
    assert syncs.run(22) == "FFFFFFFFF" + "d" + "FFFFFFFFFF" + "d" + "F"
    (line,) = syncs.lines
    assert "sends all weights from now on: all weights take 0.2 s, changes 1 s" in line
    assert "5.0% of the elements" in line


def test_a_link_that_becomes_slow_is_noticed_and_one_slow_sync_is_not():
    syncs = Syncs(full_s=0.2, delta_s=1.0)
    syncs.run(8)
    syncs.full_s = 20.0
    assert syncs.run(1) == "F"
    syncs.full_s = 0.2
    assert "d" not in syncs.run(3)
    syncs.full_s = 20.0
    assert syncs.run(6) == "FdFddd", "the first d was due"
    assert len(syncs.lines) == 2
    assert "sends what changed from now on" in syncs.lines[-1]


def test_kinds_of_nearly_the_same_time_are_not_exchanged():
    syncs = Syncs(full_s=0.95, delta_s=1.0)
    syncs.run(40)
    syncs.full_s = 1.05
    syncs.run(40)
    assert not syncs.lines


def test_all_weights_are_tried_again_when_more_changes():
    syncs = Syncs(full_s=1.0, delta_s=0.8)
    assert syncs.run(6) == "FddFdd"
    syncs.share = 0.11
    syncs.delta_s = 0.95
    assert syncs.run(4) == "dFdd"
    syncs.share = 0.3
    syncs.delta_s = 3.0
    assert syncs.run(4) == "dFFF", "and stay, if they take less time now"


def test_new_groups_are_measured_again():
    syncs = Syncs(full_s=0.2, delta_s=1.0)
    syncs.run(6)
    syncs.choice.begin_groups()
    syncs.deltas_since_full = None
    syncs.full_s = 9.0
    assert syncs.run(8) == "FddFdddd"
    assert len(syncs.lines) == 2


class MeasuredSync:
    """A run's weight sync in delta mode, whose clock stands still but for the senders."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, seconds: dict[bool, float]) -> None:
        """`seconds`: of a full sync (True), and of a delta."""
        self.now = 0.0
        self.seconds = seconds
        self.full_syncs: list[bool] = []
        self.sync: WeightSync = connected_sync(SCORES, [SCORES])
        self.sync.cfg.mode = "delta"
        self.events = RecordedEvents()
        self.sync.events = self.events
        rank: Any = self.sync.actor.ranks[0]
        rank.send_weights = ActorMethod(self.send)
        monkeypatch.setattr(coordinator, "time", SimpleNamespace(perf_counter=lambda: self.now))

    def send(self, version: int, sharded_only: bool, wants_full: bool) -> dict[str, Any]:
        is_full = wants_full or not self.full_syncs
        self.full_syncs.append(is_full)
        self.now += self.seconds[is_full]
        return SENT | {"changed": math.nan if is_full else 1.0}


@pytest.mark.parametrize(
    ("seconds", "last"), [({True: 0.1, False: 0.7}, True), ({True: 0.7, False: 0.1}, False)]
)
def test_the_coordinator_asks_the_senders_for_the_faster_kind(monkeypatch, seconds, last):
    measured = MeasuredSync(monkeypatch, seconds)
    for version in range(6):
        metrics = asyncio.run(measured.sync((0, version)))
        is_full = math.isnan(metrics["sync/changed_share"])
        assert is_full == measured.full_syncs[-1]
    assert measured.full_syncs == [True, False, False, True, last, last]
    assert len(measured.events.lines) == last


def test_a_mode_that_sends_all_weights_has_no_choice(monkeypatch):
    measured = MeasuredSync(monkeypatch, {True: 0.1, False: 0.7})
    measured.sync.cfg.mode = "full"
    for version in range(4):
        asyncio.run(measured.sync((0, version)))
    assert measured.full_syncs == [True, False, False, False], "the stand-in's; nothing is asked"
