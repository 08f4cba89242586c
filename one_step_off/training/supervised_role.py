"""The policy in supervised steps: the mean negative log-likelihood of the answers' tokens, whatever
the back end.

Each token of an answer has the same weight, over all ranks and micro-batches. The temperature is 1,
whatever rollouts have.
"""

import numpy as np
from torch import Tensor

from one_step_off.data.samples import Batch
from one_step_off.training.model_worker import WorkItem
from one_step_off.training.policy_role import PolicyWorker
from one_step_off.training.update_stats import Figures, UpdateStats


class SupervisedWorker(PolicyWorker):
    """The role "actor" while it is trained on answers. It streams no weights."""

    @property
    def temperature(self) -> float:
        """That of the answers: they were not sampled."""
        return 1.0

    def _loss_aggregation(self) -> str:
        return "token-mean"

    def _columns(self, batch: Batch) -> dict[str, list[np.ndarray] | None]:
        return {}

    def _micro_batch_loss(self, item: WorkItem, stats: UpdateStats, first_step: bool) -> Tensor:
        """sum over the answers' tokens of -log p(token) / their number in the batch."""
        log_probs, _ = self._forward(item.layout, self.temperature, "none")
        loss = -(item.columns["weight"] * log_probs).sum()
        stats.add(loss=loss.detach(), tokens=len(log_probs))
        return loss

    def _role_metrics(self, sums: Figures, maxima: Figures, mini_batches: int) -> Figures:
        return {}
