"""The commands that README.md, CONTRIBUTING.md and docs/**/*.md show, wherever they stand: in fenced blocks of bash, in
indented blocks and in the text."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
OURS = "one_step_off", "benchmarks", "tests", "docs"
# Programs of others, which a page may tell to call. Their first word, or two.
OTHERS = (
    "pip install",
    "ray start",
    "ray stop",
    "ray status",
    "mkdocs build",
    "mkdocs serve",
    "tensorboard",
    "wandb sync",
    "docker build",
    "docker run",
    "export",
    "source",
)
WRAPPERS = "bash", "sbatch"
VARIABLE = re.compile(r"([A-Z_]+)=(.*)")


@dataclass(frozen=True)
class Command:
    """One call of a program of this repository.

    Attributes:
        page: the file that shows it.
        program: a module, as `benchmarks.lora`, or a script, as `shell/setup.sh`. `shell/bench.sh` is the benchmark that it runs.
        arguments: the words behind it.
        variables: set in front of it.
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
        """Its `section.key=value`, and `config=FILE`."""
        pairs = (
            word.partition("=")
            for word in self.arguments
            if re.match(r"(config|[a-z_]+\.[a-z_]+)=", word)
        )
        return {name: value for name, _, value in pairs}

    def __str__(self) -> str:
        variables = [f"{name}={value}" for name, value in self.variables.items()]
        return " ".join([*variables, self.program, *self.arguments])


def program_of(words: list[str]) -> tuple[str, list[str]] | None:
    """The program of this repository that these words call, and its arguments; None: they call another's, or none."""
    while words and words[0] in WRAPPERS:
        words = words[1:]
        while words and words[0].startswith("-"):  # sbatch's own options
            words = words[1:]
    if not words:
        return None
    name = words[0].removeprefix("./")
    if re.search(r"(^|/)python3?$", name):
        if words[1:2] == ["-m"]:
            found, arguments = words[2], words[3:]
            return (found, arguments) if found.partition(".")[0] in OURS else None
        if words[1:2] and words[1].partition("/")[0] in OURS:
            return words[1], words[2:]
        return None
    return (name, words[1:]) if re.fullmatch(r"shell/\w+\.sh", name) else None


def read(line: str, page: str) -> Command | None:
    """The command in a line; None: there is none of this repository's. Raises ValueError: quotes do not match."""
    words = shlex.split(line.removeprefix("$ "), comments=True)
    variables = {}
    while words and (match := VARIABLE.fullmatch(words[0])):
        variables[match[1]] = match[2]
        words = words[1:]
    found = program_of(words)
    if found is None:
        return None
    program, arguments = found
    if program == "shell/bench.sh":
        program = f"benchmarks.{variables.pop('BENCHMARK', 'throughput')}"
    placeholders = ("[", "...")  # as in [section.key=value ...]
    return Command(
        page,
        program,
        tuple(word for word in arguments if not word.startswith(placeholders)),
        variables,
    )


def lines_of(text: str) -> Iterator[str]:
    """Every line of a page that may be a command: of blocks, and each span of inline code, which may go over a line's end."""
    text = re.sub(r"\\\n\s*", " ", text)
    fence = re.compile(r"^```(\w*)\n(.*?)^```$", re.M | re.S)
    for match in fence.finditer(text):
        if match[1] == "bash":
            yield from match[2].splitlines()
    text = fence.sub("", text)
    for match in re.finditer(r"^ {4}(\S.*)$", text, re.M):
        yield match[1]
    text = re.sub(r"^ {4}\S.*$", "", text, flags=re.M)
    for match in re.finditer(r"`([^`]+)`", text):
        yield " ".join(match[1].split())


def commands() -> list[Command]:
    """All of them, in order, each once."""
    found: dict[str, Command] = {}
    for page in PAGES:
        for line in lines_of(page.read_text()):
            if not any(name in line for name in ("python", ".sh")):
                continue
            try:
                command = read(line, page.name)
            except ValueError:  # prose or output with a lone quote
                continue
            if command is not None:
                found.setdefault(str(command), command)
    return list(found.values())


def unknown_programs() -> list[str]:
    """Lines of bash blocks that call neither a program of this repository nor one of OTHERS."""
    wrong = []
    for page in PAGES:
        text = re.sub(r"\\\n\s*", " ", page.read_text())
        for block in re.findall(r"^```bash\n(.*?)^```$", text, re.M | re.S):
            for line in block.splitlines():
                words = shlex.split(line, comments=True)
                while words and VARIABLE.fullmatch(words[0]):
                    words = words[1:]
                plain = " ".join([Path(words[0]).name, *words[1:]]) if words else ""
                if words and program_of(words) is None and not plain.startswith(OTHERS):
                    wrong.append(f"{page.name}: {line}")
    return wrong
