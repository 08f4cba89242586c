"""Prompts of several sources by their weights, drawn by what was measured of each.

The draw of step M knows the results up to a step that its caller names, with whole batches M - 1 -
staleness, whatever is known earlier: those of later steps wait. So a run draws the same prompts
whether it was killed and resumed or not.
"""

import math
from collections.abc import Sequence
from copy import copy
from dataclasses import asdict, dataclass, field
from fractions import Fraction
from math import floor, lcm
from statistics import fmean
from typing import Any

import numpy as np

from one_step_off.config.errors import ConfigError
from one_step_off.config.sections.data import Curriculum, DifficultyFilter
from one_step_off.data.difficulty import (
    DroppedPrompt,
    PromptHistory,
    Visit,
    replaced_visits,
    sample_rewards,
    visits_of,
)
from one_step_off.data.prompt_stream import PromptOrder
from one_step_off.data.samples import Batch, Prompt, Sample

MAX_DRAWN = 1 << 16
"""Turns that are drawn to find where the prompts of an epoch end."""


class SourceTurns:
    """Which source the next prompt comes from.

    After any number of prompts the count of each source differs from its share by less than one:
    Tijdeman, The chairman assignment problem (1980). It is exact, on whole numbers.

    Attributes:
        shares: of the sources; they sum to 1.
        counts: how many prompts of each source were drawn.
    """

    def __init__(self, weights: Sequence[float]) -> None:
        """`weights`: above 0, one per source."""
        fractions = [Fraction(repr(float(weight))) for weight in weights]
        total = sum(fractions)
        self.shares = [fraction / total for fraction in fractions]
        self.counts = [0] * len(weights)
        self._parts = max(1, 2 * len(weights) - 2)
        self._period = lcm(*(share.denominator for share in self.shares))
        self._per_period = [int(share * self._period) for share in self.shares]

    def next(self) -> int:
        """The index of the source of the next prompt.

        Of the sources that are at least 1/(2n - 2) behind their share, the one that would first be
        1 - 1/(2n - 2) behind.
        """
        chosen = 0
        parts = self._parts
        prompts = sum(self.counts) + 1
        least_slack: int | None = None
        for i, (share, count) in enumerate(zip(self._per_period, self.counts, strict=True)):
            behind = parts * (share * prompts - count * self._period)
            if behind < self._period and len(self.counts) > 1:
                continue
            slack = (parts - 1) * self._period - behind
            if least_slack is None or slack * self._per_period[chosen] < least_slack * share:
                chosen = i
                least_slack = slack
        self.counts[chosen] += 1
        return chosen

    def prompts_until(self, needed: Sequence[int]) -> int:
        """How many prompts in all, from the first, give each source at least `needed` ones.

        It is the fewest, unless finding that would take more than MAX_DRAWN turns: with a very
        small share. Then it may be more by less than 1 / share.
        """
        turns = copy(self)
        # After a whole period each count is its share exactly, and the order begins again.
        pairs = zip(needed, self._per_period, strict=True)
        whole = max(0, max(count // share for count, share in pairs) - 1)
        turns.counts = [whole * share for share in self._per_period]
        enough = self._surely_enough(needed)
        if enough - sum(turns.counts) > MAX_DRAWN:
            return enough
        while any(count < least for count, least in zip(turns.counts, needed, strict=True)):
            turns.next()
        return sum(turns.counts)

    def _surely_enough(self, needed: Sequence[int]) -> int:
        """Prompts that give each source at least `needed` ones, from how far a source may be
        behind: 1 - 1/(2n - 2). So its share of them must be above `needed` - 1/(2n - 2)."""
        tolerance = Fraction(1, self._parts)
        pairs = zip(needed, self.shares, strict=True)
        return max(floor((count - tolerance) / share) + 1 for count, share in pairs)


@dataclass(frozen=True)
class PromptSource:
    """The prompts of one source.

    Attributes:
        name: in metrics; empty: the run has one source, without metrics of its own.
        prompts: in the order of the data. Rows are counted over all sources.
    """

    name: str
    prompts: Sequence[Prompt]
    weight: float = 1.0


@dataclass(frozen=True)
class DrawRules:
    """By which results prompts are drawn.

    Attributes:
        solved_at: the least reward of a sample that solves its prompt.
        rules, curriculum: None: the draw does not depend on results.
    """

    solved_at: float = 1.0
    rules: DifficultyFilter | None = None
    curriculum: Curriculum | None = None


@dataclass
class StepDraw:
    """What is reported of one step's draw, at the end of that step.

    Attributes:
        epochs: the position of each source after it: epochs, with their fraction.
        metrics: of the difficulty of all prompts, before it.
        filtered: the prompts that the filter dropped before it, as dicts of `DroppedPrompt`.
    """

    epochs: list[float] = field(default_factory=list)
    metrics: dict[str, float] = field(default_factory=dict)
    filtered: list[dict[str, Any]] = field(default_factory=list)


class MixedStream:
    """Prompts of several sources, without end, from a position that can be saved.

    Used as a `PromptStream`: `begin_step`, `next_batch` (once, or again for replacements), and
    `record` once the step is trained. Each source has epochs of its own, and a prompt's id is
    (epoch of its source, row), so it is unique in the run.

    Attributes:
        prompts: of all sources.
        total_steps: `steps`; where that is 0, the fewest steps whose shares hold each prompt of
            each source `epochs` times. Sources that are through earlier begin further epochs.
    """

    def __init__(
        self,
        sources: Sequence[PromptSource],
        batch_size: int,
        shuffle: bool,
        seed: int,
        steps: int = 0,
        epochs: int = 0,
        draw: DrawRules | None = None,
    ) -> None:
        self._sources = list(sources)
        self._batch_size = batch_size
        self._orders = [
            PromptOrder(source.prompts, shuffle, seed, index)
            for index, source in enumerate(sources)
        ]
        self.prompts = [prompt for source in sources for prompt in source.prompts]
        self._rows = np.array([prompt.id[1] for prompt in self.prompts])
        self._turns = SourceTurns([source.weight for source in sources])
        sizes = [len(order) for order in self._orders]
        self._ends = np.cumsum(sizes)
        self._draw = draw or DrawRules()
        self._history: PromptHistory | None = None
        if self._draw.rules is not None or self._draw.curriculum is not None:
            self._history = PromptHistory(sizes, self._draw.rules, self._draw.curriculum)
        self._step = -1
        self._pending: dict[int, list[Visit]] = {}
        self._draws: dict[int, StepDraw] = {}
        needed = [size * epochs for size in sizes]
        self.total_steps = steps or math.ceil(self._turns.prompts_until(needed) / batch_size)

    def __len__(self) -> int:
        """Prompts of all sources."""
        return len(self.prompts)

    # --- the draw ---

    def begin_step(self, step: int, known_until: int) -> None:
        """The next prompts are drawn for `step`, by the results of the steps up to `known_until`.

        May be called again for the same step after a resume.
        """
        self._step = step
        draw = self._draws.setdefault(step, StepDraw())
        draw.epochs = self._positions()
        if self._history is None:
            return
        epochs = [order.epoch for order in self._orders]
        for known_step in sorted(self._pending):
            if known_step > known_until:
                continue
            visits = self._pending.pop(known_step)
            positions = self._positions_of([row for _, row, *_ in visits])
            dropped = self._history.apply(positions, visits, epochs)
            draw.filtered += [_as_note(prompt) for prompt in dropped]
        draw.metrics = self._history.metrics(epochs)

    def next_batch(self, size: int | None = None) -> list[Prompt]:
        """The next `size` prompts (None: the batch size), with ids (epoch, row)."""
        batch = []
        for _ in range(self._batch_size if size is None else size):
            index = self._turns.next()
            order = self._orders[index]
            if self._history is None:
                batch += order.take(1)
            else:
                batch.append(order.take_due(self._history.due[self._history.parts[index]]))
        self._draws.setdefault(self._step, StepDraw()).epochs = self._positions()
        return batch

    def _positions(self) -> list[float]:
        return [order.epoch + order.offset / len(order) for order in self._orders]

    def _positions_of(self, rows: Sequence[int]) -> list[int]:
        """The positions of the prompts of these rows."""
        return np.searchsorted(self._rows, rows).tolist()

    # --- results ---

    def visits(self, samples: Sequence[Sample]) -> list[Visit]:
        """What became of the prompts of these samples, for groups that are replaced."""
        return visits_of(samples, self._draw.solved_at)

    def record(self, batch: Batch) -> dict[str, float]:
        """Take the results of a trained step: its rewards are final.

        Returns:
            Metrics of the sources and of the difficulty. `batch.notes` gets the prompts that the
            filter dropped before the step was drawn.
        """
        samples = batch.samples + batch.dropped
        visits = replaced_visits(samples) + self.visits(samples)
        if self._history is not None:
            self._pending[batch.step] = visits
        draw = StepDraw(self._positions())
        for step in sorted(self._draws):
            if step <= batch.step:
                filtered = draw.filtered
                draw = self._draws.pop(step)
                draw.filtered = filtered + draw.filtered
        if draw.filtered:
            batch.notes["filtered"] = draw.filtered
        return self._source_metrics(samples, visits, draw.epochs) | draw.metrics

    def _source_metrics(
        self, samples: Sequence[Sample], visits: Sequence[Visit], epochs: Sequence[float]
    ) -> dict[str, float]:
        metrics: dict[str, float] = {}
        visits_by_source = self._by_source([visit[1] for visit in visits], visits)
        trained = [s for s in samples if "greedy" not in s.extra]
        samples_by_source = self._by_source([s.prompt_id[1] for s in trained], trained)
        for index, source in enumerate(self._sources):
            if source.name:
                metrics |= _metrics_of_source(
                    f"source/{source.name}", samples_by_source[index], visits_by_source[index]
                )
                metrics[f"source/{source.name}/epoch"] = epochs[index]
        return metrics

    def _by_source(self, rows: Sequence[int], items: Sequence[Any]) -> list[list[Any]]:
        """The items of each source, by their rows."""
        groups: list[list[Any]] = [[] for _ in self._sources]
        indices = np.searchsorted(self._ends, self._positions_of(rows), side="right")
        for index, item in zip(indices.tolist(), items, strict=True):
            groups[index].append(item)
        return groups

    # --- checkpoints ---

    def state_dict(self) -> dict[str, Any]:
        """The position, what was measured, and digests that identify the data. JSON-compatible but
        for `arrays`: name -> numpy array with one number per prompt.
        """
        state: dict[str, Any] = {
            "sources": [order.state_dict() for order in self._orders],
            "shares": [str(share) for share in self._turns.shares],
            "drawn": list(self._turns.counts),
            "step": self._step,
            "pending": {str(step): visits for step, visits in self._pending.items()},
            "draws": {str(step): asdict(draw) for step, draw in self._draws.items()},
        }
        if self._history is not None:
            state["arrays"] = self._history.arrays()
        return state

    def position_without(self, before: dict[str, Any]) -> dict[str, Any]:
        """The state for a checkpoint without the samples of the step that is being drawn.

        Args:
            before: the state before that step was drawn. Results that came since are added to it.
        """
        draws = {step: draw for step, draw in before["draws"].items() if int(step) in self._draws}
        pending = {str(step): visits for step, visits in self._pending.items()}
        return before | {"draws": draws, "pending": before["pending"] | pending}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go to a saved position. The batch size, the filter and the curriculum may differ from the
        saved ones; data, weights, seed and order may not. The state of a `PromptStream` fits one
        source.

        Raises ConfigError: this stream would not continue the saved one. The position is then
        unchanged.
        """
        saved = state if "sources" in state else {"sources": [state]}
        shares = [str(share) for share in self._turns.shares]
        if len(saved["sources"]) != len(shares) or saved.get("shares", shares) != shares:
            raise ConfigError(
                "data.train_files: the checkpoint has other sources or weights; "
                "resume with the same ones in the same order"
            )
        for order, position in zip(self._orders, saved["sources"], strict=True):
            order.check_state(position)
        for order, position in zip(self._orders, saved["sources"], strict=True):
            order.load_state_dict(position)
        self._turns.counts = list(saved.get("drawn", [0] * len(shares)))
        self._step = saved.get("step", -1)
        draws = saved.get("draws", {})
        self._draws = {int(step): StepDraw(**draw) for step, draw in draws.items()}
        self._pending = {}
        if self._history is not None and "arrays" in saved:
            self._pending = {int(step): visits for step, visits in saved["pending"].items()}
            self._history.load_arrays(saved["arrays"])


def _as_note(prompt: DroppedPrompt) -> dict[str, Any]:
    return {"prompt": list(prompt.prompt_id), "solved": prompt.solved, "until": prompt.until}


def _metrics_of_source(
    prefix: str, samples: Sequence[Sample], visits: Sequence[Visit]
) -> dict[str, float]:
    """The metrics of one source in one step."""
    metrics = {f"{prefix}/prompts": float(len({sample.prompt_id for sample in samples}))}
    rewards = [reward for group in sample_rewards(samples).values() for reward in group.values()]
    if rewards:
        metrics[f"{prefix}/reward/mean"] = fmean(rewards)
    if samples:
        lengths = [len(sample.response_ids) for sample in samples]
        metrics[f"{prefix}/response_length/mean"] = fmean(lengths)
    if visits:
        metrics[f"{prefix}/solve_rate"] = fmean(solved / n for _, _, n, solved in visits)
    return metrics
