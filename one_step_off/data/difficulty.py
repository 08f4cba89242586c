"""What became of the prompts so far: how many of their samples solved them, how hard they are, and
when each may be drawn again.

Pure bookkeeping on numpy arrays. A prompt that was visited in epoch E of its source is due again in
epoch E + 1. The curriculum makes that E + 2 or later where its pass rate is far from the target,
and the difficulty filter E + 1 + `return_after` where all last visits agreed. So each prompt comes
back: no rule lasts longer than its number of epochs.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from one_step_off.config.sections.data import Curriculum, DifficultyFilter
from one_step_off.data.rounding import reaches
from one_step_off.data.samples import PromptId, Sample

Visit = list[int]
"""One prompt of a step, as [epoch, row, samples, samples that solved it]. JSON-compatible."""


def sample_rewards(samples: Iterable[Sample]) -> dict[PromptId, dict[int, float]]:
    """The reward of each trajectory, by prompt and by index in the group.

    A trajectory may have several samples; it counts once. Greedy responses and trajectories that
    could not be scored do not count.
    """
    rewards: dict[PromptId, dict[int, float]] = {}
    for sample in samples:
        if "greedy" not in sample.extra and "error" not in sample.extra:
            rewards.setdefault(sample.prompt_id, {})[sample.index] = sample.reward
    return rewards


def visits_of(samples: Sequence[Sample], solved_at: float) -> list[Visit]:
    """One visit for each prompt with a scored sample, in the order of the samples.

    Args:
        solved_at: the least reward of a sample that solves its prompt.
    """
    visits = []
    for (epoch, row), rewards in sample_rewards(samples).items():
        solved = sum(reaches(reward, solved_at) for reward in rewards.values())
        visits.append([epoch, row, len(rewards), solved])
    return visits


def replaced_visits(samples: Iterable[Sample]) -> list[Visit]:
    """The visits of the groups that dynamic sampling replaced by these samples."""
    return [visit for sample in samples for visit in sample.extra.get("replaced_visits", ())]


ARRAYS = ("visits", "rate", "streak", "due", "dropped_until")
"""The numbers that are kept for each prompt: 24 bytes."""


@dataclass(frozen=True)
class DroppedPrompt:
    """A prompt that the filter just dropped.

    Attributes:
        solved: "always" or "never".
        until: the first epoch of its source in which it may be drawn again.
    """

    prompt_id: PromptId
    solved: str
    until: int


class PromptHistory:
    """The measured difficulty of all prompts.

    Attributes:
        visits: int32 [prompts], how often each was visited.
        rate: float64 [prompts], the pass rate: the first visit's, then the mean of the rate before
            and that of the newest visit.
        streak: int32 [prompts], by how many last visits all samples solved it; negative: none did.
        due: int32 [prompts], the first epoch of its source in which each may be drawn.
        dropped_until: int32 [prompts], the same by the filter alone.
        kept_at_limit: how many prompts the filter kept in the last `apply` because as many as it
            may were dropped already.
    """

    def __init__(
        self,
        source_sizes: Sequence[int],
        rules: DifficultyFilter | None,
        curriculum: Curriculum | None,
    ) -> None:
        """`source_sizes`: the number of prompts of each source; their prompts follow each other."""
        ends = np.cumsum(source_sizes)
        self.parts = [
            slice(end - size, end) for end, size in zip(ends.tolist(), source_sizes, strict=True)
        ]
        self._source_of = np.repeat(np.arange(len(source_sizes)), source_sizes)
        self._rules = rules
        self._curriculum = curriculum
        prompts = len(self._source_of)
        self.visits = np.zeros(prompts, np.int32)
        self.rate = np.zeros(prompts)
        self.streak = np.zeros(prompts, np.int32)
        self.due = np.zeros(prompts, np.int32)
        self.dropped_until = np.zeros(prompts, np.int32)
        self.kept_at_limit = 0

    def apply(
        self, positions: Sequence[int], visits: Sequence[Visit], epochs: Sequence[int]
    ) -> list[DroppedPrompt]:
        """Learn from visits.

        Args:
            positions: of the visited prompts.
            visits: what became of them.
            epochs: the epoch that each source is in.

        Returns:
            The prompts that the filter dropped.
        """
        for position, visit in zip(positions, visits, strict=True):
            self._count(position, visit)
        self.kept_at_limit = 0
        if self._rules is None:
            return []
        return self._drop(self._rules, positions, visits, epochs)

    def _count(self, position: int, visit: Visit) -> None:
        epoch, _, samples, solved = visit
        rate = solved / samples
        if self.visits[position]:
            self.rate[position] = (self.rate[position] + rate) / 2
        else:
            self.rate[position] = rate
        self.visits[position] += 1
        self.streak[position] = _next_streak(int(self.streak[position]), samples, solved)
        interval = 1
        if self._curriculum is not None:
            interval = epochs_between(float(self.rate[position]), self._curriculum)
        self.due[position] = epoch + interval

    def _drop(
        self,
        rules: DifficultyFilter,
        positions: Sequence[int],
        visits: Sequence[Visit],
        epochs: Sequence[int],
    ) -> list[DroppedPrompt]:
        """Drop the visited prompts that meet a rule, as far as `max_dropped` allows. A prompt that
        no longer meets it, because a late visit has shown otherwise, is no longer dropped."""
        for position in positions:
            if not self._rule_met(position, rules):
                self.dropped_until[position] = 0
        dropped = []
        room = []
        for part, epoch in zip(self.parts, epochs, strict=True):
            until = self.dropped_until[part]
            room.append(int(rules.max_dropped * len(until)) - int((until > epoch).sum()))
        for position, (epoch, row, _, _) in zip(positions, visits, strict=True):
            solved = self._rule_met(position, rules)
            source = self._source_of[position]
            until = epoch + 1 + rules.return_after
            if not solved or until <= epochs[source]:
                continue
            is_new = self.dropped_until[position] <= epochs[source]
            if is_new and room[source] <= 0:
                self.kept_at_limit += 1
                continue
            room[source] -= is_new
            self.dropped_until[position] = until
            dropped.append(DroppedPrompt((epoch, row), solved, until))
        for position in positions:
            self.due[position] = max(self.due[position], self.dropped_until[position])
        return dropped

    def _rule_met(self, position: int, rules: DifficultyFilter) -> str:
        """ "always", "never", or "" where the prompt meets no rule."""
        streak = self.streak[position]
        if streak >= rules.visits and "always" in rules.drop:
            return "always"
        if streak <= -rules.visits and "never" in rules.drop:
            return "never"
        return ""

    def metrics(self, epochs: Sequence[int]) -> dict[str, float]:
        """The state of all prompts, as metrics. `epochs`: the epoch that each source is in."""
        current = np.repeat(epochs, [part.stop - part.start for part in self.parts])
        seen = self.visits > 0
        metrics = {
            "difficulty/unseen": float((~seen).sum()),
            "difficulty/waiting": float((self.due > current).sum()),
        }
        if seen.any():
            metrics["difficulty/solve_rate"] = float(self.rate[seen].mean())
        if self._rules is not None:
            dropped = self.dropped_until > current
            metrics["difficulty/dropped_always"] = float((dropped & (self.streak > 0)).sum())
            metrics["difficulty/dropped_never"] = float((dropped & (self.streak < 0)).sum())
            metrics["difficulty/dropped"] = float(dropped.sum())
            metrics["difficulty/kept_at_limit"] = float(self.kept_at_limit)
        return metrics

    def arrays(self) -> dict[str, np.ndarray]:
        """Copies of the arrays, for a checkpoint."""
        return {name: getattr(self, name).copy() for name in ARRAYS}

    def load_arrays(self, arrays: dict[str, Any]) -> None:
        """Set what `arrays` returned."""
        for name in ARRAYS:
            getattr(self, name)[:] = arrays[name]


def _next_streak(streak: int, samples: int, solved: int) -> int:
    """The streak after one more visit."""
    if solved == samples:
        return max(streak, 0) + 1
    if solved == 0:
        return min(streak, 0) - 1
    return 0


def epochs_between(rate: float, curriculum: Curriculum) -> int:
    """Epochs from a visit to the next one: 1 at the target, `max_interval` at the pass rate that is
    farthest from it, and in proportion between them."""
    farthest = max(curriculum.target, 1 - curriculum.target)
    distance = abs(rate - curriculum.target) / farthest
    return 1 + round(distance * (curriculum.max_interval - 1))
