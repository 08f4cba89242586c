"""The bookkeeping of the overhead's benchmark, at small sizes. Nothing is asserted about
seconds.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.common.paths import ROOT
from benchmarks.overhead import __main__ as overhead
from benchmarks.overhead.cell import Cell
from benchmarks.overhead.measure import PHASES, Mark, measure, summarize

# Of a step: sync and canary of 2 replicas; send, canary, release and update of 2 ranks.
SYNC_AND_UPDATE_CALLS = 2 * 2 + 2 * 4


@pytest.mark.parametrize(
    ("settings", "other_calls"),
    [
        ({}, 4),  # a call per prompt
        ({"routing": "static", "loggers": False}, 2),  # a call per replica
        ({"full": True}, 4 + 2 * 3),  # log-probs, values and update of the other roles
    ],
)
def test_a_small_cell_counts_its_calls(settings: dict[str, Any], other_calls: int) -> None:
    cell = Cell(
        2,
        32,
        tokens=8,
        ranks=2,
        slots=8,
        buckets=2,
        generate_s=0.01,
        train_s=0.02,
        sync_s=0.005,
        **settings,
    )
    found = measure(cell)
    assert found["steps"] == 3, "of six steps two warm up and the last one generates nothing"
    calls = SYNC_AND_UPDATE_CALLS + other_calls
    # Of the three steps, up to four calls at the edges may fall on the other side of a mark, and a
    # health check may have called as well. A kind of call that is missing would make it 2 per step.
    assert found["calls"] == pytest.approx(calls, abs=1.5)
    assert found["stand_in_ms"] > 0
    assert found["with_stand_ins_ms"] > found["cpu_ms"]
    assert set(found["phases_ms"]) == set(PHASES)
    assert all(milliseconds > 0 for milliseconds in found["phases_ms"].values())


def test_figures_are_per_step_and_beyond_the_fixed_times() -> None:
    cell = Cell(1, 8, steps=5, generate_s=1.0, train_s=2.0, sync_s=0.5)
    marks = [
        Mark(wall=2.1 * step, cpu=0.25 * step, calls=3 * step, phases={"record": 0.02 * step})
        for step in range(1, 6)
    ]
    rows = [{"time/generate_s": 1.0 + 0.01 * step} for step in range(5)]
    found = summarize(cell, marks, rows)
    assert found["steps"] == 2
    assert found["phases_ms"] == {"record": pytest.approx(20)}
    assert found["with_stand_ins_ms"] == pytest.approx(250)
    assert found["excess_ms"] == pytest.approx(100)
    assert found["generate_excess_ms"] == pytest.approx(25)


@pytest.mark.slow
def test_the_command_writes_a_table_of_all_cells(
    tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    flags = "--replicas 1 2 --samples 16 --tokens 4 --steps 4".split()
    overhead.main(["--out", str(tmp_path), *flags, "--against", str(ROOT)])
    result = json.loads((tmp_path / "result.json").read_text())
    assert [*result["arms"]] == ["before", "now"]
    assert [*result["arms"]["before"]] == [*result["arms"]["now"]] == ["1 x 16", "2 x 16"]
    markdown = (tmp_path / "result.md").read_text()
    assert markdown.count("\n| 1 | 16 |") == 1
    assert markdown.count("\n| 2 | 16 |") == 1
    assert markdown in capsys.readouterr().out
    assert (tmp_path / "overhead.png").stat().st_size > 1000


@pytest.mark.parametrize("flags", [["--samples", "12"], ["--steps", "3"]])
def test_bad_flags_are_one_line(
    flags: list[str], tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    with pytest.raises(SystemExit) as ended:
        overhead.main(["--out", str(tmp_path), *flags])
    error = capsys.readouterr().err
    assert ended.value.code == 2
    assert "--samples in multiples of 8, and --steps of 4 or more" in error
    assert error.count("\n") == 1
