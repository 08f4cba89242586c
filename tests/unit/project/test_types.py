"""The type checker, as shell/test.sh calls it, finds what the tests that run may never reach."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
pytest.importorskip("ty")

ROLES = """
from one_step_off.ray_trainer import Roles


def work(roles: Roles):
    {}
"""
LAYOUT = """
from benchmarks.weight_sync.layout import Layout, make_config

{}
"""


@pytest.mark.parametrize(
    ("code", "fault"),
    [
        (ROLES.format("return roles.rollout.replicas"), ""),
        (
            ROLES.format("return roles.rollout.workers"),
            "`RolloutGroup` has no attribute `workers`",
        ),
        (ROLES.format("return roles.sync.send(1)"), "`WeightSync` has no attribute `send`"),
        (ROLES.format("return roles.actor.save_hf()"), "missing-argument"),
        (LAYOUT.format("make_config(Layout(ranks=2), '').model"), ""),
        (LAYOUT.format("Layout().devices"), "`Layout` has no attribute `devices`"),
        (LAYOUT.format("Layout(rank=2)"), "unknown-argument"),
        (
            "from one_step_off.rollout.replica_group import Replicas",
            "`one_step_off.rollout.replica_group` has no member `Replicas`",
        ),
    ],
)
def test_it_finds_what_does_not_exist(code: str, fault: str, tmp_path: Path) -> None:
    path = tmp_path / "code.py"
    path.write_text(code)
    command = [
        sys.executable,
        "-m",
        "ty",
        "check",
        "--python",
        sys.executable,
        "--output-format",
        "concise",
    ]
    done = subprocess.run(
        [*command, "--project", str(ROOT), str(path)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert fault in done.stdout and done.returncode == (1 if fault else 0), (
        done.stdout + done.stderr
    )
