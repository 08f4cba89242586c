"""The type checker, as shell/test.sh calls it, finds what the tests that run may never reach."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
pytest.importorskip("ty")

ROLES = """
from one_step_off.ray_trainer import RunGroups


def work(roles: RunGroups):
    {}
"""
LAYOUT = """
from benchmarks.weight_sync.layout import Layout, make_config

{}
"""
IMPORT = """
from one_step_off.rollout.replica_group import {}
"""


def check(code: str, folder: Path) -> subprocess.CompletedProcess:
    """Run the type checker over some code."""
    path = folder / "code.py"
    path.write_text(code)
    command = [sys.executable, "-m", "ty", "check", "--python", sys.executable]
    options = ["--output-format", "concise", "--project", str(ROOT)]
    return subprocess.run(
        [*command, *options, str(path)], cwd=ROOT, capture_output=True, text=True, timeout=120
    )


@pytest.mark.parametrize(
    "code",
    [
        ROLES.format("return roles.rollout.replicas"),
        LAYOUT.format("make_config(Layout(ranks=2), '').model"),
    ],
)
def test_what_exists_is_accepted(code: str, tmp_path: Path) -> None:
    done = check(code, tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize(
    ("code", "fault"),
    [
        (
            ROLES.format("return roles.rollout.engines"),
            "`RolloutGroup` has no attribute `engines`",
        ),
        (ROLES.format("return roles.sync.send(1)"), "`WeightSync` has no attribute `send`"),
        (ROLES.format("return roles.actor.save_hf()"), "missing-argument"),
        (LAYOUT.format("Layout().devices"), "`Layout` has no attribute `devices`"),
        (LAYOUT.format("Layout(rank=2)"), "unknown-argument"),
        (
            IMPORT.format("Replicas"),
            "`one_step_off.rollout.replica_group` has no member `Replicas`",
        ),
    ],
)
def test_what_does_not_exist_is_found(code: str, fault: str, tmp_path: Path) -> None:
    done = check(code, tmp_path)
    assert fault in done.stdout, done.stdout + done.stderr
    assert done.returncode == 1
