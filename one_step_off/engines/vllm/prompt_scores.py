"""Log-probs of given tokens by vLLM: the canary's half of a replica, and a teacher's engine."""

from collections.abc import Awaitable, Callable
from typing import Any

import numpy as np

Request = Callable[[np.ndarray, Any], Awaitable[Any]]
"""(token ids int32 [T], SamplingParams) -> the engine's last output for them."""


async def log_probs_of(request: Request, ids: np.ndarray) -> np.ndarray:
    """Log-probs (nats, temperature 1) of every token but the first, float32 [T - 1]."""
    rows = await _rows(request, ids, 0)
    log_probs = [row[int(token)].logprob for row, token in zip(rows, ids[1:], strict=True)]
    return np.array(log_probs, np.float32)


async def top_log_probs_of(request: Request, ids: np.ndarray, first: int, count: int) -> np.ndarray:
    """Log-probs of the tokens from place `first` on, and the likeliest tokens there.

    Args:
        ids: int32 [T].
        first: at least 1.
        count: k; how many of the likeliest tokens. vLLM must allow as many (`max_logprobs`).

    Returns:
        float32 [T - first, 1 + 2 k]: the token's log-prob, those of the k likeliest, and their ids.
    """
    rows = await _rows(request, ids, count)
    result = np.empty((len(ids) - first, 1 + 2 * count), np.float32)
    places = zip(rows[first - 1 :], ids[first:], strict=True)
    for line, (row, token) in enumerate(places):
        # The row also has the token itself, wherever it ranks.
        likeliest = sorted(row.items(), key=lambda item: -item[1].logprob)[:count]
        result[line, 0] = row[int(token)].logprob
        result[line, 1 : 1 + count] = [entry.logprob for _, entry in likeliest]
        result[line, 1 + count :] = [token_id for token_id, _ in likeliest]
    return result


async def _rows(request: Request, ids: np.ndarray, count: int) -> list[Any]:
    """Per token but the first: token id -> vLLM's `Logprob`, of the token and the `count`
    likeliest."""
    from vllm import SamplingParams

    params = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=count, detokenize=False)
    output = await request(ids, params)
    return output.prompt_logprobs[1:]
