"""Turns of processes that start on one GPU: an engine that measures is alone."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from one_step_off.cluster.device_turns import device_turn, turn_file

HOLDER = """
import sys
from pathlib import Path
from one_step_off.cluster.device_turns import device_turn
with device_turn(sys.argv[2] == "alone", 60.0, Path(sys.argv[1])):
    print("has its turn", flush=True)
    sys.stdin.read()
print("ended", flush=True)
"""

TOO_SHORT_S = 0.2


class Holder:
    """Another process that has its turn until `end`."""

    def __init__(self, path: Path, alone: bool) -> None:
        arguments = [str(path), "alone" if alone else "beside"]
        self.process = subprocess.Popen(
            [sys.executable, "-c", HOLDER, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def line(self) -> str:
        """What it prints next; waits for it."""
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def end(self) -> None:
        """Let it end its turn."""
        assert self.process.stdin is not None
        self.process.stdin.close()


@pytest.mark.parametrize(
    ("held_alone", "wanted_alone"), [(True, True), (True, False), (False, True)]
)
def test_one_that_measures_is_alone(tmp_path: Path, held_alone: bool, wanted_alone: bool) -> None:
    path = tmp_path / "turn"
    holder = Holder(path, held_alone)
    assert holder.line() == "has its turn"
    with (
        pytest.raises(TimeoutError, match=r"same GPU for 0\.2 s; raise trainer\.start_timeout_s"),
        device_turn(wanted_alone, TOO_SHORT_S, path),
    ):
        raise AssertionError("it had its turn")
    waiting = Holder(path, wanted_alone)
    holder.end()
    assert holder.line() == "ended"
    assert waiting.line() == "has its turn"
    waiting.end()
    assert (holder.process.wait(), waiting.process.wait()) == (0, 0)


def test_trainers_start_at_the_same_time(tmp_path: Path) -> None:
    """Else ranks that wait for one another in a collective would wait forever."""
    path = tmp_path / "turn"
    holder = Holder(path, alone=False)
    assert holder.line() == "has its turn"
    with device_turn(alone=False, limit_s=TOO_SHORT_S, path=path):
        holder.end()
    assert holder.process.wait() == 0


def test_a_killed_process_has_no_turn_left(tmp_path: Path) -> None:
    path = tmp_path / "turn"
    holder = Holder(path, alone=True)
    assert holder.line() == "has its turn"
    holder.process.kill()
    holder.process.wait()
    with device_turn(alone=True, limit_s=60.0, path=path):
        pass


def test_each_gpu_has_turns_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = []
    for gpus in ("0", "1", "GPU-5/2"):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", gpus)
        files.append(turn_file(str(tmp_path)))
    assert len(set(files)) == 3
    assert {file.parent for file in files} == {tmp_path}
