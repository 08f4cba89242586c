"""Which groups a step trains on where prompts may stay unfinished over several steps
(`pipeline.partial_rollout`).

Pure bookkeeping, without an engine. Prompts enter with the version that starts them; groups of
samples arrive when they are complete; each step takes as many groups as it trains on, in the order
in which they became complete. The others stay for the next step: a prompt leaves the pool only by
being trained on.

A prompt started with version v is normally trained on in step v + 1, and may be trained on up to
`max_carry` steps later: its last step is v + 1 + max_carry. So no token is older there than 1 +
max_carry versions. If some groups would otherwise miss their last step, the step takes those groups
first and waits for them.
"""

from dataclasses import dataclass

import numpy as np

from one_step_off.data.samples import NOT_GENERATED, Prompt, PromptId, Sample


@dataclass(eq=False)
class UnfinishedPrompt:
    """A prompt that was begun and not yet trained on.

    Attributes:
        begun_for: the step for which it was begun.
        last_step: the step that must train on it at the latest.
        samples: once all are complete.
    """

    prompt: Prompt
    begun_for: int
    last_step: int
    samples: list[Sample] | None = None


class PartialRolloutPool:
    """The unfinished prompts, in the order in which they were begun."""

    def __init__(self, groups_per_step: int, max_carry: int) -> None:
        """
        Args:
            groups_per_step: groups that a step trains on. When a step ends, at most (1 + max_carry)
                * groups_per_step prompts may be unfinished, or they could not all be trained on in
                time.
            max_carry: steps by which a prompt may be late.
        """
        self.groups_per_step = groups_per_step
        self.max_carry = max_carry
        self.unfinished: dict[PromptId, UnfinishedPrompt] = {}
        self.complete: list[UnfinishedPrompt] = []  # in the order in which they became complete
        self.total_tokens = 0  # of all batches so far
        self.total_samples = 0

    @property
    def generating(self) -> int:
        """Prompts that are still being generated."""
        return len(self.unfinished) - len(self.complete)

    def begin(self, prompts: list[Prompt], version: int, step: int) -> None:
        """These prompts are generated from now on, for `step`, by the weights `version` and newer
        ones."""
        last_step = version + 1 + self.max_carry
        for prompt in prompts:
            self.unfinished[prompt.id] = UnfinishedPrompt(prompt, step, last_step)

    def add_complete(self, samples: list[Sample]) -> None:
        """All samples of one prompt are complete."""
        entry = self.unfinished[samples[0].prompt_id]
        entry.samples = samples
        self.complete.append(entry)

    def choose(self, step: int) -> list[UnfinishedPrompt]:
        """The groups that `step` trains on, in the order in which they were begun; [] as long as it
        must wait."""
        if len(self.complete) < self.groups_per_step:
            return []
        chosen: set[UnfinishedPrompt] = set()
        for last_step in sorted({entry.last_step for entry in self.unfinished.values()}):
            urgent = self._urgent(step, last_step, chosen)
            if urgent is None:
                return []
            chosen.update(urgent)
        others = [entry for entry in self.complete if entry not in chosen]
        chosen.update(others[: self.groups_per_step - len(chosen)])
        return [entry for entry in self.unfinished.values() if entry in chosen]

    def _urgent(
        self, step: int, last_step: int, chosen: set[UnfinishedPrompt]
    ) -> list[UnfinishedPrompt] | None:
        """The groups, besides those `chosen`, that `step` must take so that all prompts up to
        `last_step` are trained on in time; None if one of them is not complete yet."""
        later_places = max(0, last_step - step) * self.groups_per_step
        due = sum(entry.last_step <= last_step for entry in self.unfinished.values())
        due_and_chosen = sum(entry.last_step <= last_step for entry in chosen)
        needed = max(0, due - later_places - due_and_chosen)
        candidates = [
            entry for entry in self.complete if entry.last_step <= last_step and entry not in chosen
        ]
        return candidates[:needed] if len(candidates) >= needed else None

    def take(self, step: int) -> list[Sample]:
        """Remove the groups that `choose` names; returns their samples. Samples that were begun for
        an earlier step get `extra["carried"]`: by how many steps they are late."""
        taken = self.choose(step)
        samples = []
        for entry in taken:
            del self.unfinished[entry.prompt.id]
            self.complete.remove(entry)
            steps_late = step - entry.begun_for
            if steps_late > 0:
                for sample in entry.samples:
                    sample.extra["carried"] = steps_late
            samples += entry.samples
        return samples

    def metrics(self, samples: list[Sample], step: int) -> dict[str, float]:
        """What partial rollouts do to the batches.

        Args:
            samples: those that `step` trains on.

        Returns:
            carry/under_way: prompts that are still being generated.
            carry/groups: groups of this step that were begun for an earlier one.
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
