"""What the user sees during a run: a live bar on a terminal, plain lines anywhere else.

    with RunConsole() as console:
        with console.working("starting Ray"):
            ...
        with console.training(total_steps):
            console.step(row, total_steps)        # a row of metrics.jsonl
        console.table(facts)

Leaving the block removes the bar, whatever happened inside, so that an error is printed below
everything else."""

import contextlib
import logging
import math
import os
import re
import sys
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any, TextIO

from rich import progress
from rich.console import Console
from rich.progress import Task
from rich.text import Text

from one_step_off.config.console_streams import ConsoleStream, console_streams, never_wait
from one_step_off.config.text import mask_secrets
from one_step_off.config.user_code import LOG_FOLDER
from one_step_off.monitoring.summary import failed_text, parts_text, reward_parts, sources_text

NAME_WIDTH = 13  # columns of the names in `table`
REFRESHES_PER_SECOND = 4
CONSOLE_LOG = f"{LOG_FOLDER}/console.log"  # in the run folder
ESCAPE = "\x1b"
STYLES = re.compile(r"\x1b\[[0-9;]*m")  # colors and bold
MIN_SHOWN_S = 1  # work that took less leaves no line behind

STEP_LINE = (
    "step {number:>{width}}/{total} [{step:>{width}}]  v{weight_version:<{width}}  "
    "reward {reward/mean:.3f}{parts}  length {response_length/mean:5.1f}  "
    "step {time/step_s:.2f}s (gen {time/generate_s:.2f}, train {time/train_s:.2f}, "
    "sync {time/sync_s:.2f})  ratio {ratio/mean:.3f}  canary {canary/logprob_diff_max:.0e}"
)
# For a step without a sync or without an update.
MISSING_METRICS = {
    "time/sync_s": 0.0,
    "ratio/mean": math.nan,
    "canary/logprob_diff_max": math.nan,
}
PROGRESS_BAR_VARIABLES = (
    "HF_HUB_DISABLE_PROGRESS_BARS",
    "HF_DATASETS_DISABLE_PROGRESS_BARS",
    "TRANSFORMERS_NO_ADVISORY_WARNINGS",
)
HIDDEN_MESSAGES = {
    # Public models need no token.
    "huggingface_hub.utils._http": "unauthenticated requests to the HF Hub",
    # Where torchao is installed, PEFT and transformers import it. Its kernels are for some GPUs;
    # its optimizer needs none of them.
    "torchao": "Failed to load ",
    "torch.utils._pytree": "is an Enum subclass",
}
"""Logger -> a part of its messages that mean nothing here."""


class RunConsole(progress.Progress):
    """A line per task at the bottom of the terminal, and one with the `figures` of the last step.
    Printed lines, and what libraries print meanwhile, scroll by above them. Files, pipes, CI,
    notebooks and terminals that cannot move their cursor get plain lines, one per step.

    Attributes:
        figures: the second line of the bar.
        steps_task: the task of the training steps.
        log_file: receives the lines that stdout or stderr does not take; None: nothing does.
        log_reasons: stream name -> why it did not take a line for the first time.
        other_streams: stream name -> the stream that says so.
    """

    def __init__(
        self,
        out: TextIO | Console | None = None,
        clock: Callable[[], float] = time.monotonic,
        log_file: Path | None = None,
    ) -> None:
        """Set up the output.

        Args:
            out: None: stdout. A rich console is taken for a terminal, whatever it looks like.
            clock: seconds.
            log_file: see above.
        """
        self.figures = ""
        self.log_file = log_file
        self.log_reasons: dict[str, str] = {}
        self.other_streams: dict[str, ConsoleStream] = {}
        self.uses_stdout = out is None
        self.streams = contextlib.ExitStack()
        self.steps_task: Task | None = None
        if isinstance(out, Console):
            console = out
            is_live = True
        else:
            # In a notebook rich would print HTML, each line apart from the others.
            console = Console(file=out, highlight=False, force_jupyter=False)
            is_live = _can_move_cursor(out or sys.stdout)
        super().__init__(
            progress.TextColumn("{task.description}", markup=False),
            progress.BarColumn(bar_width=None),
            progress.TaskProgressColumn(),
            TimeColumn(),
            console=console,
            refresh_per_second=REFRESHES_PER_SECOND,
            transient=True,
            expand=True,
            disable=not is_live,
            get_time=clock,
            # Steps may take minutes, and by default rich estimates the speed from the last 30
            # seconds.
            speed_estimate_period=math.inf,
        )

    def __enter__(self) -> "RunConsole":
        if self.uses_stdout:
            self.streams.enter_context(console_streams())
            out, err = never_wait()
            # Not those of rich, which lead both to stdout while the bar is shown.
            self.other_streams = {"stdout": err, "stderr": out}
            for stream in (out, err):
                stream.on_failure = self._log_unwritten
                self.streams.callback(setattr, stream, "on_failure", None)
                if stream.failure:  # before this began
                    self._log_unwritten(stream.name, stream.failure, "")
            out.is_redrawn = not self.disable
        self.start()
        return self

    def __exit__(self, exc_type: Any, exc_val: Any, exc_tb: Any) -> None:
        self.stop()
        if self.uses_stdout:
            self.other_streams["stderr"].is_redrawn = False
        self.streams.close()

    def _log_unwritten(self, stream: str, reason: str, text: str) -> None:
        """Append to the log what a stream did not take, and at its first failure say so there and
        on the other stream. Any thread calls this."""
        if self.log_file is None:
            return
        note = ""
        if stream not in self.log_reasons:
            self.log_reasons[stream] = reason
            note = f"{stream}: {reason}; what it does not take is written here\n"
            warning = f"warning: {stream}: {reason}; its lines go to {self.log_file}\n"
            self.other_streams[stream].write(warning)
        text = STYLES.sub("", text)
        if ESCAPE in text:
            text = ""
        with contextlib.suppress(OSError):
            self.log_file.parent.mkdir(parents=True, exist_ok=True)
            with open(self.log_file, "a", encoding="utf-8", errors="replace") as file:
                file.write(note + text)

    def _end_bar_that_nobody_sees(self) -> None:
        if "stdout" in self.log_reasons and not self.disable:
            self.stop()
            self.disable = True
            self.other_streams["stderr"].is_redrawn = False

    def get_renderables(self) -> Iterator[Any]:
        """The live part, as rich asks for it."""
        yield self.make_tasks_table(self.tasks)
        if self.figures:
            yield Text(self.figures, style="cyan")

    def print_line(self, line: str) -> None:
        """Print one line without its secrets. The terminal wraps it, so that a command copies as
        one line."""
        self._end_bar_that_nobody_sees()
        self.console.print(Text(mask_secrets(line)), soft_wrap=True)

    def table(self, facts: Iterable[tuple[str, str]]) -> None:
        """Print (name, text) pairs, one per line, aligned; an empty name continues the line
        above."""
        for name, text in facts:
            line = Text.assemble((f"{name:<{NAME_WIDTH}}", "bold"), mask_secrets(text))
            self.console.print(line, soft_wrap=True)

    @contextlib.contextmanager
    def working(self, what: str) -> Iterator[None]:
        """Show that the block does something long. When it ended well a line with its seconds
        stays."""
        task = self._begin(what, None)
        try:
            yield
        finally:
            self._remove(task)
        self._print_duration(task)

    def progress(self, what: str, done: float) -> None:
        """Show which share of something long is done, 0 to 1. As plain lines: one at once, one at
        its end."""
        running = [task for task in self.tasks if task.description == what]
        task = running[0] if running else self._begin(what, 1.0)
        self.update(task.id, completed=done)
        if done >= 1:
            self._remove(task)
            self._print_duration(task)

    def _begin(self, what: str, total: float | None) -> Task:
        if self.disable:
            self.print_line(f"{what} ...")
        self.add_task(what, total=total)
        return self.tasks[-1]

    def _print_duration(self, task: Task) -> None:
        if task.elapsed >= MIN_SHOWN_S:
            self.print_line(f"{task.description}: {task.elapsed:.0f} s")

    def _remove(self, task: Task) -> None:
        self.remove_task(task.id)
        self.refresh()  # or the next printed line would draw the task once more

    @contextlib.contextmanager
    def training(self, total_steps: int, finished_steps: int = 0) -> Iterator[None]:
        """Show the bar of the training steps; `finished_steps` were made by an earlier run."""
        description = f"{finished_steps}/{total_steps} steps"
        self.add_task(description, total=total_steps, completed=finished_steps)
        self.steps_task = self.tasks[-1]
        self.figures = "waiting for the first step"
        try:
            yield
        finally:
            self.figures = ""
            self._remove(self.steps_task)

    def step(self, row: dict[str, Any], total_steps: int) -> None:
        """Show a finished step, a row of metrics.jsonl. With a bar only the last step leaves a line
        behind."""
        self._end_bar_that_nobody_sees()
        number = row["step"] + 1
        if self.disable or number == total_steps:
            self.print_line(step_line(row, total_steps))
        if not self.disable:
            self.figures = figures_line(row)
            description = f"{number}/{total_steps} steps"
            self.update(self.steps_task.id, completed=number, description=description)


class TimeColumn(progress.ProgressColumn):
    """How long a task has run, and for how long it will where that can be told."""

    max_refresh = 0.5  # or the estimate would flicker

    def render(self, task: Task) -> Text:
        """The column of a task."""
        elapsed = f"{timedelta(seconds=int(task.elapsed or 0))} elapsed"
        if task.total is None or task.time_remaining is None or not task.completed:
            return Text(elapsed)
        return Text(f"{elapsed}, {timedelta(seconds=int(task.time_remaining))} left")


def _can_move_cursor(out: TextIO | None) -> bool:
    is_dumb = os.environ.get("TERM", "dumb") == "dumb"
    return out is not None and not out.closed and out.isatty() and not is_dumb


def step_line(row: dict[str, Any], total_steps: int) -> str:
    """A finished step as one line of a log: how many steps are finished, as checkpoints count them,
    and in brackets its number in metrics.jsonl, which counts from 0."""
    if "sft/loss" in row:
        width = len(str(total_steps))
        number = f"{row['step'] + 1:>{width}}/{total_steps} [{row['step']:>{width}}]"
        return f"step {number}  {_supervised_figures(row)}"
    values = MISSING_METRICS | row
    values["parts"] = _reward_notes(row)
    values["number"] = row["step"] + 1
    values["total"] = total_steps
    values["width"] = len(str(total_steps))
    preempted = row.get("rollout/preemptions")
    pressure = f"  preempted {preempted:.0f}" if preempted else ""
    return STEP_LINE.format_map(values) + pressure


def figures_line(row: dict[str, Any]) -> str:
    """The second line of the bar: reward, length, speed, and how long each group waited for the
    other."""
    if "sft/loss" in row:
        return _supervised_figures(row)
    reward = f"reward {row['reward/mean']:.3f}{_reward_notes(row)}"
    length = f"length {row['response_length/mean']:.1f}"
    rollout_wait_s = row.get("time/wait_trainer_s", math.nan) + row.get("time/sync_s", 0.0)
    trainer_wait_s = row.get("time/wait_rollout_s", math.nan)
    waits = f"waits: rollout {rollout_wait_s:.2f} s, trainer {trainer_wait_s:.2f} s"
    tokens_per_s = row.get("tokens_per_s/rollout")
    if tokens_per_s:
        return f"{reward}  {length}  {tokens_per_s:,.0f} tok/s  {waits}"
    return f"{reward}  {length}  {waits}"


def _reward_notes(row: dict[str, Any]) -> str:
    """What follows the reward of a step."""
    means = parts_text(reward_parts(row)) + sources_text(row)
    return means + failed_text(row) + _teacher_text(row)


def _teacher_text(row: dict[str, Any]) -> str:
    """The KL to the teacher as the text that follows the reward; "" without a teacher."""
    kl = row.get("distill/kl")
    return "" if kl is None else f"  distill/kl {kl:.4f}"


def _supervised_figures(row: dict[str, Any]) -> str:
    """A finished supervised step."""
    loss = math.nan if row["sft/loss"] is None else row["sft/loss"]
    return (
        f"v{row['weight_version']}  loss {loss:.4f}  answer tokens {row['sft/tokens']:.0f}  "
        f"lr {row['actor/lr']:.2e}  step {row['time/step_s']:.2f}s"
    )


def quiet_libraries() -> None:
    """In the driver: no progress bars of Hugging Face, and no warnings that are known to mean
    nothing here. Warnings of this program, and unknown ones of others, stay."""
    for name in PROGRESS_BAR_VARIABLES:
        os.environ.setdefault(name, "1")
    # Ray announces how later releases will treat GPUs of actors that book none.
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"ray(\.|$)")
    # In a notebook without widgets tqdm, which transformers imports, asks for them; no bar of it is
    # shown.
    warnings.filterwarnings("ignore", message="IProgress not found")
    for logger in HIDDEN_MESSAGES:
        logging.getLogger(logger).addFilter(_is_not_hidden)


def _is_not_hidden(record: logging.LogRecord) -> bool:
    return HIDDEN_MESSAGES[record.name] not in record.getMessage()
