"""Skipped optimizer steps: the first batches are kept for --replay, and too many end the run."""

from typing import Any

from one_step_off.checkpoint.files import write_batch
from one_step_off.cluster.errors import RoleError
from one_step_off.config.schema import Config
from one_step_off.data.samples import Batch
from one_step_off.training.worker_interface import TRAINED_ROLES

KEPT_BATCHES = 5  # batches with skipped updates that are kept for --replay


class SkippedUpdates:
    """Counts the skipped updates of an attempt.

    Attributes:
        empty_batches: in a row; all their groups were dropped.
    """

    def __init__(self, cfg: Config, tracker: Any) -> None:
        """`tracker`: the `Tracker` of the run."""
        self.cfg = cfg
        self.tracker = tracker
        self.empty_batches = 0

    def check(self, batch: Batch, metrics: dict[str, float]) -> None:
        """Keep the first batches with a skipped optimizer step.

        Args:
            batch: that was trained.
            metrics: of its update.

        Raises:
            RoleError: too many updates were skipped in a row, or too many batches were empty.
        """
        folder = self.tracker.folder / f"skipped/step_{batch.step:06d}"
        skipped = any(metrics.get(f"{role}/skipped_updates") for role in TRAINED_ROLES)
        kept = list(folder.parent.glob("*"))
        if skipped and len(kept) < KEPT_BATCHES:
            write_batch(batch, folder)
            self.tracker.log(
                f"step {batch.step}: an optimizer step was skipped; look with --replay {folder}"
            )
        self.empty_batches = 0 if batch.samples else self.empty_batches + 1
        check_skipped_in_a_row(self.cfg, batch.step, metrics, self.empty_batches)


def check_skipped_in_a_row(
    cfg: Config, step: int, metrics: dict[str, float], empty_batches: int = 0
) -> None:
    """Raises RoleError: too many updates were skipped in a row, or too many batches were empty.

    Args:
        metrics: of the step's update.
        empty_batches: in a row.
    """
    in_a_row = [metrics.get(f"{role}/skipped_in_a_row", 0) for role in TRAINED_ROLES]
    most = int(max(empty_batches, *in_a_row))
    limit = cfg.trainer.max_skipped_updates
    if most < limit:
        return
    reason = "all groups were dropped"
    if not empty_batches:
        reason = "a loss or gradient is not finite, or too large"
    raise RoleError(
        f"step {step}: {most} updates were skipped in a row "
        f"(trainer.max_skipped_updates={limit}): {reason}"
    )
