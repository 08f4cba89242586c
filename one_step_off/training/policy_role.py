"""The policy: log-probs for "actor" and "ref", and the PPO loss that trains the actor, whatever the
back end."""

from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from one_step_off.algorithms import core_algos, distillation, policy_losses
from one_step_off.data.samples import Batch
from one_step_off.training.model_worker import WorkItem
from one_step_off.training.update_stats import Figures, UpdateStats
from one_step_off.training.weight_export import WeightExport


class PolicyWorker(WeightExport):
    """The roles "actor" (trained) and "ref" (frozen: `log_prob` and `log_prob_and_squares`
    only)."""

    def log_prob(self, batch: Batch) -> dict[int, np.ndarray]:
        """Log-probs of all response tokens of this rank's share: position in batch -> float32 [R]
        (collective)."""
        return self._response_outputs(batch)

    def log_prob_and_squares(self, batch: Batch) -> dict[int, np.ndarray]:
        """As `log_prob`, float32 [R, 2]: beside each log-prob sum_v p(v)^2 over the vocabulary
        (collective)."""
        return self._response_outputs(batch, "squares")

    def score(self, sequences: list[np.ndarray]) -> list[np.ndarray]:
        """Log-probs at temperature 1 of every token but the first, float32 [L - 1] each
        (collective).

        Every rank scores all sequences: the canary's few cost less than gathering would. Ranks that
        do not report return [].
        """
        wanted = [np.arange(1, len(sequence)) for sequence in sequences]
        plan = self._micro_batch_plan([len(sequence) for sequence in sequences], shares=1)
        scores = self._token_outputs(sequences, wanted, plan[0], temperature=1.0)
        return [scores[i] for i in sorted(scores)]

    def _columns(self, batch: Batch) -> dict[str, list[np.ndarray] | None]:
        algorithm = self.cfg.algorithm
        columns = {"mu": [s.log_probs for s in batch.samples], "advantage": batch.advantages}
        if algorithm.old_log_probs == "recompute":
            columns["proximal"] = batch.old_log_probs
        if algorithm.kl_coef > 0 and not algorithm.kl_in_reward:
            columns["ref"] = batch.ref_log_probs
        if self._has_several_ages:
            columns["age"] = [batch.step - s.versions for s in batch.samples]
        if self._has_top_k_teacher:
            columns["teacher"] = batch.teacher_top_log_probs
        return columns

    @property
    def _has_several_ages(self) -> bool:
        """Whether the tokens of a batch may differ in age."""
        return self.cfg.pipeline.staleness > 1 or self.cfg.weight_sync.in_flight != "wait"

    @property
    def _has_top_k_teacher(self) -> bool:
        """Whether the loss compares the student with the teacher's likeliest tokens."""
        return bool(self.cfg.teacher.top_k) and "teacher" in self.cfg.placement.roles

    def _work_item(self, batch: Batch, positions: list[int], weights: np.ndarray) -> WorkItem:
        """As for every role; with `teacher.top_k` the teacher's likeliest tokens are wanted besides
        the trained ones: the layout's tokens are [n, 1 + k]."""
        item = super()._work_item(batch, positions, weights)
        if not self._has_top_k_teacher:
            return item
        top_ids = [np.zeros((0, self.cfg.teacher.top_k), np.int64)]
        for position in positions:
            top_ids.append(batch.teacher_top_ids[position][batch.samples[position].loss_mask])
        tokens = np.column_stack([item.layout.tokens, np.concatenate(top_ids)])
        return replace(item, layout=replace(item.layout, tokens=tokens))

    def _micro_batch_loss(self, item: WorkItem, stats: UpdateStats, first_step: bool) -> Tensor:
        """sum over tokens of weight * (policy loss - entropy_coef * entropy + kl_coef * KL to the
        reference + teacher.weight * KL to the teacher over its likeliest tokens)."""
        algorithm = self.cfg.algorithm
        columns = item.columns
        weight = columns["weight"]
        figure = "grad" if algorithm.entropy_coef > 0 else "metric"
        log_probs, entropies = self._forward(item.layout, self.cfg.rollout.temperature, figure)
        top_log_probs = log_probs[:, 1:] if "teacher" in columns else None
        if top_log_probs is not None:
            log_probs = log_probs[:, 0]
        per_token, clipped, correction = self._policy_loss(log_probs, columns)
        policy_loss = (weight * per_token).sum()
        loss = policy_loss - algorithm.entropy_coef * (weight * entropies).sum()
        if "ref" in columns:
            divergence = core_algos.kl(log_probs, columns["ref"], algorithm.kl_estimator)
            loss = loss + algorithm.kl_coef * (weight * divergence).sum()
            stats.add(kl=divergence.detach().sum())
        if top_log_probs is not None:
            # Without trained tokens the column has no second dimension.
            teacher = columns["teacher"].reshape(top_log_probs.shape)
            divergence = distillation.top_k_reverse_kl(top_log_probs, teacher)
            loss = loss + self.cfg.teacher.weight * (weight * divergence).sum()
            stats.add(distill_kl=divergence.detach().sum())
        stats.add(
            loss=loss.detach(),
            pg_loss=policy_loss.detach(),
            entropy=entropies.detach().sum(),
            tokens=len(log_probs),
        )
        _count_tokens(log_probs, columns["mu"], clipped, stats, first_step)
        if "age" in columns:
            quantities = {"ratio": policy_losses.ratio_of(log_probs.detach(), columns["mu"])}
            quantities["clip_frac"] = clipped
            if correction is not None:
                quantities["correction"] = correction
            ages = self.cfg.pipeline.staleness + 1
            stats.add(**age_sums(columns["age"], quantities, ages))
        return loss

    def _policy_loss(
        self, log_probs: Tensor, columns: dict[str, Tensor]
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """The loss of each token [n]; bool [n]: where the clip binds; the weight [n] of the
        rollout correction, None without one."""
        algorithm = self.cfg.algorithm
        clip_low = algorithm.clip_ratio_low
        clip_high = algorithm.clip_ratio_high
        mu = columns["mu"]
        old = columns.get("proximal", mu)
        inputs = policy_losses.LossInputs(
            log_probs=log_probs,
            old_log_probs=old,
            advantage=columns["advantage"],
            sequence=columns["sequence"],
            weight=columns["weight"],
            clip_low=algorithm.clip_ratio if clip_low is None else clip_low,
            clip_high=algorithm.clip_ratio if clip_high is None else clip_high,
            clip_c=algorithm.clip_ratio_c,
        )
        loss_function = policy_losses.POLICY_LOSSES.find(algorithm.policy_loss).function
        per_token, clipped = loss_function(inputs, **algorithm.policy_loss_kwargs)
        correction = None
        if "proximal" in columns:  # decoupled PPO
            correction = policy_losses.correction_weights(
                old,
                mu,
                columns["sequence"],
                algorithm.rollout_correction,
                algorithm.rollout_correction_cap,
                algorithm.rollout_correction_low,
            )
            per_token = per_token * correction
        return per_token, clipped, correction

    def _role_metrics(self, sums: Figures, maxima: Figures, mini_batches: int) -> Figures:
        tokens = max(sums["tokens"], 1.0)
        metrics = {}
        for name in ("entropy", "approx_kl", "kl", "distill_kl"):
            if name in sums:
                metrics[f"actor/{name}"] = sums[name] / tokens
        metrics["actor/pg_loss"] = sums["pg_loss"] / mini_batches
        metrics["ratio/mean"] = sums["ratio"] / tokens
        metrics["ratio/max"] = maxima["ratio"]
        metrics["logprob_diff/mean"] = sums["logprob_diff"] / max(sums["first_tokens"], 1.0)
        metrics["logprob_diff/max"] = maxima["logprob_diff"]
        return metrics | means_by_age(sums)


def _count_tokens(
    log_probs: Tensor, mu_log_probs: Tensor, clipped: Tensor, stats: UpdateStats, first_step: bool
) -> None:
    """Count how far theta is from the policy that made the tokens."""
    sums, maxima = core_algos.token_stats(log_probs, mu_log_probs, clipped)
    difference = sums.pop("logprob_diff")
    largest_difference = maxima.pop("logprob_diff")
    if first_step:  # later it would measure training, not policy lag and numerics
        stats.add(logprob_diff=difference, first_tokens=len(log_probs))
        stats.maximum(logprob_diff=largest_difference)
    stats.add(**sums)
    stats.maximum(**maxima)


def age_sums(age: Tensor, quantities: dict[str, Tensor], ages: int) -> dict[str, Tensor]:
    """Sums over the trained tokens of each age, for `means_by_age`.

    Args:
        age: of each token in versions, float [n].
        quantities: name -> its value for each token, [n].
        ages: their number, from 0 on.

    Returns:
        NAME_age_A for each quantity and age, and count_age_A; float64 scalars.
    """
    index = age.long()
    values = {"count": torch.ones_like(age)} | quantities
    sums = {}
    for name, value in values.items():
        totals = torch.zeros(ages, dtype=torch.float64, device=age.device)
        totals.index_add_(0, index, value.detach().double())
        for number, total in enumerate(totals):
            sums[f"{name}_age_{number}"] = total
    return sums


def means_by_age(sums: Figures) -> Figures:
    """staleness/NAME_age_A: the mean over the tokens of each age that occurs, out of the sums of
    `age_sums` over all ranks."""
    metrics = {}
    for name, total in sums.items():
        quantity, _, age = name.partition("_age_")
        count = sums.get(f"count_age_{age}")
        if count and quantity != "count":
            metrics[f"staleness/{name}"] = total / count
    return metrics
