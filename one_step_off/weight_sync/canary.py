"""The canary: engine and trainer score the same tokens, and must agree about their log-probs after
a sync.

In bfloat16 both round differently, and a mixture of experts may send a token to another expert. How
far they differ with the same weights depends on the model. So the first sync of an attempt, when
both hold the weights that they loaded, measures it, and all later syncs are held to a multiple.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from one_step_off.cluster.errors import CanaryFailed

DEFAULT_TOLERANCE = {"float32": 1e-3, "bfloat16": 1.0}
"""By model.dtype: the largest difference in nats that a model without experts was seen to have, and
more. In float32 it is the tolerance."""

MEAN_SHARE = 0.1
"""The mean difference may be this share of the tolerance. Noise of the dtype scatters, so its mean
is far below its maximum; other weights shift the mean too."""

KEY = "weight_sync.canary_tolerance"


@dataclass(frozen=True)
class Calibration:
    """How a tolerance follows from a measured difference: `factor` times as much, but at least
    `floor` and at most `bound`, in nats. A first difference above `bound` ends the attempt."""

    factor: float
    floor: float
    bound: float

    def tolerance(self, measured: float) -> float:
        """The tolerance of all later syncs."""
        return min(max(self.factor * measured, self.floor), self.bound)


LARGEST = Calibration(factor=5.0, floor=0.5, bound=4.0)
"""Of the largest difference. It is one token's, and varies from sync to sync. Tokens that go to
other experts differ by more than 1 nat."""

MEAN = Calibration(factor=3.0, floor=0.02, bound=0.1)
"""Of the mean difference, which hardly varies."""


@dataclass(frozen=True)
class Tolerance:
    """What a sync is held to, in nats.

    Attributes:
        largest: of the difference of one token.
        mean: of the mean over all tokens.
        source: names both in an error, as "weight_sync.canary_tolerance".
        is_exact: whether `mean` is MEAN_SHARE of a single given number.
    """

    largest: float
    mean: float
    source: str
    is_exact: bool = True


class Canary:
    """Compares log-probs after each sync of an attempt."""

    def __init__(self, configured: float | None, dtype: str) -> None:
        """
        Args:
            configured: weight_sync.canary_tolerance; None: 1e-3 in float32, measured in bfloat16.
            dtype: model.dtype.
        """
        self.calibrates = configured is None and dtype == "bfloat16"
        if self.calibrates:
            source = "the bound of a first sync"
            self.tolerance = Tolerance(LARGEST.bound, MEAN.bound, source, is_exact=False)
        else:
            largest = configured or DEFAULT_TOLERANCE[dtype]
            self.tolerance = Tolerance(largest, MEAN_SHARE * largest, KEY)

    def check(
        self,
        trainer: list[np.ndarray],
        replicas: dict[int, list[np.ndarray]],
        what: str,
        log: Callable[[str], None],
    ) -> dict[str, float]:
        """Compare the log-probs of the canary's tokens.

        Args:
            trainer: float32 [tokens] per sequence.
            replicas: replica -> the same.
            what: names the sync in the error.
            log: receives a line when the tolerance has been measured.

        Returns:
            The metrics canary/logprob_diff_max and canary/logprob_diff_mean, of the replica that
            differs most, and canary/tolerance.

        Raises:
            CanaryFailed: a replica differs by more than the tolerance, or by NaN.
        """
        numbers = list(replicas)
        replica_log_probs = np.stack([np.concatenate(scores) for scores in replicas.values()])
        differences = np.abs(np.concatenate(trainer) - replica_log_probs)  # [replicas, tokens]
        largest = differences.max(1)
        means = differences.mean(1)
        self._check_limits(largest, means, numbers, what)
        if self.calibrates:
            self._calibrate(float(largest.max()), float(means.max()), what, log)
        return {
            "canary/logprob_diff_max": float(largest.max()),
            "canary/logprob_diff_mean": float(means.max()),
            "canary/tolerance": self.tolerance.largest,
        }

    def _check_limits(
        self, largest: np.ndarray, means: np.ndarray, numbers: list[int], what: str
    ) -> None:
        """Raises CanaryFailed: a difference is over its limit or NaN."""
        tolerance = self.tolerance
        mean_source = f"{tolerance.source} / 10" if tolerance.is_exact else tolerance.source
        _check_limit(largest, "max", tolerance.largest, tolerance.source, numbers, what)
        _check_limit(means, "mean", tolerance.mean, mean_source, numbers, what)

    def _calibrate(
        self, largest: float, mean: float, what: str, log: Callable[[str], None]
    ) -> None:
        self.calibrates = False
        source = f"the tolerance measured in the first sync; {KEY} sets another"
        self.tolerance = Tolerance(
            LARGEST.tolerance(largest), MEAN.tolerance(mean), source, is_exact=False
        )
        log(
            f"{what}: engine and trainer differ by {largest:.3g} nats at most, {mean:.3g} in the "
            f"mean, with the same weights in bfloat16; allowed from here on: "
            f"{self.tolerance.largest:.3g} and {self.tolerance.mean:.3g}"
        )


def _check_limit(
    differences: np.ndarray,
    kind: str,
    limit: float,
    source: str,
    numbers: list[int],
    what: str,
) -> None:
    """Raises CanaryFailed: one of `differences`, float [replicas], is over the limit or NaN."""
    within_limit = differences <= limit
    for i in np.flatnonzero(~within_limit):
        raise CanaryFailed(
            f"{what}: rollout replica {numbers[i]} and the trainer differ by {differences[i]:.3g} "
            f"nats on the same tokens ({kind}), more than {source} = {limit:g}"
        )
