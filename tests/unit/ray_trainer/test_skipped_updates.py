"""Skipped optimizer steps: the batches that are kept for --replay, and batches that are torn."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from one_step_off.checkpoint.files import read_batch, write_batch
from one_step_off.cluster.errors import RoleError
from one_step_off.config.errors import ConfigError
from one_step_off.data.samples import Batch, Sample
from one_step_off.main_ppo import main
from one_step_off.tools.replay import describe_quantities
from tests.unit.ray_trainer.stand_ins import World, build


class SkippingActor:
    """An actor whose loss is not finite in some steps."""

    def __init__(self, world: World, skips: Any) -> None:
        self.world = world
        self.skips = skips
        self.skipped_in_a_row = 0

    async def update(self, batch, learn=True):
        while self.world.engine_version != self.world.version:
            await asyncio.sleep(0)
        self.world.version += 1
        skipped = self.skips(batch.step)
        self.skipped_in_a_row = self.skipped_in_a_row + 1 if skipped else 0
        return {
            "actor/skipped_updates": float(skipped),
            "actor/skipped_in_a_row": float(self.skipped_in_a_row),
        }


def make_samples() -> list[Sample]:
    """Two groups of two samples, one of which has no tokens."""
    samples = []
    for i, length in enumerate((3, 0, 1, 5)):
        samples.append(
            Sample(
                (0, i // 2),
                i,
                np.arange(2, dtype=np.int32),
                response_ids=np.arange(length, dtype=np.int32),
                log_probs=np.zeros(length, np.float32),
                loss_mask=np.ones(length, bool),
                versions=np.zeros(length, np.int32),
                reward=float(i),
            )
        )
    return samples


def test_skipped_updates_are_kept_for_replay_and_bounded(tmp_path):
    world = World(random.Random(0))
    pipeline = build(tmp_path, world, 30, 1)
    pipeline.val = None
    pipeline.cfg.trainer.max_skipped_updates = 4
    roles: Any = pipeline.roles
    roles.actor = SkippingActor(world, lambda step: step % 4 in (1, 2, 3) or step > 20)
    words = r"step 24: 4 updates were skipped in a row \(trainer.max_skipped_updates=4\): a loss or"
    with pytest.raises(RoleError, match=words):
        asyncio.run(pipeline.fit())
    kept = sorted(path.name for path in (tmp_path / "skipped").iterdir())
    assert kept == [f"step_{step:06d}" for step in (1, 2, 3, 5, 6)], "the first few"
    batch = read_batch(tmp_path / "skipped" / "step_000003")
    assert batch.step == 3
    assert batch.expected_stamp == (0, 2)
    assert len(batch.samples) == 6 == len(batch.advantages)


def test_a_batch_is_read_as_it_was_written(tmp_path):
    samples = make_samples()
    samples[1].extra = {"error": "why", "agent": {"turns": 2.0}}
    rng = np.random.default_rng(0)
    advantages = [rng.normal(size=len(s.response_ids)).astype(np.float32) for s in samples]
    advantages[3][2] = np.nan
    values = [-advantage for advantage in advantages]
    write_batch(Batch(12, samples, (1, 11), advantages=advantages, values=values), tmp_path / "b")
    again = read_batch(tmp_path / "b")
    assert again.step == 12
    assert again.expected_stamp == (1, 11)
    assert again.returns is None
    assert again.ref_log_probs is None
    for found, wanted in zip(again.advantages, advantages, strict=True):
        np.testing.assert_array_equal(found, wanted)
        assert found.dtype == wanted.dtype
    assert again.samples[1].extra == samples[1].extra
    assert again.samples[3].prompt_id == (0, 1)


@pytest.mark.parametrize("name", ["", "none"])
def test_a_folder_without_a_batch_is_refused(tmp_path, name):
    with pytest.raises(ConfigError, match="--replay .*: no batch: .*skipped/step_000012"):
        read_batch(tmp_path / name)


def cut_off(path: Path, begin: int | None, end: int | None) -> None:
    path.write_bytes(path.read_bytes()[begin:end])


def flip_a_byte(path: Path) -> None:
    """Change a byte in the first array."""
    content = bytearray(path.read_bytes())
    content[content.index(b"NUMPY") + 130] ^= 255
    path.write_bytes(bytes(content))


def drop_first_line(path: Path) -> None:
    path.write_text(path.read_text().partition("\n")[2])


TORN = {
    "no batch.npz": lambda b: (b / "batch.npz").unlink(),
    "batch.npz cut off": lambda b: cut_off(b / "batch.npz", None, -200),
    "samples.npz cut off": lambda b: cut_off(b / "samples.npz", None, 200),
    "a flipped byte": lambda b: flip_a_byte(b / "batch.npz"),
    "no stamp": lambda b: np.savez(b / "batch.npz", advantages=np.zeros(9)),
    "an unknown array": lambda b: np.savez(b / "batch.npz", stamp=(1, 0, 0), other=np.zeros(9)),
    "rows of other fields": lambda b: (b / "samples.jsonl").write_text(
        '{"prompt_id": [0, 1]}\n' * 4
    ),
    "rows that are none": lambda b: (b / "samples.jsonl").write_text("3\n" * 4),
    "a row too few": lambda b: drop_first_line(b / "samples.jsonl"),
}


@pytest.mark.parametrize("tear", TORN.values(), ids=TORN.keys())
def test_a_torn_batch_is_refused_in_one_line(tear, tmp_path, capsys):
    samples = make_samples()
    advantages = [np.ones(len(sample.response_ids), np.float32) for sample in samples]
    folder = tmp_path / "b"
    write_batch(Batch(12, samples, (1, 11), advantages=advantages), folder)
    tear(folder)
    keys = [
        "model.path=tiny:qwen2",
        "data.train_files=generator:word_problems",
        "trainer.total_steps=1",
        "placement.device=cpu",
        f"trainer.output_dir={tmp_path}/out",
    ]
    assert main([*keys, "--replay", str(folder)]) == 2
    line = capsys.readouterr().err.removesuffix("\n")
    assert line.startswith(f"error: --replay {folder}: no batch: ")
    assert "\n" not in line
    assert line.endswith("; name a folder such as OUTPUT_DIR/skipped/step_000012")


def test_a_replay_names_the_tokens():
    first, _, _, second = make_samples()
    first.index = 0
    second.index = 1
    samples = [first, second]
    for sample, reward in zip(samples, (0.0, 1.0), strict=True):
        sample.prompt_id = (0, 0)
        sample.response_ids = np.arange(3, dtype=np.int32)
        sample.loss_mask = np.ones(3, bool)
        sample.reward = reward
    first.loss_mask[0] = False  # what is not trained on is not reported
    ratios = [np.array([np.nan, 1.0, -2.0]), np.array([np.inf, 0.0, 5.0])]
    values = {
        "ratio": ratios,
        "good": [np.zeros(3), np.ones(3)],
        "all bad": [np.full(3, np.nan)] * 2,
    }
    lines = describe_quantities(samples, values)
    assert lines[0] == "ratio: 1 of 5 trained tokens are not finite"
    assert lines[1:4] == [
        "  inf at prompt (0, 0), sample 1 (reward 1), token 0",
        "  -2 at prompt (0, 0), sample 0 (reward 0), token 2",
        "  5 at prompt (0, 0), sample 1 (reward 1), token 2",
    ]
    assert lines[-4] == "all bad: 5 of 5 trained tokens are not finite"
    assert len(lines) == 4 + 3 + 4
