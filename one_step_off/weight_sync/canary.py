"""The canary: engine and trainer score the same tokens, and must agree about their log-probs after
a sync."""

import numpy as np

from one_step_off.cluster.errors import SyncError

DEFAULT_TOLERANCE = {"float32": 1e-3, "bfloat16": 1.0}
"""By model.dtype: the largest difference in nats, without weight_sync.canary_tolerance."""

MEAN_SHARE = 0.1
"""The mean difference may be this share of the tolerance. Noise of the dtype scatters, so its mean
is far below its maximum; other weights shift the mean too."""


def compare_log_probs(
    trainer: list[np.ndarray],
    replicas: dict[int, list[np.ndarray]],
    tolerance: float,
    what: str,
) -> dict[str, float]:
    """Compare the log-probs of the canary's tokens.

    Args:
        trainer: float32 [tokens] per sequence.
        replicas: replica -> the same.
        tolerance: in nats.
        what: names the sync in the error.

    Returns:
        The metrics canary/logprob_diff_max and canary/logprob_diff_mean, of the replica that
        differs most.

    Raises:
        SyncError: a replica differs by more than the tolerance, or by NaN.
    """
    numbers = list(replicas)
    replica_log_probs = np.stack([np.concatenate(scores) for scores in replicas.values()])
    differences = np.abs(np.concatenate(trainer) - replica_log_probs)  # [replicas, tokens]
    largest = differences.max(1)
    means = differences.mean(1)
    _check_limit(largest, "max", tolerance, "", numbers, what)
    _check_limit(means, "mean", MEAN_SHARE * tolerance, " / 10", numbers, what)
    return {
        "canary/logprob_diff_max": float(largest.max()),
        "canary/logprob_diff_mean": float(means.max()),
    }


def _check_limit(
    differences: np.ndarray,
    kind: str,
    limit: float,
    divisor: str,
    numbers: list[int],
    what: str,
) -> None:
    """Raises SyncError: one of `differences`, float [replicas], is over the limit or NaN."""
    within_limit = differences <= limit
    for i in np.flatnonzero(~within_limit):
        raise SyncError(
            f"{what}: rollout replica {numbers[i]} and the trainer differ by {differences[i]:.3g} "
            f"nats on the same tokens ({kind}), more than "
            f"weight_sync.canary_tolerance{divisor} = {limit:g}"
        )
