"""Figures of an evaluation: avg@n and pass@k of each held-out set. Pure functions."""

from collections import Counter
from collections.abc import Sequence
from math import comb
from statistics import fmean

from one_step_off.data.samples import Sample

MAIN_SET = "val"  # the set of data.val_files; its keys carry no name


def set_epoch(index: int) -> int:
    """The epoch in the ids of the prompts of held-out set `index`: -1, -2, ... Training has 0 and up."""
    return -1 - index


def pass_at_k(n: int, passed: int, k: int) -> float:
    """Chance that at least one of k samples passes, estimated without bias from n samples of which `passed` did. Codex
    (arXiv:2107.03374), equation 1: 1 - C(n - c, k) / C(n, k)."""
    return 1.0 - comb(n - passed, k) / comb(n, k)


def part_means(samples: Sequence[Sample]) -> dict[str, float]:
    """The mean of each part of the rewards over the samples that have it, by name; a sample that was not scored counts 0.
    {} where the rewards have no parts."""
    parts = [s.extra.get("reward_parts", {}) for s in samples]
    means = {}
    for name in dict.fromkeys(name for own in parts for name in own):
        values = [
            own.get(name, 0.0)
            for s, own in zip(samples, parts, strict=True)
            if name in own or "error" in s.extra
        ]
        means[name] = fmean(values)
    return means


def evaluation_metrics(
    samples: Sequence[Sample], names: Sequence[str], passes_at: float = 1.0
) -> dict[str, float]:
    """avg@n, pass@k for k = 1, 2, 4 .. n, length and size of each set: "val/reward" (mean reward), "val/reward/PART" of
    rewards in parts, "val/pass@k", ... for the first of `names`, "val/NAME/reward", ... for the others. A sample passes
    with a reward of at least `passes_at`. The epoch in a sample's prompt_id tells its set."""
    found: dict[str, float] = {}
    for index, name in enumerate(names):
        if not (own := [s for s in samples if s.prompt_id[0] == set_epoch(index)]):
            continue
        sizes, passed = (
            Counter(s.prompt_id for s in own),
            Counter(s.prompt_id for s in own if s.reward >= passes_at),
        )
        n = min(sizes.values())
        key = "val" if index == 0 else f"val/{name}"
        found |= {f"{key}/reward": fmean(s.reward for s in own), f"{key}/samples": float(len(own))}
        found |= {f"{key}/reward/{part}": mean for part, mean in part_means(own).items()}
        found[f"{key}/response_length"] = fmean(len(s.response_ids) for s in own)
        if n > 1:
            found[f"{key}/avg@{n}"] = found[f"{key}/reward"]
            for k in sorted({1 << e for e in range(n.bit_length())} | {n}):
                found[f"{key}/pass@{k}"] = fmean(
                    pass_at_k(size, passed[id], k) for id, size in sizes.items()
                )
    return found
