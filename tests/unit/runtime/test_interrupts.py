"""Ctrl-C and SIGTERM: to a run in the main thread's event loop, and to one in a thread of its own,
as in a notebook."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from types import SimpleNamespace

import pytest

from one_step_off.runtime.interrupts import LoopRunner, stop_on_interrupt

LONG_S = 60.0


class Run:
    """A pipeline that stops when it is asked to, in the coroutine `main`.

    Attributes:
        lines: what it logs.
        thread: the thread in which it ran.
    """

    def __init__(self, runner: LoopRunner, grace_s: float, stops: bool = True) -> None:
        self.runner = runner
        self.grace_s = grace_s
        self.stops = stops
        self.pipeline = SimpleNamespace(stopping=False)
        self.lines: list[str] = []
        self.thread: threading.Thread | None = None

    async def main(self, signals: list[int]) -> str:
        """Send the signals to this process, one after another, and wait until the pipeline is to
        stop."""
        self.thread = threading.current_thread()
        with stop_on_interrupt(self.runner, self.pipeline, self.grace_s, self.lines.append) as stop:
            for number in signals:
                lines = len(self.lines)
                os.kill(os.getpid(), number)
                while len(self.lines) == lines:
                    await asyncio.sleep(0.001)
            if not (self.pipeline.stopping and self.stops):
                await asyncio.sleep(LONG_S)
            return f"stopped, requested: {stop.requested}"


def call(runner: LoopRunner, run: Run, signals: list[int], in_a_loop: bool) -> str:
    """Run it as `train` does: in this thread, or where this thread has an event loop already."""
    if not in_a_loop:
        return runner.run(run.main(signals))

    async def cell() -> str:
        return runner.run(run.main(signals))

    return asyncio.run(cell())


@pytest.fixture(autouse=True)
def default_sigterm():
    """Without the handler that Ray leaves after other tests: asyncio would not restore it."""
    before = signal.signal(signal.SIGTERM, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGTERM, before)


@pytest.mark.parametrize("in_a_loop", [False, True])
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_first_signal_asks_the_pipeline_to_stop(number, in_a_loop):
    handlers = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    runner = LoopRunner()
    run = Run(runner, grace_s=LONG_S)
    assert call(runner, run, [number], in_a_loop) == "stopped, requested: True"
    assert run.lines == [
        "stopping: a checkpoint is written when this step ends, within 60 s; "
        "press Ctrl-C again to abort"
    ]
    assert (run.thread is threading.main_thread()) is not in_a_loop
    assert handlers == [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]


@pytest.mark.parametrize("in_a_loop", [False, True])
@pytest.mark.parametrize("grace_s", [LONG_S, 0.0])
def test_the_second_signal_aborts_and_so_does_the_first_without_a_grace_time(grace_s, in_a_loop):
    runner = LoopRunner()
    run = Run(runner, grace_s, stops=False)
    signals = [signal.SIGINT] if grace_s == 0 else [signal.SIGINT, signal.SIGINT]
    with pytest.raises(asyncio.CancelledError):
        call(runner, run, signals, in_a_loop)
    assert run.lines[-1] == "stopping at once: no checkpoint was written"


@pytest.mark.parametrize("in_a_loop", [False, True])
def test_the_grace_time_ends_a_step_that_takes_too_long(in_a_loop):
    runner = LoopRunner()
    run = Run(runner, grace_s=0.05, stops=False)
    with pytest.raises(asyncio.CancelledError):
        call(runner, run, [signal.SIGINT], in_a_loop)


def test_before_training_a_signal_aborts_what_runs_in_a_thread():
    async def start_engines() -> None:
        os.kill(os.getpid(), signal.SIGINT)
        await asyncio.sleep(LONG_S)

    async def cell() -> None:
        LoopRunner().run(start_engines())

    with pytest.raises(asyncio.CancelledError):
        asyncio.run(cell())


@pytest.mark.parametrize("in_a_loop", [False, True])
def test_results_and_errors_come_back(in_a_loop):
    async def work(value: int) -> int:
        if value < 0:
            raise ValueError("negative")
        return value

    async def cell(value: int) -> int:
        return LoopRunner().run(work(value))

    def run(value: int) -> int:
        return asyncio.run(cell(value)) if in_a_loop else LoopRunner().run(work(value))

    assert run(3) == 3
    with pytest.raises(ValueError, match="negative"):
        run(-1)


def test_outside_the_main_thread_no_signal_is_handled():
    handlers = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    results = []
    runner = LoopRunner()

    async def work() -> str:
        with stop_on_interrupt(runner, SimpleNamespace(stopping=False), LONG_S, print):
            await asyncio.sleep(0)
        return "done"

    thread = threading.Thread(target=lambda: results.append(runner.run(work())))
    thread.start()
    thread.join(30)
    assert results == ["done"]
    assert handlers == [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
