"""Folders of made-up runs that the real Tracker wrote, and their reports as a real browser shows
them."""

from __future__ import annotations

import html
import io
import json
import os
import re
import shutil
import signal
import subprocess
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest

from one_step_off.config.schema import Config
from one_step_off.config.yaml_io import resolved_yaml
from one_step_off.data.samples import Batch, Sample
from one_step_off.monitoring.loggers import LogEntry, SampleDump
from one_step_off.monitoring.tracker import Tracker

BROWSERS = ("chromium", "chromium-browser", "google-chrome")
BROWSER = next((path for path in map(shutil.which, BROWSERS) if path), None)
needs_browser = pytest.mark.skipif(BROWSER is None, reason="no chromium and no chrome is installed")
BROWSER_OPTIONS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--enable-logging=stderr",
    "--v=0",
    "--dump-dom",
)
BROWSER_TIMEOUT_S = 60

STEP_S = 2.0
PAUSE_S = 3600.0
LANES = (
    "rollout 0",
    "rollout 1",
    "rollout 0 evaluation",
    "sync",
    "sync trainer 0",
    "sync rollout 0",
    "sync rollout 0.1 wire",
    "actor",
    "critic",
    "checkpoint",
    "checkpoint write",
)
METRICS = {
    "time/step_s": STEP_S,
    "time/generate_s": 1.5,
    "time/train_s": 1.85,
    "time/sync_s": 0.2,
    "time/wait_trainer_s": 0.3,
    "sync/wait_s": 0.1,
    "sync/load_s": 0.05,
    "sync/verify_s": 0.01,
    "canary/logprob_diff_max": 1e-6,
    "restarts/trainer": 0.0,
}
# Lane, activity, begin and end in seconds after the step's begin.
TRACED_SPANS = (
    ("sync trainer 0", "wire", 0.05, 0.1),
    ("sync rollout 0", "load", 0.05, 0.1),
    ("sync rollout 0.1 wire", "wire", 0.05, 0.1),
    ("rollout 0", "generate", 0.2, 1.5),
    ("rollout 1", "generate", 0.2, 1.5),
)
EVALUATION_SPANS = (
    ("rollout 0 evaluation", "evaluate", 0.2, 0.9),
    ("checkpoint", "stall", -0.1, 0.0),
    ("checkpoint write", "write", 0.0, 0.8),
)


def sample(step: int, index: int, text: str = "#### 4", length: int = 3) -> Sample:
    zeros = np.zeros(length)
    return Sample(
        (0, step),
        index,
        np.arange(2),
        zeros,
        zeros,
        zeros > -1,
        np.full(length, max(0, step - 1)),
        reward=index % 2,
        finish_reason="stop",
        response=text,
    )


def make_run(
    folder: Path, steps: int = 12, first: int = 0, text: str = "#### 4", **metrics: float | None
) -> Tracker:
    """A run in which each step takes two seconds.

    Args:
        first: the run is resumed at this step, after an hour's pause.
        text: what the samples say; "": no evaluations and no checkpoints.
        metrics: they replace those of every step.
    """
    tracker = Tracker(str(folder), steps, io.StringIO())
    (folder / "config.yaml").write_text(resolved_yaml(Config()))
    (folder / "versions.json").write_text(json.dumps({"torch": "2.13", "device": "cpu"}))
    earlier_evaluations = [{"val/version": 0.0, "val/reward": 0.25}] if first else ()
    tracker.start(first, earlier_evaluations)
    dump = SampleDump(folder, lambda prompt_id: None)
    run_begin = tracker.begin + (PAUSE_S if first else 0.0)
    for step in range(first, steps):
        begin = run_begin + STEP_S * step
        draw_step(tracker, step, begin)
        if step % 3 == 0 and text:
            evaluate(tracker, step, begin)
        samples = [sample(step, index, text, 3 + step + index) for index in range(4)]
        batch = Batch(step, samples, (0, 0))
        tracker.step(batch, step, METRICS | metrics_of_step(step) | metrics)
        dump.write(LogEntry({}, step, False, samples))
    return tracker


def metrics_of_step(step: int) -> dict[str, float]:
    return {
        "ratio/mean": 1.0 + step / 100,
        "actor/entropy": 1 / (1 + step),
        "actor/approx_kl": 1e-3 * step,
        "restarts/replicas": float(step > 5),
    }


def trace(tracker: Tracker, spans: tuple, step: int, begin: float) -> None:
    begin += tracker.epoch
    for lane, activity, first_s, last_s in spans:
        tracker.trace([(lane, activity, step, begin + first_s, begin + last_s)])


def draw_step(tracker: Tracker, step: int, begin: float) -> None:
    """The timeline of a step: sync, generation, updates."""
    tracker.span("sync", "weights", step, begin, begin + 0.2)
    trace(tracker, TRACED_SPANS, step, begin)
    tracker.span("rollout", "generate", step, begin + 0.2, begin + 1.7)
    tracker.span("actor", "update", step, begin + 0.05, begin + 1.9)
    tracker.span("critic", "update", step, begin + 0.05, begin + 1.1)


def evaluate(tracker: Tracker, step: int, begin: float) -> None:
    """An evaluation and a checkpoint beside a step."""
    tracker.span("rollout", "evaluate", step, begin + 0.2, begin + 0.9)
    trace(tracker, EVALUATION_SPANS, step, begin)
    held_out = [replace(sample(0, index), prompt_id=(-1, index)) for index in range(2)]
    tracker.evaluation(step, held_out, 0.7)


def read_rows(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def write_rows(path: Path, rows: list[dict]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


@dataclass
class Page:
    """A report as the browser has it when all scripts have run.

    Attributes:
        dom: the elements as text.
        messages: what the scripts logged; a page without errors logs nothing.
    """

    dom: str
    messages: list[str]

    @property
    def text(self) -> str:
        """What can be read on the page."""
        return html.unescape(re.sub(r"<script.*?</script>|<[^>]+>", " ", self.dom, flags=re.S))

    def count_spans(self) -> dict[str, int]:
        """How many spans each lane of the pipeline's picture has."""
        lanes = re.findall(r'<g data-lane="([^"]+)">(.*?)</g>', self.dom, re.S)
        return {lane: len(re.findall(r'<rect [^>]*class="work"', body)) for lane, body in lanes}

    def curves(self) -> dict[str, str]:
        """Name -> path of each curve."""
        found = re.findall(r'<path d="([^"]*)"[^>]*data-curve="([^"]*)"', self.dom)
        return {name: path for path, name in found}

    def titles(self) -> set[str]:
        """The titles of the curves."""
        return {html.unescape(title) for title in re.findall(r"<figcaption>([^<]+)", self.dom)}

    def shown_steps(self) -> tuple[int, int, float]:
        """The first and the last step of the pipeline's picture, and its seconds."""
        first, last, seconds = re.search(r"steps (\d+) to (\d+), ([\d.]+) s", self.dom).groups()
        return int(first), int(last), float(seconds)


def open_page(folder: Path) -> Page:
    """Open report.html of a folder in the browser."""
    command = [BROWSER, *BROWSER_OPTIONS, f"--user-data-dir={folder / 'browser'}"]
    # A process group of its own: a helper process of the browser would keep the pipe open.
    with subprocess.Popen(
        [*command, f"file://{folder / 'report.html'}"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as browser:
        try:
            dom, log = browser.communicate(timeout=BROWSER_TIMEOUT_S)
        finally:
            if browser.poll() is None:
                os.killpg(browser.pid, signal.SIGKILL)
    return Page(dom, [line for line in log.splitlines() if "CONSOLE" in line])


def add_script(folder: Path, script: str) -> None:
    """Let the page run a script once it is drawn."""
    path = folder / "report.html"
    path.write_text(path.read_text().replace("</body>", f"<script>{script}</script></body>"))
