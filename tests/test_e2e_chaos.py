"""A real run goes on when its processes are killed, and leaves nothing behind. `python -m tests.chaos` goes further."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.chaos.__main__ import disturb, exact, main, parsed

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]


def run_with(tmp_path: Path, kills: int, kinds: str, points: str) -> dict:
    """Killed so often, then SIGTERM. Ledger, rows and leftovers are checked."""
    args = ["--kills", f"{kills}", "--kinds", kinds, "--points", points, "--seed", "1", "--out", f"{tmp_path}/c"]
    found = disturb(parsed(args), go_on=False)
    assert found["wrong"] == [] and found["hit"] == kills, json.dumps(found, indent=1)
    assert found["starts"] == 1, "the run itself never ended"
    return found


@pytest.mark.slow
def test_an_engine_dies_between_two_buckets_and_the_run_goes_on(tmp_path: Path):
    """What this takes is the start of a run and of an engine: there is one kill."""
    (kill,) = run_with(tmp_path, 1, "engine", "between buckets")["kills"]
    assert kill["step"] >= 1 and kill["recovered_s"] > 0


@pytest.mark.slow
def test_a_replica_and_an_engine_die_one_after_the_other(tmp_path: Path):
    """One in mid-generation, then, with its next life in the groups, one between two buckets."""
    kills = run_with(tmp_path, 2, "replica,engine", "generating,between buckets")["kills"]
    assert {(kill["kind"], kill["point"]) for kill in kills} == {
        ("replica", "generating"),
        ("engine", "between buckets"),
    }


@pytest.mark.slow
def test_everything_dies(tmp_path: Path):
    assert main(["--kills", "10", "--critic", "--seed", "1", "--out", f"{tmp_path}/c"]) == 0


@pytest.mark.slow
def test_stopped_anywhere_and_resumed_are_the_same_bits(tmp_path: Path):
    found = exact(parsed(["--kills", "4", "--exact", "--seed", "2", "--out", f"{tmp_path}/c"]))
    assert found["wrong"] == [] and len(found["stops"]) == 4, json.dumps(found, indent=1)
