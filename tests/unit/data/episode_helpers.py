"""Episodes of several samples, for tests: a sample cut into segments."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from one_step_off.data.samples import Sample


def cut(sample: Sample, ends: list[int], parents: list[int] | None = None) -> list[Sample]:
    """The sample as an episode whose segments end at these positions of its response.

    What stood before a segment is its context, so each trained token sees what it saw before.
    """
    bounds = sorted({0, *ends, len(sample.response_ids)})
    count = len(bounds) - 1
    segments = []
    for i, (begin, end) in enumerate(zip(bounds[:-1], bounds[1:], strict=True)):
        parent = parents[i] if parents else i - 1
        segments.append(
            replace(
                sample,
                prompt_ids=np.concatenate([sample.prompt_ids, sample.response_ids[:begin]]),
                response_ids=sample.response_ids[begin:end],
                log_probs=sample.log_probs[begin:end],
                loss_mask=sample.loss_mask[begin:end],
                versions=sample.versions[begin:end],
                extra=sample.extra | {"segment": {"index": i, "count": count, "parent": parent}},
            )
        )
    return segments if count > 1 else [sample]


def cut_arrays(arrays: list[np.ndarray], episodes: list[list[Sample]]) -> list[np.ndarray]:
    """Arrays with one value per response token, cut as `cut` has cut their samples."""
    parts = []
    for array, segments in zip(arrays, episodes, strict=True):
        ends = np.cumsum([len(segment.response_ids) for segment in segments])
        parts += np.split(array, ends[:-1])
    return parts


def make_sample(
    index: int = 0,
    length: int = 6,
    reward: float = 1.0,
    row: int = 0,
    mask: list[bool] | None = None,
    **extra: object,
) -> Sample:
    """Sample `index` of prompt (0, `row`); its tokens are all trained without a `mask`, and else
    context where it is False."""
    loss_mask = np.array(mask if mask is not None else [True] * length, bool)
    size = len(loss_mask)
    return Sample(
        prompt_id=(0, row),
        index=index,
        prompt_ids=np.arange(3, dtype=np.int32),
        response_ids=np.arange(10, 10 + size, dtype=np.int32),
        log_probs=np.where(loss_mask, -1.0, 0.0).astype(np.float32),
        loss_mask=loss_mask,
        versions=np.where(loss_mask, 0, -1).astype(np.int32),
        reward=reward,
        finish_reason="stop",
        response="text",
        extra=dict(extra),
    )
