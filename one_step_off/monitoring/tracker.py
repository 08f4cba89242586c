"""The files of a run that other programs rely on; console, loggers and callbacks get each step."""

import json
import shutil
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TextIO

from one_step_off.cluster.run_events import RunEvents, Span
from one_step_off.data.episodes import episode_stats, one_per_episode
from one_step_off.data.evaluation import MAIN_SET, evaluation_metrics
from one_step_off.data.samples import AGENT_ERROR, FAULT_METRICS, Batch, Sample, generated_tokens
from one_step_off.monitoring.callbacks import StepCallbacks
from one_step_off.monitoring.console import RunConsole
from one_step_off.monitoring.flops import Meter
from one_step_off.monitoring.loggers import Loggers
from one_step_off.monitoring.summary import (
    Row,
    agent_stats,
    evaluation_summary,
    evaluation_text,
    failed_agents,
    failed_share,
    fault_counts,
    first_and_last_kl,
    first_and_last_rewards,
    sample_stats,
    sampling_text,
    speed_summary,
    without_nan,
)
from one_step_off.monitoring.timeline import Timeline


class Tracker(RunEvents):
    """Writes `metrics.jsonl`, `ledger.jsonl`, `evaluations.jsonl`, `timeline.json` and
    `summary.json`.

    Attributes:
        steps: the rows of metrics.jsonl, those before a resume too.
        steps_before: how many of them are from before the resume.
        evaluations: the metrics of all evaluations, those before a resume too.
        unwritten: the metrics of the newest evaluation, until the next row repeats them.
        spans: times of this step's phases, for its row.
        usage: the newest metrics of memory and utilization; every row repeats them.
        epoch: the time since the epoch, in seconds, at which time.perf_counter was 0.
        begin: when the run began, by time.perf_counter.
        restart_begin: when the failure was noticed after which no step has ended yet, by
            time.perf_counter; None: there is none.
        loggers, meter: None: none.
        callbacks: the user's functions that are called after each step.
        val_sampling: how held-out responses are chosen, in words.
        passes_at: the reward with which a held-out sample passes, for pass@k.
        has_external_agents: every step reports `episode_stats`, also where no episode has several
            samples.
    """

    def __init__(
        self,
        folder: str,
        total_steps: int,
        out: TextIO | None = None,
        console: RunConsole | None = None,
    ) -> None:
        """`console` None: plain lines to `out`."""
        self.folder = Path(folder)
        self.total_steps = total_steps
        self.console = console or RunConsole(out)
        self.folder.mkdir(parents=True, exist_ok=True)
        self.begin = time.perf_counter()
        self.epoch = time.time() - time.perf_counter()
        self.timeline = Timeline(self.folder / "timeline.json")
        self.first_step = 0
        self.steps_before = 0
        self.steps: list[Row] = []
        self.evaluations: list[dict[str, float]] = []
        self.unwritten: dict[str, float] = {}
        self.val_names = [MAIN_SET]
        self.passes_at = 1.0
        self.val_sampling = sampling_text(0.0)
        self.has_external_agents = False
        self.loggers: Loggers | None = None
        self.meter: Meter | None = None
        self.callbacks = StepCallbacks()
        self.usage: dict[str, float] = {}
        self.spans: dict[str, float] = {}
        self.restart_begin: float | None = None
        self.warned_share = 0.0  # of failed agents, by the last warning

    def start(
        self, step: int, evaluations: Sequence[Row] = (), unwritten: Row | None = None
    ) -> None:
        """Begin at `step`: what an earlier run in this folder wrote from there on is dropped, its
        rows before it count.

        Args:
            evaluations: those of the checkpoint with which the run is resumed.
            unwritten: of these what no row has repeated yet.
        """
        self.first_step = step
        self.evaluations = list(evaluations)
        self.unwritten = dict(unwritten or {})
        self.steps = self._rows_before(step, "metrics.jsonl")
        self.steps_before = len(self.steps)
        kept_rows = {
            "metrics.jsonl": self.steps,
            "ledger.jsonl": self._rows_before(step, "ledger.jsonl"),
            "evaluations.jsonl": self.evaluations,
        }
        self._remove_outdated_files(step, kept_rows)
        for name, rows in kept_rows.items():
            if rows:
                self._replace_file(name, rows)
        self._repeat_evaluations_of_checkpoint(step)

    def _rows_before(self, step: int, name: str) -> list[Row]:
        """The whole rows of a file of an earlier run before `step`."""
        path = self.folder / name
        if step == 0 or not path.exists():
            return []
        lines = path.read_text().splitlines(keepends=True)
        # The last line may be cut off by a kill.
        rows = [json.loads(line) for line in lines if line.endswith("\n")]
        return [row for row in rows if row["step"] < step]

    def _remove_outdated_files(self, step: int, kept_rows: dict[str, list[Row]]) -> None:
        outdated = [name for name, rows in kept_rows.items() if not rows]
        outdated += ["summary.json", "error.log", "report.html"]
        if step == 0:
            outdated.append("timeline.json")
        for name in outdated:
            (self.folder / name).unlink(missing_ok=True)
        for folder in self.folder.glob("skipped/step_*"):
            skipped_step = int(folder.name.removeprefix("step_"))
            if skipped_step >= step:
                shutil.rmtree(folder)

    def _replace_file(self, name: str, rows: Iterable[Row]) -> None:
        """Replace a file in one move, since the process may be killed at any moment."""
        new = self.folder / f"{name}.new"
        new.write_text("".join(json.dumps(without_nan(row)) + "\n" for row in rows))
        new.replace(self.folder / name)

    def _repeat_evaluations_of_checkpoint(self, step: int) -> None:
        """Log the evaluations of the checkpoint's weights again: TensorBoard hides what it had from
        that step on."""
        if self.loggers is None or step == 0:
            return
        for evaluation in self.evaluations:
            if evaluation["val/version"] >= step:
                self.loggers.evaluation(evaluation, [])

    def report_usage(self, metrics: dict[str, float], device_name: str) -> None:
        """Receive what `resource_usage.watch_usage` measured; it goes into the rows from now on."""
        self.usage |= metrics
        if self.meter and device_name:
            self.meter.device_name = device_name

    def log(self, line: str) -> None:
        """Print one line for the user."""
        self.console.print_line(line)

    def span(self, role: str, activity: str, step: int, begin: float, end: float) -> None:
        """Record when a role worked (seconds, by time.perf_counter), in the next row and in the
        timeline."""
        name = f"time/{role}_{activity}"
        self.spans[f"{name}_s"] = end - begin
        self.spans[f"{name}_begin_s"] = begin - self.begin
        self.spans[f"{name}_end_s"] = end - self.begin
        # An evaluation runs beside the generation of the next samples.
        lane = "evaluation" if activity == "evaluate" else role
        self.trace([(lane, activity, step, begin + self.epoch, end + self.epoch)])

    def trace(self, spans: Iterable[Span]) -> None:
        """Record spans in the timeline alone."""
        self.timeline.write(spans)

    def step(self, batch: Batch, version: int, metrics: dict[str, float]) -> None:
        """Record one finished step; `version` is the trainer's before the update.

        Raises:
            Exception: what a callback raises.
        """
        row = self._step_row(batch, version, metrics)
        self.steps.append(row)
        self._append("metrics.jsonl", row)
        self._append("ledger.jsonl", _ledger_row(batch))
        if self.loggers:
            self.loggers.step(row, self._dumped(batch))
        self.console.step(row, self.total_steps)
        self.callbacks.step(row)

    def _dumped(self, batch: Batch) -> Batch:
        """The batch whose samples are dumped."""
        return batch

    def _step_row(self, batch: Batch, version: int, metrics: dict[str, float]) -> Row:
        """The row of metrics.jsonl."""
        generated, oldest_version, newest_version = generated_tokens(batch.samples)
        row: Row = {"step": batch.step, "weight_version": version}
        row |= sample_stats(batch.samples)
        row |= episode_stats(batch.samples, always=self.has_external_agents)
        row |= failed_share(batch.samples + batch.dropped)
        row["tokens/response"] = float(generated.sum())
        row["staleness/min"] = version - newest_version
        row["staleness/max"] = version - oldest_version
        row |= self._with_phases(metrics)
        self._warn_of_new_faults(batch, metrics)
        self._warn_of_failed_agents(f"step {batch.step}", batch.samples + batch.dropped)
        if self.meter:
            sync_wait_s = row.get("actor/sync_wait_s", 0.0)
            update_s = row.get("time/actor_update_s", 0.0) - sync_wait_s
            generate_s = row["time/generate_s"]
            self.meter.replicas = row.get("rollout/replicas")
            shared = row.get("actor/shared_prefix_share", 0.0)
            row |= self.meter.step(batch, generate_s, update_s, row["time/step_s"], shared)
        return row

    def _with_phases(self, metrics: dict[str, float]) -> Row:
        """The metrics of a step with what was recorded since the last row. The first row after a
        failure says how long it took to get there."""
        row = metrics | self.spans | self.unwritten | self.usage
        self.spans = {}
        self.unwritten = {}
        if self.restart_begin is not None:
            row["restarts/recovery_s"] = time.perf_counter() - self.restart_begin
            self.restart_begin = None
        return row

    def _warn_of_new_faults(self, batch: Batch, metrics: dict[str, float]) -> None:
        """Name the first sample of each kind that was not scored, once in a run."""
        for name in FAULT_METRICS:
            was_seen = any(row.get(name) for row in self.steps)
            if not metrics.get(name) or was_seen or name == AGENT_ERROR:
                continue
            errors = [
                sample.extra["error"]
                for sample in batch.samples + batch.dropped
                if sample.extra.get("fault") == name
            ]
            first_error = errors[0] if errors else "a greedy one"
            self.log(
                f"warning: {name} counts samples that were not scored; the first: {first_error}"
            )

    def _warn_of_failed_agents(self, where: str, samples: list[Sample]) -> None:
        """Name the first failure of an agent: once, and whenever twice as many fail."""
        failed, episodes, reason = failed_agents(samples)
        if not failed or failed / episodes < 2 * self.warned_share:
            return
        self.warned_share = failed / episodes
        errors = sum(s.extra.get("fault") == AGENT_ERROR for s in one_per_episode(samples))
        self.log(
            f"warning: {where}: {failed} of {episodes} agents failed ({errors} errors, see "
            f"reward.on_error; {failed - errors} at a limit of the run); the first: {reason}"
        )

    def evaluation(self, version: int, samples: list[Sample], seconds: float) -> None:
        """Record one evaluation of the held-out sets with the weights `version`.
        `evaluations.jsonl` has them all; the row of the step that ends next repeats the newest."""
        metrics = {"val/version": float(version), "val/seconds": seconds}
        metrics |= evaluation_metrics(samples, self.val_names, self.passes_at)
        stats = agent_stats(samples) | episode_stats(samples, always=self.has_external_agents)
        stats |= failed_share(samples)
        for name, value in stats.items():
            metrics[f"val/{name}"] = value
        self.evaluations.append(metrics)
        self.unwritten = metrics
        self._append("evaluations.jsonl", metrics)
        if self.loggers:
            self.loggers.evaluation(metrics, samples)
        self.log(evaluation_text(metrics, self.val_sampling))
        self._warn_of_failed_agents(f"evaluation of v{version}", samples)

    def close(self, failed: bool = False) -> None:
        """Wait for what the loggers still write. `failed`: the run ended by an error."""
        if self.loggers:
            self.loggers.close(failed)

    def summary(self) -> Row:
        """Write and return `summary.json`.

        `seconds` are this run's; `steps` also count those before a resume (`steps_before`). Medians
        leave the first step out, in which caches and buffers warm up."""
        summary: Row = {"steps": len(self.steps), "seconds": time.perf_counter() - self.begin}
        if self.steps_before:
            summary["steps_before"] = self.steps_before
        summary |= self._results()
        # Memory was measured once more after the last row.
        for name, value in self.usage.items():
            if name.startswith("memory/"):
                summary[name] = value
        summary |= self._faults()
        if self.meter:
            summary["device"] = self.meter.device_name or "cpu"
        summary = without_nan(summary)
        (self.folder / "summary.json").write_text(json.dumps(summary, indent=2) + "\n")
        return summary

    def _results(self) -> Row:
        """What was learned and how fast, for the summary."""
        results: Row = {}
        if self.steps:
            results |= first_and_last_rewards(self.steps)
            results |= first_and_last_kl(self.steps)
            results |= speed_summary(self.steps[1:] or self.steps)
            differences = [row.get("canary/logprob_diff_max", 0.0) for row in self.steps]
            results["canary/logprob_diff_max"] = max(differences)
        return results | evaluation_summary(self.evaluations)

    def _faults(self) -> Row:
        """Counts of what went wrong, for the summary."""
        return dict(fault_counts(self.steps))

    def _append(self, name: str, row: Row) -> None:
        with open(self.folder / name, "a") as file:
            file.write(json.dumps(without_nan(row)) + "\n")


def _ledger_row(batch: Batch) -> Row:
    """The prompts that a step consumed, in order; those dropped, those that others replaced, and
    the notes of the batch."""
    row: Row = {"step": batch.step, "prompts": batch.prompt_order()}
    if batch.dropped:
        row["dropped"] = list(dict.fromkeys(sample.prompt_id for sample in batch.dropped))
    samples = batch.samples + batch.dropped
    replaced = [prompt for sample in samples for prompt in sample.extra.get("replaces", ())]
    if replaced:
        row["replaced"] = replaced
    return row | batch.notes
