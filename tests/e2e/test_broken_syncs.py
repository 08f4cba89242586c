"""Syncs that fail in a real run end it soon and by name. `python -m tests.chaos --syncs` goes
further."""

from __future__ import annotations

import json
import re
import time
from pathlib import Path

import pytest

from tests.chaos.__main__ import parse_arguments
from tests.chaos.command import Command, left_behind, settings
from tests.chaos.syncs import break_syncs

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(900)]


def wait_for_hit(command: Command, hit_file: Path) -> None:
    """Wait until the fault has happened. Fails if the run ends before."""
    deadline = time.monotonic() + 240
    while time.monotonic() < deadline:
        if hit_file.exists() or command.process.poll() is not None:
            break
        time.sleep(0.1)
    assert hit_file.exists(), command.log.read_text()


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
    step. No time limit ends that wait: it is longer than the test. With two replicas: the next
    test, and test_sync_failures.py."""
    more = ["trainer.step_timeout_s=300", "placement.pools={rollout: [1], actor: [2]}"]
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
