"""After a failed canary: engine and trainer score it once more, and the log says at which token
they differ and which side has changed.

It helps to find the cause and decides nothing: the attempt ends with the canary's error.
"""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from one_step_off.cluster.remote_calls import LIVENESS_TIMEOUT_S
from one_step_off.weight_sync.canary_beside import canary_limit_s
from one_step_off.weight_sync.participants import LogProbs, Trainers

SCORE_AGAIN_S = 30.0
"""Seconds for all to score again, if the canary's own limit is not shorter. A trainer whose update
waits for this very sync does not answer."""

NO_ANSWER = "no answer in time"

OnLog = Callable[[str], None]


@dataclass(frozen=True)
class FailedCanary:
    """A canary over its limits.

    Attributes:
        what: names it in the log.
        sequences: token ids of each sequence, int32 [tokens].
        trainer: the log-probs that were compared.
        replicas: replica -> the same.
        limit: of the difference of one token, in nats.
        trainer_waits: its update may have begun, and waits for this canary. It cannot score then.
    """

    what: str
    sequences: list[np.ndarray]
    trainer: LogProbs
    replicas: dict[int, LogProbs]
    limit: float
    trainer_waits: bool = False

    async def log_diagnosis(
        self, trainers: Trainers, actors: dict[int, Any], on_log: OnLog
    ) -> None:
        """Log where engine and trainer differ, and what they return now. Never raises an error that
        it meets.

        Args:
            trainers: score again, beside the replicas, if they do not wait.
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
        """Who, its first log-probs, and its new ones: None if it does not answer in time. Without
        a trainer that waits for this canary."""
        calls: list[tuple[str, LogProbs, Awaitable[LogProbs]]] = [
            (f"rollout replica {number}", scores, actors[number].score.remote(self.sequences))
            for number, scores in self.replicas.items()
        ]
        if not self.trainer_waits:
            calls.append(("the trainer", self.trainer, trainers.score(self.sequences)))
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
