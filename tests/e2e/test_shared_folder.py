"""weight_sync.transport=shared_folder with real engines: the same samples and weights, bit for
bit, as over process groups and shared memory."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.conftest import tiny_config
from tests.e2e.run_folder import assert_same_weights, learned_metrics, read_rows

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(900)]

STEPS = 3


def sample_rows(folder: Path) -> list[dict]:
    """All that the run recorded of its samples."""
    all_rows = []
    for step in range(STEPS):
        all_rows += read_rows(folder, f"samples/step_{step:06d}.jsonl")
    return all_rows


def test_a_run_has_the_same_bits_by_any_transport(models, tmp_path):
    """Two replicas and two ranks, all of which send."""
    from one_step_off.runtime import launch

    pools = {"rollout": [2], "actor": [2]}
    settings = {"trainer.total_steps": STEPS, "placement.pools": pools}
    for transport in ("auto", "collective", "shared_folder"):
        changes = settings | {"weight_sync.transport": transport}
        assert launch.run(tiny_config(models(), str(tmp_path / transport), **changes)) == 0
    auto = tmp_path / "auto"
    assert len(sample_rows(auto)) > 0
    for transport in ("collective", "shared_folder"):
        other = tmp_path / transport
        assert learned_metrics(other) == learned_metrics(auto)
        assert sample_rows(other) == sample_rows(auto)
        assert_same_weights(other, auto)
    folder = tmp_path / "shared_folder" / "weight_sync"
    assert sorted(path.name for path in folder.iterdir()) == ["sender_0", "sender_1"]
    assert not list(folder.rglob("*.safetensors")), "messages that all receivers have are deleted"
