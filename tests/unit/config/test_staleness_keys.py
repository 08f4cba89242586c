"""The keys of staleness: which fit together, and the schedule that they make."""

from __future__ import annotations

import pytest

from one_step_off.config.errors import ConfigError
from one_step_off.config.schema import Config
from one_step_off.config.sync_schedule import (
    is_sync_step,
    last_begun_batch,
    prompts_allowed,
    sync_period,
    version_of_batch,
)
from one_step_off.runtime.validation import validate
from tests.conftest import tiny_config


@pytest.mark.parametrize(
    ("keys", "fix"),
    [
        (
            {"weight_sync.in_flight": "keep", "pipeline.staleness": 0},
            "weight_sync.in_flight=keep: .*set that to 1 or more",
        ),
        (
            {
                "pipeline.staleness": 4,
                "trainer.test_freq": 6,
                "trainer.save_freq": 6,
                "trainer.keep_best": "val/reward",
                "trainer.val_before_train": True,
            },
            "trainer.test_freq=6: .*use a multiple of 4",
        ),
        ({"pipeline.staleness": 17}, "pipeline.staleness=17: must be at most 16"),
    ],
)
def test_keys_that_do_not_fit_are_refused(models, tmp_path, keys, fix):
    with pytest.raises(ConfigError, match=fix):
        validate(tiny_config(models("qwen2", True), str(tmp_path), **keys), 0)


def schedule(staleness: int, steps: int) -> list[tuple[int, int]]:
    """The steps with a sync, each with the newest batch that begins there."""
    cfg = Config()
    cfg.pipeline.staleness = staleness
    return [(step, last_begun_batch(cfg, step)) for step in range(steps) if is_sync_step(cfg, step)]


def test_a_sync_begins_as_many_batches_as_the_inequality_allows():
    assert schedule(0, 3) == [(0, 0), (1, 1), (2, 2)]
    assert schedule(1, 3) == [(0, 1), (1, 2), (2, 3)]
    assert schedule(3, 8) == [(0, 3), (3, 6), (6, 9)]
    for staleness in range(17):
        cfg = Config()
        cfg.pipeline.staleness = staleness
        for version, last_begun in schedule(staleness, 40):
            begun = (last_begun + 1) * cfg.data.train_batch_size
            assert begun == prompts_allowed(cfg, version), "neither more nor less"


def test_the_schedule_names_the_weights_of_each_batch():
    for staleness in range(17):
        cfg = Config()
        cfg.pipeline.staleness = staleness
        assert version_of_batch(cfg, 0) == 0
        last_begun_before = -1
        for version, last_begun in schedule(staleness, 40):
            for step in range(last_begun_before + 1, last_begun + 1):
                assert version_of_batch(cfg, step) == version
            last_begun_before = last_begun


def test_a_pool_gets_weights_at_each_step():
    cfg = Config()
    cfg.pipeline.staleness = 4
    cfg.weight_sync.in_flight = "recompute"
    assert sync_period(cfg) == 1
    assert prompts_allowed(cfg, 2) == 448, "(2 + 1 + 4) * 64"
