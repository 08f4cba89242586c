"""What each role computes, whatever the back end: the policy, the critic, the policy in supervised
steps, the reward model and the teacher.

A back end puts its own class before each of these, see `worker_interface.py`.
"""

import functools
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from one_step_off.algorithms import core_algos, distillation, policy_losses
from one_step_off.config.roles import vocabulary_size
from one_step_off.data.images import Images
from one_step_off.data.samples import Batch
from one_step_off.training.model_worker import ModelWorker, WorkItem
from one_step_off.training.token_outputs import Figure
from one_step_off.training.trained_worker import TrainedWorker
from one_step_off.training.update_stats import Figures, UpdateStats
from one_step_off.training.weight_export import WeightExport


class PolicyWorker(WeightExport):
    """The roles "actor" (trained) and "ref" (frozen: `log_prob` and `log_prob_and_squares`
    only)."""

    @property
    def trained_figure(self) -> Figure:
        """See `ModelWorker`."""
        return "grad" if self.cfg.algorithm.entropy_coef > 0 else "metric"

    def log_prob(self, batch: Batch) -> dict[int, np.ndarray]:
        """Log-probs of all response tokens of this rank's share: position in batch -> float32 [R]
        (collective)."""
        return self._response_outputs(batch)

    def log_prob_and_squares(self, batch: Batch) -> dict[int, np.ndarray]:
        """As `log_prob`, float32 [R, 2]: beside each log-prob sum_v p(v)^2 over the vocabulary
        (collective)."""
        return self._response_outputs(batch, "squares")

    def score(self, sequences: list[np.ndarray], images: Sequence[Images] = ()) -> list[np.ndarray]:
        """Log-probs at temperature 1 of every token but the first, float32 [L - 1] each
        (collective). `images`: of each sequence; (): none has any.

        Every rank scores all sequences: the canary's few cost less than gathering would. Ranks that
        do not report return [].
        """
        wanted = [np.arange(1, len(sequence)) for sequence in sequences]
        plan = self._micro_batch_plan([len(sequence) for sequence in sequences], shares=1)
        scores = self._token_outputs(
            sequences, wanted, plan[0], temperature=1.0, images=images, is_sampled=False
        )
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

    def _other_tokens(self, batch: Batch, positions: list[int]) -> np.ndarray | None:
        """With `teacher.top_k` the teacher's likeliest ones."""
        if not self._has_top_k_teacher:
            return None
        top_ids = [np.zeros((0, self.cfg.teacher.top_k), np.int64)]
        for position in positions:
            top_ids.append(batch.teacher_top_ids[position][batch.samples[position].loss_mask])
        return np.concatenate(top_ids)

    def _micro_batch_loss(self, item: WorkItem, stats: UpdateStats, first_step: bool) -> Tensor:
        """sum over tokens of weight * (policy loss - entropy_coef * entropy + kl_coef * KL to the
        reference + teacher.weight * KL to the teacher over its likeliest tokens)."""
        algorithm = self.cfg.algorithm
        columns = item.columns
        weight = columns["weight"]
        log_probs, entropies = self._forward(
            item.layout, self.cfg.rollout.temperature, self.trained_figure
        )
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
        if self.cfg.rollout.replay_routing:
            stats.add(**_count_replayed(item))
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
        if "replayed" in sums:
            metrics["actor/replayed_share"] = sums["replayed"] / max(sums["read"], 1.0)
        metrics["logprob_diff/mean"] = sums["logprob_diff"] / max(sums["first_tokens"], 1.0)
        metrics["logprob_diff/max"] = maxima["logprob_diff"]
        return metrics | means_by_age(sums)


def _count_replayed(item: WorkItem) -> dict[str, float]:
    """How many tokens the model reads before the last of each sequence, and for how many of them it
    takes the engine's experts."""
    replayed = 0
    if item.layout.experts is not None:
        replayed = int((item.layout.experts[:, 0, 0] >= 0).sum())
    return {"read": sum(item.lengths) - len(item.lengths), "replayed": replayed}


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


class SupervisedWorker(PolicyWorker):
    """The role "actor" while it is trained on answers: the mean negative log-likelihood of their
    tokens, each with the same weight over all ranks and micro-batches. It streams no weights."""

    @property
    def temperature(self) -> float:
        """That of the answers: they were not sampled."""
        return 1.0

    @property
    def trained_figure(self) -> Figure:
        """See `ModelWorker`."""
        return "none"

    def _loss_aggregation(self) -> str:
        return "token-mean"

    def _columns(self, batch: Batch) -> dict[str, list[np.ndarray] | None]:
        return {}

    def _micro_batch_loss(self, item: WorkItem, stats: UpdateStats, first_step: bool) -> Tensor:
        """sum over the answers' tokens of -log p(token) / their number in the batch."""
        log_probs, _ = self._forward(item.layout, self.temperature, self.trained_figure)
        loss = -(item.columns["weight"] * log_probs).sum()
        stats.add(loss=loss.detach(), tokens=len(log_probs))
        return loss

    def _role_metrics(self, sums: Figures, maxima: Figures, mini_batches: int) -> Figures:
        return {}


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


class RewardModelWorker(ModelWorker):
    """The role "reward_model": the scalar head's output at the last token of a sequence, as
    classifiers do."""

    def score_sequences(self, sequences: list[np.ndarray]) -> dict[int, float]:
        """Scores of this rank's share of int sequences [L]: position -> score (collective)."""
        # The output at the last token is found where a next token's would be. So one token is
        # added; under causal attention no other one sees it.
        extended = [np.append(sequence, 0) for sequence in sequences]
        wanted = [np.array([len(sequence)]) for sequence in sequences]
        lengths = [len(sequence) for sequence in extended]
        plan = self._micro_batch_plan(lengths, self.batch_share.count)
        micro_batches = plan[self.batch_share.index]
        outputs = self._token_outputs(extended, wanted, micro_batches, temperature=1.0)
        return {i: float(output[0]) for i, output in outputs.items()}


class TeacherWorker(ModelWorker):
    """The role "teacher": it scores what the student generated, after `rollout.temperature`."""

    def score_responses(self, batch: Batch) -> dict[int, np.ndarray]:
        """Log-probs of all response tokens of this rank's share: position in batch -> float32 [R]
        (collective).

        With `teacher.top_k` float32 [R, 1 + 2 k]: beside each log-prob those of the k likeliest
        tokens of the student's vocabulary, and their ids, which float32 holds exactly below 2^24.
        """
        count = self.cfg.teacher.top_k
        if not count:
            return self._response_outputs(batch)
        likeliest = functools.partial(
            likeliest_tokens, count=count, vocabulary=self._student_vocabulary
        )
        return self._response_outputs(batch, likeliest)

    @functools.cached_property
    def _student_vocabulary(self) -> int:
        return vocabulary_size(self.cfg)


def likeliest_tokens(log_probs: Tensor, count: int, vocabulary: int) -> Tensor:
    """The log-probs of the likeliest tokens, then their ids: float32 [n, 2 count].

    Args:
        log_probs: float32 [n, V].
        vocabulary: only ids below it are taken. Models of one family pad their vocabulary to
            different sizes, and the student has no logits beyond its own.
    """
    values, ids = log_probs[:, :vocabulary].topk(count, dim=-1)
    return torch.cat([values, ids.to(values.dtype)], dim=-1)
