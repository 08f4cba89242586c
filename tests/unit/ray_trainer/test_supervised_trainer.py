"""The supervised pipeline with a stand-in for the actor: steps, evaluations, checkpoints, stops."""

from __future__ import annotations

import asyncio
import io
import json
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from one_step_off.checkpoint import Checkpointer, finished, read_state
from one_step_off.cluster.errors import RoleError
from one_step_off.config.schema import Config
from one_step_off.data.prompt_stream import PromptStream
from one_step_off.data.staleness import assert_staleness
from one_step_off.data.supervised_data import SupervisedRow
from one_step_off.monitoring.supervised_tracker import SupervisedTracker
from one_step_off.ray_trainer import Stopped
from one_step_off.supervised_trainer import SupervisedPipeline

ROWS = 10
BATCH_SIZE = 4


def row(index: int, epoch: int = 0) -> SupervisedRow:
    """A row of `index` + 4 tokens, of which the last two are answers."""
    ids = np.arange(index + 4, dtype=np.int32)
    is_answer = np.zeros(len(ids), bool)
    is_answer[-2:] = True
    return SupervisedRow((epoch, index), ids, "", "", is_answer=is_answer)


class FakeActor:
    """Counts updates; log-probs of held-out tokens are -version - 1."""

    def __init__(self) -> None:
        self.version = 0
        self.trained: list[list[tuple[int, int]]] = []
        self.skipped_in_a_row = 0
        self.on_update = lambda step: None

    async def update(self, batch):
        assert_staleness(batch)
        assert batch.step == batch.expected_stamp[1] == self.version
        self.on_update(batch.step)
        self.version += 1
        self.trained.append([sample.prompt_id for sample in batch.samples])
        return {
            "actor/loss": 1.0 / self.version,
            "actor/tokens": 2.0 * len(batch.samples),
            "actor/tokens_total": float(sum(sample.length for sample in batch.samples)),
            "actor/lr": 0.1,
            "actor/skipped_in_a_row": float(self.skipped_in_a_row),
        }

    async def log_prob(self, batch):
        return [
            np.full(len(s.response_ids), -1.0 - self.version, np.float32) for s in batch.samples
        ]

    async def save(self, folder):
        version = self.version

        async def write():
            Path(folder, "version").write_text(str(version))
            return {}

        return asyncio.gather(write())


def pipeline(folder: Path, steps: int = 6, start: int = 0, **trainer: object) -> SimpleNamespace:
    """A pipeline of some steps, and what it works with."""
    cfg = Config()
    cfg.trainer.output_dir = str(folder)
    for name, value in trainer.items():
        setattr(cfg.trainer, name, value)
    stream = PromptStream([row(i) for i in range(ROWS)], BATCH_SIZE, True, 0, steps)
    out = io.StringIO()
    tracker = SupervisedTracker(str(folder), steps, out)
    tracker.start(start)
    actor = FakeActor()
    actor.version = start
    checkpointer = Checkpointer(cfg, actor.save)
    val = [row(i, epoch=-1) for i in range(3)]
    made = SupervisedPipeline(
        cfg, SimpleNamespace(actor=actor), stream, val, tracker, checkpointer, start=start
    )
    return SimpleNamespace(pipeline=made, actor=actor, stream=stream, tracker=tracker, out=out)


def rows_in(folder: Path, name: str = "metrics.jsonl") -> list[dict]:
    return [json.loads(line) for line in (folder / name).read_text().splitlines()]


def test_steps_evaluations_and_checkpoints(tmp_path):
    run = pipeline(tmp_path, test_freq=2, save_freq=4)
    asyncio.run(run.pipeline.fit())
    metrics = rows_in(tmp_path)
    assert [row["step"] for row in metrics] == [row["weight_version"] for row in metrics]
    assert [row["sft/loss"] for row in metrics] == [1 / (step + 1) for step in range(6)]
    assert {row["sft/rows"] for row in metrics} == {BATCH_SIZE}
    assert {row["sft/tokens"] for row in metrics} == {2.0 * BATCH_SIZE}
    ledger = rows_in(tmp_path, "ledger.jsonl")
    assert [[tuple(id) for id in row["prompts"]] for row in ledger] == run.actor.trained
    flat = [id for batch in run.actor.trained for id in batch]
    assert sorted(flat[:ROWS]) == [(0, i) for i in range(ROWS)], "every row once per epoch"
    evaluations = rows_in(tmp_path, "evaluations.jsonl")
    assert [row["val/version"] for row in evaluations] == [0, 2, 4, 6]
    assert [row["val/loss"] for row in evaluations] == [1, 3, 5, 7], "minus the mean log-prob"
    assert {(row["val/tokens"], row["val/rows"]) for row in evaluations} == {(6, 3)}
    assert [row.get("val/version") for row in metrics] == [0, None, 2, None, 4, 6]
    assert [path.name for path in finished(tmp_path / "checkpoints")] == [
        "step_000004",
        "step_000006",
    ]
    assert (tmp_path / "checkpoints/step_000004/version").read_text() == "4"
    summary = run.tracker.summary()
    assert (summary["sft/first"], summary["sft/last"]) == (1.0, 1 / 6)
    assert summary["val/losses"] == [1, 3, 5, 7]
    assert "step 6/6 [5]" in run.out.getvalue() and "loss 0.1667" in run.out.getvalue()


def test_a_stopped_run_resumes_with_the_next_rows(tmp_path):
    whole = pipeline(tmp_path / "whole")
    asyncio.run(whole.pipeline.fit())
    folder = tmp_path / "halves"
    first = pipeline(folder)

    def stop(step: int) -> None:
        first.pipeline.stopping = step == 2

    first.actor.on_update = stop
    with pytest.raises(Stopped, match="step 3"):
        asyncio.run(first.pipeline.fit())
    (checkpoint,) = finished(folder / "checkpoints")
    state = read_state(checkpoint)
    assert state["step"] == 3
    second = pipeline(folder, start=3)
    second.stream.load_state_dict(state["stream"])
    asyncio.run(second.pipeline.fit())
    assert first.actor.trained + second.actor.trained == whole.actor.trained
    assert [row["step"] for row in rows_in(folder)] == list(range(6))


def test_an_attempt_that_was_killed_before_its_last_evaluation_makes_it(tmp_path):
    run = pipeline(tmp_path, start=6)
    asyncio.run(run.pipeline.fit())
    assert not run.actor.trained
    assert [row["val/version"] for row in run.tracker.evaluations] == [6]


def test_an_evaluation_alone(tmp_path):
    run = pipeline(tmp_path, start=2, val_only=True)
    asyncio.run(run.pipeline.fit())
    assert not run.actor.trained
    assert [row["val/loss"] for row in run.tracker.evaluations] == [3]
    assert "held-out loss of v2: 3.0000 over 6 tokens of 3 rows" in run.out.getvalue()


def test_a_failure_is_raised_as_it_is(tmp_path):
    run = pipeline(tmp_path)

    def fail(step: int) -> None:
        if step == 1:
            raise RoleError("actor 0, update: broken")

    run.actor.on_update = fail
    with pytest.raises(RoleError, match="broken"):
        asyncio.run(run.pipeline.fit())
    assert len(rows_in(tmp_path)) == 1


def test_skipped_updates_end_the_run(tmp_path):
    run = pipeline(tmp_path, max_skipped_updates=3)
    run.actor.skipped_in_a_row = 3
    with pytest.raises(RoleError, match="step 0: 3 updates were skipped in a row"):
        asyncio.run(run.pipeline.fit())
