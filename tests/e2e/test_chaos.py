"""A real run goes on when its processes are killed, and leaves nothing behind. `python -m
tests.chaos` goes further."""

from __future__ import annotations

import json
import re
import time
from pathlib import Path

import pytest

from tests.chaos.__main__ import compare_stopped_runs, main, parse_arguments, run_with_kills
from tests.chaos.command import Command, left_behind, settings
from tests.chaos.points import KINDS
from tests.chaos.syncs import break_syncs

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]


def run_with(tmp_path: Path, kills: int, kinds: str, points: str) -> dict:
    """Killed so often, then SIGTERM. Ledger, rows and leftovers are checked."""
    args = [
        "--kills",
        f"{kills}",
        "--kinds",
        kinds,
        "--points",
        points,
        "--seed",
        "1",
        "--out",
        f"{tmp_path}/c",
    ]
    found = run_with_kills(parse_arguments(args), resume_after=False)
    assert found["wrong"] == []
    assert found["hit"] == kills, json.dumps(found, indent=1)
    assert found["starts"] == 1, "the run itself never ended"
    return found


@pytest.mark.slow
def test_an_engine_dies_between_two_buckets_and_the_run_goes_on(tmp_path: Path):
    """What this takes is the start of a run and of an engine: there is one kill."""
    (kill,) = run_with(tmp_path, 1, "engine", "between buckets")["kills"]
    assert kill["step"] >= 1
    assert kill["recovered_s"] > 0


@pytest.mark.slow
def test_a_replica_and_an_engine_die_one_after_the_other(tmp_path: Path):
    """One in mid-generation, then, with its next life in the groups, one between two buckets."""
    kills = run_with(tmp_path, 2, "replica,engine", "generating,between buckets")["kills"]
    assert {(kill["kind"], kill["point"]) for kill in kills} == {
        ("replica", "generating"),
        ("engine", "between buckets"),
    }


@pytest.mark.slow
@pytest.mark.ci
def test_one_of_each_kind_of_process_dies_and_the_run_goes_on(tmp_path: Path):
    """By its number, at any moment: driver, replica, engine, trainer, critic, reward worker."""
    args = [
        "--kills",
        "6",
        "--each",
        "--critic",
        "--points",
        "anywhere",
        "--seed",
        "3",
        "--out",
        f"{tmp_path}/c",
    ]
    found = run_with_kills(parse_arguments(args))
    assert found["wrong"] == [], json.dumps(found, indent=1)
    assert sorted(kill["kind"] for kill in found["kills"]) == sorted(KINDS)


@pytest.mark.slow
def test_everything_dies(tmp_path: Path):
    assert main(["--kills", "10", "--critic", "--seed", "1", "--out", f"{tmp_path}/c"]) == 0


@pytest.mark.slow
@pytest.mark.ci
@pytest.mark.parametrize(
    ("kind", "point", "action", "words"),
    [
        (
            "driver",
            "in the canary",
            "corrupt",
            r"SyncError: canary after the sync of version 2: rollout replica \d and",
        ),
        (
            "engine",
            "loading",
            "raise",
            "SyncError: weight sync of version 2.*broken on purpose: engine, loading",
        ),
    ],
)
def test_a_failed_sync_in_mid_run_ends_the_command_by_name(
    tmp_path: Path, kind, point, action, words
):
    """The sync is beside the update of step 2, whose ranks wait for it before their optimiser
    step."""
    command = Command(tmp_path, settings(tmp_path / "run", 50, ranks=2))
    wish = {"id": 0, "kind": kind, "point": point, "skip": 0, "signal": action, "version": 2}
    (tmp_path / "armed").write_text(json.dumps(wish))
    try:
        command.start()
        deadline = time.monotonic() + 240
        while (
            not (tmp_path / "hit_0").exists()
            and time.monotonic() < deadline
            and command.process.poll() is None
        ):
            time.sleep(0.1)
        assert (tmp_path / "hit_0").exists(), command.log.read_text()
        code = command.process.wait(30)  # from the fault on
        said = command.log.read_text()
        assert code == 1
        assert re.search(words, said), said
        assert command.steps() == 1, "nothing is trained with weights of which the sync failed"
        assert left_behind(command) == []
    finally:
        command.clear()


@pytest.mark.slow
@pytest.mark.ci
def test_syncs_broken_in_every_way_end_soon(tmp_path: Path):
    """Some of `python -m tests.chaos --syncs`: an exception, a wrong sum, a hang and a death, of
    each process in it."""
    faults = [
        "engine: joining the sync: SIGKILL",
        "engine: after the last bucket: corrupt",
        "replica: in the canary: hang",
        "trainer: between buckets: raise",
        "trainer: between buckets: hang",
    ]
    chosen = [word for fault in faults for word in ("--faults", fault)]
    which = ["--syncs", "--all", "--layouts", "2x2", "--versions", "middle"]
    found = break_syncs(parse_arguments([*which, *chosen, "--out", f"{tmp_path}/s"]))
    assert found["wrong"] == []
    assert found["hit"] == 2 * len(faults), json.dumps(found, indent=1)


@pytest.mark.slow
def test_stopped_anywhere_and_resumed_are_the_same_bits(tmp_path: Path):
    found = compare_stopped_runs(
        parse_arguments(["--kills", "4", "--exact", "--seed", "2", "--out", f"{tmp_path}/c"])
    )
    assert found["wrong"] == []
    assert len(found["stops"]) == 4, json.dumps(found, indent=1)
