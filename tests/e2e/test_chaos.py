"""A real run continues when its processes are killed, and leaves nothing behind.
`python -m tests.chaos` goes further."""

from __future__ import annotations

import json
import re
import time
from pathlib import Path

import pytest

from tests.chaos.__main__ import compare_stopped_runs, main, parse_arguments, run_with_kills
from tests.chaos.command import Command, left_behind, settings
from tests.chaos.doubles import RELATIONS
from tests.chaos.points import KINDS
from tests.chaos.syncs import break_syncs

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]


def run_with(tmp_path: Path, kills: int, kinds: str, points: str) -> dict:
    """Kill processes of a run, and then stop it by SIGTERM.

    Args:
        tmp_path: for the files of the run.
        kills: how many processes to kill.
        kinds: of processes, with commas.
        points: where in their work they are killed, with commas.

    Returns:
        what happened. The ledger, the rows and the processes left are checked.
    """
    arguments = [f"--kills={kills}", f"--kinds={kinds}", f"--points={points}"]
    arguments += ["--seed=1", f"--out={tmp_path}/c"]
    result = run_with_kills(parse_arguments(arguments), resume_after=False)
    assert result["wrong"] == [], json.dumps(result, indent=1)
    assert result["hit"] == kills, json.dumps(result, indent=1)
    assert result["starts"] == 1, "the run itself never ended"
    return result


@pytest.mark.slow
def test_an_engine_dies_between_two_buckets_and_the_run_continues(tmp_path: Path):
    """One kill. Most of the test's time is the start of a run and of an engine."""
    (kill,) = run_with(tmp_path, 1, "engine", "between buckets")["kills"]
    assert kill["step"] >= 1
    assert kill["recovered_s"] > 0


@pytest.mark.slow
def test_a_replica_and_an_engine_die_one_after_the_other(tmp_path: Path):
    """The replica dies in mid-generation. After its restart the engine dies between two buckets."""
    kills = run_with(tmp_path, 2, "replica,engine", "generating,between buckets")["kills"]
    assert {(kill["kind"], kill["point"]) for kill in kills} == {
        ("replica", "generating"),
        ("engine", "between buckets"),
    }


@pytest.mark.slow
@pytest.mark.ci
@pytest.mark.timeout(1800)
def test_one_of_each_kind_of_process_dies_and_the_run_continues(tmp_path: Path):
    """At any moment: driver, replica, engine, trainer, critic and reward worker."""
    arguments = ["--kills=6", "--each", "--critic", "--points=anywhere", "--seed=3"]
    arguments += ["--limit=400", f"--out={tmp_path}/c"]
    result = run_with_kills(parse_arguments(arguments))
    assert result["wrong"] == [], json.dumps(result, indent=1)
    hits = [kill["kind"] for kill in result["kills"] if kill["time"]]
    assert sorted(hits) == sorted(KINDS), json.dumps(result, indent=1)


@pytest.mark.slow
def test_everything_dies(tmp_path: Path):
    assert main(["--kills=10", "--critic", "--seed=1", f"--out={tmp_path}/c"]) == 0


@pytest.mark.slow
def test_both_replicas_die_in_every_relation(tmp_path: Path):
    """At one moment, some seconds apart, and the second in the recovery from the first. The run
    itself goes on each time."""
    arguments = ["--double", "--kinds=replica", "--kills=6", "--seed=4", f"--out={tmp_path}/c"]
    result = run_with_kills(parse_arguments(arguments), resume_after=False)
    assert result["wrong"] == [], json.dumps(result, indent=1)
    relations = {double["relation"] for double in result["doubles"]}
    assert relations == set(RELATIONS), json.dumps(result, indent=1)
    assert result["starts"] == 1, "the run itself never ended"


def wait_for_hit(command: Command, hit_file: Path) -> None:
    """Wait until the fault has happened. Fails if the run ends before."""
    deadline = time.monotonic() + 240
    while time.monotonic() < deadline:
        if hit_file.exists() or command.process.poll() is not None:
            break
        time.sleep(0.1)
    assert hit_file.exists(), command.log.read_text()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "point", "action", "error"),
    [
        (
            "driver",
            "in the canary",
            "corrupt",
            r"SyncError: canary after the sync of version 2: rollout replica \d and",
        ),
        pytest.param(
            "engine",
            "loading",
            "raise",
            "SyncError: weight sync of version 2.*broken on purpose: engine, loading",
            marks=pytest.mark.ci,
        ),
    ],
)
def test_a_failed_sync_in_mid_run_ends_the_command_by_name(
    tmp_path: Path, kind: str, point: str, action: str, error: str
):
    """The sync overlaps with the update of step 2, whose ranks wait for it before their optimizer
    step. No time limit ends that wait: it is longer than the test."""
    more = ["trainer.step_timeout_s=300"]
    command = Command(tmp_path, settings(tmp_path / "run", 50, ranks=2, more=more))
    fault = {"id": 0, "kind": kind, "point": point, "skip": 0, "signal": action, "version": 2}
    (tmp_path / "armed").write_text(json.dumps(fault))
    try:
        command.start()
        wait_for_hit(command, tmp_path / "hit_0")
        code = command.process.wait(60)  # seconds from the fault on
        output = command.log.read_text()
        assert code == 1, output
        assert re.search(error, output), output
        assert command.steps() == 1, "nothing is trained with weights of a failed sync"
        assert left_behind(command) == []
    finally:
        command.clear()


@pytest.mark.slow
def test_syncs_broken_in_every_way_end_soon(tmp_path: Path):
    """Some of `python -m tests.chaos --syncs`: a hang in the replica and a death of the engine.
    tests/unit/weight_sync/test_sync_failures.py has more, without processes of Ray."""
    faults = [
        "engine: joining the sync: SIGKILL",
        "replica: in the canary: hang",
    ]
    arguments = ["--syncs", "--all", "--layouts=2x2", "--versions=middle"]
    for fault in faults:
        arguments += ["--faults", fault]
    arguments.append(f"--out={tmp_path}/s")
    result = break_syncs(parse_arguments(arguments))
    assert result["wrong"] == [], json.dumps(result, indent=1)
    assert result["hit"] == 2 * len(faults), json.dumps(result, indent=1)


@pytest.mark.slow
def test_stopped_anywhere_and_resumed_are_the_same_bits(tmp_path: Path):
    arguments = ["--kills=4", "--exact", "--seed=2", f"--out={tmp_path}/c"]
    result = compare_stopped_runs(parse_arguments(arguments))
    assert result["wrong"] == [], json.dumps(result, indent=1)
    assert len(result["stops"]) == 4, json.dumps(result, indent=1)
