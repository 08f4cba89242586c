"""What every bad input must lead to: exit code 2, and one line that names the fault and its fix.

Nothing is started, and no file of an earlier run is changed.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import struct
from collections.abc import Iterator, Sequence
from pathlib import Path

import psutil
import pytest

from one_step_off.main_ppo import main
from one_step_off.runtime import launch

# One of these words tells the user what to do.
FIX_WORDS = re.compile(
    r"\b(add|ask|change|check|choose|did you mean|do without|fix|free|give|install|lower|make|"
    r"must|name|needs|pass|put|quote|raise|remove|rename|resume|run|send|set|start|unset|use|write)"
    r"\b"
)
# The files of an earlier run, and their content.
EARLIER = {
    "metrics.jsonl": '{"step": 0}\n',
    "summary.json": "{}\n",
    "config.yaml": "{}\n",
    "error.log": "an error\n",
    "samples/step_000000.jsonl": "{}\n",
    "tensorboard/events": "x",
    "hf_model/config.json": "{}",
}


def base(folder: Path, model: str) -> list[str]:
    """The arguments of a small valid run, whose folder has the files of an earlier run."""
    run_folder = folder / "run"
    for name, text in EARLIER.items():
        path = run_folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return [
        f"model.path={model}",
        "model.dtype=float32",
        "data.train_files=generator:word_problems",
        "data.generator_size=16",
        "data.max_prompt_length=128",
        "data.max_response_length=16",
        "data.train_batch_size=4",
        "actor.ppo_mini_batch_size=4",
        "rollout.n=2",
        "placement.device=cpu",
        "trainer.total_steps=2",
        f"trainer.output_dir={run_folder}",
        "trainer.overwrite=true",
    ]


def names_a_fix(line: str) -> bool:
    """Whether a line says what to do. The names of files do not count: one may be called run."""
    without_paths = re.sub(r"[\w.~=-]*/[^\s;,)]*", "", line)
    return bool(FIX_WORDS.search(without_paths))


def write(folder: Path, files: dict[str, str | bytes]) -> None:
    """Write files by name. A name that ends with / is a folder."""
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if name.endswith("/"):
            path.mkdir(exist_ok=True)
        elif isinstance(content, str):
            path.write_bytes(content.encode())
        else:
            path.write_bytes(content)


@contextlib.contextmanager
def no_engines() -> Iterator[None]:
    """Fail if the program gets as far as starting Ray."""

    def started(cfg: object) -> str:
        raise AssertionError("bad input went as far as Ray")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(launch, "start_ray", started)
        yield


def refused(
    argv: Sequence[str], parts: Sequence[str], folder: Path, capsys: pytest.CaptureFixture
) -> str:
    """Run the program with these arguments, and check that they are refused as they must be;
    returns the line.
    """
    children = {child.pid for child in psutil.Process().children(recursive=True)}
    capsys.readouterr()
    with no_engines():
        code = main(list(argv))
    out, err = capsys.readouterr()
    assert code == 2, f"exit code {code}: {err}"
    line = err.removesuffix("\n")
    assert line.startswith("error: "), err
    assert "\n" not in line, err
    assert len(line.replace(str(folder), "TMP")) < 600, err
    assert "Traceback" not in out + err
    for part in parts:
        assert part.replace("TMP", str(folder)) in line, f"{part!r} is not in: {line}"
    assert names_a_fix(line), f"names no fix: {line}"
    children_after = {child.pid for child in psutil.Process().children(recursive=True)}
    started = children_after - children
    assert not started, f"left running: {started}"
    run = folder / "run"
    if run.is_dir():
        result = {
            str(path.relative_to(run)): path.read_text()
            for path in run.rglob("*")
            if path.is_file()
        }
        assert result == EARLIER, "an earlier run's folder was changed"
    return line


@contextlib.contextmanager
def without_privileges() -> Iterator[None]:
    """Let file modes apply to root: drop its capabilities to read, write and search everything."""
    libc = ctypes.CDLL(None, use_errno=True)
    header = struct.pack("Ii", 0x20080522, 0)
    saved = ctypes.create_string_buffer(24)
    assert libc.capget(header, saved) == 0
    low_effective, *rest = struct.unpack("6I", saved.raw)
    # CAP_DAC_OVERRIDE, CAP_DAC_READ_SEARCH and CAP_FOWNER
    file_capabilities = 0b1110
    fewer = struct.pack("6I", low_effective & ~file_capabilities, *rest)
    assert libc.capset(header, fewer) == 0
    try:
        yield
    finally:
        assert libc.capset(header, saved) == 0
        assert os.access("/", os.R_OK)
