"""The PPO update of a role that learns, whatever the back end (arXiv:1707.06347, algorithm 1).

    for each epoch and each mini-batch of whole prompt groups:
        for each micro-batch:  loss, backward
        clip the gradients by their global norm
        optimizer step, or none: see `skips_update`
        zero the gradients

Gradients are summed over the micro-batches and over all ranks. A step is skipped by all ranks or by
none.
"""

import os
from abc import abstractmethod
from collections.abc import Iterator

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from one_step_off.algorithms import batching, core_algos, schedule
from one_step_off.algorithms.shared_prefixes import Prefixes
from one_step_off.data.episodes import episodes_of
from one_step_off.data.packing import token_ids_of
from one_step_off.data.samples import Batch
from one_step_off.data.staleness import assert_staleness
from one_step_off.training.model_worker import WorkItem
from one_step_off.training.update_stats import Figures, PhaseTimer, UpdateStats
from one_step_off.training.worker_checkpoint import CheckpointedWorker


def skips_update(grad_norm: float, has_broken_loss: bool, largest_norm: float | None) -> bool:
    """Whether an optimizer step is skipped, because it would break the weights or the optimizer's
    moments.

    Args:
        grad_norm: the global norm of the gradients.
        has_broken_loss: the loss of a micro-batch, on any rank, is NaN or infinite.
        largest_norm: max_grad_norm_skip; None: any finite norm is accepted.
    """
    if has_broken_loss or not np.isfinite(grad_norm):
        return True
    return bool(largest_norm) and grad_norm > largest_norm


class TrainedWorker(CheckpointedWorker):
    """One rank of a role that learns. A role says which columns of the batch its loss needs, and
    what the loss is."""

    optimizer: torch.optim.Optimizer | None = None

    # What a role defines.

    @abstractmethod
    def _columns(self, batch: Batch) -> dict[str, list[np.ndarray] | None]:
        """What the loss needs of every response token, by the loss's own names: one array [R] per
        sample."""

    @abstractmethod
    def _micro_batch_loss(self, item: WorkItem, stats: UpdateStats, first_step: bool) -> Tensor:
        """This micro-batch's part of the mini-batch's loss, a scalar; its statistics go into
        `stats`.

        Args:
            item: its columns are those of `_columns`, "weight" and "sequence", see
                `_token_columns`.
            first_step: no optimizer step of this update has been made yet.
        """

    @abstractmethod
    def _role_metrics(self, sums: Figures, maxima: Figures, mini_batches: int) -> Figures:
        """Metrics beyond those of every trained role, out of what `_micro_batch_loss` counted on
        all ranks."""

    def _loss_aggregation(self) -> str:
        """How the losses of the tokens are added up, see `core_algos.token_weights`."""
        return self.cfg.algorithm.loss_agg

    def _other_tokens(self, batch: Batch, positions: list[int]) -> np.ndarray | None:
        """Further tokens whose log-probs the loss needs where a token of these samples is trained:
        int64 [n, k]; None: there are none."""
        return None

    def before_step(self) -> None:
        """Called before the weights change. A weight sender that still reads them waits here."""

    # What a back end defines.

    def _auxiliary_loss(
        self, item: WorkItem, mini_batch_tokens: int, stats: UpdateStats
    ) -> Tensor | None:
        """The model's own part of the loss of the micro-batch that has just run forward, as the
        load balancing of experts; None: it has none.

        Args:
            mini_batch_tokens: of all ranks.
            stats: counts it.
        """
        return None

    def _model_metrics(self) -> Figures:
        """What the model itself counted in this update, the same on every rank (collective)."""
        return {}

    @abstractmethod
    def _grad_norm(self) -> Tensor | float:
        """The global norm of the gradients, over all parameters and ranks (collective)."""

    @abstractmethod
    def _clip_and_step(self, grad_norm: Tensor | float, learning_rate: float) -> None:
        """Clip the gradients, whose norm is `grad_norm`, by grad_clip, and make an optimizer step
        (collective)."""

    @abstractmethod
    def _zero_grad(self) -> None:
        """Forget the gradients."""

    # The update.

    def update(self, batch: Batch, learn: bool = True, profile: str = "") -> dict[str, float]:
        """ppo_epochs passes over the batch in mini-batches of whole prompt groups (collective):
        v(N) -> v(N+1).

        Args:
            learn: False: the step counts and nothing changes. The actor waits so while the critic
                warms up.
            profile: a folder for torch's profile of this rank; "": none.

        Returns:
            The metrics, the same on every rank; {} without `learn`.

        Raises:
            StalenessError: before this rank has changed anything. A rank sees the tokens of its
                share; the first failure of any ends the update of all.
        """
        if not profile:
            return self._checked_update(batch, learn)
        os.makedirs(profile, exist_ok=True)
        path = f"{profile}/{self.role}_rank_{self.rank}.json.gz"
        with torch.profiler.profile(
            on_trace_ready=lambda profiler: profiler.export_chrome_trace(path)
        ):
            return self._checked_update(batch, learn)

    def _checked_update(self, batch: Batch, learn: bool) -> dict[str, float]:
        assert_staleness(batch)
        if not learn:
            self.before_step()
            self.version += 1
            return {}
        self._check_columns(batch)
        metrics = self._ppo_update(batch)
        self._end_turn()
        return metrics

    def _check_columns(self, batch: Batch) -> None:
        count = len(batch.samples)
        for name, values in self._columns(batch).items():
            if values is None or len(values) != count:
                raise ValueError(
                    f"step {batch.step}: the update needs {name} of all {count} samples"
                )

    def _ppo_update(self, batch: Batch) -> dict[str, float]:
        prompts = [s.prompt_id for s in batch.samples]
        epoch = batching.split_into_mini_batches(prompts, self.role_config.ppo_mini_batch_size)
        mini_batches = epoch * self.role_config.ppo_epochs
        stats = UpdateStats(self.device)
        timer = PhaseTimer(self.device)
        learning_rates = []
        for step, mini_batch in enumerate(mini_batches):
            self._accumulate_gradients(batch, mini_batch, stats, timer, first_step=step == 0)
            with timer("sync_wait"):
                self.before_step()
            with timer("optimizer"):
                learning_rates.append(self._optimizer_step(stats))
        self.version += 1
        self.adapters.gather()  # now, because sending calls no collective
        return self._metrics(stats, timer, len(mini_batches), learning_rates[-1])

    def _accumulate_gradients(
        self,
        batch: Batch,
        mini_batch: list[int],
        stats: UpdateStats,
        timer: PhaseTimer,
        first_step: bool,
    ) -> None:
        """Forward and backward over this rank's micro-batches of one mini-batch, positions in the
        batch (collective)."""
        lengths = [batch.samples[position].length for position in mini_batch]
        rows = self._rows(batch, mini_batch)
        plan = self._micro_batch_plan(lengths, self.batch_share.count, rows)
        micro_batches = plan[self.batch_share.index]
        weights = self._token_weights(batch, mini_batch)

        def items() -> Iterator[WorkItem]:
            for indices in micro_batches:
                positions = [mini_batch[index] for index in indices]
                own_rows = None if rows is None else rows[indices]
                yield self._work_item(batch, positions, weights[indices], own_rows)

        def compute_loss(item: WorkItem) -> Tensor:
            loss = self._micro_batch_loss(item, stats, first_step)
            auxiliary = self._auxiliary_loss(item, sum(lengths), stats)
            return loss if auxiliary is None else loss + auxiliary

        self._run_micro_batches(items(), compute_loss, timer)
        own = [index for indices in micro_batches for index in indices]
        stats.add(tokens_total=sum(lengths[i] for i in own))
        if rows is not None:
            stats.add(tokens_shared=int(rows[own, 1].sum()))

    def _token_weights(self, batch: Batch, mini_batch: list[int]) -> np.ndarray:
        """The weight in the loss of the trained tokens of each sample of a mini-batch, float64
        [samples]."""
        trained = [int(batch.samples[position].loss_mask.sum()) for position in mini_batch]
        # Whole prompt groups, and so whole episodes, are in a mini-batch.
        episodes = episodes_of(batch)
        of_mini_batch = None if episodes is None else episodes[mini_batch]
        episode_lengths, count = core_algos.lengths_of_episodes(trained, of_mini_batch)
        # Every rank knows the whole mini-batch, so the denominators are global without a
        # collective.
        return core_algos.token_weights(
            trained,
            self._loss_aggregation(),
            global_tokens=sum(trained),
            global_sequences=count,
            longest=self.cfg.data.max_response_length,
            episode_lengths=episode_lengths,
        )

    def _work_item(
        self,
        batch: Batch,
        positions: list[int],
        weights: np.ndarray,
        rows: Prefixes | None,
    ) -> WorkItem:
        """A micro-batch of these samples; wanted are their trained tokens, beside them
        `_other_tokens`. `rows`: see `batching.rows_that_pay`."""
        samples = [batch.samples[position] for position in positions]
        sequences = [token_ids_of(s) for s in samples]
        wanted = [len(s.prompt_ids) + np.flatnonzero(s.loss_mask) for s in samples]
        layout = self._lay_out(sequences, wanted, [self._experts_of(s) for s in samples], rows)
        for sample in samples:
            layout.images += batch.images.get(sample.prompt_id, ())
        others = self._other_tokens(batch, positions)
        if others is not None:
            layout.tokens = np.column_stack([layout.tokens, others])
        columns = self._token_columns(batch, positions, weights)
        return WorkItem(layout, columns, [len(sequence) for sequence in sequences])

    def _token_columns(
        self, batch: Batch, positions: list[int], weights: np.ndarray
    ) -> dict[str, Tensor]:
        """What the loss needs of the n trained tokens of some samples, one sample after the other.

        Args:
            weights: each sample's weight of a token in the loss, [samples].

        Returns:
            The columns and "weight", float32 [n] (or [n, k], as the batch has them); "sequence",
            int64 [n]: which sequence a token belongs to, counted over those with trained tokens.
        """
        masks = [batch.samples[position].loss_mask for position in positions]
        arrays = {}
        for name, values in self._columns(batch).items():
            arrays[name] = [values[position] for position in positions]
        arrays["weight"] = [
            np.full(len(mask), weight) for mask, weight in zip(masks, weights, strict=True)
        ]
        is_trained = np.concatenate([np.zeros(0, bool), *masks])
        columns = {}
        for name, parts in arrays.items():
            # The empty array is for a micro-batch without samples.
            flat = np.concatenate(parts or [np.zeros(0)])
            columns[name] = self._tensor(flat[is_trained].astype(np.float32))
        counts = [int(mask.sum()) for mask in masks if mask.any()]
        sequence = np.repeat(np.arange(len(counts)), counts).astype(np.int64)
        columns["sequence"] = self._tensor(sequence)
        return columns

    def _optimizer_step(self, stats: UpdateStats) -> float:
        """Clip the gradients and step, or skip the step. Returns the learning rate."""
        learning_rate = self._learning_rate()
        # A loss exists on some ranks only, and all must do the same.
        dist.all_reduce(stats.non_finite_losses)
        has_broken_loss = bool(stats.non_finite_losses)
        stats.non_finite_losses.zero_()
        grad_norm = self._grad_norm()
        norm = float(grad_norm)  # once: each reading waits for the GPU
        stats.grad_norms.append(norm)
        largest_norm = self.role_config.max_grad_norm_skip
        if skips_update(norm, has_broken_loss, largest_norm):
            self.skipped_in_a_row += 1
            stats.skipped_updates += 1
        else:
            self.skipped_in_a_row = 0
            self._clip_and_step(grad_norm, learning_rate)
        self._zero_grad()
        self.optimizer_steps += 1
        return learning_rate

    def _learning_rate(self) -> float:
        """Of the next optimizer step."""
        role_config = self.role_config
        return schedule.learning_rate(
            self.optimizer_steps,
            self.decay.total,
            role_config.lr,
            role_config.lr_schedule,
            role_config.warmup_steps,
            role_config.min_lr_ratio,
            self.decay.begin,
            self.decay.done,
        )

    def _metrics(
        self, stats: UpdateStats, timer: PhaseTimer, mini_batches: int, learning_rate: float
    ) -> dict[str, float]:
        """Reduce over ranks: the same on every rank (collective)."""
        seconds = {f"{phase}_s": total for phase, total in timer.totals().items()}
        stats.maximum(**seconds)
        sums, maxima = stats.reduce(self.batch_share.reports)
        finite_norms = [norm for norm in stats.grad_norms if np.isfinite(norm)]
        metrics = {name: value for name, value in maxima.items() if name.endswith("_s")}
        metrics["loss"] = sums["loss"] / mini_batches
        if "clip" in sums:
            metrics["clip_frac"] = sums["clip"] / max(sums["tokens"], 1.0)
        if "load_balancing" in sums:
            metrics["load_balancing_loss"] = sums["load_balancing"] / mini_batches
        metrics |= self._model_metrics()
        metrics["lr"] = learning_rate
        metrics["skipped_updates"] = float(stats.skipped_updates)
        metrics["skipped_in_a_row"] = float(self.skipped_in_a_row)
        metrics["tokens"] = sums["tokens"]
        metrics["tokens_total"] = sums["tokens_total"]
        if sums.get("tokens_shared"):
            metrics["shared_prefix_share"] = sums["tokens_shared"] / sums["tokens_total"]
        metrics["grad_norm"] = float(np.mean(finite_norms)) if finite_norms else float("nan")
        of_role = {f"{self.role}/{name}": value for name, value in metrics.items()}
        return of_role | self._role_metrics(sums, maxima, mini_batches)
