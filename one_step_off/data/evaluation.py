"""Metrics of an evaluation: avg@n and pass@k of each held-out set. Pure functions."""

from collections import Counter
from collections.abc import Sequence
from math import comb
from statistics import fmean

from one_step_off.data.episodes import one_per_episode
from one_step_off.data.rounding import reaches
from one_step_off.data.samples import Sample

MAIN_SET = "val"  # the set of data.val_files; its metrics carry no set name


def set_epoch(index: int) -> int:
    """The epoch in the prompt ids of held-out set `index`: -1, -2, ... Training epochs are 0 and
    up.
    """
    return -1 - index


def pass_at_k(n: int, passed: int, k: int) -> float:
    """The chance that at least one of k samples passes.

    The unbiased estimate from n samples, `passed` of which pass: 1 - C(n - c, k) / C(n, k). Codex
    (arXiv:2107.03374), equation 1.
    """
    return 1.0 - comb(n - passed, k) / comb(n, k)


def part_means(samples: Sequence[Sample]) -> dict[str, float]:
    """The mean of each reward part over the samples that have it; {} where the rewards have no
    parts.

    A sample that could not be scored counts as 0 in every part.
    """
    parts_of_samples = [sample.extra.get("reward_parts", {}) for sample in samples]
    names = dict.fromkeys(name for parts in parts_of_samples for name in parts)
    means = {}
    for name in names:
        values = []
        for sample, parts in zip(samples, parts_of_samples, strict=True):
            if name in parts or "error" in sample.extra:
                values.append(parts.get(name, 0.0))
        means[name] = fmean(values)
    return means


def evaluation_metrics(
    samples: Sequence[Sample], names: Sequence[str], passes_at: float = 1.0
) -> dict[str, float]:
    """The metrics of each held-out set.

    "val/reward" (mean reward), "val/samples", "val/reward/PART" for rewards in parts,
    "val/response_length", "val/episodes" where episodes have several samples, and with several
    episodes per prompt "val/avg@n" and "val/pass@k" for k = 1, 2, 4 .. n. The prefix of every set
    but the first is "val/NAME".

    Args:
        samples: of all sets; the epoch in a sample's prompt_id tells its set. Rewards and passes
            are counted per episode, lengths per sample.
        names: the names of the sets, in order.
        passes_at: a sample passes if its reward is at least this.
    """
    metrics: dict[str, float] = {}
    for index, name in enumerate(names):
        samples_of_set = [s for s in samples if s.prompt_id[0] == set_epoch(index)]
        if samples_of_set:
            prefix = "val" if index == 0 else f"val/{name}"
            metrics |= _set_metrics(samples_of_set, prefix, passes_at)
    return metrics


def _set_metrics(samples: Sequence[Sample], prefix: str, passes_at: float) -> dict[str, float]:
    """The metrics of one held-out set."""
    episodes = one_per_episode(samples)
    mean_reward = fmean(episode.reward for episode in episodes)
    metrics = {f"{prefix}/reward": mean_reward, f"{prefix}/samples": float(len(samples))}
    if len(episodes) < len(samples):
        metrics[f"{prefix}/episodes"] = float(len(episodes))
    for part, mean in part_means(episodes).items():
        metrics[f"{prefix}/reward/{part}"] = mean
    metrics[f"{prefix}/response_length"] = fmean(len(sample.response_ids) for sample in samples)
    sizes = Counter(episode.prompt_id for episode in episodes)
    n = min(sizes.values())
    if n == 1:
        return metrics
    metrics[f"{prefix}/avg@{n}"] = mean_reward
    passed = Counter(e.prompt_id for e in episodes if reaches(e.reward, passes_at))
    powers_of_two = {1 << exponent for exponent in range(n.bit_length())}
    for k in sorted(powers_of_two | {n}):
        chances = [pass_at_k(size, passed[prompt_id], k) for prompt_id, size in sizes.items()]
        metrics[f"{prefix}/pass@{k}"] = fmean(chances)
    return metrics
