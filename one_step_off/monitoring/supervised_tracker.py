"""The tracker of a supervised run: the same files, with losses in the place of rewards."""

from one_step_off.data.samples import Batch
from one_step_off.monitoring.summary import Row, medians_of_times, per_second
from one_step_off.monitoring.tracker import Tracker


class SupervisedTracker(Tracker):
    """Writes the files of `Tracker` for supervised steps. No samples are dumped: they are the rows
    of the data."""

    def _dumped(self, batch: Batch) -> Batch:
        """None of its samples."""
        return Batch(batch.step, [], batch.expected_stamp)

    def _step_row(self, batch: Batch, version: int, metrics: dict[str, float]) -> Row:
        row: Row = {"step": batch.step, "weight_version": version}
        row["sft/loss"] = metrics["actor/loss"]
        row["sft/tokens"] = metrics["actor/tokens"]
        row["sft/tokens_total"] = metrics["actor/tokens_total"]
        row["sft/rows"] = float(len(batch.samples))
        row |= self._with_phases(metrics)
        if self.meter:
            update_s = row.get("time/actor_update_s", 0.0)
            row |= self.meter.training_step(batch, update_s, row["time/step_s"])
        return row

    def held_out_loss(
        self, version: int, loss: float, tokens: int, rows: int, seconds: float
    ) -> None:
        """Record the mean loss of the held-out answers' tokens, in nats, at the weights
        `version`."""
        metrics = {
            "val/version": float(version),
            "val/seconds": seconds,
            "val/loss": loss,
            "val/tokens": float(tokens),
            "val/rows": float(rows),
        }
        self.evaluations.append(metrics)
        self.unwritten = metrics
        self._append("evaluations.jsonl", metrics)
        if self.loggers:
            self.loggers.evaluation(metrics, [])
        self.log(f"held-out loss of v{version}: {loss:.4f} over {tokens} tokens of {rows} rows")

    def _faults(self) -> Row:
        """None: rows are not scored."""
        return {}

    def _results(self) -> Row:
        """See `Tracker._results`."""
        results: Row = {}
        if self.steps:
            results["sft/first"] = self.steps[0]["sft/loss"]
            results["sft/last"] = self.steps[-1]["sft/loss"]
            timed = self.steps[1:] or self.steps
            results |= medians_of_times(timed)
            results["rows_per_s"] = per_second("sft/rows", timed)
        if self.evaluations:
            losses = [evaluation["val/loss"] for evaluation in self.evaluations]
            results["val/loss/first"] = losses[0]
            results["val/loss/last"] = losses[-1]
            results["val/losses"] = losses
            results["val/versions"] = [row["val/version"] for row in self.evaluations]
        return results
