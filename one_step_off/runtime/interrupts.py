"""Ctrl-C and SIGTERM: the first one stops the run with a checkpoint, the second one aborts it.
SIGHUP (its terminal was closed) and SIGUSR1 (Slurm announces the end of its time) stop it too, and
never abort what stops already.

    loop_runner = LoopRunner()
    loop_runner.run(coroutine)      # like asyncio.run, even if this thread runs an event loop

    with loop_runner.handle_signals(handler):   # in the coroutine
        ...

A signal handler of the event loop only works in the main thread. In a notebook the main thread
already runs an event loop, so the run gets one in a thread of its own, and the main thread forwards
the signals to it."""

import asyncio
import contextlib
import contextvars
import signal
import threading
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import Future
from types import FrameType
from typing import Any

HINT_SIGNALS = (signal.SIGHUP, signal.SIGUSR1)
"""They come more than once, as from the kernel and from the shell of a closed terminal."""

# How long the waiting thread sleeps at a time. Signal handlers run meanwhile.
JOIN_INTERVAL_S = 0.5


def in_main_thread() -> bool:
    """Whether this is the main thread, the only one that may set signal handlers."""
    return threading.current_thread() is threading.main_thread()


def has_running_loop() -> bool:
    """Whether this thread runs an event loop, as the cells of a notebook do."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


def interrupt_once(number: int, frame: FrameType | None) -> None:
    """The handler of `HINT_SIGNALS` while nothing trains: the first one interrupts."""
    ignore_hints()
    raise KeyboardInterrupt


def hint_signals() -> tuple[int, ...]:
    """Those of `HINT_SIGNALS` that would end this process. SIGHUP does not under nohup, and a
    signal for which the user's program has a handler is the user's."""
    ours = (signal.SIG_DFL, interrupt_once)
    return tuple(number for number in HINT_SIGNALS if signal.getsignal(number) in ours)


def ignore_hints() -> None:
    """From now on `HINT_SIGNALS` do nothing: the run ends already."""
    if in_main_thread():
        for number in hint_signals():
            signal.signal(number, signal.SIG_IGN)


def stop_signals() -> tuple[int, ...]:
    """The signals that stop a run."""
    return (signal.SIGINT, signal.SIGTERM, *hint_signals())


@contextlib.contextmanager
def signal_handlers(
    handler: Callable[[int, FrameType | None], Any] | signal.Handlers, numbers: tuple[int, ...]
) -> Iterator[None]:
    """Set a handler of signals while the block runs. Outside the main thread nothing changes."""
    if not in_main_thread():
        yield
        return
    previous_handlers = {number: signal.signal(number, handler) for number in numbers}
    try:
        yield
    finally:
        for number, previous_handler in previous_handlers.items():
            # None: a handler that was not set from Python, which cannot be set again.
            if previous_handler is not None:
                signal.signal(number, previous_handler)


class LoopRunner:
    """Runs coroutines to their end, and leads signals to the handler of the one that runs.

    Attributes:
        loop: the event loop of the thread that runs a coroutine; None: the coroutine runs in the
            caller's thread, or none does.
        main_task: the task of that coroutine.
        handler: called in that event loop with the number of each signal; None: a signal cancels
            the task.
    """

    def __init__(self) -> None:
        self.loop: asyncio.AbstractEventLoop | None = None
        self.main_task: asyncio.Task | None = None
        self.handler: Callable[[int], None] | None = None

    @property
    def run(self) -> Callable[[Coroutine[Any, Any, Any]], Any]:
        """`asyncio.run`; where this thread already runs an event loop, the same in a thread of its
        own."""
        return self._run_in_thread if has_running_loop() else asyncio.run

    @contextlib.contextmanager
    def handle_signals(self, handler: Callable[[int], None]) -> Iterator[None]:
        """Call `handler` in this event loop with each of `stop_signals` while the block runs."""
        self.handler = handler
        try:
            with contextlib.ExitStack() as cleanup:
                if in_main_thread():
                    loop = asyncio.get_running_loop()
                    for number in stop_signals():
                        # asyncio alone would restore the default: death, without any cleanup.
                        cleanup.callback(signal.signal, number, signal.getsignal(number))
                        loop.add_signal_handler(number, handler, number)
                        cleanup.callback(loop.remove_signal_handler, number)
                yield
        finally:
            self.handler = None

    def _run_in_thread(self, main: Coroutine[Any, Any, Any]) -> Any:
        result: Future[Any] = Future()

        async def main_with_loop() -> Any:
            self.loop = asyncio.get_running_loop()
            self.main_task = asyncio.current_task()
            return await main

        def run_loop() -> None:
            try:
                result.set_result(asyncio.run(main_with_loop()))
            except BaseException as error:
                result.set_exception(error)
            finally:
                self.loop = None

        # A notebook knows by the context to which cell printed lines belong.
        context = contextvars.copy_context()
        thread = threading.Thread(
            target=context.run, args=(run_loop,), name="one_step_off", daemon=True
        )
        with signal_handlers(lambda number, frame: self._forward_signal(number), stop_signals()):
            thread.start()
            while thread.is_alive():
                thread.join(JOIN_INTERVAL_S)
        return result.result()

    def _forward_signal(self, number: int) -> None:
        loop = self.loop
        # RuntimeError: the loop has just been closed.
        with contextlib.suppress(RuntimeError):
            if loop is not None:
                loop.call_soon_threadsafe(self._on_forwarded_signal, number)

    def _on_forwarded_signal(self, number: int) -> None:
        if self.handler is not None:
            self.handler(number)
        else:
            self.main_task.cancel()


class StopOnInterrupt:
    """What an interrupt does to a run in training. Call it for each signal.

    The first one lets the pipeline stop at the beginning of the next step, with a checkpoint. A
    second Ctrl-C or SIGTERM, or `grace_s` seconds without that checkpoint, cancels the task at
    once.

    Attributes:
        requested: whether an interrupt has come.
    """

    def __init__(self, pipeline: Any, grace_s: float, log: Callable[[str], None]) -> None:
        """Create it inside the task of the run."""
        self.pipeline = pipeline
        self.grace_s = grace_s
        self.log = log
        self.loop = asyncio.get_running_loop()
        self.task = asyncio.current_task()
        self.requested = False
        self.timer: asyncio.TimerHandle | None = None

    def __call__(self, number: int) -> None:
        """Handle one signal."""
        if self.requested and number in HINT_SIGNALS:
            return
        if self.requested or self.grace_s == 0:
            self.requested = True
            self._abort()
            return
        self.requested = True
        self.pipeline.stopping = True
        self.timer = self.loop.call_later(self.grace_s, self._abort)
        self.log(
            f"stopping: a checkpoint is written when this step ends, within {self.grace_s:g} s; "
            "press Ctrl-C again to abort"
        )

    def _abort(self) -> None:
        self.log("stopping at once: no checkpoint was written")
        self.task.cancel()

    def close(self) -> None:
        """End the time limit: it bounds the way to the checkpoint, not the writing of the model
        after the last step."""
        if self.timer is not None:
            self.timer.cancel()


@contextlib.contextmanager
def stop_on_interrupt(
    loop_runner: LoopRunner, pipeline: Any, grace_s: float, log: Callable[[str], None]
) -> Iterator[StopOnInterrupt]:
    """Let signals stop `pipeline` while the block runs; see `StopOnInterrupt`."""
    stop = StopOnInterrupt(pipeline, grace_s, log)
    try:
        with contextlib.closing(stop), loop_runner.handle_signals(stop):
            yield stop
    finally:
        if stop.requested:
            ignore_hints()
