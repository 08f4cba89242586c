"""What became of the prompts of a step: how many of their samples solved them."""

from collections.abc import Iterable, Sequence

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
