"""Ctrl-C and SIGTERM: to a run in the main thread's event loop, and to one in a thread of its own,
as in a notebook."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import threading
from types import SimpleNamespace

import pytest

from one_step_off.runtime.interrupts import (
    LoopRunner,
    hint_signals,
    interrupt_once,
    signal_handlers,
    stop_on_interrupt,
)

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


HINTS = [signal.SIGHUP, signal.SIGUSR1]
SIGNALS = [signal.SIGINT, signal.SIGTERM, *HINTS]


@pytest.fixture(autouse=True)
def default_handlers():
    """Without what other tests, Ray or nohup have left."""
    before = {number: signal.getsignal(number) for number in SIGNALS}
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for number in SIGNALS[1:]:
        signal.signal(number, signal.SIG_DFL)
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def handlers_now() -> list:
    return [signal.getsignal(number) for number in SIGNALS]


@pytest.mark.parametrize("in_a_loop", [False, True])
@pytest.mark.parametrize("number", SIGNALS)
def test_the_first_signal_asks_the_pipeline_to_stop(number, in_a_loop):
    handlers = handlers_now()
    runner = LoopRunner()
    run = Run(runner, grace_s=LONG_S)
    assert call(runner, run, [number], in_a_loop) == "stopped, requested: True"
    assert run.lines == [
        "stopping: a checkpoint is written when this step ends, within 60 s; "
        "press Ctrl-C again to abort"
    ]
    assert (run.thread is threading.main_thread()) is not in_a_loop
    if not in_a_loop:
        handlers[2:] = [signal.SIG_IGN, signal.SIG_IGN]  # `ray_session` restores them
    assert handlers == handlers_now()


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
    handlers = handlers_now()
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
    assert handlers == handlers_now()


@pytest.mark.parametrize("first", SIGNALS)
@pytest.mark.parametrize("hint", HINTS)
def test_a_hint_that_comes_again_or_late_aborts_nothing(hint, first):
    """A terminal that closes hangs up twice: the kernel and the shell send it. And one that is
    closed after Ctrl-C must not cost the checkpoint."""
    runner = LoopRunner()
    pipeline = SimpleNamespace(stopping=False)
    lines: list[str] = []

    async def main() -> bool:
        with stop_on_interrupt(runner, pipeline, LONG_S, lines.append) as stop:
            os.kill(os.getpid(), first)
            while not lines:
                await asyncio.sleep(0.001)
            for _ in range(3):
                os.kill(os.getpid(), hint)
                await asyncio.sleep(0.05)
        os.kill(os.getpid(), hint)  # while the model is written, and the processes are ended
        await asyncio.sleep(0.05)
        return stop.requested

    with signal_handlers(interrupt_once, hint_signals()):
        assert runner.run(main())
    assert len(lines) == 1
    assert handlers_now()[2:] == [signal.SIG_DFL, signal.SIG_DFL]


@pytest.mark.parametrize("hint", HINTS)
def test_a_hint_that_is_ignored_or_the_users_stays_so(hint):
    """SIGHUP under nohup; a handler of the program that calls `train`."""
    received = []
    for handler in (signal.SIG_IGN, lambda number, frame: received.append(number)):
        signal.signal(hint, handler)
        runner = LoopRunner()
        pipeline = SimpleNamespace(stopping=False)

        async def main(runner=runner, pipeline=pipeline) -> None:
            with stop_on_interrupt(runner, pipeline, LONG_S, print):
                os.kill(os.getpid(), hint)
                await asyncio.sleep(0.05)

        with signal_handlers(interrupt_once, hint_signals()):
            runner.run(main())
        assert not pipeline.stopping
        assert signal.getsignal(hint) is handler
    assert received == [hint]


@pytest.mark.parametrize("hint", HINTS)
def test_before_training_a_hint_interrupts_once(hint):
    """As SIGTERM does; the next one must not interrupt the cleanup."""
    with signal_handlers(interrupt_once, hint_signals()):
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), hint)
        os.kill(os.getpid(), hint)
        os.kill(os.getpid(), signal.SIGHUP)
    assert handlers_now()[2:] == [signal.SIG_DFL, signal.SIG_DFL]


def test_the_processes_of_a_run_are_started_without_hangup():
    """A terminal that closes hangs up all of them, and without them there is no checkpoint."""
    with signal_handlers(interrupt_once, hint_signals()):
        with signal_handlers(signal.SIG_IGN, hint_signals()):
            child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
        assert handlers_now()[2:] == [interrupt_once, interrupt_once]
    for hint in HINTS:
        child.send_signal(hint)
    child.communicate(b"\n", timeout=60)
    assert child.returncode == 0


def test_after_training_sigterm_still_ends_in_good_order():
    """asyncio alone would leave the default, which ends the process without any cleanup."""

    async def main() -> None:
        with stop_on_interrupt(runner, SimpleNamespace(stopping=False), LONG_S, print):
            pass
        os.kill(os.getpid(), signal.SIGTERM)
        await asyncio.sleep(LONG_S)

    runner = LoopRunner()
    with signal_handlers(signal.default_int_handler, (signal.SIGTERM,)):
        with pytest.raises(KeyboardInterrupt):
            runner.run(main())
