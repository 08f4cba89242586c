"""The critic: a value for the state before each response token, and its clipped loss, whatever the
back end."""

import numpy as np
from torch import Tensor

from one_step_off.algorithms import core_algos
from one_step_off.data.samples import Batch
from one_step_off.training.model_worker import WorkItem
from one_step_off.training.trained_worker import TrainedWorker
from one_step_off.training.update_stats import Figures, UpdateStats


class CriticWorker(TrainedWorker):
    """The role "critic"."""

    def values(self, batch: Batch) -> dict[int, np.ndarray]:
        """V(state before each response token), of this rank's share: position in batch -> float32
        [R] (collective)."""
        return self._response_outputs(batch)

    def _loss_aggregation(self) -> str:
        return self.role_config.loss_agg

    def _columns(self, batch: Batch) -> dict[str, list[np.ndarray] | None]:
        return {"value": batch.values, "return": batch.returns}

    def _micro_batch_loss(self, item: WorkItem, stats: UpdateStats, first_step: bool) -> Tensor:
        old_values = item.columns["value"]
        returns = item.columns["return"]
        values, _ = self._forward(item.layout, temperature=1.0, figure="none")
        per_token, clipped = core_algos.value_loss(
            values, old_values, returns, self.role_config.clip_range_value
        )
        loss = (item.columns["weight"] * per_token).sum()
        stats.add(loss=loss.detach(), tokens=len(values), clip=clipped.sum())
        _add_moments(stats, "value", old_values)
        _add_moments(stats, "return", returns)
        _add_moments(stats, "error", returns.double() - old_values)
        return loss

    def _role_metrics(self, sums: Figures, maxima: Figures, mini_batches: int) -> Figures:
        tokens = max(sums["tokens"], 1.0)
        return {
            "critic/value_mean": sums["value"] / tokens,
            "critic/return_mean": sums["return"] / tokens,
            "critic/explained_variance": _explained_variance(sums, tokens),
        }


def _add_moments(stats: UpdateStats, name: str, values: Tensor) -> None:
    """Add the sums of the values and of their squares, for mean and variance."""
    exact = values.double()
    stats.add(**{name: exact.sum(), f"{name}^2": exact.square().sum()})


def _explained_variance(sums: Figures, tokens: float) -> float:
    """1 - Var(return - value) / Var(return), of the values before the update. 1: they predicted the
    returns; 0: no better than their mean; NaN: all returns are the same."""

    def variance(name: str) -> float:
        mean = sums[name] / tokens
        return max(sums[f"{name}^2"] / tokens - mean**2, 0.0)

    of_returns = variance("return")
    if of_returns <= 0:
        return float("nan")
    return 1 - variance("error") / of_returns
