"""Which groups a step trains on where prompts of several steps are generated at once
(`weight_sync.in_flight` = recompute or keep).

Pure bookkeeping, without an engine. Prompts enter with the version that starts them; groups of
samples arrive when they are complete; each step takes as many groups as it trains on, in the order
in which they became complete. The others stay for the next step: a prompt leaves the pool only by
being trained on, or with dynamic sampling by being replaced.

A prompt started with version v is trained on in step v + staleness at the latest, so no token is
older there than that. If some groups would otherwise miss their last step, the step takes those
groups first and waits for them. There are enough places for all, as long as the prompts that have
begun keep to the inequality of `one_step_off/config/sync_schedule.py`.
"""

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from one_step_off.data.samples import NOT_GENERATED, Prompt, PromptId, Sample


@dataclass(eq=False)
class PooledPrompt:
    """A prompt that was begun and not yet trained on.

    Attributes:
        turn: the step that trains on it if all prompts are trained on in the order in which they
            began.
        version: with which it was begun; while it waits for a replica, the newest.
        samples: once all are complete.
        notes: which groups it replaces, see `dynamic_sampling.notes_of_replaced`; they become
            extras of its first sample.
        has_begun: whether a replica has it.
    """

    prompt: Prompt
    turn: int
    version: int
    samples: list[Sample] | None = None
    notes: dict[str, Any] = field(default_factory=dict)
    has_begun: bool = False


class PromptPool:
    """The prompts in progress, in the order in which they were begun."""

    def __init__(self, groups_per_step: int, staleness: int) -> None:
        """
        Args:
            groups_per_step: groups that a step trains on.
            staleness: versions by which a token may be older than the step that trains on it.
        """
        self.groups_per_step = groups_per_step
        self.staleness = staleness
        self.prompts: dict[PromptId, PooledPrompt] = {}
        self.complete: list[PooledPrompt] = []  # in the order in which they became complete
        self.total_tokens = 0  # of all batches so far
        self.total_samples = 0

    @property
    def generating(self) -> int:
        """Prompts that are still being generated."""
        return len(self.prompts) - len(self.complete)

    def last_step(self, entry: PooledPrompt) -> int:
        """The step that must train on a prompt at the latest."""
        return entry.version + self.staleness

    def begin(self, entries: list[PooledPrompt]) -> None:
        """These prompts are generated from now on, by the version that they name and newer
        ones. Restored ones may be complete already."""
        for entry in entries:
            self.prompts[entry.prompt.id] = entry
            if entry.samples is not None:
                self.complete.append(entry)

    def add_complete(self, samples: list[Sample]) -> PooledPrompt:
        """All samples of one prompt are complete. Returns its entry."""
        entry = self.prompts[samples[0].prompt_id]
        entry.samples = samples
        samples[0].extra.update(entry.notes)
        self.complete.append(entry)
        return entry

    def remove(self, entry: PooledPrompt) -> None:
        """Take a complete prompt out: it is trained on, or replaced."""
        del self.prompts[entry.prompt.id]
        self.complete.remove(entry)

    def choose(self, step: int) -> list[PooledPrompt]:
        """The groups that `step` trains on, in the order in which they were begun; [] as long as it
        must wait."""
        if len(self.complete) < self.groups_per_step:
            return []
        urgent = self._urgent(step)
        if urgent is None:
            return []
        others = [entry for entry in self.complete if entry not in urgent]
        chosen = urgent.union(others[: self.groups_per_step - len(urgent)])
        return [entry for entry in self.prompts.values() if entry in chosen]

    def _urgent(self, step: int) -> set[PooledPrompt] | None:
        """The groups that `step` must take so that all prompts are trained on in time; None if one
        of them is not complete yet."""
        due = Counter(self.last_step(entry) for entry in self.prompts.values())
        urgent: set[PooledPrompt] = set()
        due_so_far = 0
        for last_step in sorted(due):
            due_so_far += due[last_step]
            later_places = max(0, last_step - step) * self.groups_per_step
            needed = due_so_far - later_places - len(urgent)
            if needed <= 0:
                continue
            candidates = [
                entry
                for entry in self.complete
                if self.last_step(entry) <= last_step and entry not in urgent
            ]
            if len(candidates) < needed:
                return None
            urgent.update(candidates[:needed])
        return urgent

    def take(self, step: int) -> list[Sample]:
        """Remove the groups that `choose` names; returns their samples. Samples that come later
        than their turn get `extra["carried"]`: by how many steps."""
        samples = []
        for entry in self.choose(step):
            self.remove(entry)
            steps_late = step - entry.turn
            if steps_late > 0:
                for sample in entry.samples:
                    sample.extra["carried"] = steps_late
            samples += entry.samples
        return samples

    def metrics(self, samples: list[Sample], step: int) -> dict[str, float]:
        """What a pool does to the batches.

        Args:
            samples: those that `step` trains on.

        Returns:
            carry/under_way: prompts that are still being generated.
            carry/groups: groups of this step that others have overtaken.
            carry/interrupted: the share of samples that several versions made.
            carry/old_tokens: the share of tokens that are older than one version.
            carry/length_bias: mean length of the samples that are not late over the mean of all
                samples since the start; below 1 where short answers are trained on first.
        """
        lengths = np.array([len(sample.response_ids) for sample in samples])
        on_time = np.array(["carried" not in sample.extra for sample in samples])
        self.total_tokens += int(lengths.sum())
        self.total_samples += len(samples)
        versions = [sample.versions[sample.versions > NOT_GENERATED] for sample in samples]
        interrupted = [v.size > 0 and v[0] != v[-1] for v in versions]
        all_versions = np.concatenate([*versions, np.zeros(0)])
        late_groups = {sample.prompt_id for sample in samples if "carried" in sample.extra}
        metrics = {
            "carry/under_way": float(self.generating),
            "carry/groups": float(len(late_groups)),
            "carry/interrupted": float(np.mean(interrupted)),
            "carry/old_tokens": float(np.mean(all_versions < step - 1)),
        }
        if on_time.any():
            mean_length = self.total_tokens / self.total_samples
            metrics["carry/length_bias"] = float(lengths[on_time].mean() / mean_length)
        return metrics
