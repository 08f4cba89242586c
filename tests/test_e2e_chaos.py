"""A real run goes on when its processes are killed, and leaves nothing behind. `python -m tests.chaos` goes further."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.chaos.__main__ import disturb, exact, main, parsed

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]


def test_a_replica_and_an_engine_die_and_the_run_goes_on(tmp_path: Path):
    """One in mid-generation, one between two buckets of a sync; then SIGTERM. Ledger, rows and leftovers are checked."""
    points = "generating,between buckets"
    args = parsed(
        ["--kills", "2", "--kinds", "replica,engine", "--points", points, "--seed", "1", "--out", f"{tmp_path}/c"]
    )
    found = disturb(args, go_on=False)
    assert found["wrong"] == [] and found["hit"] == 2, json.dumps(found, indent=1)
    assert found["starts"] == 1, "the run itself never ended"
    assert {(kill["kind"], kill["point"]) for kill in found["kills"]} == {
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
