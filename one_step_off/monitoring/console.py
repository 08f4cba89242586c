"""What a person at the screen sees: a live bar on a terminal, plain lines anywhere else; and what a run says of itself
before it starts and after it has ended, as (name, text) pairs.

    with RunConsole() as run_console:
        with run_console.working("starting Ray"):
            ...
        with run_console.training(total_steps):
            run_console.step(row, total_steps)        # a row of metrics.jsonl
        run_console.table(facts)

Leaving the block takes the live part off the screen, whatever happened in it, so that an error is printed below
everything else and never painted over.
"""

import contextlib
import logging
import math
import os
import shlex
import sys
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, TextIO

from rich import progress
from rich.console import Console
from rich.progress import Task
from rich.text import Text

from one_step_off.config.loading import placement_text
from one_step_off.config.schema import Config
from one_step_off.config.validation import mask_secrets
from one_step_off.monitoring.loggers import VAL, numbered

Facts = list[tuple[str, str]]

_NAMES = 13
_STEP = """step {number:>{width}}/{total}  v{weight_version:<{width}}  reward {reward/mean:.3f}{parts}  \
length {response_length/mean:5.1f}  step {time/step_s:.2f}s (gen {time/generate_s:.2f}, train {time/train_s:.2f}, \
sync {time/sync_s:.2f})  ratio {ratio/mean:.3f}  canary {canary/logprob_diff_max:.0e}"""

# Of `summary.json`, but memory in GiB. A line whose figures are not all there is left out; of
# two with one name the first stands.
_PARTS = ", ".join(f"{part} {{median/time/{part}_s:.2f}} s" for part in ("generate", "train"))
_END = (
    ("reward", "{reward/first:.3f} -> {reward/last:.3f} ({averaged})"),
    ("reward", "{reward/last:.3f}"),
    ("held out", "{val/first:.3f} -> {val/last:.3f}"),
    ("held out", "{val/last:.3f}"),
    ("median step", f"{{median/time/step_s:.2f}} s: {_PARTS}, sync {{median/time/sync_s:.3f}} s"),
    ("idle", "rollout {idle_share/rollout:.0%}, trainer {idle_share/trainer:.0%}"),
    ("samples/s", "{samples_per_s:.0f}"),
    (
        "tokens/s",
        "rollout {tokens_per_s/rollout:,.0f}, trainer {tokens_per_s/trainer:,.0f} while they work",
    ),
    ("MFU", "rollout {mfu/rollout:.1%}, trainer {mfu/trainer:.1%} of {device} in bf16"),
    (
        "peak memory",
        "rollout {memory/rollout_peak_bytes:.2f} GiB, trainer {memory/trainer_peak_bytes:.2f} GiB",
    ),
)


class RunConsole(progress.Progress):
    """What is going on stands at the bottom of a terminal and moves, a line per task and one with the `figures` of the last
    step; what was said, and what libraries print meanwhile, scrolls by above it. Files, pipes, CI and terminals that cannot
    move their cursor get lines instead, one per step."""

    figures = ""

    def __init__(
        self, out: TextIO | Console | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """`out` None: stdout; a console: a terminal, whatever it may look like. `clock`: seconds."""
        dumb, given = os.environ.get("TERM", "dumb") == "dumb", isinstance(out, Console)
        moves = given or ((out or sys.stdout).isatty() and not dumb)
        console = out if given else Console(file=out, highlight=False)
        what, bar = (
            progress.TextColumn("{task.description}", markup=False),
            progress.BarColumn(bar_width=None),
        )
        times = (
            progress.TimeElapsedColumn(),
            progress.TextColumn("left"),
            progress.TimeRemainingColumn(),
        )
        look = {"refresh_per_second": 4, "transient": True, "expand": True, "disable": not moves}
        # Steps may take minutes, and by default rich would only look at the last half of one.
        pace = {"get_time": clock, "speed_estimate_period": math.inf}
        super().__init__(
            what, bar, progress.TaskProgressColumn(), *times, console=console, **look, **pace
        )

    def get_renderables(self) -> Iterator[Any]:
        """What moves."""
        yield self.make_tasks_table(self.tasks)
        if self.figures:
            yield Text(self.figures, style="cyan")

    def print_line(self, line: str) -> None:
        """One line without its secrets, left to the terminal to wrap: a command must copy as one line."""
        self.console.print(Text(mask_secrets(line)), soft_wrap=True)

    def table(self, facts: Iterable[tuple[str, str]]) -> None:
        """Named facts, one per line, aligned; an empty name continues the one above."""
        for name, text in facts:
            self.console.print(
                Text.assemble((f"{name:<{_NAMES}}", "bold"), mask_secrets(text)), soft_wrap=True
            )

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
        task = next((t for t in self.tasks if t.description == what), None) or self._begin(
            what, 1.0
        )
        self.update(task.id, completed=done)
        if done >= 1:
            self._remove(task)
            self._tell(task)

    def _begin(self, what: str, total: float | None) -> Task:
        if self.disable:
            self.print_line(f"{what} ...")
        self.add_task(what, total=total)
        return self.tasks[-1]

    def _tell(self, task: Task) -> None:
        if task.elapsed >= 1:
            self.print_line(f"{task.description}: {task.elapsed:.0f} s")

    def _remove(self, task: Task) -> None:
        self.remove_task(task.id)
        self.refresh()  # or what is said next would draw it once more

    @contextlib.contextmanager
    def training(self, total: int, done: int = 0) -> Iterator[None]:
        """The steps come now; `done` of them were made by an earlier run."""
        self.add_task(f"step {done}/{total}", total=total, completed=done)
        self.steps, self.figures = self.tasks[-1], "waiting for the first step"
        try:
            yield
        finally:
            self.figures = ""
            self._remove(self.steps)

    def step(self, row: dict[str, Any], total: int) -> None:
        """One finished step: its row of metrics.jsonl. Of the bar's steps only the last leaves a line behind."""
        if self.disable or row["step"] + 1 == total:
            known = {
                "time/sync_s": 0.0,
                "ratio/mean": math.nan,
                "canary/logprob_diff_max": math.nan,
            } | row
            known["parts"] = parts_text(reward_parts(row))
            self.print_line(
                _STEP.format_map(
                    known | {"number": row["step"] + 1, "total": total, "width": len(str(total))}
                )
            )
        if not self.disable:
            self.figures, done = figures(row), row["step"] + 1
            self.update(self.steps.id, completed=done, description=f"step {done}/{total}")


def reward_parts(row: dict[str, Any]) -> dict[str, float]:
    """The means of the parts of a step's rewards: name -> mean, from a row of metrics.jsonl."""
    found = {}
    for key, mean in row.items():
        name = key.removeprefix("reward/").removesuffix("/mean")
        if mean is not None and key == f"reward/{name}/mean":
            found[name] = mean
    return found


def parts_text(parts: dict[str, float], digits: str = ".3f") -> str:
    """Parts of a reward, to stand behind it: " (right 0.750, form 0.500)"; empty where it has none."""
    return (
        " (" + ", ".join(f"{name} {part:{digits}}" for name, part in parts.items()) + ")"
        if parts
        else ""
    )


def figures(row: dict[str, Any]) -> str:
    """The second line of the bar: reward, length, speed, who waited for whom."""
    tokens, waits = row.get("tokens_per_s/rollout"), row.get("time/wait_trainer_s", math.nan)
    speed = f"{tokens:,.0f} tok/s  " if tokens else ""
    text = f"reward {row['reward/mean']:.3f}{parts_text(reward_parts(row))}  length {row['response_length/mean']:.1f}  {speed}waits: rollout "
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
    logging.getLogger("huggingface_hub.utils._http").addFilter(
        lambda record: known not in record.getMessage()
    )


def start_facts(
    cfg: Config, asked_model: str, params: int | None, data: Any, links: Facts
) -> Facts:
    """The run that is about to start. `asked_model`: `model.path` as the user gave it (a tiny: name has become a folder
    since). `params`: the model's parameters, None if they cannot be counted yet. `data`: the `data.Data` of the run.
    `links`: more places to look at, as the W&B run's."""
    size = "" if params is None else f", {count(params)} parameters"
    how = (
        "one step off, samples are 1 version old"
        if cfg.pipeline.staleness
        else "synchronous, samples are fresh"
    )
    each = f"{data.stream.total_steps}, each {cfg.data.train_batch_size} prompts x {cfg.rollout.n} samples"
    return [
        ("model", f"{asked_model}{size}, {cfg.model.dtype}"),
        ("data", f"{len(data.stream)} prompts of {cfg.data.train_files}"),
        ("held out", f"{len(data.val)} prompts of {cfg.data.val_files}" if data.val else "none"),
        *(
            ("" if i else "placement", line)
            for i, line in enumerate(placement_text(cfg).splitlines())
        ),
        ("staleness", f"{cfg.pipeline.staleness} ({how})"),
        ("steps", "none: the held-out set is evaluated" if cfg.trainer.val_only else each),
        ("output", cfg.trainer.output_dir),
        *links,
    ]


def count(number: int) -> str:
    """A large number for people: 345k, 494M, 1.54B."""
    for size, letter in ((1e9, "B"), (1e6, "M"), (1e3, "k")):
        if number >= 0.9995 * size:
            return f"{number / size:.3g}{letter}"
    return str(number)


def end_facts(summary: dict[str, Any], cfg: Config) -> Facts:
    """What the run came to, where things lie, and how to go on. `summary` is that of `Tracker.summary`."""
    known = {k: v for k, v in summary.items() if v is not None}
    known |= {k: v / 2**30 for k, v in known.items() if k.startswith("memory/")}
    dropped = {
        "reward/first": known["steps"] == 1,
        "val/first": len(known.get("val/versions", ())) == 1,
    }
    known = {k: v for k, v in known.items() if not dropped.get(k)}
    k = known.get("reward/averaged_steps", 0)
    known["averaged"] = (
        "first and last step" if k == 1 else f"means of the first and last {k} steps"
    )
    found: dict[str, str] = {}
    for name, pattern in _END:
        with contextlib.suppress(KeyError):
            found.setdefault(name, pattern.format_map(known))
    made = known["steps"] - known.get("steps_before", 0)
    found["this run" if "steps_before" in known else "whole run"] = (
        f"{made} steps in {known['seconds']:.0f} s"
    )
    return [*found.items(), *_places(cfg)]


def _places(cfg: Config) -> Facts:
    """Where things lie, as far as they are there."""
    folder = Path(cfg.trainer.output_dir)
    run, events, offline = (
        shlex.quote(str(folder / name)) for name in ("", "tensorboard", "wandb")
    )
    files = [
        str(folder / n)
        for n in ("metrics.jsonl", "evaluations.jsonl", "summary.json")
        if (folder / n).exists()
    ]
    # An evaluation alone has no steps to look at.
    evaluated = f" --val {max(numbered(folder, VAL), default=0)}" if cfg.trainer.val_only else ""
    places = [
        (bool(files), "metrics", ", ".join(files)),
        ((folder / "report.html").exists(), "report", str(folder / "report.html")),
        (
            any(folder.glob("tensorboard/*")),
            "tensorboard",
            f"{interpreter()} -m tensorboard.main --logdir {events}",
        ),
        (
            any(folder.glob("wandb/offline-run-*")),
            "wandb",
            f"{interpreter()} -m wandb sync {offline}/offline-run-*",
        ),
        (
            any(folder.glob("samples/*.jsonl")),
            "samples",
            f"{interpreter()} -m one_step_off.view {run}{evaluated}",
        ),
    ]
    if cfg.trainer.save_hf_model and not cfg.trainer.val_only and (folder / "hf_model").is_dir():
        places += [(True, "model", str(folder / "hf_model")), (True, "to go on", going_on(cfg))]
    return [(name, text) for there, name, text in places if there]


def interpreter() -> str:
    """This Python, in a shell's words that work where this run was started, without an activated environment."""
    near = os.path.relpath(sys.executable)
    return shlex.quote(sys.executable if near.startswith("..") else near)


def going_on(cfg: Config) -> str:
    """The command that trains the resulting model further, into a folder beside this one."""
    folder = Path(cfg.trainer.output_dir)
    beside = folder.with_name(folder.name + "_next") if folder.name else "outputs/next"
    parts = (
        f"config={folder / 'config.yaml'}",
        f"model.path={folder / 'hf_model'}",
        f"trainer.output_dir={beside}",
    )
    return f"{interpreter()} -m {shlex.join(['one_step_off.main_ppo', *parts])}"
