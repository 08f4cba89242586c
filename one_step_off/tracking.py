"""What a run leaves behind in files that other programs rely on; screen and loggers are told of each step too."""

from __future__ import annotations

import json
import math
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TextIO

import numpy as np

from one_step_off.evaluation import MAIN, figures
from one_step_off.loggers import Loggers
from one_step_off.performance import Meter
from one_step_off.samples import Batch, Sample
from one_step_off.screen import PlainScreen


def group_stats(samples: list[Sample]) -> dict[str, float]:
    """Reward and length over samples."""
    rewards = np.array([s.reward for s in samples])
    lengths = np.array([len(s.response_ids) for s in samples])
    return {
        "reward/mean": float(rewards.mean()),
        "reward/std": float(rewards.std()),
        "response_length/mean": float(lengths.mean()),
        "response_length/max": float(lengths.max()),
        "response_length/cut_share": float(np.mean([s.finish_reason == "length" for s in samples])),
    }


def staleness(batch: Batch, version: int) -> dict[str, float]:
    """Trainer's version minus the version of each trained token: smallest and largest."""
    made = np.concatenate([s.versions for s in batch.samples])
    return {"staleness/min": float(version - made.max()), "staleness/max": float(version - made.min())}


class Tracker:
    """Writes `metrics.jsonl`, `ledger.jsonl` and `summary.json`, and tells the screen and the loggers.

    Attributes:
        loggers: TensorBoard and the like, once they are open.
        meter: counts tokens and FLOPs, once the model is known.
        usage: the latest figures of memory and GPU utilisation; `report_usage` keeps them fresh.
    """

    def __init__(
        self, folder: str, total_steps: int, out: TextIO | None = None, screen: PlainScreen | None = None
    ) -> None:
        """`screen` None: plain lines to `out`."""
        self.folder, self.total_steps = Path(folder), total_steps
        self.screen = screen or PlainScreen(out)
        self.folder.mkdir(parents=True, exist_ok=True)
        self.begin = time.perf_counter()
        self.first_step, self.first_step_s = 0, math.nan
        self.steps: list[dict[str, Any]] = []
        self.evaluations: list[dict[str, float]] = []
        self.unwritten: dict[str, float] = {}  # of an evaluation, for the next row
        self.val_names = [MAIN]
        self.loggers: Loggers | None = None
        self.meter: Meter | None = None
        self.usage: dict[str, float] = {}
        self.spans: dict[str, float] = {}  # of this step, for its row
        self.epoch = time.time() - time.perf_counter()

    def start(
        self, step: int, evaluations: Sequence[dict[str, float]] = (), unwritten: dict[str, float] | None = None
    ) -> None:
        """Begin at `step`: rows from there on, of an earlier run in this folder, are dropped; those before it count."""
        self.first_step = step
        self.evaluations, self.unwritten = list(evaluations), dict(unwritten or {})
        for name in ("summary.json", "error.log", "evaluations.jsonl") + (() if step else ("timeline.json",)):
            (self.folder / name).unlink(missing_ok=True)
        for found in self.evaluations:
            self._append("evaluations.jsonl", found)
        for name in ("metrics.jsonl", "ledger.jsonl"):
            path = self.folder / name
            rows = [json.loads(line) for line in path.read_text().splitlines()] if step and path.exists() else []
            rows = [row for row in rows if row["step"] < step]
            if name == "metrics.jsonl":
                self.steps = rows
            path.unlink(missing_ok=True)
            for row in rows:
                self._append(name, row)

    def repeat_evaluations(self) -> None:
        """After a resume, once the loggers are open: tell them of the evaluation of the checkpoint's weights."""
        # TensorBoard hides what it had from there on, and the evaluation of these weights was one of those.
        for found in self.evaluations if self.loggers and self.first_step else ():
            if found["val/version"] >= self.first_step:
                self.loggers.evaluation(found, [])

    def keep(self) -> None:
        """Add to what an earlier run left in this folder, and drop nothing: for a run that only evaluates."""
        path = self.folder / "evaluations.jsonl"
        found = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
        self.start(sys.maxsize, found)
        self.first_step = self.steps[-1]["step"] + 1 if self.steps else 1

    def say(self, line: str) -> None:
        """One line for the person at the screen."""
        self.screen.say(line)

    def report_usage(self, metrics: dict[str, float], device_name: str) -> None:
        """What `usage.watching` found; it goes into the rows from now on."""
        self.usage |= metrics
        if self.meter and device_name:
            self.meter.device_name = device_name

    def span(self, role: str, what: str, step: int, begin: float, end: float) -> None:
        """Record when a role worked (time.perf_counter, seconds): in the next row and in `timeline.json`.

        That file is a Chrome trace (chrome://tracing, Perfetto); its last bracket is left out, as the format allows, so
        that it is whole at any moment.
        """
        name = f"time/{role}_{what}"
        self.spans |= {
            f"{name}_s": end - begin,
            f"{name}_begin_s": begin - self.begin,
            f"{name}_end_s": end - self.begin,
        }
        event = {"name": f"{what} {step}", "ph": "X", "pid": 1, "tid": role}
        event |= {"ts": round((begin + self.epoch) * 1e6), "dur": round((end - begin) * 1e6), "args": {"step": step}}
        with open(self.folder / "timeline.json", "a") as f:
            f.write(("" if f.tell() else "[\n") + json.dumps(event) + ",\n")

    def step(self, batch: Batch, version: int, metrics: dict[str, float]) -> None:
        """Record one finished step; `version` is the trainer's before the update."""
        row = {"step": batch.step, "weight_version": version}
        row |= (
            group_stats(batch.samples) | staleness(batch, version) | metrics | self.spans | self.unwritten | self.usage
        )
        self.unwritten, self.spans = {}, {}
        row["tokens/response"] = float(sum(len(s.response_ids) for s in batch.samples))
        row["samples"] = float(len(batch.samples))
        if self.meter:
            row |= self.meter.step(batch, row["time/generate_s"], row["time/train_s"], row["time/step_s"])
        if math.isnan(self.first_step_s):
            self.first_step_s = time.perf_counter() - self.begin
        self.steps.append(row)
        self._append("metrics.jsonl", row)
        self._append("ledger.jsonl", {"step": batch.step, "prompts": batch.prompt_order()})
        if self.loggers:
            self.loggers.step(row, batch)
        self.screen.step(row, self.total_steps)

    def evaluation(self, version: int, samples: list[Sample], seconds: float) -> None:
        """Record one evaluation of the held-out set, made by weight version `version`.

        `evaluations.jsonl` has them all. The row of the step that ends next repeats the newest; "val/version" tells its
        weights, since it ran beside that step.
        """
        found = {"val/version": float(version), "val/seconds": seconds} | figures(samples, self.val_names)
        self.evaluations.append(found)
        self.unwritten = found
        self._append("evaluations.jsonl", found)
        if self.loggers:
            self.loggers.evaluation(found, samples)
        self.say(held_out_line(found))

    def close(self, failed: bool = False) -> None:
        """Wait for what the loggers still write. `failed`: the run ended by an error."""
        loggers, self.loggers = self.loggers, None
        if loggers:
            loggers.close(failed)

    def summary(self) -> dict[str, Any]:
        """Write and return `summary.json`. Medians leave the first step out (caches and buffers warm up in it)."""
        rows = self.steps[1:] or self.steps
        found: dict[str, Any] = {"steps": len(self.steps), "seconds": time.perf_counter() - self.begin}
        found["time_to_first_step_s"] = self.first_step_s
        if rows:
            found |= _learning(self.steps) | _speed(rows)
            found["canary/logprob_diff_max"] = max(r.get("canary/logprob_diff_max", 0.0) for r in self.steps)
        if self.evaluations:
            found["val/first"] = self.evaluations[0]["val/reward"]
            found["val/last"] = self.evaluations[-1]["val/reward"]
            found["val/rewards"] = [e["val/reward"] for e in self.evaluations]
            found["val/versions"] = [e["val/version"] for e in self.evaluations]
        # The last look at memory was after the last row.
        found |= {name: value for name, value in self.usage.items() if name.startswith("memory/")}
        if self.meter:
            found["device"] = self.meter.device_name or "cpu"
        found = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in found.items()}
        (self.folder / "summary.json").write_text(json.dumps(found, indent=2) + "\n")
        return found

    def _append(self, name: str, row: dict[str, Any]) -> None:
        with open(self.folder / name, "a") as f:
            f.write(_line(row))


def _line(row: dict[str, Any]) -> str:
    """One row as JSON, which has no NaN."""
    clean = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in row.items()}
    return json.dumps(clean) + "\n"


def _learning(steps: list[dict[str, Any]]) -> dict[str, float]:
    """The rewards of the first and the last steps."""
    k, rewards = min(5, len(steps)), [r["reward/mean"] for r in steps]
    return {
        "reward/first": statistics.fmean(rewards[:k]),
        "reward/last": statistics.fmean(rewards[-k:]),
        "reward/averaged_steps": k,
    }


def _speed(rows: list[dict[str, Any]]) -> dict[str, float | None]:
    """Medians, idle shares and rates over these steps; a rate is None where no step has it."""
    names = [n for n in rows[-1] if n.startswith("time/")]
    found: dict[str, float | None] = {f"median/{n}": _median(rows, n) for n in names}
    step, gen = found["median/time/step_s"], found["median/time/generate_s"]
    train = found["median/time/train_s"]
    total = sum(r["time/step_s"] for r in rows)
    found |= {
        "overlap_ratio": step / max(gen, train),
        # The replicas idle from the end of their samples to the end of the next sync.
        "idle_share/rollout": sum(r["time/wait_trainer_s"] + r["time/sync_s"] for r in rows) / total,
        "idle_share/trainer": 1 - sum(r["time/train_s"] for r in rows) / total,
        "samples_per_s": sum(r["samples"] for r in rows) / total,
        "response_tokens_per_s": sum(r["tokens/response"] for r in rows) / total,
    }
    rates = ("tokens_per_s/", "flops_per_s/", "mfu/", "gpu_utilisation/")
    return found | {n: _median(rows, n) for n in rows[-1] if n.startswith(rates)}


def _median(rows: list[dict[str, Any]], name: str) -> float | None:
    values = [r[name] for r in rows if r.get(name) is not None]
    return statistics.median(values) if values else None


def held_out_line(found: dict[str, float]) -> str:
    """An evaluation in one line: each set's reward and its pass@k for the largest k."""
    parts = []
    for key in (k for k in found if k.endswith("/reward")):
        name, best = (
            key.removesuffix("/reward"),
            [k for k in found if k.startswith(key.removesuffix("reward") + "pass@")],
        )
        more = f", {best[-1].rsplit('/', 1)[1]} {found[best[-1]]:.3f}" if best else ""
        title = "" if name == "val" else name.removeprefix("val/") + " "
        parts.append(f"{title}{found[key]:.3f} over {found[name + '/samples']:.0f} samples{more}")
    return f"held-out reward of v{found['val/version']:.0f}: " + "; ".join(parts)
