"""The bookkeeping of the overhead's benchmark, at small sizes; of its seconds nothing is asserted."""

from __future__ import annotations

import json
import sys

import pytest

from benchmarks.overhead import __main__ as overhead
from benchmarks.overhead.__main__ import Cell


@pytest.mark.parametrize("how", [{}, {"routing": "static", "loggers": False}, {"full": True}])
def test_a_small_cell_counts_what_was_asked(how):
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
        **how,
    )
    found = overhead.measure(cell)
    assert found["steps"] == 3, "of six steps two warm up and the last one generates nothing"
    # per step: prompts (or one call per replica), sync and canary of 2 replicas, and of 2 ranks send, canary, release
    # and update; a watch may have asked whether the replicas are there
    wanted = (2 if "routing" in how else 4) + 2 * 2 + 2 * 4 + (2 * 3 if "full" in how else 0)
    assert wanted <= found["calls"] <= wanted + 1
    assert found["stand_in_ms"] > 0 and found["with_stand_ins_ms"] > found["cpu_ms"]
    assert set(found["phases_ms"]) == set(overhead.PHASES) and all(
        ms > 0 for ms in found["phases_ms"].values()
    )


def test_what_the_clocks_say_is_per_step_and_beyond_the_fixed_times():
    cell = Cell(1, 8, steps=5, generate_s=1.0, train_s=2.0, sync_s=0.5)
    marks = [(2.1 * k, 0.25 * k, 3 * k, {"record": 0.02 * k}) for k in range(1, 6)]
    rows = [{"time/generate_s": 1.0 + 0.01 * k} for k in range(5)]
    found = overhead.summarised(cell, marks, rows)
    assert found["steps"] == 2 and found["phases_ms"] == {"record": pytest.approx(20)}
    assert found["with_stand_ins_ms"] == pytest.approx(250) and found["excess_ms"] == pytest.approx(
        100
    )
    assert found["generate_excess_ms"] == pytest.approx(25)


def test_the_command_writes_a_table_of_all_cells(tmp_path, monkeypatch, capsys):
    command = f"overhead --out {tmp_path} --replicas 1 2 --samples 16 --tokens 4 --steps 4 --against {overhead.ROOT}"
    monkeypatch.setattr(sys, "argv", command.split())
    overhead.main()
    result = json.loads((tmp_path / "result.json").read_text())
    assert {who: list(arm) for who, arm in result["arms"].items()} == dict.fromkeys(
        ("before", "now"), ["1 x 16", "2 x 16"]
    )
    said = (tmp_path / "result.md").read_text()
    assert (
        said.count("\n| 1 | 16 |") == said.count("\n| 2 | 16 |") == 1
        and said in capsys.readouterr().out
    )
    assert (tmp_path / "overhead.png").stat().st_size > 1000
