"""Training batches of random tokens."""

from __future__ import annotations

import numpy as np

from one_step_off.data.samples import Batch, Sample

TOKEN_IDS = 300  # token ids are drawn below this, which every model's vocabulary exceeds
LOG_PROB = -5.9  # about that of one token of 300


def random_batch(prompts: int, samples_per_prompt: int, tokens: int, version: int = 0) -> Batch:
    """A batch of random tokens with random advantages, the same in every call.

    Args:
        prompts: prompts of the batch.
        samples_per_prompt: samples of each prompt.
        tokens: tokens of each prompt, and of each response.
        version: the weight version that the tokens are stamped with.
    """
    rng = np.random.default_rng(0)
    samples = []
    for row in range(prompts * samples_per_prompt):
        prompt_ids, response_ids = rng.integers(0, TOKEN_IDS, (2, tokens)).astype(np.int32)
        sample = Sample(
            (0, row // samples_per_prompt),
            row % samples_per_prompt,
            prompt_ids,
            response_ids,
            np.full(tokens, LOG_PROB, np.float32),
            np.ones(tokens, bool),
            np.full(tokens, version, np.int32),
        )
        samples.append(sample)
    batch = Batch(0, samples, expected_stamp=(0, version))
    batch.advantages = [rng.normal(size=tokens).astype(np.float32) for _ in samples]
    return batch
