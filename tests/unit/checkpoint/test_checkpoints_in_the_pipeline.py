"""Checkpoints beside the pipeline: what training waits for, and what the end of a run waits for."""

from __future__ import annotations

import asyncio
import datetime
import json
import random
import re
from pathlib import Path

import pytest

from one_step_off import checkpoint
from one_step_off.config.errors import ConfigError
from one_step_off.ray_trainer import Stopped
from tests.unit.ray_trainer.stand_ins import World, build


def running(tmp_path: Path, write_s: float, steps: int = 6, fail_at: int = -1, stop_at: int = -1):
    """A pipeline of stand-ins with a checkpoint at each step, and notes of what began and ended."""
    pipeline = build(tmp_path, World(random.Random(0), longest=0.01), steps, 1)
    notes = []
    pipeline.cfg.trainer.save_freq = 1
    pipeline.cfg.trainer.output_dir = str(tmp_path)

    async def copied(folder: str) -> asyncio.Future:
        step = int(re.search(r"step_(\d+)", folder)[1])
        notes.append(("copied", step))
        if step == stop_at:
            pipeline.stopping = True

        async def written() -> None:
            await asyncio.sleep(write_s)
            notes.append(("written", step))
            if step == fail_at:
                raise OSError(28, "No space left on device")

        return asyncio.ensure_future(written())

    pipeline.checkpointer = checkpoint.Checkpointer(pipeline.cfg, copied)
    update = pipeline.roles.actor.update

    async def noted(batch, learn=True):
        found = await update(batch, learn)
        notes.append(("trained", batch.step))
        return found

    pipeline.roles.actor.update = noted
    return pipeline, notes


@pytest.mark.parametrize("save_freq", [-1, 1000])
@pytest.mark.parametrize(
    ("value", "words"),
    [
        (
            datetime.date(2026, 1, 1),
            r"extra\.note.when=datetime.date\(2026, 1, 1\) is a datetime.date",
        ),
        ({1, 2}, r"extra\.note.when=\{1, 2\} is a builtins.set"),
        ({3: "x"}, r"extra\.note.when: the key 3 is no text"),
    ],
)
def test_what_no_checkpoint_can_hold_ends_the_first_step_by_name(tmp_path, save_freq, value, words):
    """Whatever put it there, and long before the first checkpoint."""
    pipeline, notes = running(tmp_path, write_s=0.0)
    pipeline.cfg.trainer.save_freq = save_freq
    generate = pipeline.roles.rollout.generate

    async def with_note(*args, **kwargs):
        samples, seconds = await generate(*args, **kwargs)
        samples[0].extra["note"] = {"when": value}
        return samples, seconds

    pipeline.roles.rollout.generate = with_note
    where = rf"checkpoints in .* cannot be written: .*sample 0 of prompt \(0, \d+\)\.{words}"
    with pytest.raises(ConfigError, match=where):
        asyncio.run(pipeline.fit())
    assert notes == []


def test_a_folder_that_cannot_be_written_ends_the_first_step(tmp_path):
    pipeline, notes = running(tmp_path, write_s=0.0)
    (tmp_path / "checkpoints").write_text("a file, and no folder")
    with pytest.raises(ConfigError, match="checkpoints in .*/checkpoints cannot be written"):
        asyncio.run(pipeline.fit())
    assert notes == []


def test_the_trial_leaves_nothing(tmp_path):
    pipeline, _ = running(tmp_path, write_s=0.0)
    asyncio.run(pipeline.fit())
    assert all(path.name.startswith("step_") for path in (tmp_path / "checkpoints").iterdir())


def test_one_is_written_beside_the_next_step_and_the_end_waits_for_the_last(tmp_path):
    pipeline, notes = running(tmp_path, write_s=0.2)
    said: list[str] = []
    pipeline.tracker.log = said.append
    asyncio.run(pipeline.fit())
    for step in range(1, 6):
        assert notes.index(("trained", step)) < notes.index(("written", step)), (
            f"step {step} trained while its checkpoint was written"
        )
    of_checkpoints = [(what, step) for what, step in notes if what != "trained"]
    assert of_checkpoints == [
        (what, step) for step in range(1, 7) for what in ("copied", "written")
    ], "one at a time"
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert "checkpoint/stall_s" not in rows[0]
    assert all("checkpoint/stall_s" in row for row in rows[1:])
    later = [row for row in rows if "checkpoint/write_s" in row]
    assert later
    for row in later:
        assert row["checkpoint/write_s"] >= 0.2
        assert row["checkpoint/bytes"] > 0
    first = later[0]
    assert rows[1]["checkpoint/stall_s"] < first["checkpoint/write_s"], (
        "it waited for the copy alone"
    )
    found = checkpoint.finished(tmp_path / "checkpoints")[-1]
    assert found.name == "step_000006"
    assert checkpoint.read_state(found)["incarnation"] == 0
    assert re.search(
        r"checkpoint of step 6 in .*step_000006 \(0.0 MB in \d\.\d+ s, training waited \d\.\d+ s\)",
        said[-1],
    )


def test_a_stop_waits_until_the_checkpoint_is_written(tmp_path):
    pipeline, notes = running(tmp_path, write_s=0.2, stop_at=2)
    with pytest.raises(Stopped):
        asyncio.run(pipeline.fit())
    newest = checkpoint.finished(tmp_path / "checkpoints")[-1].name
    assert newest == "step_000002"
    assert notes[-1] == ("written", 2)


def test_a_write_that_fails_ends_the_run_and_the_older_ones_stay(tmp_path):
    pipeline, notes = running(tmp_path, write_s=0.05, steps=9, fail_at=3)
    with pytest.raises(OSError, match="No space left on device"):
        asyncio.run(pipeline.fit())
    assert [p.name for p in checkpoint.finished(tmp_path / "checkpoints")] == [
        "step_000001",
        "step_000002",
    ]
    assert ("trained", 8) not in notes
