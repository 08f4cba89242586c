"""The teachers of a run as the pipeline asks them: each scores the samples of its sources.

    columns = await teachers.outputs(batch)      # fields of the batch

A teacher is a group of ranks under a training back end (`TeacherGroup`), or of vLLM engines
(`TeacherEngineGroup`).
"""

import asyncio
import contextlib
from collections.abc import Callable
from typing import Any

import numpy as np

from one_step_off.algorithms import batching
from one_step_off.cluster.remote_calls import call_all
from one_step_off.config.placement import start_limit_s
from one_step_off.data.packing import PackedArrays, token_ids_of
from one_step_off.data.samples import Batch, Sample
from one_step_off.training.trainer_group import WorkerGroup, merged
from one_step_off.training.worker_interface import BatchShare

STOP_TIMEOUT_S = 10.0


class TeacherGroup(WorkerGroup):
    """A teacher under a training back end."""

    async def outputs(self, batch: Batch) -> list[np.ndarray]:
        """What `TeacherWorker.score_responses` gives, for all samples in order."""
        stored = self._batch_for_ranks(batch)
        return merged(await self._on_devices(batch.step, "score_responses", stored))


class TeacherEngineGroup(TeacherGroup):
    """A teacher in vLLM engines, each of which scores a part of the batch."""

    async def setup(self) -> None:
        """Load all engines."""
        await call_all(start_limit_s(self.cfg, self.role), self.role, self.ranks, "start")
        self.has_answered = True
        count = len(self.ranks)
        self.shares = [BatchShare(index, count) for index in range(count)]

    async def outputs(self, batch: Batch) -> list[np.ndarray]:
        """As of `TeacherGroup`. The engines get about as many tokens each."""
        sequences = [token_ids_of(sample) for sample in batch.samples]
        firsts = [len(sample.prompt_ids) for sample in batch.samples]
        lengths = [len(sequence) for sequence in sequences]
        whole = [list(range(len(sequences)))]
        positions = batching.positions_of_shares(lengths, whole, len(self.ranks), 1)
        parts = [
            (PackedArrays(sequences[i] for i in own), [firsts[i] for i in own]) for own in positions
        ]
        answers = await self._on_devices(batch.step, "score_responses", parts)
        result: dict[int, np.ndarray] = {}
        for own, outputs in zip(positions, answers, strict=True):
            result.update(zip(own, outputs, strict=True))
        return [result[position] for position in range(len(sequences))]

    async def stop(self) -> None:
        """Let the engines end their own processes, which may outlive them otherwise."""
        with contextlib.suppress(Exception):  # what does not answer is killed by the caller
            await call_all(STOP_TIMEOUT_S, self.role, self.ranks, "stop")


class Teachers:
    """All teachers of a run, asked at once. Those in one pool take turns: their groups see to
    that."""

    def __init__(
        self, groups: dict[str, TeacherGroup], teacher_of: Callable[[Sample], str], top_k: int
    ) -> None:
        """
        Args:
            groups: teacher name -> its processes.
            teacher_of: returns the name of a sample's teacher.
            top_k: `teacher.top_k`.
        """
        self.groups = groups
        self.teacher_of = teacher_of
        self.top_k = top_k

    async def outputs(self, batch: Batch) -> dict[str, Any]:
        """The fields of the batch that the teachers give: `teacher_log_probs`; with top_k
        `teacher_top_ids` and `teacher_top_log_probs`; with several teachers `teacher_names`."""
        if len(self.groups) == 1:
            (group,) = self.groups.values()
            return self._columns(await group.outputs(batch))
        names = [self.teacher_of(sample) for sample in batch.samples]
        positions = {name: [i for i, of in enumerate(names) if of == name] for name in self.groups}
        used = {name: own for name, own in positions.items() if own}
        calls = [self.groups[name].outputs(part_of(batch, own)) for name, own in used.items()]
        by_position: dict[int, np.ndarray] = {}
        for own, outputs in zip(used.values(), await asyncio.gather(*calls), strict=True):
            by_position.update(zip(own, outputs, strict=True))
        columns = self._columns([by_position[i] for i in range(len(names))])
        return columns | {"teacher_names": names}

    def _columns(self, outputs: list[np.ndarray]) -> dict[str, Any]:
        if not self.top_k:
            return {"teacher_log_probs": outputs}
        end = 1 + self.top_k
        return {
            "teacher_log_probs": [output[:, 0] for output in outputs],
            "teacher_top_log_probs": [output[:, 1:end] for output in outputs],
            "teacher_top_ids": [output[:, end:].astype(np.int32) for output in outputs],
        }


def part_of(batch: Batch, positions: list[int]) -> Batch:
    """The samples at these positions as a batch of their own, without columns."""
    samples = [batch.samples[position] for position in positions]
    return Batch(batch.step, samples, batch.expected_stamp, batch.max_version_lag)
