"""weight_sync.overlap decides when the trainer works, and nothing else: whatever it chooses, the
samples and the weights are the same bits."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from one_step_off.weight_sync import overlap
from tests.conftest import tiny_config
from tests.e2e.run_folder import assert_same_weights, learned_metrics, read_rows

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(400)]

STEPS = 12


def sample_rows(folder: Path) -> list[dict]:
    """All that the run recorded of its samples: texts, versions, rewards, advantages."""
    rows = []
    for step in range(STEPS):
        rows += read_rows(folder, f"samples/step_{step:06d}.jsonl")
    return rows


def test_a_run_that_changes_between_the_settings_has_the_bits_of_both(
    models, tmp_path, monkeypatch
):
    """Each decision is the opposite of the one before. Three steps come between two decisions."""
    from one_step_off.runtime import launch

    shares = itertools.cycle([1.0, 0.0])
    monkeypatch.setattr(overlap, "hidden_share", lambda steps: next(shares))
    for setting in ("auto", "true", "false"):
        changes = {"weight_sync.overlap": setting, "trainer.total_steps": STEPS}
        assert launch.run(tiny_config(models(), str(tmp_path / setting), **changes)) == 0

    overlapped = {
        setting: [row["sync/overlapped"] for row in read_rows(tmp_path / setting, "metrics.jsonl")]
        for setting in ("auto", "true", "false")
    }
    assert overlapped["auto"] == [0.0] * 4 + [1.0] * 3 + [0.0] * 3 + [1.0] * 2
    assert overlapped["true"] == [1.0] * STEPS
    assert overlapped["false"] == [0.0] * STEPS
    for setting in ("true", "false"):
        for content in (learned_metrics, sample_rows):
            assert content(tmp_path / "auto") == content(tmp_path / setting)
        assert_same_weights(tmp_path / "auto", tmp_path / setting)
    assert len(sample_rows(tmp_path / "auto")) == STEPS * 16
