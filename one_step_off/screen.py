"""What a person at the screen sees: a live bar on a terminal, plain lines anywhere else.

    with Screen() as screen:
        with screen.working("starting Ray"):
            ...
        with screen.training(total_steps):
            screen.step(row, total_steps)        # a row of metrics.jsonl
        screen.table(facts)

Leaving the block takes the live part off the screen, whatever happened in it, so that an error is printed below
everything else and never painted over.
"""

import contextlib
import logging
import math
import os
import sys
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Self, TextIO

from rich import progress
from rich.console import Console
from rich.progress import Task
from rich.text import Text

from one_step_off.config_checks import masked

_NAMES = 13
_STEP = """step {number:>{width}}/{total}  v{weight_version:<{width}}  reward {reward/mean:.3f}  \
length {response_length/mean:5.1f}  step {time/step_s:.2f}s (gen {time/generate_s:.2f}, train {time/train_s:.2f}, \
sync {time/sync_s:.2f})  ratio {ratio/mean:.3f}  canary {canary/logprob_diff_max:.0e}"""


class _Bars(progress.Progress):
    """A line per task, and one with the figures of the last step."""

    figures = ""

    def get_renderables(self) -> Iterator[Any]:
        yield self.make_tasks_table(self.tasks)
        if self.figures:
            yield Text(self.figures, style="cyan")


class Screen:
    """What is going on stands at the bottom of a terminal and moves, what was said scrolls by above it. Files, pipes,
    CI and terminals that cannot move their cursor get lines instead, one per step."""

    def __init__(self, out: TextIO | Console | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        """`out` None: stdout; a console: a terminal, whatever it may look like. `clock`: seconds."""
        dumb, given = os.environ.get("TERM", "dumb") == "dumb", isinstance(out, Console)
        self.live = given or ((out or sys.stdout).isatty() and not dumb)
        self.console = out if given else Console(file=out, highlight=False)
        what, bar = progress.TextColumn("{task.description}", markup=False), progress.BarColumn(bar_width=None)
        times = progress.TimeElapsedColumn(), progress.TextColumn("left"), progress.TimeRemainingColumn()
        look = {"refresh_per_second": 4, "transient": True, "expand": True, "disable": not self.live}
        # Steps may take minutes, and by default rich would only look at the last half of one.
        pace = {"get_time": clock, "speed_estimate_period": math.inf}
        self.bars = _Bars(what, bar, progress.TaskProgressColumn(), *times, console=self.console, **look, **pace)

    def __enter__(self) -> Self:
        # What libraries print meanwhile goes through the console too, and so above the live part.
        self.bars.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.bars.stop()

    def say(self, line: str) -> None:
        """One line without its secrets, left to the terminal to wrap: a command must copy as one line."""
        self.console.print(Text(masked(line)), soft_wrap=True)

    def table(self, facts: Iterable[tuple[str, str]]) -> None:
        """Named facts, one per line, aligned; an empty name continues the one above."""
        for name, text in facts:
            self.console.print(Text.assemble((f"{name:<{_NAMES}}", "bold"), masked(text)), soft_wrap=True)

    @contextlib.contextmanager
    def working(self, what: str) -> Iterator[None]:
        """Something long without steps of its own. A line of it stays, with the seconds, when it ended well."""
        task = self._begin(what, None)
        try:
            yield
        finally:
            self._remove(task)
        self._tell(task)

    def progress(self, what: str, done: float) -> None:
        """Something long of which `done` (0 to 1) is done. Lines: one at once, one at its end."""
        task = next((t for t in self.bars.tasks if t.description == what), None) or self._begin(what, 1.0)
        self.bars.update(task.id, completed=done)
        if done >= 1:
            self._remove(task)
            self._tell(task)

    def _begin(self, what: str, total: float | None) -> Task:
        if not self.live:
            self.say(f"{what} ...")
        self.bars.add_task(what, total=total)
        return self.bars.tasks[-1]

    def _tell(self, task: Task) -> None:
        if task.elapsed >= 1:
            self.say(f"{task.description}: {task.elapsed:.0f} s")

    def _remove(self, task: Task) -> None:
        self.bars.remove_task(task.id)
        self.bars.refresh()  # or what is said next would draw it once more

    @contextlib.contextmanager
    def training(self, total: int, done: int = 0) -> Iterator[None]:
        """The steps come now; `done` of them were made by an earlier run."""
        self.bars.add_task(f"step {done}/{total}", total=total, completed=done)
        self.steps, self.bars.figures = self.bars.tasks[-1], "waiting for the first step"
        try:
            yield
        finally:
            self.bars.figures = ""
            self._remove(self.steps)

    def step(self, row: dict[str, Any], total: int) -> None:
        """One finished step: its row of metrics.jsonl. Of the bar's steps only the last leaves a line behind."""
        if not self.live or row["step"] + 1 == total:
            self.say(step_line(row, total))
        if self.live:
            self.bars.figures, done = figures(row), row["step"] + 1
            self.bars.update(self.steps.id, completed=done, description=f"step {done}/{total}")


def step_line(row: dict[str, Any], total: int) -> str:
    """One step in one line."""
    known = {"time/sync_s": 0.0, "ratio/mean": math.nan, "canary/logprob_diff_max": math.nan} | row
    return _STEP.format_map(known | {"number": row["step"] + 1, "total": total, "width": len(str(total))})


def figures(row: dict[str, Any]) -> str:
    """The second line of the bar: reward, length, speed, who waited for whom."""
    tokens, waits = row.get("tokens_per_s/rollout"), row.get("time/wait_trainer_s", math.nan)
    speed = f"{tokens:,.0f} tok/s  " if tokens else ""
    text = f"reward {row['reward/mean']:.3f}  length {row['response_length/mean']:.1f}  {speed}waits: rollout "
    text += f"{waits + row.get('time/sync_s', 0.0):.2f} s, trainer {row.get('time/wait_rollout_s', math.nan):.2f} s"
    return text


def quiet_libraries() -> None:
    """In the driver: no progress bars of Hugging Face's, and not those warnings that are known to mean nothing here.
    Warnings of this program and unknown ones of others stay."""
    bars = "HF_HUB_DISABLE_PROGRESS_BARS", "HF_DATASETS_DISABLE_PROGRESS_BARS"
    for name in (*bars, "TRANSFORMERS_NO_ADVISORY_WARNINGS"):
        os.environ.setdefault(name, "1")
    # Ray announces how later releases will treat GPUs of actors that book none.
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"ray(\.|$)")
    # Public models need no token.
    known = "unauthenticated requests to the HF Hub"
    logging.getLogger("huggingface_hub.utils._http").addFilter(lambda record: known not in record.getMessage())
