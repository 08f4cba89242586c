"""The teachers as the pipeline asks them: one for each row, and engines that share a batch."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

from one_step_off.data.samples import Batch, Sample
from one_step_off.training.teachers import TeacherEngineGroup, TeacherGroup, Teachers


def make_sample(row: int, length: int) -> Sample:
    """A response whose token ids are row, row + 1 ..., after a prompt of two tokens."""
    return Sample(
        prompt_id=(0, row),
        index=0,
        prompt_ids=np.array([1, 2], np.int32),
        response_ids=np.arange(row, row + length, dtype=np.int32),
        log_probs=np.zeros(length, np.float32),
        loss_mask=np.ones(length, bool),
        versions=np.zeros(length, np.int32),
    )


def make_batch() -> Batch:
    return Batch(3, [make_sample(row, 2 + row % 3) for row in range(6)], (0, 0))


class FixedTeacher(TeacherGroup):
    """Gives the same number for every token."""

    def __init__(self, value: float) -> None:
        self.value = value
        self.scored: list[int] = []

    async def outputs(self, batch: Batch) -> list[np.ndarray]:
        self.scored += [sample.prompt_id[1] for sample in batch.samples]
        return [np.full(len(s.response_ids), self.value, np.float32) for s in batch.samples]


def test_each_row_is_scored_by_its_teacher() -> None:
    groups = {"default": FixedTeacher(-1.0), "math": FixedTeacher(-2.0), "idle": FixedTeacher(0)}

    def name_of(sample: Sample) -> str:
        return "math" if sample.prompt_id[1] % 3 == 1 else "default"

    columns = asyncio.run(Teachers(dict(groups), name_of, 0).outputs(make_batch()))
    assert groups["math"].scored == [1, 4]
    assert groups["default"].scored == [0, 2, 3, 5]
    assert not groups["idle"].scored
    assert columns["teacher_names"] == ["default", "math", "default", "default", "math", "default"]
    for sample, values in zip(make_batch().samples, columns["teacher_log_probs"], strict=True):
        expected = -2.0 if name_of(sample) == "math" else -1.0
        assert values.tolist() == [expected] * len(sample.response_ids)


def test_the_likeliest_tokens_become_columns() -> None:
    """Of each token its log-prob, two log-probs and two ids."""

    class TopTwo(TeacherGroup):
        def __init__(self) -> None:
            pass

        async def outputs(self, batch: Batch) -> list[np.ndarray]:
            row = np.array([-3.0, -0.1, -2.5, 150_001.0, 7.0], np.float32)
            return [np.tile(row, (len(s.response_ids), 1)) for s in batch.samples]

    columns = asyncio.run(
        Teachers({"default": TopTwo()}, lambda s: "default", 2).outputs(make_batch())
    )
    assert columns["teacher_log_probs"][0].tolist() == [-3.0, -3.0]
    np.testing.assert_allclose(columns["teacher_top_log_probs"][0], [[-0.1, -2.5]] * 2)
    assert columns["teacher_top_ids"][0].tolist() == [[150_001, 7]] * 2
    assert "teacher_names" not in columns


@pytest.mark.parametrize("engines", [1, 2, 4])
def test_the_engines_share_a_batch(engines: int) -> None:
    """Every sample is scored once, and comes back in its place."""

    class Engines(TeacherEngineGroup):
        def __init__(self) -> None:
            self.ranks = [None] * engines

        async def _on_devices(self, step, method, batch_for_ranks, *args):
            assert (step, method) == (3, "score_responses")
            answers = []
            for sequences, firsts in batch_for_ranks:
                pairs = zip(sequences, firsts, strict=True)
                answers.append([ids[first:].astype(np.float32) for ids, first in pairs])
            self.sizes = [len(answer) for answer in answers]
            return answers

    group = Engines()
    outputs = asyncio.run(group.outputs(make_batch()))
    for sample, output in zip(make_batch().samples, outputs, strict=True):
        assert output.tolist() == sample.response_ids.tolist()
    assert sum(group.sizes) == 6
    assert max(group.sizes) - min(group.sizes) <= 1
