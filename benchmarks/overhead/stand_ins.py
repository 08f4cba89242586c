"""Stand-ins for replicas and trainer ranks in the driver's process. They answer after fixed
times.
"""

from __future__ import annotations

import asyncio
import functools
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from benchmarks.overhead.cell import Cell
from one_step_off.data.samples import Batch, Prompt, Sample

CANARY_LOG_PROBS = np.zeros(7, np.float32)
MAX_SPANS = 200


@dataclass(frozen=True)
class LoggedCall:
    """A call that the driver made."""

    method: RemoteMethod
    arguments: tuple


class RemoteMethod:
    """A method of a stand-in, called by `remote` as a method of a Ray actor is.

    Args:
        compute: gives the answer.
        seconds: until the answer is there.
        log: list to which every call is appended.
    """

    def __init__(
        self,
        compute: Callable[..., Any],
        seconds: float = 0.0,
        log: list[LoggedCall] | None = None,
    ) -> None:
        self.compute = compute
        self.seconds = seconds
        self.log = log

    def remote(self, *args: Any) -> asyncio.Future:
        """Returns at once what can be awaited, as Ray does."""
        if self.log is not None:
            self.log.append(LoggedCall(self, args))
        loop = asyncio.get_running_loop()
        future = loop.create_future()
        loop.call_later(self.seconds, self._answer, future, args)
        return future

    def _answer(self, future: asyncio.Future, args: tuple) -> None:
        if not future.done():
            future.set_result(self.compute(*args))


def canary_scores(sequences: list[np.ndarray]) -> list[np.ndarray]:
    """The answer of replicas and of rank 0 to the canary."""
    return [CANARY_LOG_PROBS for _ in sequences]


def sync_report(cell: Cell, phases: tuple[str, ...], bucket_s: float) -> dict[str, Any]:
    """What sender and receiver both report of a weight sync.

    Args:
        cell: the measurement.
        phases: their names.
        bucket_s: seconds of a bucket on the wire.
    """
    now = time.time()
    spans = [["", phase, now - 0.01, now] for _ in range(cell.buckets) for phase in phases]
    report: dict[str, Any] = {
        "bucket_wire": [[bucket, bucket_s] for bucket in range(cell.buckets)],
        "spans": spans[:MAX_SPANS],
    }
    return report | dict.fromkeys(phases, 0.02)


@dataclass
class CapacityQuestion:
    """A call that waits until fewer than `most` of the `sent` samples are unfinished."""

    sent: int
    most: int
    answer: asyncio.Future


class Replica:
    """Stands in for a vLLM replica.

    Args:
        cell: the measurement.
        ready: prompt id -> its samples.
        log: receives the calls.
    """

    def __init__(self, cell: Cell, ready: dict[Any, list[Sample]], log: list[LoggedCall]) -> None:
        self.ready = ready
        self.finished_samples = 0
        self.rollout = RemoteMethod(self._rollout, cell.generate_s / self._waves(cell), log)
        self.wait_for_capacity = Capacity(self)
        self.ping = RemoteMethod(lambda: (0, 0), log=log)
        self.score = RemoteMethod(canary_scores, log=log)
        self.sync = RemoteMethod(functools.partial(self._sync, cell), cell.sync_s, log)

    @staticmethod
    def _waves(cell: Cell) -> int:
        """How many times the replicas fill their slots in a step."""
        if cell.routing != "least_loaded":
            return 1
        all_slots = cell.replicas * cell.slots
        return -(-cell.samples // all_slots)

    def _rollout(self, prompts: list[Prompt], _: Any) -> list[Sample]:
        samples = [sample for prompt in prompts for sample in self.ready[prompt.id]]
        self.finished_samples += len(samples)
        self.wait_for_capacity.check()
        return samples

    @staticmethod
    def _sync(cell: Cell, *_: Any) -> list[dict[str, Any]]:
        report = sync_report(cell, ("wait", "apply", "load"), bucket_s=0.001)
        return [report | {"bytes": 1e9, "bare_wire": 0.01}]


class Capacity:
    """A replica's `wait_for_capacity`: it answers when the replica can take more samples."""

    def __init__(self, replica: Replica) -> None:
        self.replica = replica
        self.waiting: list[CapacityQuestion] = []

    def remote(self, sent: int, most: int) -> asyncio.Future:
        """Returns at once what can be awaited, as Ray does."""
        future = asyncio.get_running_loop().create_future()
        self.waiting.append(CapacityQuestion(sent, most, future))
        self.check()
        return future

    def check(self) -> None:
        """Answer the questions whose condition holds by now."""
        finished = self.replica.finished_samples
        still_waiting = []
        for question in self.waiting:
            if question.answer.done():
                continue
            if question.sent - finished < question.most:
                question.answer.set_result((finished, question.most))
            else:
                still_waiting.append(question)
        self.waiting = still_waiting


class Rank:
    """Stands in for one training process of any role.

    Args:
        index: of the rank.
        cell: the measurement.
        values: per sample of a step its log-probs or values, float32 [tokens].
        log: receives the calls.
    """

    def __init__(
        self, index: int, cell: Cell, values: list[np.ndarray], log: list[LoggedCall]
    ) -> None:
        share = {row: values[row] for row in range(index, cell.samples, cell.ranks)}
        self.update = RemoteMethod(self._update, cell.train_s, log)
        self.log_prob = RemoteMethod(lambda batch: share, cell.log_prob_s, log)
        self.values = self.log_prob
        self.score = RemoteMethod(canary_scores if index == 0 else lambda _: None, log=log)
        self.release = RemoteMethod(lambda version: None, log=log)
        self.connect_sync = RemoteMethod(lambda *_: None, log=log)
        self.send_weights = RemoteMethod(functools.partial(self._send, cell), cell.sync_s, log)

    @staticmethod
    def _update(batch: Batch, learn: bool, profile: str) -> dict[str, float]:
        metrics = {f"actor/figure_{number}": 0.5 for number in range(30)}
        return metrics | {"ratio/mean": 1.0, "actor/sync_wait_s": 0.0}

    @staticmethod
    def _send(cell: Cell, *_: Any) -> dict[str, Any]:
        report = sync_report(cell, ("gather", "checksum", "wire"), bucket_s=0.002)
        return report | {"bytes": 1e9 / cell.ranks, "changed": 1.0}
