"""What vLLM's engine returns: token ids, log-probs, and the weight version of every token."""

from typing import Any

import numpy as np

from agent_loop.base import Generated


def token_versions(spans: Any, length: int) -> tuple[int, np.ndarray]:
    """The weights that made each token of a response.

    Args:
        spans: vLLM's spans of weight versions, labeled "attempt.version".
        length: tokens of the response.

    Returns:
        The attempt, and the version of each token, int32 [length].

    Raises:
        RuntimeError: a token has no version, or the spans have two attempts.
    """
    versions = np.full(length, -1, dtype=np.int32)
    attempts = set()
    for span in spans or ():
        attempt, version = span.version.split(".")
        versions[span.start : span.end] = int(version)
        attempts.add(int(attempt))
    several_attempts = length > 0 and len(attempts) != 1
    if several_attempts or (versions < 0).any():
        raise RuntimeError(
            f"the engine stamped {length} tokens with {spans}: expected one known version for each"
        )
    return next(iter(attempts), 0), versions


def generated_tokens(completion: Any) -> Generated:
    """vLLM's `CompletionOutput` as the tokens of one turn.

    Raises:
        RuntimeError: a token has no version, or there is not one log-prob per token.
    """
    tokens = np.asarray(completion.token_ids, dtype=np.int32)
    attempt, versions = token_versions(completion.weight_versions, len(tokens))
    log_probs = np.asarray(completion.logprobs.logprobs, dtype=np.float32)
    if len(log_probs) != len(tokens):
        raise RuntimeError(f"the engine gave {len(log_probs)} log-probs for {len(tokens)} tokens")
    return Generated(tokens, log_probs, versions, attempt, str(completion.finish_reason))
