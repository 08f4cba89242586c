"""Turns of processes that start on one GPU: an engine that measures is alone."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from one_step_off.cluster.device_turns import device_turn, turn_file
from one_step_off.config.loading import load_config
from one_step_off.engines.vllm.kv_cache import measuring_turn
from one_step_off.training.device_memory import in_device_turn

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


SHARED = "placement.pools={rollout: [0.5], actor: [0.5]}"


class Rank:
    """A trainer's rank, as far as `in_device_turn` looks at it."""

    def __init__(self, pools: str, device: str = "cuda") -> None:
        self.cfg = load_config(["model.path=tiny:qwen2", pools])
        self.cfg.trainer.start_timeout_s = TOO_SHORT_S
        self.role = "actor"
        self._device_type = device

    @in_device_turn
    def setup(self) -> None:
        """Load the model."""


def engine_config(size: int | None) -> Any:
    """vLLM's `VllmConfig`, with this size of the KV cache."""
    return SimpleNamespace(cache_config=SimpleNamespace(kv_cache_memory_bytes=size))


@pytest.fixture
def measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Another engine measures this process's GPU meanwhile."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    holder = Holder(turn_file(), alone=True)
    assert holder.line() == "has its turn"
    yield
    holder.end()
    holder.process.wait()


@pytest.mark.usefixtures("measured")
def test_a_trainer_on_a_shared_gpu_waits_for_an_engine_that_measures() -> None:
    with pytest.raises(TimeoutError, match="same GPU"):
        Rank(SHARED).setup()
    Rank(SHARED, device="cpu").setup()
    Rank("placement.pools={rollout: [1], actor: [1]}").setup()


@pytest.mark.usefixtures("measured")
@pytest.mark.parametrize(
    ("size", "device", "pools", "waits"),
    [
        (None, "cuda", SHARED, True),
        (1 << 30, "cuda", SHARED, True),
        (None, "cpu", SHARED, False),
        (None, "cuda", "placement.pools={rollout: [1], actor: [1]}", False),
    ],
)
def test_an_engine_on_a_shared_gpu_waits_for_another_that_measures(
    size: int | None, device: str, pools: str, waits: bool
) -> None:
    cfg = load_config(["model.path=tiny:qwen2", pools])
    cfg.trainer.start_timeout_s = TOO_SHORT_S
    expected = pytest.raises(TimeoutError) if waits else contextlib.nullcontext()
    with expected, measuring_turn(cfg, "rollout", device, engine_config(size)):
        assert not waits
