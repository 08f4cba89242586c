"""Batches with samples in error: dropped groups, samples with reward 0, empty batches."""

from __future__ import annotations

import asyncio
import io
import itertools
import random
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from one_step_off.algorithms.advantages import ADVANTAGE_ESTIMATORS, estimate_advantages
from one_step_off.algorithms.trajectories import Options, Trajectories
from one_step_off.cluster.errors import RoleError
from one_step_off.data.samples import FAULT_METRICS, Batch, Prompt
from one_step_off.monitoring.tracker import Tracker
from one_step_off.ray_trainer import Pipeline
from one_step_off.rollout.sampling import Sampling
from tests.unit.ray_trainer.stand_ins import (
    FakeJudge,
    World,
    build,
    change_samples,
    make_sample,
    read_rows,
    train_all,
)


def with_faults(pipeline: Pipeline, is_faulty: Any, fault: str = "reward/errors") -> Pipeline:
    """Put errors into the samples for which is_faulty(number of the call, row, index)."""
    calls = itertools.count()

    def add_faults(purpose, samples):
        call = next(calls)
        for sample in samples:
            if is_faulty(call, sample.prompt_id[1], sample.index):
                sample.reward = 0.0
                sample.extra |= {"fault": fault, "error": "on purpose"}

    change_samples(pipeline, add_faults)
    pipeline.val = None
    return pipeline


def tiny_sample(row: int, index: int):
    return make_sample(Prompt((0, row), np.arange(2, dtype=np.int32), "", ""), index, 0)


def batches_with_faulty_row(folder, estimator, staleness, judged, faulty_row):
    """Two steps, with an error in the first sample of a row."""
    pipeline = build(folder, World(random.Random(0)), 2, staleness)
    algorithm = pipeline.cfg.algorithm
    algorithm.adv_estimator = estimator
    algorithm.whiten_adv = False
    algorithm.old_log_probs = "recompute"
    pipeline.cfg.reward.on_error = "drop"
    greedy = estimator == "remax"
    pipeline.roles.rollout.train_sampling = Sampling(2, 1.0, 0, greedy=greedy)
    if judged:
        pipeline.roles.reward_model = FakeJudge()
    with_faults(pipeline, lambda call, row, index: row == faulty_row and index == 0)
    return train_all(pipeline)


@pytest.mark.parametrize("judged", [False, True])
@pytest.mark.parametrize("staleness", [0, 1])
@pytest.mark.parametrize(
    "estimator",
    ["grpo", "rloo", "gpg", "remax", "optimal_token_baseline", "reinforce_plus_plus", "gdpo"],
)
def test_a_dropped_group_leaves_the_others_as_they_were(tmp_path, estimator, staleness, judged):
    """The same run, with a dropped group and without: what is left has the same advantages, and the
    ledger names the dropped group."""
    if estimator == "gdpo" and not judged:
        pytest.skip("it needs parts")
    given = (estimator, staleness, judged)
    whole_batches = batches_with_faulty_row(tmp_path / "whole", *given, faulty_row=-1)
    less_batches = batches_with_faulty_row(tmp_path / "less", *given, faulty_row=3)
    dropped_groups = 0
    for whole, less in zip(whole_batches, less_batches, strict=True):
        stays = [sample.prompt_id[1] != 3 for sample in whole.samples]
        dropped_groups += not all(stays)
        left = list(itertools.compress(whole.samples, stays))
        assert [s.prompt_id for s in less.samples] == [s.prompt_id for s in left]
        assert sorted(less.prompt_order()) == sorted(whole.prompt_order())
        normalized_over_the_batch = estimator in ("gpg", "gdpo")
        if not normalized_over_the_batch:
            expected = itertools.compress(whole.advantages, stays)
            for found, wanted in zip(less.advantages, expected, strict=True):
                np.testing.assert_array_equal(found, wanted)
        assert len(less.old_log_probs) == len(less.advantages) == len(less.samples)
        assert all(sample.extra["dropped"] for sample in less.dropped)
        assert all(np.isfinite(advantage).all() for advantage in less.advantages)
    assert dropped_groups
    metrics = read_rows(tmp_path / "less", "metrics.jsonl")
    ledger = read_rows(tmp_path / "less", "ledger.jsonl")
    for row, entry in zip(metrics, ledger, strict=True):
        dropped = [prompt for prompt in entry["prompts"] if prompt[1] == 3]
        assert row["samples/dropped_groups"] == len(dropped) == row["reward/errors"]
        assert entry.get("dropped", []) == dropped
        assert row["samples"] == 6 - 2 * len(dropped)


def test_zero_counts_and_marks_but_keeps_the_group(tmp_path):
    pipeline = build(tmp_path, World(random.Random(0)), 2, 1)
    pipeline.cfg.reward.on_error = "zero"
    with_faults(pipeline, lambda call, row, index: index == 1 and call == 0, "agent/errors")
    batches = train_all(pipeline)
    assert [len(batch.samples) for batch in batches] == [6, 6]
    assert all(sample.reward == 0 for sample in batches[0].samples)
    metrics = read_rows(tmp_path, "metrics.jsonl")
    assert [row["agent/errors"] for row in metrics] == [3, 0]
    assert [row["samples/dropped_groups"] for row in metrics] == [0, 0]
    assert pipeline.tracker.summary()["agent/errors"] == 3


def test_zero_gives_gdpo_parts_of_zero(tmp_path):
    pipeline = build(tmp_path, World(random.Random(0)), 1, 1)
    pipeline.cfg.algorithm.adv_estimator = "gdpo"
    pipeline.cfg.reward.on_error = "zero"
    with_faults(pipeline, lambda call, row, index: index == 1)

    def give_parts(purpose, samples):
        for sample in samples:
            if "error" not in sample.extra:
                sample.extra["reward_parts"] = {"right": 1.0, "form": 0.5}

    change_samples(pipeline, give_parts)
    (batch,) = train_all(pipeline)
    for sample, advantage in zip(batch.samples, batch.advantages, strict=True):
        assert np.sign(advantage[0]) == (1 if sample.index == 0 else -1)


@pytest.mark.parametrize("staleness", [0, 1])
def test_an_empty_step_counts_and_changes_nothing(tmp_path, staleness):
    pipeline = build(tmp_path, World(random.Random(0)), 4, staleness, test_freq=1)
    pipeline.cfg.reward.on_error = "drop"
    actor: Any = pipeline.roles.actor
    update = actor.update
    updates = []

    async def recorded(batch, learn=True):
        updates.append((batch.step, learn, len(batch.samples)))
        return await update(batch, learn)

    actor.update = recorded
    asyncio.run(with_faults(pipeline, lambda call, row, index: call == 1).fit())
    assert updates == [(0, True, 6), (1, False, 0), (2, True, 6), (3, True, 6)]
    metrics = read_rows(tmp_path, "metrics.jsonl")
    assert [row["step"] for row in metrics] == [0, 1, 2, 3]
    assert metrics[1]["reward/mean"] is None
    assert metrics[1]["samples/dropped_groups"] == 3
    assert metrics[2]["staleness/max"] == staleness
    ages = [row[f"staleness/age_{staleness}"] for row in metrics]
    assert ages[1:] == [None, 1.0, 1.0], "of the tokens that are trained"
    again = Tracker(str(tmp_path), 4, out=io.StringIO())
    again.start(4)
    # None in an earlier run's row is left out.
    assert again.summary()["reward/last"] == pytest.approx(0.5)


def test_a_run_whose_batches_are_always_empty_ends_by_name(tmp_path):
    pipeline = build(tmp_path, World(random.Random(0)), 40, 1)
    pipeline.cfg.reward.on_error = "drop"
    pipeline.cfg.trainer.max_skipped_updates = 3
    words = r"step 2: 3 updates were skipped in a row \(trainer.max_skipped_updates=3\): all groups"
    with pytest.raises(RoleError, match=words):
        asyncio.run(with_faults(pipeline, lambda *_: True).fit())


def test_dynamic_sampling_leaves_groups_with_errors_to_be_dropped_and_seen(tmp_path):
    pipeline = build(tmp_path, World(random.Random(0)), 2, 1, rows=60)
    pipeline.cfg.algorithm.max_gen_batches = 3
    pipeline.cfg.reward.on_error = "drop"
    batches = train_all(with_faults(pipeline, lambda call, row, index: row % 3 == 0))
    assert sum(len(batch.dropped) for batch in batches)
    assert all(sample.prompt_id[1] % 3 for batch in batches for sample in batch.samples)
    assert all(len(row["prompts"]) == 3 for row in read_rows(tmp_path, "ledger.jsonl"))


def test_the_ledger_names_what_a_dropped_group_had_replaced(tmp_path):
    """Odd rows score alike, and the groups in place of them have errors."""
    pipeline = build(tmp_path, World(random.Random(0)), 3, 1, rows=60)
    pipeline.cfg.algorithm.max_gen_batches = 2
    pipeline.cfg.reward.on_error = "drop"
    pipeline.val = None

    def change(purpose, samples):
        for sample in samples:
            if "instead of" in purpose:
                sample.extra |= {"fault": "reward/errors", "error": "on purpose"}
            elif sample.prompt_id[1] % 2:
                sample.reward = 1.0

    change_samples(pipeline, change)
    asyncio.run(pipeline.fit())
    ledger = read_rows(tmp_path, "ledger.jsonl")
    used = [tuple(prompt) for row in ledger for prompt in row["prompts"]]
    dropped = [tuple(prompt) for row in ledger for prompt in row.get("dropped", ())]
    replaced = [tuple(prompt) for row in ledger for prompt in row.get("replaced", ())]
    assert len(replaced) == len(dropped) > 0
    twin = build(tmp_path / "twin", World(random.Random(0)), 3, 1, rows=60)
    drawn = twin.stream.next_batch(len(used) + len(replaced))
    assert sorted(used + replaced) == sorted(prompt.id for prompt in drawn)


@given(st.data())
@settings(max_examples=30)
def test_drop_removes_what_belongs_to_each_sample(data):
    groups = data.draw(st.lists(st.integers(0, 4), min_size=1, max_size=12))
    faulty = data.draw(st.sets(st.integers(0, 4)))
    samples = [tiny_sample(row, i) for i, row in enumerate(groups)]
    columns = [np.full(3, i, np.float32) for i in range(len(groups))]
    batch = Batch(0, samples, (0, 0), advantages=list(columns), values=list(columns))
    batch.drop({(0, row) for row in faulty})
    left = [i for i, row in enumerate(groups) if row not in faulty]
    assert [sample.index for sample in batch.samples] == left
    assert batch.old_log_probs is None
    assert [int(advantage[0]) for advantage in batch.advantages] == left
    assert [int(value[0]) for value in batch.values] == left
    assert {sample.index for sample in batch.dropped} == set(range(len(groups))) - set(left)
    assert set(batch.prompt_order()) == {(0, row) for row in groups}
    # The samples of a checkpoint are not changed.
    assert not any("dropped" in sample.extra for sample in samples)


@pytest.mark.parametrize("name", list(ADVANTAGE_ESTIMATORS))
def test_every_estimator_takes_samples_without_tokens(name):
    """A sample whose agent loop failed has none."""
    lengths = [3, 0, 0, 2]
    rewards = np.array([1.0, 0.0, 0.0, 0.5])
    columns = [np.full(length, -0.5, np.float32) for length in lengths]
    trajectories = Trajectories(
        rewards,
        ["a", "a", "b", "b"],
        [np.ones(length, bool) for length in lengths],
        values=columns,
        parts={"x": rewards},
        baselines=np.zeros(4),
        log_probs=columns,
        prob_squares=[-column for column in columns],
    )
    found, _ = estimate_advantages(name, trajectories, Options())
    assert [len(advantage) for advantage in found] == lengths
    assert all(np.isfinite(advantage).all() for advantage in found)


def test_the_faults_are_metrics_from_the_first_step(tmp_path):
    asyncio.run(build(tmp_path, World(random.Random(0)), 1, 1).fit())
    (row,) = read_rows(tmp_path, "metrics.jsonl")
    for name in (*FAULT_METRICS, "samples/dropped_groups"):
        assert row[name] == 0
