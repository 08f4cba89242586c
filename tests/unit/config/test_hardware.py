"""Counting GPUs, and sharing cores between the groups."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from one_step_off.config.hardware import count_gpus, divide_cores


def test_plan_cores_by_hand() -> None:
    assert divide_cores(1, 1, [4, 7]) == ([[4]], [[7]])
    assert divide_cores(1, 3, list(range(8))) == ([[0, 1]], [[2, 3], [4, 5], [6, 7]])
    assert divide_cores(2, 1, [5]) == ([[5], [5]], [[5]])
    assert divide_cores(3, 1, [0, 1]) == ([[0], [0], [0]], [[1]])


@given(st.integers(1, 20), st.integers(1, 20), st.sets(st.integers(0, 99), min_size=1, max_size=40))
def test_plan_cores_shares_nothing_between_groups(
    rollout: int, trainer: int, cores: set[int]
) -> None:
    a, b = divide_cores(rollout, trainer, sorted(cores))
    assert (len(a), len(b)) == (rollout, trainer)
    assert all(a)
    assert all(b)
    mine = {c for p in a for c in p}
    theirs = {c for p in b for c in p}
    assert mine | theirs == cores or rollout < len(mine) or trainer < len(theirs) or len(cores) == 1
    assert mine | theirs <= cores
    assert len(cores) == 1 or not mine & theirs
    for group in (a, b):
        assert max(map(len, group)) - min(map(len, group)) <= 1


@pytest.mark.parametrize(
    ("smi", "visible", "count"),
    [
        ("GPU 0: A\nGPU 1: B\n", None, 2),
        ("GPU 0: A\nGPU 1: B\n", "1", 1),
        ("GPU 0: A\nGPU 1: B\n", "", 0),
        ("GPU 0: A\nGPU 1: B\n", "-1", 0),
        ("GPU 0: A\nGPU 1: B\n", "0,5,1", 1),
        ("GPU 0: A\n  MIG 1g: X\n", "MIG-abc", 1),
        ("No devices were found\n", None, 0),
        ("", "0", 0),
    ],
)
def test_count_gpus(
    smi: str, visible: str | None, count: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "answer").write_text(smi)
    tool = tmp_path / "nvidia-smi"
    tool.write_text(f'#!/bin/sh\nwhile read -r line; do echo "$line"; done < {tmp_path}/answer\n')
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    if visible is None:
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    else:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert count_gpus() == count
