"""What a person at the screen sees: a live bar on a terminal, plain lines anywhere else.

    with open_screen() as screen:
        with screen.working("starting engines"):
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
import statistics
import sys
import time
import warnings
from collections import deque
from collections.abc import Iterable, Iterator
from typing import Any, TextIO

Facts = Iterable[tuple[str, str]]
"""(name, what is so); an empty name continues the one above."""

_NAMES = 13
_TREND = 24
_RECENT = 20
_BLOCKS = "▁▂▃▄▅▆▇█"


class PlainScreen:
    """One line per step, for files, pipes and CI."""

    def __init__(self, out: TextIO | None = None) -> None:
        """`out` None: stdout, whatever it is when something is said."""
        self.out = out
        self._told: dict[str, float] = {}

    def __enter__(self) -> PlainScreen:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def say(self, line: str) -> None:
        """One line."""
        print(line, file=self.out, flush=True)

    def table(self, facts: Facts) -> None:
        """Named facts, one per line, aligned."""
        for name, text in facts:
            self.say(f"{name:<{_NAMES}}{text}")

    @contextlib.contextmanager
    def working(self, what: str) -> Iterator[None]:
        """Something long without steps of its own."""
        self.say(f"{what} ...")
        yield

    def progress(self, what: str, done: float) -> None:
        """Something long of which `done` (0 to 1) is done; one line per quarter."""
        if what not in self._told or done - self._told[what] >= 0.25:
            self._told[what] = done
            self.say(f"{what}: {done:.0%}")

    @contextlib.contextmanager
    def training(self, total: int, done: int = 0) -> Iterator[None]:
        """The steps come now; `done` of them were made by an earlier run."""
        yield

    def step(self, row: dict[str, Any], total: int) -> None:
        """One finished step: its row of metrics.jsonl."""
        self.say(progress_line(row, total))

    def stop(self) -> None:
        """Nothing more moves after this."""


class LiveScreen(PlainScreen):
    """A terminal: what is going on stands at the bottom and moves, what was said scrolls by above it."""

    def __init__(self, console: Any = None) -> None:
        """`console`: a rich Console; None: stdout."""
        super().__init__()
        from rich.console import Console

        self.console = console or Console(highlight=False)
        self.tasks: list[_Task] = []
        self.steps: _Steps | None = None
        self.live: Any = None

    def say(self, line: str) -> None:
        """One line, above what moves."""
        self.console.print(line, markup=False, highlight=False, soft_wrap=True)

    def table(self, facts: Facts) -> None:
        """Named facts, the names bold. Long texts are left to the terminal to wrap: a command must copy as one line."""
        from rich.text import Text

        for name, text in facts:
            self.console.print(Text.assemble((f"{name:<{_NAMES}}", "bold"), text), soft_wrap=True)

    @contextlib.contextmanager
    def working(self, what: str) -> Iterator[None]:
        """A spinner with the time it has taken."""
        task = _Task(what)
        self.tasks.append(task)
        self._refresh()
        try:
            yield
        finally:
            self.tasks.remove(task)
            self._refresh()

    def progress(self, what: str, done: float) -> None:
        """A bar with percent; it goes when all is done."""
        task = next((t for t in self.tasks if t.what == what), None)
        if task is None:
            task = _Task(what)
            self.tasks.append(task)
        task.done = done
        if done >= 1:
            self.tasks.remove(task)
        self._refresh()

    @contextlib.contextmanager
    def training(self, total: int, done: int = 0) -> Iterator[None]:
        """The bar of the steps."""
        self.steps = _Steps(total, done)
        self._refresh()
        try:
            yield
        finally:
            self.steps = None
            self._refresh()

    def step(self, row: dict[str, Any], total: int) -> None:
        """The bar moves on; no line is left behind, for metrics.jsonl holds them all."""
        if self.steps is None:
            self.steps = _Steps(total, row["step"])
        self.steps.add(row, total, self.console.width)
        self._refresh()

    def stop(self) -> None:
        """Take the live part off the screen."""
        self.tasks.clear()
        self.steps = None
        self._refresh()

    def _refresh(self) -> None:
        if not (self.tasks or self.steps):
            if self.live is not None:
                self.live.stop()
                self.live = None
        elif self.live is None:
            from rich.live import Live

            # What libraries print meanwhile goes through the console too, and so above the live part.
            self.live = Live(get_renderable=self._render, console=self.console, refresh_per_second=4, transient=True)
            self.live.start()

    def _render(self) -> Any:
        from rich.console import Group

        steps, tasks = self.steps, list(self.tasks)
        return Group(*(steps.render() if steps else ()), *(task.render() for task in tasks))


class _Task:
    """A line that shows that something is being done, and for how long."""

    def __init__(self, what: str) -> None:
        from rich.spinner import Spinner

        self.what, self.begin, self.done = what, time.monotonic(), math.nan
        self.spinner = Spinner("dots")

    def render(self) -> Any:
        from rich.progress_bar import ProgressBar
        from rich.table import Table

        line = Table.grid(padding=(0, 1))
        cells = [self.spinner, self.what]
        if not math.isnan(self.done):
            cells += [ProgressBar(total=1.0, completed=self.done, width=24), f"{self.done:4.0%}"]
        line.add_row(*cells, clock(time.monotonic() - self.begin))
        return line


class _Steps:
    """The bar of the steps and the figures of the last one.

    It is drawn in a thread of rich's, so what `render` reads is replaced whole and never changed.
    """

    def __init__(self, total: int, done: int) -> None:
        self.total, self.done, self.begin = total, done, time.monotonic()
        self.text, self.step_s = "waiting for the first step", math.nan
        self.rewards: deque[float] = deque(maxlen=_TREND)
        self.seconds: deque[float] = deque(maxlen=_RECENT)

    def add(self, row: dict[str, Any], total: int, width: int) -> None:
        self.rewards.append(row["reward/mean"])
        self.seconds.append(row["time/step_s"])
        self.total, self.done = total, row["step"] + 1
        self.step_s, self.text = statistics.median(self.seconds), figures(row, self.rewards, width)

    def render(self) -> list[Any]:
        from rich.progress_bar import ProgressBar
        from rich.table import Table
        from rich.text import Text

        bar = Table.grid(padding=(0, 1), expand=True)
        bar.add_column(no_wrap=True)
        bar.add_column(ratio=1)
        bar.add_column(no_wrap=True)
        left = "" if math.isnan(self.step_s) else f"  left {clock(self.step_s * (self.total - self.done))}"
        bar.add_row(
            f"step {self.done}/{self.total}",
            ProgressBar(total=self.total, completed=self.done),
            f"{self.done / max(1, self.total):4.0%}  {clock(time.monotonic() - self.begin)}{left}",
        )
        return [bar, Text(self.text, style="cyan")]


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


def clock(seconds: float) -> str:
    """h:mm:ss, or m:ss under an hour."""
    whole = max(0, round(seconds))
    hours, minutes = whole // 3600, whole // 60 % 60
    return f"{hours}:{minutes:02}:{whole % 60:02}" if hours else f"{minutes}:{whole % 60:02}"


def progress_line(row: dict[str, Any], total: int) -> str:
    """One step in one line."""
    width = len(str(total))
    return (
        f"step {row['step'] + 1:>{width}}/{total}  v{row['weight_version']:<{width}}  "
        f"reward {row['reward/mean']:.3f}  length {row['response_length/mean']:5.1f}  "
        f"step {row['time/step_s']:.2f}s (gen {row['time/generate_s']:.2f}, train {row['time/train_s']:.2f},"
        f" sync {row.get('time/sync_s', 0.0):.2f})  ratio {row.get('ratio/mean', math.nan):.3f}"
        f"  canary {row.get('canary/logprob_diff_max', math.nan):.0e}"
    )


def open_screen(out: TextIO | None = None) -> PlainScreen:
    """A live screen where stdout (or `out`) is a terminal that can move its cursor, else a plain one."""
    stream = out or sys.stdout
    if stream.isatty() and os.environ.get("TERM", "dumb") != "dumb":
        from rich.console import Console

        return LiveScreen(Console(file=out, highlight=False))
    return PlainScreen(out)


class _Without(logging.Filter):
    """Drops records that hold one of some texts."""

    def __init__(self, *texts: str) -> None:
        super().__init__()
        self.texts = texts

    def filter(self, record: logging.LogRecord) -> bool:
        """Whether the record is shown."""
        message = record.getMessage()
        return not any(text in message for text in self.texts)


def quiet_libraries() -> None:
    """In the driver: no progress bars of Hugging Face's, and not those warnings that are known to mean nothing here.

    Warnings of this program and unknown ones of others stay.
    """
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    os.environ.setdefault("HF_DATASETS_DISABLE_PROGRESS_BARS", "1")
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
    # Ray announces how later releases will treat GPUs of actors that book none.
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"ray(\.|$)")
    # Public models need no token.
    logging.getLogger("huggingface_hub.utils._http").addFilter(_Without("unauthenticated requests to the HF Hub"))
