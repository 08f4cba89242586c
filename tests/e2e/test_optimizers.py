"""Runs with each optimizer: they learn, and a run that is resumed has the same bits."""

from __future__ import annotations

import pytest

from tests.conftest import tiny_config
from tests.e2e.run_folder import assert_same_weights, learned_metrics, read_rows

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.mark.parametrize(
    ("optimizer", "kwargs"),
    [
        ("muon", {"momentum": 0.9}),
        ("adamw_8bit", {}),
        ("tests.unit.training.own_optimizers:Lion", {}),
    ],
    ids=["muon", "adamw_8bit", "own"],
)
def test_three_steps_and_two_and_one(models, tmp_path, optimizer, kwargs):
    if optimizer == "adamw_8bit":
        pytest.importorskip("torchao", reason="torchao is not installed (the extra)")
    from one_step_off.runtime import launch

    def settings(folder, **changes):
        keys = {
            "actor.optimizer": optimizer,
            "actor.optimizer_kwargs": kwargs,
            "trainer.save_freq": 2,
            "data.val_files": "",
        }
        return tiny_config(models(), str(tmp_path / folder), **keys, **changes)

    assert launch.run(settings("whole")) == 0
    rows = read_rows(tmp_path / "whole", "metrics.jsonl")
    assert [row["step"] for row in rows] == [0, 1, 2]
    assert all(row["actor/skipped_updates"] == 0 for row in rows)
    assert rows[-1]["canary/logprob_diff_max"] < 1e-3
    checkpoint = tmp_path / "whole" / "checkpoints" / "step_000002"
    resumed = settings("resumed", **{"trainer.resume": str(checkpoint)})
    assert launch.run(resumed) == 0
    assert [row["step"] for row in read_rows(tmp_path / "resumed", "metrics.jsonl")] == [2]
    assert learned_metrics(tmp_path / "whole")[2:] == learned_metrics(tmp_path / "resumed")
    assert_same_weights(tmp_path / "whole", tmp_path / "resumed")
