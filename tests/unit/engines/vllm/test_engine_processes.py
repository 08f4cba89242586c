"""How the processes of an engine that did not start have ended."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from one_step_off.cluster.errors import ProcessDied
from one_step_off.cluster.process_cleanup import RUN_FOLDER_VARIABLE
from one_step_off.engines.engine_processes import kill_processes, not_running
from one_step_off.engines.vllm.processes import (
    kill_engines_of_run,
    killed_engine_raises_process_died,
)


def wait_for_engine_startup(launch: Any) -> None:
    """As vLLM's: what has ended may have no exit code yet."""
    raise RuntimeError("Engine core initialization failed. Failed core proc(s): {}")


def start_engine(*codes: int | None) -> None:
    """Start processes that end with these exit codes."""
    processes = [SimpleNamespace(pid=7, exitcode=code, join=lambda limit: None) for code in codes]
    wait_for_engine_startup(SimpleNamespace(engine_manager=SimpleNamespace(processes=processes)))


@pytest.mark.parametrize(
    ("codes", "death"),
    [
        ([-9], "^its engine's process 7 died \\(SIGKILL\\)$"),
        ([-15, 1, -11], "SIGSEGV"),
        ([-40], "signal 40"),
    ],
)
def test_an_engine_that_a_signal_has_ended_has_died(codes, death):
    with pytest.raises(ProcessDied, match=death), killed_engine_raises_process_died():
        start_engine(*codes)


@pytest.mark.parametrize("codes", [[1], [0], [None], [1, -15], []])
def test_an_engine_that_raised_has_not(codes):
    with (
        pytest.raises(RuntimeError, match="initialization failed") as caught,
        killed_engine_raises_process_died(),
    ):
        start_engine(*codes)
    assert not isinstance(caught.value, ProcessDied)


@pytest.mark.parametrize("failure", [RuntimeError("no memory"), ValueError("max_model_len")])
def test_other_failures_stay_as_they_are(failure):
    with pytest.raises(type(failure)) as caught, killed_engine_raises_process_died():
        raise failure
    assert caught.value is failure


def test_the_exit_code_of_a_process_that_still_ends_is_waited_for():
    process = multiprocessing.get_context("fork").Process(target=signal.pause)
    process.start()
    os.kill(process.pid, signal.SIGKILL)
    launch = SimpleNamespace(engine_manager=SimpleNamespace(processes=[process]))
    with (
        pytest.raises(ProcessDied, match=f"process {process.pid} died"),
        killed_engine_raises_process_died(),
    ):
        wait_for_engine_startup(launch)


@pytest.fixture
def processes() -> Iterator[Any]:
    """A function that starts a process with a title and a run's folder; it is ended afterwards."""
    started = []

    def start(title: str, folder: str) -> subprocess.Popen:
        env = os.environ | {RUN_FOLDER_VARIABLE: folder}
        process = subprocess.Popen([title, "600"], executable="/bin/sleep", env=env)
        started.append(process)
        return process

    yield start
    for process in started:
        process.kill()
        process.wait()


def test_engines_without_their_replica_are_killed_and_no_others(processes, monkeypatch):
    ours = processes("VLLM::EngineCore", "/tmp/run_a")
    others = [processes("VLLM::EngineCore", "/tmp/run_b"), processes("ray::Scorer", "/tmp/run_a")]
    monkeypatch.delenv(RUN_FOLDER_VARIABLE, raising=False)
    kill_engines_of_run()
    assert ours.poll() is None, "without a run's folder nothing is known"
    monkeypatch.setenv(RUN_FOLDER_VARIABLE, "/tmp/run_a")
    kill_engines_of_run()
    assert ours.wait(10) == -signal.SIGKILL
    assert [process.poll() for process in others] == [None, None]


def test_a_killed_process_has_ended_before_another_engine_starts() -> None:
    """Its memory is free by then. It stays a zombie here, since nothing has waited for it."""
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"]) as child:
        process = psutil.Process(child.pid)
        kill_processes([(child.pid, process.create_time() + 1)])  # another process, by now
        assert not_running(process) == ""
        kill_processes([(child.pid, process.create_time())])
        assert not_running(process)
