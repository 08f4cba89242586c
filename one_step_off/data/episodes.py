"""Which samples make up an episode.

An external agent's episode may give several samples, its segments: where the agent edits or drops
history, a new context begins. They have the same prompt, the same index and the same reward, and
`extra["segment"]`. A sample without it is an episode of its own. Here alone episodes are numbered
and ordered. Whatever compares or averages
outcomes counts episodes; whatever counts tokens counts samples.
"""

from collections.abc import Iterable, Sequence

import numpy as np

from one_step_off.data.samples import NOT_GENERATED, Batch, Prompt, Sample


class EpisodeError(AssertionError):
    """The samples of an episode are not complete, or do not agree."""


def episode_numbers(samples: Sequence[Sample]) -> np.ndarray | None:
    """Of each sample the number of its episode, int64 [B], counted from 0 in the order of first
    appearance; None where every sample is an episode of its own."""
    if not any("segment" in sample.extra for sample in samples):
        return None
    numbers: dict[object, int] = {}
    numbers_of_samples = []
    for position, sample in enumerate(samples):
        key: object = position
        if "segment" in sample.extra:
            key = (sample.prompt_id, sample.index)
        numbers_of_samples.append(numbers.setdefault(key, len(numbers)))
    return np.array(numbers_of_samples, np.int64)


def episodes_of(batch: Batch) -> np.ndarray | None:
    """The `episode_numbers` of a batch. One that has travelled without its samples' extras has
    brought them along."""
    return episode_numbers(batch.samples) if batch.episodes is None else batch.episodes


def in_batch_order(samples: Iterable[Sample], prompts: Iterable[Prompt]) -> list[Sample]:
    """The samples ordered by (position of the prompt, index, segment of the episode), as in every
    `Batch`. `prompts`: those that the samples belong to."""
    position = {prompt.id: i for i, prompt in enumerate(prompts)}
    return sorted(
        samples,
        key=lambda sample: (position[sample.prompt_id], sample.index, segment_index(sample)),
    )


def positions_of_episodes(numbers: np.ndarray) -> list[np.ndarray]:
    """Of each episode the positions of its samples, in order: int64, one array per episode.

    `numbers`: see `episode_numbers`.
    """
    order = np.argsort(numbers, kind="stable")
    ends = np.cumsum(np.bincount(numbers))
    return np.split(order, ends[:-1])


def first_positions(samples: Sequence[Sample]) -> np.ndarray:
    """The position of the first sample of each episode, int64."""
    numbers = episode_numbers(samples)
    if numbers is None:
        return np.arange(len(samples))
    return np.unique(numbers, return_index=True)[1]


def group_by_episode(samples: Sequence[Sample]) -> list[list[Sample]]:
    """The samples of each episode, in order."""
    numbers = episode_numbers(samples)
    if numbers is None:
        return [[sample] for sample in samples]
    return [[samples[i] for i in positions] for positions in positions_of_episodes(numbers)]


def one_per_episode(samples: Sequence[Sample]) -> list[Sample]:
    """The first sample of each episode: it has the episode's reward, parts, faults and counts."""
    return [segments[0] for segments in group_by_episode(samples)]


def segment_index(sample: Sample) -> int:
    """The number of this segment in its episode; 0 for a sample that is an episode of its own."""
    segment = sample.extra.get("segment")
    return 0 if segment is None else segment["index"]


def check_episodes(samples: Sequence[Sample]) -> None:
    """Check that all segments of each episode are there, in order, with one reward.

    Raises:
        EpisodeError: names the prompt and the sample.
    """
    numbers = episode_numbers(samples)
    if numbers is None:
        return
    for positions in positions_of_episodes(numbers):
        segments = [samples[i] for i in positions]
        first = segments[0]
        if "segment" not in first.extra:
            continue
        where = f"prompt {first.prompt_id}, sample {first.index}"
        indices = [segment_index(segment) for segment in segments]
        count = first.extra["segment"]["count"]
        if indices != list(range(count)):
            raise EpisodeError(
                f"{where}: has the segments {indices}, but its episode has {count} of them, "
                "counted from 0"
            )
        rewards = np.unique([segment.reward for segment in segments])  # NaN equals NaN
        if len(rewards) > 1:
            raise EpisodeError(
                f"{where}: its segments have the rewards {rewards.tolist()}, not one"
            )


def episode_stats(samples: Sequence[Sample], always: bool = False) -> dict[str, float]:
    """Means over episodes: "episode/segments", "episode/turns" (of the policy) and
    "episode/trained_tokens".

    Args:
        always: also where every episode has one segment; else {} then.
    """
    has_segments = any("segment" in sample.extra for sample in samples)
    if not samples or not (has_segments or always):
        return {}
    episodes = len(group_by_episode(samples))
    trained = sum(int(np.count_nonzero(sample.loss_mask)) for sample in samples)
    return {
        "episode/segments": len(samples) / episodes,
        "episode/turns": sum(_count_turns(sample) for sample in samples) / episodes,
        "episode/trained_tokens": trained / episodes,
    }


def agent_counts(segments: Sequence[Sample]) -> dict[str, float]:
    """What the agent loop counted in an episode: its turns over all segments. A sample without
    counts has one turn."""
    counts = [segment.extra.get("agent", {"turns": 1.0}) for segment in segments]
    if len(counts) == 1:
        return counts[0]
    return counts[0] | {"turns": sum(own.get("turns", 0.0) for own in counts)}


def _count_turns(sample: Sample) -> float:
    """Turns of the policy in a sample, as its agent loop counted them, or runs of tokens that it
    generated."""
    turns = sample.extra.get("agent", {}).get("turns")
    if turns is not None:
        return turns
    is_generated = sample.versions != NOT_GENERATED
    begins = is_generated[1:] & ~is_generated[:-1]
    return int(is_generated[:1].sum()) + int(begins.sum())
