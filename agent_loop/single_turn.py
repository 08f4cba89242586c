"""One turn: the prompt goes in, the response comes out."""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass

import numpy as np

from one_step_off.samples import Prompt, Sample


@dataclass(frozen=True)
class Generated:
    """What the engine made of one request: ids int32 [R], log_probs float32 [R] (nats), versions int32 [R]."""

    ids: np.ndarray
    log_probs: np.ndarray
    versions: np.ndarray
    incarnation: int
    finish_reason: str


Generate = Callable[[np.ndarray], Awaitable[Generated]]
"""Token ids in, token ids out; sampling settings and seed are bound by the caller."""


async def run(prompt: Prompt, index: int, generate: Generate) -> Sample:
    """The trajectory of one prompt and one answer; every response token is the policy's own."""
    out = await generate(prompt.ids)
    return Sample(
        prompt_id=prompt.id,
        index=index,
        prompt_ids=prompt.ids,
        response_ids=out.ids,
        log_probs=out.log_probs,
        loss_mask=np.ones(len(out.ids), dtype=bool),
        versions=out.versions,
        incarnation=out.incarnation,
        finish_reason=out.finish_reason,
    )
