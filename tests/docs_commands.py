"""The commands in README.md, CONTRIBUTING.md and docs/: in fenced bash blocks, indented blocks and
inline code.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).parent.parent
# The tables of modules repeat docstrings; their commands are on other pages.
DOCS = [page for page in (ROOT / "docs").rglob("*.md") if not page.name.startswith("modules_")]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted(DOCS)]
OWN_PACKAGES = ("one_step_off", "benchmarks", "tests", "docs")
# Programs of other projects that a page may call: their first word, or two.
OTHER_PROGRAMS = (
    "pip install",
    "pip wheel",
    "python3 -m venv",
    "ray start",
    "ray stop",
    "ray status",
    "mkdocs build",
    "mkdocs serve",
    "tensorboard",
    "wandb sync",
    "docker build",
    "docker run",
    "nvidia-smi",
    "df -h",
    "export",
    "source",
)
WRAPPERS = ("bash", "sbatch")
CONSOLE_SCRIPT = "one-step-off"  # the installed command of one_step_off.main_ppo
PLACEHOLDERS = ("[", "...")  # as in [section.key=value ...]
VARIABLE = re.compile(r"([A-Z_]+)=(.*)")
CONTINUED_LINE = re.compile(r"\\\n\s*")
FENCED_BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.M | re.S)
INDENTED_LINE = re.compile(r"^ {4}(\S.*)$", re.M)
INLINE_CODE = re.compile(r"`([^`]+)`")


@dataclass(frozen=True)
class Command:
    """One call of a program of this repository.

    Attributes:
        page: name of the file that shows it.
        program: a module, as `benchmarks.lora`, or a script, as `shell/setup.sh`. `shell/bench.sh`
            becomes the benchmark that it runs.
        arguments: the words after the program.
        variables: environment variables set before it.
    """

    page: str
    program: str
    arguments: tuple[str, ...] = ()
    variables: dict[str, str] = field(default_factory=dict)

    @property
    def flags(self) -> set[str]:
        """Its `--flags`, without their values."""
        return {word.partition("=")[0] for word in self.arguments if re.match(r"--?[a-z]", word)}

    @property
    def keys(self) -> dict[str, str]:
        """Its `section.key=value` arguments, and `config=FILE`."""
        keys = {}
        for word in self.arguments:
            if re.match(r"(config|[a-z_]+\.[a-z_]+)=", word):
                name, _, value = word.partition("=")
                keys[name] = value
        return keys

    def __str__(self) -> str:
        variables = [f"{name}={value}" for name, value in self.variables.items()]
        return " ".join([*variables, self.program, *self.arguments])


def program_of(words: list[str]) -> tuple[str, list[str]] | None:
    """The program of this repository that these words call, and its arguments.

    Returns None if they call a program of another project, or none.
    """
    while words and words[0] in WRAPPERS:
        words = words[1:]
        while words and words[0].startswith("-"):  # options of sbatch
            words = words[1:]
    if not words:
        return None
    if words[0] == CONSOLE_SCRIPT:
        return "one_step_off.main_ppo", words[1:]
    name = words[0].removeprefix("./")
    if not re.search(r"(^|/)python3?$", name):
        return (name, words[1:]) if re.fullmatch(r"shell/\w+\.sh", name) else None
    if words[1:2] == ["-m"]:
        module, arguments = words[2], words[3:]
        return (module, arguments) if module.partition(".")[0] in OWN_PACKAGES else None
    if words[1:2] and words[1].partition("/")[0] in OWN_PACKAGES:
        return words[1], words[2:]
    return None


def split_variables(words: list[str]) -> tuple[dict[str, str], list[str]]:
    """The variables that are set at the beginning of a command, and its other words."""
    variables = {}
    for count, word in enumerate(words):
        match = VARIABLE.fullmatch(word)
        if match is None:
            return variables, words[count:]
        variables[match[1]] = match[2]
    return variables, []


def read(line: str, page: str) -> Command | None:
    """The command in a line, or None if it has none of this repository's.

    Raises ValueError if quotes do not match.
    """
    words = shlex.split(line.removeprefix("$ "), comments=True)
    variables, words = split_variables(words)
    called = program_of(words)
    if called is None:
        return None
    program, arguments = called
    if program == "shell/bench.sh":
        program = f"benchmarks.{variables.pop('BENCHMARK', 'throughput')}"
    real_arguments = tuple(word for word in arguments if not word.startswith(PLACEHOLDERS))
    return Command(page, program, real_arguments, variables)


def possible_commands(text: str) -> Iterator[str]:
    """Every line of a page that may be a command. Inline code may continue over the end of a
    line.
    """
    text = CONTINUED_LINE.sub(" ", text)
    for block in FENCED_BLOCK.finditer(text):
        if block[1] == "bash":
            yield from block[2].splitlines()
    text = FENCED_BLOCK.sub("", text)
    for line in INDENTED_LINE.finditer(text):
        yield line[1]
    text = INDENTED_LINE.sub("", text)
    for code in INLINE_CODE.finditer(text):
        yield " ".join(code[1].split())


def commands() -> list[Command]:
    """All commands of all pages in order, each once."""
    found: dict[str, Command] = {}
    for page in PAGES:
        for line in possible_commands(page.read_text()):
            if not any(part in line for part in ("python", ".sh", CONSOLE_SCRIPT)):
                continue
            try:
                command = read(line, page.name)
            except ValueError:  # prose or output with a single quote
                continue
            if command is not None:
                found.setdefault(str(command), command)
    return list(found.values())


def unknown_programs() -> list[str]:
    """Lines of bash blocks that call neither a program of this repository nor a known other one."""
    unknown = []
    for page in PAGES:
        text = CONTINUED_LINE.sub(" ", page.read_text())
        blocks = [block[2] for block in FENCED_BLOCK.finditer(text) if block[1] == "bash"]
        for line in "\n".join(blocks).splitlines():
            _, words = split_variables(shlex.split(line, comments=True))
            if not words or program_of(words) is not None:
                continue
            name_and_arguments = " ".join([Path(words[0]).name, *words[1:]])
            if not name_and_arguments.startswith(OTHER_PROGRAMS):
                unknown.append(f"{page.name}: {line}")
    return unknown
