"""What a person at the screen sees: a live bar on a terminal, plain lines anywhere else.

    with open_screen() as screen:
        with screen.working("starting Ray"):
            ...
        with screen.training(total_steps):
            screen.step(row, total_steps)        # a row of metrics.jsonl
        screen.table(facts)

Leaving the block takes the live part off the screen, whatever happened in it, so that an error is printed below
everything else and never painted over.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import sys
import time
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TextIO

Facts = Iterable[tuple[str, str]]
"""(name, what is so); an empty name continues the one above."""

_NAMES = 13
_TREND = 24
_BLOCKS = "▁▂▃▄▅▆▇█"
_FIRST_ESTIMATE_S = 5.0


class PlainScreen:
    """One line per step, for files, pipes and CI."""

    def __init__(self, out: TextIO | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        """`out` None: stdout, whatever it is when something is said. `clock`: seconds."""
        self.out, self.clock = out, clock
        self._jobs: dict[str, Any] = {}  # what is known of each that told of its progress

    def __enter__(self) -> PlainScreen:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def say(self, line: str) -> None:
        """One line."""
        print(line, file=self.out, flush=True)

    def table(self, facts: Facts) -> None:
        """Named facts, one per line, aligned."""
        for name, text in facts:
            self.say(f"{name:<{_NAMES}}{text}")

    @contextlib.contextmanager
    def working(self, what: str) -> Iterator[None]:
        """Something long without steps of its own: a line when it begins, and how long it took when it ended well."""
        begin = self.clock()
        with self._shown(what):
            yield
        if self.clock() - begin >= 1:
            self.say(f"{what}: {self.clock() - begin:.0f} s")

    @contextlib.contextmanager
    def _shown(self, what: str) -> Iterator[None]:
        self.say(f"{what} ...")
        yield

    def progress(self, what: str, done: float) -> None:
        """Something long of which `done` (0 to 1) is done. A line at once, an estimate soon, then ever more seldom."""
        now = self.clock()
        if what not in self._jobs:
            self._jobs[what] = now, done, _FIRST_ESTIMATE_S  # begin, done by then, seconds at which to tell more
            self.say(f"{what} ...")
        begin, before, next_s = self._jobs[what]
        seconds = now - begin
        if done >= 1:
            del self._jobs[what]
            self.say(f"{what}: {seconds:.0f} s")
        elif seconds >= next_s and done > before:
            self._jobs[what] = begin, before, 2 * seconds
            left = in_clock(seconds * (1 - done) / (done - before))
            self.say(f"{what}: {done:.0%} after {in_clock(seconds)}, about {left} left")

    @contextlib.contextmanager
    def training(self, total: int, done: int = 0) -> Iterator[None]:
        """The steps come now; `done` of them were made by an earlier run."""
        yield

    def step(self, row: dict[str, Any], total: int) -> None:
        """One finished step: its row of metrics.jsonl."""
        width = len(str(total))
        self.say(
            f"step {row['step'] + 1:>{width}}/{total}  v{row['weight_version']:<{width}}  "
            f"reward {row['reward/mean']:.3f}  length {row['response_length/mean']:5.1f}  "
            f"step {row['time/step_s']:.2f}s (gen {row['time/generate_s']:.2f}, train {row['time/train_s']:.2f},"
            f" sync {row.get('time/sync_s', 0.0):.2f})  ratio {row.get('ratio/mean', math.nan):.3f}"
            f"  canary {row.get('canary/logprob_diff_max', math.nan):.0e}"
        )


class LiveScreen(PlainScreen):
    """A terminal: what is going on stands at the bottom and moves, what was said scrolls by above it."""

    def __init__(self, console: Any, clock: Callable[[], float] = time.monotonic) -> None:
        """`console`: a rich Console."""
        from rich import progress
        from rich.text import Text

        super().__init__(clock=clock)
        self.console, self.figures = console, ""
        self.rewards: deque[float] = deque(maxlen=_TREND)
        screen = self

        class Times(progress.ProgressColumn):
            """Time taken and, once it can be told, time left."""

            def render(self, task: progress.Task) -> Text:
                left = "" if task.time_remaining is None else f"  left {in_clock(task.time_remaining)}"
                return Text(in_clock(task.elapsed or 0) + left)

        class Bars(progress.Progress):
            """A line per task, and one with the figures of the last step."""

            def get_renderables(self) -> Iterator[Any]:
                yield self.make_tasks_table(self.tasks)
                if screen.figures:
                    yield Text(screen.figures, style="cyan")

        self.bars = Bars(
            progress.TextColumn("{task.description}", markup=False),
            progress.BarColumn(bar_width=None),
            progress.TaskProgressColumn(),
            Times(),
            console=console,
            get_time=clock,
            speed_estimate_period=math.inf,  # steps may take minutes, and rich would only look at the last half
            refresh_per_second=4,
            transient=True,
            expand=True,
        )

    def __enter__(self) -> LiveScreen:
        # What libraries print meanwhile goes through the console too, and so above the live part.
        self.bars.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.bars.stop()

    def say(self, line: str) -> None:
        """One line, above what moves."""
        self.console.print(line, markup=False, highlight=False, soft_wrap=True)

    def table(self, facts: Facts) -> None:
        """Named facts, the names bold. Long texts are left to the terminal to wrap: a command must copy as one line."""
        from rich.text import Text

        for name, text in facts:
            self.console.print(Text.assemble((f"{name:<{_NAMES}}", "bold"), text), soft_wrap=True)

    @contextlib.contextmanager
    def _shown(self, what: str) -> Iterator[None]:
        task = self.bars.add_task(what, total=None)
        try:
            yield
        finally:
            self._remove(task)

    def _remove(self, task: Any) -> None:
        self.bars.remove_task(task)
        self.bars.refresh()  # or what is said next would draw it once more

    def progress(self, what: str, done: float) -> None:
        """A bar with percent and the time left; a line stays of it when all is done."""
        if what not in self._jobs:
            self._jobs[what] = self.bars.add_task(what, total=1.0), self.clock()
        task, begin = self._jobs[what]
        self.bars.update(task, completed=done)
        if done >= 1:
            del self._jobs[what]
            self._remove(task)
            self.say(f"{what}: {self.clock() - begin:.0f} s")

    @contextlib.contextmanager
    def training(self, total: int, done: int = 0) -> Iterator[None]:
        """The bar of the steps."""
        self.figures, name = "waiting for the first step", f"step {done}/{total}"
        self.steps = self.bars.add_task(name, total=total, completed=done)
        try:
            yield
        finally:
            self.figures = ""
            self._remove(self.steps)

    def step(self, row: dict[str, Any], total: int) -> None:
        """The bar moves on; no line is left behind, for metrics.jsonl holds them all."""
        done = row["step"] + 1
        self.rewards.append(row["reward/mean"])
        self.figures = figures(row, self.rewards, self.console.width)
        self.bars.update(self.steps, completed=done, description=f"step {done}/{total}")


def figures(row: dict[str, Any], rewards: Iterable[float], width: int = 120) -> str:
    """The second line of the bar: reward and its trend, length, speed, who waited for whom. The trend takes what is left
    of `width`."""
    tokens = row.get("tokens_per_s/rollout")
    waits = row.get("time/wait_trainer_s", math.nan) + row.get("time/sync_s", 0.0)
    reward = f"reward {row['reward/mean']:.3f}"
    others = (
        f"length {row['response_length/mean']:.1f}  "
        + (f"{tokens:,.0f} tok/s  " if tokens else "")
        + f"waits: rollout {waits:.2f} s, trainer {row.get('time/wait_rollout_s', math.nan):.2f} s"
    )
    drawn = trend(list(rewards)[-max(1, width - len(reward) - len(others) - 3) :])
    return f"{reward} {drawn}  {others}" if drawn else f"{reward}  {others}"


def trend(values: Iterable[float]) -> str:
    """A line of blocks, lowest to highest."""
    known = [v for v in values if math.isfinite(v)]
    if len(known) < 2:
        return ""
    low, span = min(known), (max(known) - min(known)) or 1.0
    return "".join(_BLOCKS[round((v - low) / span * (len(_BLOCKS) - 1))] for v in known)


def in_clock(seconds: float) -> str:
    """h:mm:ss, or m:ss under an hour."""
    minutes, whole = divmod(max(0, round(seconds)), 60)
    return f"{minutes // 60}:{minutes % 60:02}:{whole:02}" if minutes >= 60 else f"{minutes}:{whole:02}"


def open_screen(out: TextIO | None = None) -> PlainScreen:
    """A live screen where stdout (or `out`) is a terminal that can move its cursor, else a plain one."""
    if (out or sys.stdout).isatty() and os.environ.get("TERM", "dumb") != "dumb":
        from rich.console import Console

        return LiveScreen(Console(file=out, highlight=False))
    return PlainScreen(out)


def quiet_libraries() -> None:
    """In the driver: no progress bars of Hugging Face's, and not those warnings that are known to mean nothing here.

    Warnings of this program and unknown ones of others stay.
    """
    for name in (
        "HF_HUB_DISABLE_PROGRESS_BARS",
        "HF_DATASETS_DISABLE_PROGRESS_BARS",
        "TRANSFORMERS_NO_ADVISORY_WARNINGS",
    ):
        os.environ.setdefault(name, "1")
    # Ray announces how later releases will treat GPUs of actors that book none.
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"ray(\.|$)")
    # Public models need no token.
    logging.getLogger("huggingface_hub.utils._http").addFilter(
        lambda record: "unauthenticated requests to the HF Hub" not in record.getMessage()
    )
