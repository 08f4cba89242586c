"""Why an engine did not start: vLLM's own reason, in one line."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from one_step_off.cluster.errors import ProcessDied
from one_step_off.engines.vllm.processes import (
    failed_start_names_its_reason,
    log_size,
    start_failure,
)

ARGUMENTS = """1 validation error for ModelConfig
  Value error, Unknown quantization method: x. Must be one of ['awq'\
, 'fp8']. [type=value_error, input_value=ArgsKwargs((), {}), input_type=ArgsKwargs]
    For further information visit https://errors.pydantic.dev/2.14/v/value_error"""
CORE = "Engine core initialization failed. See root cause above. Failed core proc(s): {'0': 1}"
EARLIER = (
    "(EngineCore pid=1) ERROR 11-25 20:55:08 [core.py:1510] ValueError: of an attempt before\n"
)
LOG = """\
(EngineCore pid=7) INFO 11-25 20:55:07 [utils.py:347] Using LBHNC KV cache layout.
(Worker pid=9) ERROR 11-25 20:55:08 [worker.py:15] Traceback (most recent call last):
(Worker pid=9) ERROR 11-25 20:55:08 [worker.py:15]     raise ValueError("no kernel")
(Worker pid=9) ERROR 11-25 20:55:08 [worker.py:15] torch.ValueError: no kernel for [4, 8] bits
(EngineCore pid=7) ERROR 11-25 20:55:08 [core.py:1510] Exception: WorkerProc initialization \
failed due to an exception in a background process. See stack trace for root cause.
RuntimeError: printed by another library
"""


@pytest.mark.parametrize(
    ("raised", "reason"),
    [
        (ARGUMENTS, "Unknown quantization method: x. Must be one of ['awq', 'fp8']."),
        (CORE, "ValueError: no kernel for [4, 8] bits"),
        ("no memory\nand more", "no memory"),
    ],
)
def test_the_reason_is_one_line(tmp_path: Path, raised: str, reason: str) -> None:
    log = tmp_path / "teacher_0.log"
    log.write_text(EARLIER)
    start = log_size(str(log))
    log.write_text(EARLIER + LOG)
    assert start_failure(RuntimeError(raised), str(log), start) == reason


def test_without_an_error_in_the_log_the_log_is_named(tmp_path: Path) -> None:
    log = tmp_path / "teacher_0.log"
    assert log_size(str(log)) == 0
    expected = f"{CORE} ({log})"
    assert start_failure(RuntimeError(CORE), str(log), 0) == expected
    log.write_text(EARLIER)
    assert start_failure(RuntimeError(CORE), str(log), log_size(str(log))) == expected


def test_without_a_log_vllms_error_is_all_there_is() -> None:
    assert start_failure(RuntimeError(CORE), "", 0) == CORE


def wait_for_engine_startup(launch: Any) -> None:
    """As vLLM's."""
    raise RuntimeError(CORE)


@pytest.mark.parametrize(
    ("exit_code", "error", "message"),
    [
        (1, RuntimeError, "^it did not start: ValueError: no kernel for"),
        (-9, ProcessDied, "^its engine's process 7 died"),
    ],
)
def test_a_killed_engine_has_died_whatever_the_log_says(
    tmp_path: Path, exit_code: int, error: type[Exception], message: str
) -> None:
    log = tmp_path / "rollout_0.log"
    process = SimpleNamespace(pid=7, exitcode=exit_code, join=lambda limit: None)
    with (
        pytest.raises(error, match=message),
        failed_start_names_its_reason("it did not start", str(log)),
    ):
        log.write_text(LOG)
        wait_for_engine_startup(
            SimpleNamespace(engine_manager=SimpleNamespace(processes=[process]))
        )


@pytest.mark.parametrize(
    ("said", "key"),
    [
        ("No available memory for the cache blocks. Try in", "rollout.gpu_memory_utilization"),
        (
            "Free memory on device cuda:0 (20/80 GiB) on startup is less than desired GPU memory "
            "utilization (0.36, 28.8 GiB).",
            "end them",
        ),
        (
            "Error in memory profiling. Initial free memory 20 GiB, current free memory 21 GiB.",
            "engine_kwargs.kv_cache_memory_bytes (of rollout or teacher)",
        ),
        (
            "To serve at least one request with the model's max seq len (4096), (1 GiB KV cache is",
            "data.max_response_length",
        ),
        (
            "CUDA out of memory. Tried to allocate 9.00 GiB.",
            "engine_kwargs.max_num_seqs, or raise tensor_parallel_size (of rollout or teacher)",
        ),
    ],
)
def test_a_lack_of_memory_names_its_cause_and_the_key(tmp_path: Path, said: str, key: str) -> None:
    log = tmp_path / "rollout_0.log"
    kind = "torch.OutOfMemoryError" if "CUDA" in said else "ValueError"
    log.write_text(f"(EngineCore pid=7) ERROR 11-26 20:55:08 [core.py:1510] {kind}: {said}\n")
    reason = start_failure(RuntimeError(CORE), str(log), 0)
    cause, _, vllms = reason.partition("; vLLM: ")
    assert key in cause
    assert said in vllms
    assert "\n" not in reason
