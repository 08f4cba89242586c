"""Every benchmark and every command that the pages show runs, in its smallest form, and leaves what it should leave."""

from __future__ import annotations

import importlib.util
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests import docs_commands
from tests.docs_commands import PAGES, ROOT, Command
from tests.smoke_cases import BENCHMARKS, CASES, PROGRAM, WITHOUT, Smoke, covers

LIMIT_S = 400


def test_every_documented_command_has_a_smallest_form() -> None:
    missing = [
        f"{command.page}: {command}"
        for command in docs_commands.commands()
        if not any(covers(case, command) for case in CASES.values())
        and not any(without.means(command) for without in WITHOUT)
    ]
    assert not missing, "no case in tests/smoke_cases.py, and no reason why there is none"


def test_every_benchmark_has_a_smallest_form() -> None:
    folder = ROOT / "benchmarks"
    programs = {path.parent.name for path in folder.glob("*/__main__.py")}
    programs |= {path.stem for path in folder.glob("*.py") if "__main__" in path.read_text()}
    listed = {case.program for case in BENCHMARKS} | {without.program for without in WITHOUT}
    assert programs == {name.partition(".")[2] for name in listed if name.startswith("benchmarks.")}


def test_no_reason_stands_there_for_nothing() -> None:
    commands = docs_commands.commands()
    assert not [w for w in WITHOUT if not any(w.means(command) for command in commands)]


def test_pages_call_known_programs() -> None:
    assert docs_commands.unknown_programs() == []


@pytest.mark.parametrize(
    ("line", "program", "flags"),
    [
        ("BENCHMARK=learning bash shell/bench.sh --arms sync", "benchmarks.learning", {"--arms"}),
        ("$ .venv/bin/python -m benchmarks.lora --out=DIR  # a word", "benchmarks.lora", {"--out"}),
        ("sbatch --nodes=4 shell/slurm_qwen_gsm8k.sh", "shell/slurm_qwen_gsm8k.sh", set()),
        ("python docs/make_reference.py", "docs/make_reference.py", set()),
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
        return any(covers(case, command) for case in CASES.values()) or any(
            w.means(command) for w in WITHOUT
        )

    tiny = "python -m one_step_off.main_ppo config=config/gsm8k_tiny_cpu.yaml"
    assert covered("python -m benchmarks.lora --out DIR --model 0.5b") and covered(
        f"{tiny} trainer.total_steps=7"
    )
    assert not covered("python -m benchmarks.lora --out DIR --rank 8")
    assert not covered("python -m benchmarks.brand_new --out DIR")
    assert not covered(f"{tiny} --brand-new")
    assert not covered(f"{tiny} actor.lr=7.0")
    assert not covered("python -m one_step_off.main_ppo config=config/brand_new.yaml")
    assert not covered("python -m one_step_off.plan config=FILE --brand-new")
    assert not covered("FRESH=1 shell/run_split_placement.sh")


@pytest.fixture(scope="module")
def desk(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder where a user stands, with the modules that the pages show; beside it a checkout that is set up."""
    root = tmp_path_factory.mktemp("smoke")
    checkout = root / "checkout"
    checkout.mkdir()
    for path in ROOT.iterdir():
        if path.name not in ("shell", "outputs") and not path.name.startswith("."):
            (checkout / path.name).symlink_to(path)
    shutil.copytree(ROOT / "shell", checkout / "shell")
    (checkout / "venv").symlink_to(sys.prefix)
    # Its work is done: this Python has what setup.sh would install.
    (checkout / "shell/setup.sh").write_text(
        f'[[ "${{1:-}}" != --print-venv ]] || echo "{checkout}/venv"\n'
    )
    (checkout / "shell/setup.sh").chmod(0o755)
    place = root / "desk"
    place.mkdir()
    for page in PAGES:
        for text in re.findall(r"^```python\n(# \w+\.py\n.*?)^```$", page.read_text(), re.M | re.S):
            (place / text.split()[1]).write_text(text)
    return place


def words_of(case: Smoke, checkout: Path) -> list[str]:
    """The command line. A benchmark runs by shell/bench.sh, as the pages show both ways."""
    arguments = [
        re.sub(r"^(config=)?(?=config/)", rf"\1{checkout}/", word) for word in case.arguments
    ]
    if case.program.startswith("shell/"):
        return ["bash", f"{checkout}/{case.program}", *arguments]
    if case.program == "benchmarks.throughput":
        return ["bash", f"{checkout}/shell/bench.sh", *arguments]
    return [sys.executable, "-P", "-m", case.program, *arguments]


@pytest.fixture(scope="module")
def outcome(desk: Path) -> Callable[[Smoke], str]:
    """outcome(case): what it printed; each case runs once, after those whose files it reads."""
    printed: dict[str, str] = {}
    paths = os.pathsep.join([str(desk), str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    # The scripts' own variables must come from the case alone.
    env = {
        name: value
        for name, value in os.environ.items()
        if name not in ("MODEL", "DATA", "BACKEND", "BENCHMARK")
    }
    env |= {"PYTHONPATH": paths, "EXTRA": "cpu"}

    def of(case: Smoke) -> str:
        for name in case.after:
            of(CASES[name])
        if case.name not in printed:
            words = words_of(case, desk.parent / "checkout")
            done = subprocess.run(
                words,
                cwd=desk,
                env=env | case.variables,
                capture_output=True,
                text=True,
                timeout=LIMIT_S,
            )
            assert done.returncode == 0, (
                f"{shlex.join(words)}\n{(done.stdout + done.stderr)[-4000:]}"
            )
            printed[case.name] = done.stdout
        return printed[case.name]

    return of


@pytest.mark.ci
@pytest.mark.slow
@pytest.mark.e2e
@pytest.mark.timeout(3 * LIMIT_S)
@pytest.mark.parametrize(
    "case", [pytest.param(case, id=case.name) for case in [*BENCHMARKS, *PROGRAM]]
)
def test_runs(case: Smoke, desk: Path, outcome: Callable[[Smoke], str]) -> None:
    if case.needs and importlib.util.find_spec(case.needs.partition(".")[0]) is None:
        pytest.skip(f"{case.needs} is not installed")
    assert case.prints in outcome(case)
    for name in case.writes:
        path = desk / case.folder / name
        assert path.is_dir() or path.stat().st_size > 0, path
