"""What an engine did to generate samples, in tokens: from it follow the FLOPs of any model."""

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

from one_step_off.data.episodes import segment_index
from one_step_off.data.samples import Sample, generated_tokens


class TokenWork(NamedTuple):
    """The tokens of a forward pass, or of a generation.

    Attributes:
        tokens: that pass through the layers: read or generated.
        pairs: of tokens, of which the later one looks at the earlier one in each attention layer.
            A pass over whole sequences counts the square of each length, as in PaLM (appendix B).
        head_tokens: after which the head computes logits.
    """

    tokens: float = 0.0
    pairs: float = 0.0
    head_tokens: float = 0.0

    def plus(self, other: "TokenWork") -> "TokenWork":
        """Both together."""
        return TokenWork(*(own + more for own, more in zip(self, other, strict=True)))


def pass_work(lengths: Iterable[int] | np.ndarray, head_tokens: float | None = None) -> TokenWork:
    """One forward pass over whole sequences.

    Args:
        lengths: tokens of each sequence.
        head_tokens: None: the head is computed at all of them.
    """
    tokens = np.array(list(lengths), np.float64)
    total = float(tokens.sum())
    return TokenWork(
        total, float((tokens * tokens).sum()), total if head_tokens is None else head_tokens
    )


def generation_work(samples: list[Sample]) -> TokenWork:
    """Each prompt is read once, whatever the number of its samples; a later segment of an episode
    has a context of its own. Then each token is read, if a tool wrote it, or generated."""
    generated, _, _ = generated_tokens(samples)
    prompts = {}
    for sample in samples:
        segment = segment_index(sample)
        name = (*sample.prompt_id, sample.index, segment) if segment else sample.prompt_id
        prompts[name] = len(sample.prompt_ids)
    context = np.array([len(sample.prompt_ids) for sample in samples], np.float64)
    written = np.array([len(sample.response_ids) for sample in samples], np.float64)
    pairs = written * context + written * (written - 1) / 2
    after_prompts = TokenWork(
        float(written.sum()), float(pairs.sum()), float(np.sum(generated, dtype=np.float64))
    )
    return pass_work(prompts.values(), 0.0).plus(after_prompts)


def replaced_work(samples: Iterable[Sample]) -> TokenWork:
    """The work on the groups that dynamic sampling replaced by these samples."""
    total = TokenWork()
    for sample in samples:
        total = total.plus(TokenWork(*sample.extra.get("replaced_work", ())))
    return total
