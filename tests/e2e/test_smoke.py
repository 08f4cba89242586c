"""Every benchmark and every documented command runs in its smallest form and writes its files."""

from __future__ import annotations

import importlib.util
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests import docs_commands
from tests.docs_commands import PAGES, ROOT, Command
from tests.smoke_cases import BENCHMARKS, CASES, NOT_IN_CI, PROGRAM, WITHOUT, SmokeCase, covers

TIME_LIMIT_S = 400


def is_known(command: Command) -> bool:
    """Whether a command has a case, or a reason why it has none."""
    has_case = any(covers(case, command) for case in CASES.values())
    return has_case or any(without.matches(command) for without in WITHOUT)


def test_every_documented_command_has_a_smallest_form() -> None:
    unknown = [command for command in docs_commands.commands() if not is_known(command)]
    missing = [f"{command.page}: {command}" for command in unknown]
    assert not missing, "no case in tests/smoke_cases.py, and no reason why there is none"


def test_every_benchmark_has_a_smallest_form() -> None:
    folder = ROOT / "benchmarks"
    programs = {path.parent.name for path in folder.glob("*/__main__.py")}
    programs |= {path.stem for path in folder.glob("*.py") if "__name__ ==" in path.read_text()}
    listed = {case.program for case in BENCHMARKS} | {without.program for without in WITHOUT}
    assert programs == {name.partition(".")[2] for name in listed if name.startswith("benchmarks.")}


def test_every_reason_is_for_a_documented_command() -> None:
    commands = docs_commands.commands()
    unused = [
        without for without in WITHOUT if not any(without.matches(command) for command in commands)
    ]
    assert not unused


def test_pages_call_known_programs() -> None:
    assert docs_commands.unknown_programs() == []


@pytest.mark.parametrize(
    ("line", "program", "flags"),
    [
        ("BENCHMARK=learning bash shell/bench.sh --arms sync", "benchmarks.learning", {"--arms"}),
        ("$ .venv/bin/python -m benchmarks.lora --out=DIR  # a word", "benchmarks.lora", {"--out"}),
        ("sbatch --nodes=4 shell/slurm_qwen_gsm8k.sh", "shell/slurm_qwen_gsm8k.sh", set()),
        ("python docs/make_reference.py", "docs/make_reference.py", set()),
        ("one-step-off config=gsm8k_tiny_cpu --dry-run", "one_step_off.main_ppo", {"--dry-run"}),
        ("python -m verl.trainer.main_ppo --flag", None, set()),
        ("pip install -e .", None, set()),
    ],
)
def test_lines_are_read_as_a_shell_does(line: str, program: str | None, flags: set[str]) -> None:
    command = docs_commands.read(line, "page")
    assert (command.program if command else None) == program
    assert command is None or command.flags == flags


def test_a_new_flag_key_or_program_is_not_covered() -> None:
    def covered(line: str) -> bool:
        command = docs_commands.read(line, "page")
        assert isinstance(command, Command)
        return is_known(command)

    tiny = "python -m one_step_off.main_ppo config=config/gsm8k_tiny_cpu.yaml"
    assert covered("python -m benchmarks.lora --out DIR --model 0.5b")
    assert covered(f"{tiny} trainer.total_steps=7")
    assert not covered("python -m benchmarks.lora --out DIR --rank 8")
    assert not covered("python -m benchmarks.brand_new --out DIR")
    assert not covered(f"{tiny} --brand-new")
    assert not covered(f"{tiny} actor.lr=7.0")
    assert not covered("python -m one_step_off.main_ppo config=config/brand_new.yaml")
    assert not covered("python -m one_step_off.plan config=FILE --brand-new")
    assert not covered("FRESH=1 shell/run_split_placement.sh")


@dataclass(frozen=True)
class Workspace:
    """Where the commands run.

    Attributes:
        checkout: a copy of this repository that counts as installed.
        folder: the working directory, with the modules that the pages show.
    """

    checkout: Path
    folder: Path


@pytest.fixture(scope="module")
def workspace(tmp_path_factory: pytest.TempPathFactory) -> Workspace:
    root = tmp_path_factory.mktemp("smoke")
    checkout = root / "checkout"
    checkout.mkdir()
    for path in ROOT.iterdir():
        if path.name not in ("shell", "outputs") and not path.name.startswith("."):
            (checkout / path.name).symlink_to(path)
    shutil.copytree(ROOT / "shell", checkout / "shell")
    (checkout / "venv").symlink_to(sys.prefix)
    # It has nothing to install: this Python has what the real setup.sh installs.
    setup = checkout / "shell/setup.sh"
    setup.write_text(f'[[ "${{1:-}}" != --print-venv ]] || echo "{checkout}/venv"\n')
    setup.chmod(0o755)
    folder = root / "working_directory"
    folder.mkdir()
    for page in PAGES:
        for text in re.findall(r"^```python\n(# \w+\.py\n.*?)^```$", page.read_text(), re.M | re.S):
            file_name = text.split()[1]
            (folder / file_name).write_text(text)
    return Workspace(checkout, folder)


def words_of(case: SmokeCase, checkout: Path) -> list[str]:
    """The command line. The pages show two ways to run the throughput benchmark: this one uses
    shell/bench.sh."""
    arguments = [
        re.sub(r"^(config=)?(?=(config|tests)/)", rf"\1{checkout}/", word)
        for word in case.arguments
    ]
    if case.program.startswith("shell/"):
        return ["bash", f"{checkout}/{case.program}", *arguments]
    if case.program == "benchmarks.throughput":
        return ["bash", f"{checkout}/shell/bench.sh", *arguments]
    return [sys.executable, "-P", "-m", case.program, *arguments]


def environment(workspace: Workspace) -> dict[str, str]:
    """The environment of all commands. The scripts' variables must come from the case alone."""
    variables = dict(os.environ)
    for name in ("MODEL", "DATA", "BACKEND", "BENCHMARK"):
        variables.pop(name, None)
    paths = [str(workspace.folder), str(ROOT)]
    if variables.get("PYTHONPATH"):
        paths.append(variables["PYTHONPATH"])
    variables["PYTHONPATH"] = os.pathsep.join(paths)
    variables["EXTRA"] = "cpu"
    return variables


@pytest.fixture(scope="module")
def output_of(workspace: Workspace) -> Callable[[SmokeCase], str]:
    """output_of(case): what it printed. Each case runs once, after those whose files it reads."""
    outputs: dict[str, str] = {}

    def run_once(case: SmokeCase) -> str:
        for name in case.after:
            run_once(CASES[name])
        if case.name in outputs:
            return outputs[case.name]
        words = words_of(case, workspace.checkout)
        finished = subprocess.run(
            words,
            cwd=workspace.folder,
            env=environment(workspace) | case.variables,
            capture_output=True,
            text=True,
            timeout=TIME_LIMIT_S,
        )
        end_of_output = (finished.stdout + finished.stderr)[-4000:]
        assert finished.returncode == 0, f"{shlex.join(words)}\n{end_of_output}"
        outputs[case.name] = finished.stdout
        return finished.stdout

    return run_once


def parameters() -> list[Any]:
    """All cases; those that are not in `NOT_IN_CI` have the marker "ci"."""
    return [
        pytest.param(case, id=case.name, marks=() if case.name in NOT_IN_CI else pytest.mark.ci)
        for case in [*BENCHMARKS, *PROGRAM]
    ]


@pytest.mark.slow
@pytest.mark.e2e
@pytest.mark.timeout(3 * TIME_LIMIT_S)
@pytest.mark.parametrize("case", parameters())
def test_runs(case: SmokeCase, workspace: Workspace, output_of: Callable[[SmokeCase], str]) -> None:
    package = case.needs.partition(".")[0]
    if package and importlib.util.find_spec(package) is None:
        pytest.skip(f"{case.needs} is not installed")
    assert case.prints in output_of(case)
    for name in case.writes:
        path = workspace.folder / case.folder / name
        assert path.is_dir() or path.stat().st_size > 0, path
