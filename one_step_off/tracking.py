"""What a run leaves behind: the run folder's files, and a line per step for whoever watches."""

from __future__ import annotations

import json
import math
import statistics
import time
from pathlib import Path
from typing import Any, TextIO

import numpy as np

from one_step_off.samples import Batch, Sample


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
    """Writes `metrics.jsonl`, `ledger.jsonl` and `summary.json`, and prints the progress lines."""

    def __init__(self, folder: str, total_steps: int, out: TextIO | None = None) -> None:
        self.folder, self.total_steps, self.out = Path(folder), total_steps, out
        self.folder.mkdir(parents=True, exist_ok=True)
        self.begin = time.perf_counter()
        self.first_step_s = math.nan
        self.steps: list[dict[str, Any]] = []
        self.evaluations: list[dict[str, float]] = []
        self.unwritten: dict[str, float] = {}  # of an evaluation, for the next row

    def start(
        self, step: int, evaluations: list[dict[str, float]] = (), unwritten: dict[str, float] | None = None
    ) -> None:
        """Begin at `step`: rows from there on, of an earlier run in this folder, are dropped; those before it count."""
        self.evaluations, self.unwritten = list(evaluations), dict(unwritten or {})
        for name in ("summary.json", "error.log", "evaluations.jsonl"):
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

    def say(self, line: str) -> None:
        """One line for the person at the screen."""
        print(line, file=self.out, flush=True)

    def step(self, batch: Batch, version: int, metrics: dict[str, float]) -> None:
        """Record one finished step; `version` is the trainer's before the update."""
        row = {"step": batch.step, "weight_version": version}
        row |= group_stats(batch.samples) | staleness(batch, version) | metrics | self.unwritten
        self.unwritten = {}
        row["tokens/response"] = float(sum(len(s.response_ids) for s in batch.samples))
        row["samples"] = float(len(batch.samples))
        if math.isnan(self.first_step_s):
            self.first_step_s = time.perf_counter() - self.begin
        self.steps.append(row)
        self._append("metrics.jsonl", row)
        self._append("ledger.jsonl", {"step": batch.step, "prompts": batch.prompt_order()})
        self.say(progress_line(row, self.total_steps))

    def evaluation(self, version: int, samples: list[Sample], seconds: float) -> None:
        """Record one evaluation of the held-out set, made by weight version `version`.

        `evaluations.jsonl` has them all. The row of the step that ends next repeats the newest; "val/version" tells its
        weights, since it ran beside that step.
        """
        found = {
            "val/version": float(version),
            "val/reward": float(np.mean([s.reward for s in samples])),
            "val/samples": float(len(samples)),
            "val/response_length": float(np.mean([len(s.response_ids) for s in samples])),
            "val/seconds": seconds,
        }
        self.evaluations.append(found)
        self.unwritten = found
        self._append("evaluations.jsonl", found)
        self.say(f"held-out reward of v{version}: {found['val/reward']:.3f} over {len(samples)} samples")

    def summary(self) -> dict[str, Any]:
        """Write and return `summary.json`. Medians leave the first step out (caches and buffers warm up in it)."""
        rows = self.steps[1:] or self.steps
        found: dict[str, Any] = {"steps": len(self.steps), "seconds": time.perf_counter() - self.begin}
        found["time_to_first_step_s"] = self.first_step_s
        if rows:
            k = min(5, len(self.steps))
            rewards = [r["reward/mean"] for r in self.steps]
            found |= {
                "reward/first": statistics.fmean(rewards[:k]),
                "reward/last": statistics.fmean(rewards[-k:]),
                "reward/averaged_steps": k,
            }
            names = [n for n in rows[-1] if n.startswith("time/")]
            found |= {f"median/{n}": statistics.median(r[n] for r in rows if n in r) for n in names}
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
                "canary/logprob_diff_max": max(r.get("canary/logprob_diff_max", 0.0) for r in self.steps),
            }
        if self.evaluations:
            found["val/first"] = self.evaluations[0]["val/reward"]
            found["val/last"] = self.evaluations[-1]["val/reward"]
            found["val/versions"] = [e["val/version"] for e in self.evaluations]
        found = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in found.items()}
        (self.folder / "summary.json").write_text(json.dumps(found, indent=2) + "\n")
        return found

    def _append(self, name: str, row: dict[str, Any]) -> None:
        clean = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in row.items()}
        with open(self.folder / name, "a") as f:
            f.write(json.dumps(clean) + "\n")


def progress_line(row: dict[str, Any], total: int) -> str:
    """One step in one line."""
    width = len(str(total))
    return (
        f"step {row['step'] + 1:>{width}}/{total}  v{row['weight_version']:<{width}}  "
        f"reward {row['reward/mean']:.3f}  length {row['response_length/mean']:5.1f}  "
        f"step {row['time/step_s']:.2f}s = gen {row['time/generate_s']:.2f} | train {row['time/train_s']:.2f}"
        f" | sync {row.get('time/sync_s', 0.0):.2f}  ratio {row.get('ratio/mean', math.nan):.3f}"
        f"  canary {row.get('canary/logprob_diff_max', math.nan):.0e}"
    )
