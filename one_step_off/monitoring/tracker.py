"""What a run leaves behind in files that other programs rely on; screen and loggers are told of each step too."""

import json
import math
import re
import shutil
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TextIO

import numpy as np

from one_step_off.data.evaluation import MAIN_SET, evaluation_metrics
from one_step_off.data.samples import FAULT_METRICS, Batch, Sample, generated_tokens
from one_step_off.monitoring.console import RunConsole, parts_text
from one_step_off.monitoring.flops import Meter
from one_step_off.monitoring.loggers import Loggers

Row = dict[str, Any]
# What the pipeline as a whole does, in the timeline's order.
LANES = (
    "rollout",
    "evaluation",
    "sync",
    "actor",
    "critic",
    "ref",
    "reward_model",
    "checkpoint",
    "checkpoint write",
)


def numbers_of(lane: str) -> tuple[str, int, int]:
    """The process that a lane of the timeline belongs to, its pid there and the lane's tid: the same in each life of a
    run, and sorted as they are to be shown. "sync rollout 0.1 wire" is of the second worker of the first replica."""
    if own := re.search(r"(rollout|trainer) (\d+)(?:\.(\d+))?", lane):
        pid = (20_000 if own[1] == "trainer" else 10_000) + int(own[2])
        tid = (
            2 * int(own[3] or 0)
            + 2 * lane.startswith("sync")
            + lane.endswith(("evaluation", "wire"))
        )
        return f"{own[1]} {own[2]}", pid, 100 * pid + tid
    return "pipeline", 1, 1 + (LANES.index(lane) if lane in LANES else len(LANES))


def group_stats(samples: list[Sample]) -> dict[str, float]:
    """Reward and length over samples; of conversations also what their loops counted, 0 where one did not."""
    of_each = [(s.reward, len(s.response_ids), s.finish_reason == "length") for s in samples] or [
        (np.nan,) * 3
    ]
    rewards, lengths, cut = (np.array(column, np.float64) for column in zip(*of_each, strict=True))
    found = {
        "reward/mean": rewards.mean(),
        "reward/std": rewards.std(),
        "response_length/mean": lengths.mean(),
    }
    found |= {
        "response_length/max": lengths.max(),
        "response_length/cut_share": cut.mean(),
        "samples": len(samples),
    }
    return {name: float(figure) for name, figure in found.items()} | agent_stats(samples)


def agent_stats(samples: list[Sample]) -> dict[str, float]:
    """Means of what agent loops counted, as "agent/tool_calls/mean"; nothing where all samples are of one turn."""
    some = samples if any("agent" in s.extra for s in samples) else ()
    found = [s.extra.get("agent", {"turns": 1.0}) for s in some]
    names = dict.fromkeys(name for one in found for name in one)
    return {
        f"agent/{name}/mean": float(np.mean([one.get(name, 0.0) for one in found]))
        for name in names
    }


class Tracker:
    """Writes `metrics.jsonl`, `ledger.jsonl` and `summary.json`, and tells the screen and, once they are open, the
    `loggers`. `usage` is the latest of what `resource_usage.watch_usage` found. `evaluations` are all of the run, those before a
    resume too; `unwritten` is what the next row has to repeat of them."""

    def __init__(
        self,
        folder: str,
        total_steps: int,
        out: TextIO | None = None,
        console: RunConsole | None = None,
    ) -> None:
        """`screen` None: plain lines to `out`."""
        self.folder, self.total_steps, self.console = (
            Path(folder),
            total_steps,
            console or RunConsole(out),
        )
        self.log = self.console.print_line  # one line for the person at the screen
        self.folder.mkdir(parents=True, exist_ok=True)
        self.begin = time.perf_counter()
        self.first_step = self.steps_before = 0
        self.steps: list[Row] = []
        self.evaluations: list[dict[str, float]] = []
        self.unwritten: dict[str, float] = {}
        self.val_names = [MAIN_SET]
        self.passes_at = 1.0  # the reward with which a held-out sample passes, for pass@k
        self.loggers: Loggers | None = None
        self.meter: Meter | None = None
        self.usage: dict[str, float] = {}
        self.spans: dict[str, float] = {}  # of this step, for its row
        self.epoch = time.time() - time.perf_counter()
        self.lanes: dict[
            str, Row
        ] = {}  # that this process has named in the timeline, and their numbers there

    def start(
        self, step: int, evaluations: Sequence[Row] = (), unwritten: Row | None = None
    ) -> None:
        """Begin at `step`: rows from there on, of an earlier run in this folder, are dropped; those before it count. The
        loggers, if there are any, are open, and are told of the evaluation of the checkpoint's weights."""
        self.first_step, self.evaluations, self.unwritten = (
            step,
            list(evaluations),
            dict(unwritten or {}),
        )
        names = "metrics.jsonl", "ledger.jsonl"
        kept = {
            name: [row for row in self._read(name) if row["step"] < step] if step else []
            for name in names
        }
        self.steps, self.steps_before = kept["metrics.jsonl"], len(kept["metrics.jsonl"])
        kept["evaluations.jsonl"] = self.evaluations
        gone = [name for name in kept if not kept[name]]
        for name in (
            *gone,
            "summary.json",
            "error.log",
            "report.html",
            *(() if step else ("timeline.json",)),
        ):
            (self.folder / name).unlink(missing_ok=True)
        for folder in self.folder.glob("skipped/step_*"):
            if int(folder.name[5:]) >= step:
                shutil.rmtree(folder)
        for name in kept.keys() - gone:  # in one move: this may be killed at any moment
            new = self.folder / f"{name}.new"
            new.write_text("".join(json.dumps(_without_nan(row)) + "\n" for row in kept[name]))
            new.replace(self.folder / name)
        # TensorBoard hides what it had from there on, and the evaluation of the checkpoint's weights was one of those.
        for found in self.evaluations if self.loggers and step else ():
            if found["val/version"] >= step:
                self.loggers.evaluation(found, [])

    def report_usage(self, metrics: dict[str, float], device_name: str) -> None:
        """What `resource_usage.watch_usage` found; it goes into the rows from now on."""
        self.usage |= metrics
        if self.meter and device_name:
            self.meter.device_name = device_name

    def span(self, role: str, what: str, step: int, begin: float, end: float) -> None:
        """Record when a role worked (time.perf_counter, seconds): in the next row and in `timeline.json`, a Chrome
        trace (chrome://tracing, Perfetto). Its last bracket is left out, as the format allows: it is always whole."""
        name, since = f"time/{role}_{what}", self.begin
        self.spans |= {
            f"{name}_s": end - begin,
            f"{name}_begin_s": begin - since,
            f"{name}_end_s": end - since,
        }
        # An evaluation runs beside the generation of the next samples.
        self.trace(
            [
                (
                    "evaluation" if what == "evaluate" else role,
                    what,
                    step,
                    begin + self.epoch,
                    end + self.epoch,
                )
            ]
        )

    def trace(self, spans: list[tuple[str, str, Any, float, float]]) -> None:
        """Draw them in `timeline.json` alone: (lane, what, step, begin, end), times by the clock on the wall."""
        events = []
        for lane, what, step, begin, end in spans:
            if lane not in self.lanes:
                who, pid, tid = numbers_of(lane)
                own = self.lanes[lane] = {"pid": pid, "tid": tid}
                named = {
                    "process_name": who,
                    "process_sort_index": pid,
                    "thread_name": lane,
                    "thread_sort_index": tid,
                }
                events += [
                    {"name": k, "ph": "M", "args": {k.partition("_")[2]: x}} | own
                    for k, x in named.items()
                ]
            times = {
                "ts": round(begin * 1e6),
                "dur": round((end - begin) * 1e6),
                "args": {"step": step},
            }
            events.append(
                {"name": f"{what} {step}", "cat": lane, "ph": "X"} | times | self.lanes[lane]
            )
        with open(self.folder / "timeline.json", "a") as f:
            # All in one call, for each costs more than its event; and each on a line of its own.
            f.write(
                "[\n" * (not f.tell())
                + json.dumps(events)[1:-1].replace("}, {", "},\n{")
                + ",\n" * bool(events)
            )

    def step(self, batch: Batch, version: int, metrics: dict[str, float]) -> None:
        """Record one finished step; `version` is the trainer's before the update."""
        made, oldest, newest = generated_tokens(batch.samples)
        row = {"step": batch.step, "weight_version": version} | group_stats(batch.samples)
        row |= {"tokens/response": float(made.sum()), "staleness/min": version - newest}
        row |= (
            {"staleness/max": version - oldest} | metrics | self.spans | self.unwritten | self.usage
        )
        self.unwritten, self.spans = {}, {}
        for name in (
            n for n in FAULT_METRICS if metrics.get(n) and not any(r.get(n) for r in self.steps)
        ):
            whose = (
                s.extra["error"]
                for s in batch.samples + batch.dropped
                if s.extra.get("fault") == name
            )
            self.log(
                f"warning: {name} counts samples that were not scored; the first: {next(whose, 'a greedy one')}"
            )
        if self.meter:
            update = row.get("time/actor_update_s", 0.0) - row.get("actor/sync_wait_s", 0.0)
            row |= self.meter.step(batch, made, row["time/generate_s"], update, row["time/step_s"])
        self.steps.append(row)
        self._append("metrics.jsonl", row)
        consumed = {"step": batch.step, "prompts": batch.prompt_order()}
        consumed |= (
            {"dropped": list(dict.fromkeys(s.prompt_id for s in batch.dropped))}
            if batch.dropped
            else {}
        )
        replaced = [prompt for s in batch.samples for prompt in s.extra.get("replaces", ())]
        self._append("ledger.jsonl", consumed | ({"replaced": replaced} if replaced else {}))
        if self.loggers:
            self.loggers.step(row, batch)
        self.console.step(row, self.total_steps)

    def evaluation(self, version: int, samples: list[Sample], seconds: float) -> None:
        """Record one evaluation of the held-out set, made by weight version `version`. `evaluations.jsonl` has them
        all; the row of the step that ends next, beside which it ran, repeats the newest."""
        found = {"val/version": float(version), "val/seconds": seconds} | evaluation_metrics(
            samples, self.val_names, self.passes_at
        )
        found |= {f"val/{name}": value for name, value in agent_stats(samples).items()}
        self.evaluations.append(found)
        self.unwritten = found
        self._append("evaluations.jsonl", found)
        if self.loggers:
            self.loggers.evaluation(found, samples)
        self.log(held_out_line(found))

    def close(self, failed: bool = False) -> None:
        """Wait for what the loggers still write. `failed`: the run ended by an error."""
        if self.loggers:
            self.loggers.close(failed)

    def summary(self) -> Row:
        """Write and return `summary.json`. `seconds` are this run's; `steps` also count those before a resume
        (`steps_before`). Medians leave the first step out: caches and buffers warm up in it."""
        found: Row = {"steps": len(self.steps), "seconds": time.perf_counter() - self.begin}
        found |= {"steps_before": self.steps_before} if self.steps_before else {}
        if self.steps:
            # The rewards of the first and of the last steps: as many as do not overlap, five at most.
            known = [r["reward/mean"] for r in self.steps if r["reward/mean"] is not None]
            rewards = [x for x in known if not math.isnan(x)] or [math.nan]
            k = max(1, min(5, len(rewards) // 2))
            first, last = np.mean(rewards[:k]), np.mean(rewards[-k:])
            found |= {"reward/first": first, "reward/last": last, "reward/averaged_steps": k}
            found |= speed(self.steps[1:] or self.steps)
            found["canary/logprob_diff_max"] = max(
                r.get("canary/logprob_diff_max", 0.0) for r in self.steps
            )
        if self.evaluations:
            scores, versions = (
                [e[name] for e in self.evaluations] for name in ("val/reward", "val/version")
            )
            found |= {
                "val/first": scores[0],
                "val/last": scores[-1],
                "val/rewards": scores,
                "val/versions": versions,
            }
        # The last look was after the last row.
        found |= {name: value for name, value in self.usage.items() if name.startswith("memory/")}
        found |= {
            name: sum(r.get(name, 0.0) for r in self.steps)
            for name in (*FAULT_METRICS, "samples/dropped_groups")
        }
        found |= {"device": self.meter.device_name or "cpu"} if self.meter else {}
        found = _without_nan(found)
        (self.folder / "summary.json").write_text(json.dumps(found, indent=2) + "\n")
        return found

    def _read(self, name: str) -> list[Row]:
        path = self.folder / name
        lines = path.read_text().splitlines(keepends=True) if path.exists() else []
        return [
            json.loads(line) for line in lines if line.endswith("\n")
        ]  # the last may be cut off by a kill

    def _append(self, name: str, row: Row) -> None:
        with open(self.folder / name, "a") as f:
            f.write(json.dumps(_without_nan(row)) + "\n")


def _without_nan(row: Row) -> Row:
    """JSON has no NaN."""
    return {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in row.items()}


def speed(rows: list[Row]) -> dict[str, float | None]:
    """Medians, idle shares and rates over these steps; a rate is None where no step has it."""
    medians: dict[str, float | None] = {}
    for name in rows[-1]:
        timestamp = name.endswith(
            ("_begin_s", "_end_s")
        )  # when a phase was, of which a median says nothing
        if (
            name.startswith(("time/", "tokens_per_s/", "flops_per_s/", "mfu/", "gpu_utilisation/"))
            and not timestamp
        ):
            known = [r[name] for r in rows if r.get(name) is not None]
            medians[name] = np.median(known) if known else None
    found = {f"median/{n}" if n.startswith("time/") else n: value for n, value in medians.items()}

    def per_s(name: str, of: list[Row] = rows, over: list[Row] = rows) -> float:
        # A step in which the last replica was lost has no sync.
        return sum(r.get(name) or 0.0 for r in of) / sum(r["time/step_s"] for r in over)

    found["overlap_ratio"] = medians["time/step_s"] / max(
        medians["time/generate_s"], medians["time/train_s"]
    )
    found |= {"idle_share/rollout": None, "idle_share/trainer": None}
    if rows[1:]:
        # The replicas idle from the end of their samples, within the step before, to the end of the next sync. Nothing
        # is generated beside the last step, which so would tell of the run's length.
        waits = per_s("time/sync_s") + per_s("time/wait_trainer_s", rows[1:], rows[:-1])
        found |= {
            "idle_share/rollout": min(1.0, waits),
            "idle_share/trainer": 1 - per_s("time/train_s"),
        }
    return found | {
        "samples_per_s": per_s("samples"),
        "response_tokens_per_s": per_s("tokens/response"),
    }


def held_out_line(found: dict[str, float]) -> str:
    """An evaluation in one line: each set's reward, with its parts, and its pass@k for the largest k."""
    sets = []
    for name in (key.removesuffix("/reward") for key in found if key.endswith("/reward")):
        if f"{name}/samples" not in found:
            continue  # a part of a reward, with such a name
        passes = [key for key in found if key.startswith(f"{name}/pass@")]
        more = f", {passes[-1].rsplit('/', 1)[1]} {found[passes[-1]]:.3f}" if passes else ""
        title = "" if name == "val" else name.removeprefix("val/") + " "
        before = f"{name}/reward/"
        parts = parts_text(
            {key.removeprefix(before): x for key, x in found.items() if key.startswith(before)}
        )
        sets.append(
            f"{title}{found[name + '/reward']:.3f}{parts} over {found[name + '/samples']:.0f} samples{more}"
        )
    return f"held-out reward of v{found['val/version']:.0f}: " + "; ".join(sets)
