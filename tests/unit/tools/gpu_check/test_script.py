"""shell/gpu_check.sh with stand-ins for the setup and for Python: which venv it takes."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.unit.runtime.test_scripts import ROOT, script, shell

SETUP = """#!/bin/bash
[[ "$1" == --print-venv ]] || { echo "setup for $EXTRA, from $MIN_GPUS GPU"; exit; }
[[ "${EXTRA:-cpu}" == cpu ]] && echo "$ROOT/.venv" || echo "$ROOT/.venv-gpu"
"""
PYTHON = """#!/bin/bash
echo "$(basename "$(dirname "$(dirname "$0")")") $*"
"""


@pytest.mark.parametrize(
    ("arguments", "extra", "venv"),
    [
        ([], "", ".venv"),
        ([], "gpu", ".venv-gpu"),
        (["--device", "cpu", "--only", "devices"], "", ".venv"),
        (["--device=cuda"], "", ".venv-gpu"),
        (["--out", "cuda", "--device", "cuda", "--list"], "", ".venv-gpu"),
        (["--out", "cuda"], "", ".venv"),
        (["--device", "cpu"], "gpu", ".venv-gpu"),
    ],
)
def test_the_venv_follows_from_the_device(
    tmp_path: Path, arguments: list[str], extra: str, venv: str
) -> None:
    name = "gpu_check.sh"
    script(tmp_path / "shell" / name, (ROOT / "shell" / name).read_text())
    script(tmp_path / "shell/setup.sh", SETUP)
    for folder in (".venv", ".venv-gpu"):
        script(tmp_path / folder / "bin/python", PYTHON)
    env = {"ROOT": str(tmp_path)} | ({"EXTRA": extra} if extra else {})
    done = shell(tmp_path, name, *arguments, **env)
    assert done.returncode == 0, done.stderr
    setup, program = done.stdout.splitlines()
    assert setup == f"setup for {'gpu' if venv == '.venv-gpu' else 'cpu'}, from 1 GPU"
    words = [venv, "-P", "-m", "one_step_off.gpu_check", *arguments]
    assert program.split() == words
