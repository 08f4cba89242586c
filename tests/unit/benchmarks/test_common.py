"""What the benchmarks share: runs as processes, command lines, and lengths of responses."""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path

import numpy as np
import pytest

from agent_loop.base import Generated, Limits, Loops
from benchmarks.common import lengths, runs
from benchmarks.common.command_line import Parser
from benchmarks.common.processes import memory, run_in_checkout
from benchmarks.common.report import markdown_table, spread, with_range
from one_step_off.config.errors import ConfigError
from one_step_off.config.loading import load_config
from one_step_off.data.samples import Prompt

TINY = "config=config/gsm8k_tiny_cpu.yaml"


def test_a_failing_arm_says_why(tmp_path: Path) -> None:
    with pytest.raises(runs.RunFailed, match=r"(?s)ended with 2:.*rollout.nn") as failed:
        runs.run_arm("config/gsm8k_tiny_cpu.yaml", [], tmp_path, ["rollout.nn=1"])
    assert failed.value.code == 2


def test_a_run_may_use_the_cores_it_is_given() -> None:
    one_core = min(os.sched_getaffinity(0))
    script = "import os; print(os.sched_getaffinity(0)); import benchmarks"
    command = [sys.executable, "-c", script]
    assert runs.run_process(command, {one_core}) == f"{{{one_core}}}\n"
    assert runs.run_process(command) == f"{os.sched_getaffinity(0)}\n"


def test_arms_alternate() -> None:
    assert [runs.rotated("abc", repeat) for repeat in range(4)] == [
        ["a", "b", "c"],
        ["b", "c", "a"],
        ["c", "a", "b"],
        ["a", "b", "c"],
    ]
    assert [runs.alternated("ab", repeat) for repeat in range(2)] == [["a", "b"], ["b", "a"]]


def test_config_keys_stand_anywhere_between_the_flags() -> None:
    parser = Parser("a benchmark")
    parser.add_argument("--steps", type=int)
    args, keys = parser.parse(["rollout.n=2", "--steps", "3", "config=x.yaml"])
    assert args.steps == 3
    assert keys == ["rollout.n=2", "config=x.yaml"]


def test_a_wrong_flag_is_one_line(capsys: pytest.CaptureFixture) -> None:
    with pytest.raises(SystemExit) as ended:
        Parser("a benchmark").parse(["--fast"])
    error = capsys.readouterr().err
    assert ended.value.code == 2
    assert error.startswith("error: unrecognized argument --fast")
    assert error.count("\n") == 1


def test_a_module_runs_with_the_product_of_another_checkout(tmp_path: Path) -> None:
    (tmp_path / "one_step_off").mkdir()
    (tmp_path / "one_step_off/__init__.py").touch()
    (tmp_path / "one_step_off/__main__.py").write_text(
        "import benchmarks.common.paths, one_step_off\n"
        "print(one_step_off.__file__, benchmarks.common.paths.ROOT)\n"
    )
    product, benchmarks_root = run_in_checkout("one_step_off", [], tmp_path).split()
    assert product == str(tmp_path / "one_step_off/__init__.py")
    assert benchmarks_root == str(Path(__file__).parents[3])
    with pytest.raises(RuntimeError, match="No module named one_step_off.nothing"):
        run_in_checkout("one_step_off.nothing", [], tmp_path)


def test_memory_of_a_process() -> None:
    assert memory(os.getpid(), "VmHWM") >= memory(os.getpid(), "VmRSS") > 1e6
    with pytest.raises(RuntimeError, match="process 4194305 has ended"):
        memory(4194305, "VmRSS")  # above the largest process id


def test_tables() -> None:
    numbers = spread([3.0, 1.0, 2.0])
    assert numbers == {"median": 2.0, "min": 1.0, "max": 3.0, "runs": [3.0, 1.0, 2.0]}
    assert with_range(numbers, "{:.1f}") == "2.0 (1.0 to 3.0)"
    table = markdown_table(["arm", "s"], [["a", "1"], ["b", ""]])
    assert table == ["| arm | s |", "| --- | --- |", "| a | 1 |", "| b | |"]


def draws(seed: int, prompts: int) -> list[int]:
    """Lengths of 8 samples of each prompt, with median 16 and at most 128."""
    return [
        lengths.draw(seed, (0, row), number, 16.0, 1.0, 128)
        for row in range(prompts)
        for number in range(8)
    ]


def test_long_tailed_lengths_are_what_they_say() -> None:
    drawn = draws(0, 500)
    assert 15 <= np.median(drawn) <= 17
    assert min(drawn) >= 1
    assert max(drawn) == 128
    cut_share = sum(length == 128 for length in drawn) / len(drawn)
    # A log-normal's: P(X > 8 medians) = P(Z > ln 8) = 0.0188.
    assert cut_share == pytest.approx(0.0188, abs=0.008)
    assert drawn == draws(0, 500)
    assert drawn[:80] != draws(1, 10)


def test_the_long_tail_asks_for_its_lengths() -> None:
    keys, in_words = lengths.keys_of("longtail:64")
    cfg = load_config([TINY, *keys])
    loop = Loops(cfg, None).get()
    requested: list[int] = []

    async def generate(ids: np.ndarray, tokens: int) -> Generated:
        requested.append(tokens)
        log_probs, versions = np.zeros((2, tokens), np.float32)
        return Generated(np.ones(tokens, np.int32), log_probs, versions, 0, "length")

    async def three_samples(row: int) -> list[int]:
        prompt = Prompt((0, row), np.array([5], np.int32), "q", "1")
        trajectories = [await loop.run(prompt, generate, None, Limits(64)) for _ in range(3)]
        return [trajectory.length for trajectory in trajectories]

    made = asyncio.run(three_samples(0)) + asyncio.run(three_samples(1))
    expected = [
        lengths.draw(0, (0, row), number, 8.0, 1.0, 64) for row in (0, 1) for number in range(3)
    ]
    assert made == requested == expected
    assert "median 8" in in_words
    with pytest.raises(ConfigError, match="ignore_eos"):
        Loops(load_config([TINY, *keys, "rollout.sampling_kwargs={}"]), None).get()
