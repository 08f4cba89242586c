"""The canary: engine and trainer score the same tokens, and must agree about their log-probs after
a sync.

In bfloat16 both round differently, a mixture of experts may send a token to another expert, and a
quantized engine has other weights. How far they differ depends on the model. So the first sync of
an attempt, when both hold the weights that they loaded, measures it, and all later syncs are held
to a multiple.

After a failed canary engine and trainer score it once more (`FailedCanary`), and the log says at
which token they differ and which side has changed. It helps to find the cause and decides nothing:
the attempt ends with the canary's error.
"""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from one_step_off.cluster.errors import CanaryFailed
from one_step_off.cluster.remote_calls import LIVENESS_TIMEOUT_S
from one_step_off.config.schema import Config
from one_step_off.data.samples import PolicyVersion
from one_step_off.weight_sync.sync_calls import LogProbs, Trainers

DEFAULT_TOLERANCE = {"float32": 1e-3, "bfloat16": 1.0}
"""By model.dtype: the largest difference in nats that a model without experts was seen to have, and
more. In float32 it is the tolerance."""

MEAN_SHARE = 0.1
"""The mean difference may be this share of the tolerance. Noise of the dtype scatters, so its mean
is far below its maximum; other weights shift the mean too."""

KEY = "weight_sync.canary_tolerance"

SCORE_AGAIN_S = 30.0
"""Seconds for all to score again, if the canary's own limit is not shorter. A trainer whose update
waits for this very sync does not answer."""

NO_ANSWER = "no answer in time"

OnLog = Callable[[str], None]


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

QUANTIZED_MEAN = Calibration(factor=2.5, floor=0.05, bound=0.4)
"""Of the mean difference to a quantized engine. A layer that is a version behind stays below it:
the proof of the reload detects that."""


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

    def __init__(self, configured: float | None, dtype: str, is_quantized: bool = False) -> None:
        """
        Args:
            configured: weight_sync.canary_tolerance; None: 1e-3 in float32, measured in bfloat16.
            dtype: model.dtype.
            is_quantized: the engine quantizes weights or its KV cache; measured in any dtype.
        """
        self.calibrates = configured is None and (dtype == "bfloat16" or is_quantized)
        self.mean_calibration = QUANTIZED_MEAN if is_quantized else MEAN
        self.engine = f"{dtype}, quantized in the engine" if is_quantized else dtype
        if self.calibrates:
            source = "the bound of a first sync"
            mean_bound = self.mean_calibration.bound
            self.tolerance = Tolerance(LARGEST.bound, mean_bound, source, is_exact=False)
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
            LARGEST.tolerance(largest),
            self.mean_calibration.tolerance(mean),
            source,
            is_exact=False,
        )
        log(
            f"{what}: engine and trainer differ by {largest:.3g} nats at most, {mean:.3g} in the "
            f"mean, with the same weights in {self.engine}; allowed from here on: "
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


def canary_limit_s(cfg: Config) -> float:
    """Seconds for the replicas to score the canary.

    Requests that continue across a sync stand before it in the engine's queue: a full engine
    scores it when enough of them have ended. So there it has the time in which a busy replica must
    complete a request; after `weight_sync.timeout_s` a replica that is well would be restarted.
    """
    if cfg.weight_sync.in_flight == "wait":
        return cfg.weight_sync.timeout_s
    return max(cfg.weight_sync.timeout_s, cfg.rollout.progress_timeout_s)


def canary_name(stamp: PolicyVersion) -> str:
    """Names the canary of a sync in errors."""
    _, version = stamp
    return f"canary after the sync of version {version}"


@dataclass(frozen=True)
class FailedCanary:
    """A canary over its limits.

    Attributes:
        what: names it in the log.
        sequences: token ids of each sequence, int32 [tokens].
        trainer: the log-probs that were compared.
        replicas: replica -> the same.
        limit: of the difference of one token, in nats.
        scored: the arguments of `score`: the sequences, and their images if they have any.
    """

    what: str
    sequences: list[np.ndarray]
    trainer: LogProbs
    replicas: dict[int, LogProbs]
    limit: float
    scored: tuple[Any, ...]

    async def log_diagnosis(
        self, trainers: Trainers, actors: dict[int, Any], on_log: OnLog
    ) -> None:
        """Log where engine and trainer differ, and what they return now. Never raises an error that
        it meets.

        Args:
            trainers: score again, beside the replicas.
            actors: replica -> its Ray actor.
            on_log: receives the lines.
        """
        try:
            self._log_places(on_log)
            # First, because scoring may move processes to other cores.
            await self._log_threads(trainers, actors, on_log)
            for who, first, again in await self._score_again(trainers, actors):
                on_log(f"{self.what}, scored again: {who}: {self._changes(first, again)}")
        except Exception as error:
            on_log(f"{self.what}: its diagnosis failed: {type(error).__name__}: {error}")

    def _log_places(self, on_log: OnLog) -> None:
        for number, scores in self.replicas.items():
            over = int((_differences(self.trainer, scores) > self.limit).sum())
            on_log(
                f"{self.what}: rollout replica {number} and the trainer differ most in "
                f"{self._worst(self.trainer, scores)}; {over} tokens by more than {self.limit:g}"
            )

    async def _log_threads(self, trainers: Trainers, actors: dict[int, Any], on_log: OnLog) -> None:
        processes = {f"rollout replica {number}": actors[number] for number in self.replicas}
        processes |= {f"trainer rank {rank}": actor for rank, actor in enumerate(trainers.ranks)}
        calls = [_outcome(actor.threads_and_cores.remote()) for actor in processes.values()]
        for who, answer in zip(processes, await _answers(calls, LIVENESS_TIMEOUT_S), strict=True):
            on_log(f"{self.what}: {who}: {answer or NO_ANSWER}")

    async def _score_again(
        self, trainers: Trainers, actors: dict[int, Any]
    ) -> list[tuple[str, LogProbs, LogProbs | Exception | None]]:
        """Who, its first log-probs, and its new ones: None if it does not answer in time."""
        calls: list[tuple[str, LogProbs, Awaitable[LogProbs]]] = [
            (f"rollout replica {number}", scores, actors[number].score.remote(*self.scored))
            for number, scores in self.replicas.items()
        ]
        calls.append(("the trainer", self.trainer, trainers.score(*self.scored)))
        limit_s = min(SCORE_AGAIN_S, canary_limit_s(trainers.cfg))
        again = await _answers([_outcome(answer) for _, _, answer in calls], limit_s)
        return [(who, first, new) for (who, first, _), new in zip(calls, again, strict=True)]

    def _changes(self, first: LogProbs, again: LogProbs | Exception | None) -> str:
        """How the second scoring of one side differs from its first."""
        if again is None:
            return NO_ANSWER
        if isinstance(again, Exception):
            return f"{type(again).__name__}: {again}"
        if all(np.array_equal(a, b, equal_nan=True) for a, b in zip(first, again, strict=True)):
            return "the same log-probs, bit for bit"
        with_trainer = float(_differences(self.trainer, again).max())
        return (
            f"other log-probs, most in {self._worst(first, again)} (first and second); the new "
            f"ones differ from the trainer's first ones by {with_trainer:.3g} at most"
        )

    def _worst(self, one: LogProbs, other: LogProbs) -> str:
        """The token at which two scorings differ most, and both log-probs."""
        place = int(_differences(one, other).argmax())
        sequence = 0
        while place >= len(one[sequence]):
            place -= len(one[sequence])
            sequence += 1
        token = place + 1  # the first token has no log-prob
        ids = self.sequences[sequence]
        return (
            f"sequence {sequence}, token {token} of 0 to {len(ids) - 1} (id {ids[token]}): "
            f"{one[sequence][place]:.9g} and {other[sequence][place]:.9g}"
        )


def _differences(one: LogProbs, other: LogProbs) -> np.ndarray:
    """Of all tokens; infinite where one of them is NaN."""
    differences = np.abs(np.concatenate(one) - np.concatenate(other))
    return np.where(np.isnan(differences), np.inf, differences)


async def _answers(calls: list[Awaitable[Any]], limit_s: float) -> list[Any]:
    """The answers that come within `limit_s` seconds; None for the others."""
    tasks = [asyncio.ensure_future(call) for call in calls]
    try:
        await asyncio.wait(tasks, timeout=limit_s)
        has_ended = {task: task.done() and not task.cancelled() for task in tasks}
        return [task.result() if has_ended[task] else None for task in tasks]
    finally:
        for task in tasks:
            task.cancel()


async def _outcome(answer: Awaitable[Any]) -> Any:
    """The answer, or the exception in its place."""
    try:
        return await answer
    except Exception as error:
        return error
