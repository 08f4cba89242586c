"""What becomes of the samples of a step: replaced groups, baselines, parts of the reward."""

from __future__ import annotations

import asyncio
import random

import numpy as np
import pytest

from one_step_off.config.errors import ConfigError
from one_step_off.data.staleness import StalenessError
from one_step_off.rollout.sampling import Sampling
from tests.unit.ray_trainer.stand_ins import (
    FakeJudge,
    World,
    build,
    change_samples,
    read_rows,
    train_all,
)


@pytest.mark.parametrize("staleness", [0, 1])
def test_groups_that_score_alike_are_replaced_a_bounded_number_of_times(tmp_path, staleness):
    """Odd rows score alike: no prompt is used twice or skipped, and steps keep their size."""
    world = World(random.Random(0))
    pipeline = build(tmp_path, world, 3, staleness, rows=60)
    pipeline.cfg.algorithm.max_gen_batches = 3
    pipeline.val = None

    def score_odd_rows_alike(purpose, samples):
        for sample in samples:
            is_odd = sample.prompt_id[1] % 2
            sample.reward = 0.0 if is_odd else float(sample.index)

    change_samples(pipeline, score_odd_rows_alike)
    asyncio.run(pipeline.fit())
    ledger = read_rows(tmp_path, "ledger.jsonl")
    used = [tuple(prompt) for row in ledger for prompt in row["prompts"]]
    replaced = [tuple(prompt) for row in ledger for prompt in row.get("replaced", ())]
    assert all(len(row["prompts"]) == 3 for row in ledger)
    assert replaced
    assert all(row % 2 for _, row in replaced)
    twin = build(tmp_path / "twin", World(random.Random(0)), 3, staleness, rows=60)
    drawn = twin.stream.next_batch(len(used) + len(replaced))
    assert sorted(used + replaced) == sorted(prompt.id for prompt in drawn)
    assert len(set(used + replaced)) == len(used + replaced)
    launched = world.begun("generate")
    for step in range(3):
        assert sum(purpose.startswith(f"step {step}") for purpose in launched) <= 3
    assert any("instead of" in purpose for purpose in launched)


def test_greedy_responses_do_not_make_a_group_informative(tmp_path):
    world = World(random.Random(0))
    pipeline = build(tmp_path, world, 2, 1, rows=60)
    pipeline.cfg.algorithm.max_gen_batches = 2
    pipeline.val = None
    pipeline.roles.rollout.train_sampling = Sampling(2, 1.0, 0, greedy=True)

    def reward_only_greedy(purpose, samples):
        for sample in samples:
            sample.reward = float(sample.index == 2)

    change_samples(pipeline, reward_only_greedy)
    asyncio.run(pipeline.fit())
    assert world.begun("generate").count("step 0, instead of 3 prompts") == 1


@pytest.mark.parametrize("judged", [False, True])
@pytest.mark.parametrize("staleness", [0, 1])
def test_greedy_responses_are_baselines_and_nothing_else(tmp_path, staleness, judged):
    pipeline = build(tmp_path, World(random.Random(0)), 3, staleness)
    pipeline.val = None
    pipeline.cfg.algorithm.adv_estimator = "remax"
    # Responses of 3 tokens lose 1 / 2.
    pipeline.cfg.data.max_response_length = 4
    pipeline.cfg.reward.overlong_buffer = 2
    pipeline.roles.rollout.train_sampling = Sampling(2, 1.0, 0, greedy=True)
    pipeline.roles.reward_model = FakeJudge(10.0) if judged else None
    batches = train_all(pipeline)
    assert len(batches) == 3
    # Rewards are indices, the greedy response has index 2; the judge adds ten times the index.
    unit = 11.0 if judged else 1.0
    for batch in batches:
        assert [sample.index for sample in batch.samples] == [0, 1] * 3
        assert [sample.reward for sample in batch.samples] == [0, unit] * 3
        assert {sample.extra["baseline"] for sample in batch.samples} == {2 * unit - 0.5}
        advantages = [set(advantage.tolist()) for advantage in batch.advantages]
        assert advantages == [{-2 * unit}, {-unit}] * 3
    for row in read_rows(tmp_path, "metrics.jsonl"):
        assert row["samples"] == 6
        assert row["reward/mean"] == unit / 2
    assert [len(row["prompts"]) for row in read_rows(tmp_path, "ledger.jsonl")] == [3] * 3


def test_a_greedy_response_of_other_weights_stops_the_run(tmp_path):
    pipeline = build(tmp_path, World(random.Random(0)), 3, 1)
    pipeline.cfg.algorithm.adv_estimator = "remax"
    pipeline.roles.rollout.train_sampling = Sampling(2, 1.0, 0, greedy=True)

    def forge(purpose, samples):
        if purpose == "step 2":
            samples[-1].versions[1] += 1

    change_samples(pipeline, forge)
    with pytest.raises(StalenessError, match="step 2.*sample 2"):
        asyncio.run(pipeline.fit())


def test_the_optimal_token_baseline_reads_the_trainers_own_distribution(tmp_path):
    pipeline = build(tmp_path, World(random.Random(0)), 1, 1)
    pipeline.cfg.algorithm.adv_estimator = "optimal_token_baseline"
    pipeline.val = None
    (batch,) = train_all(pipeline)
    # Rewards 0 and 1; energies t (1 - 2 / e + .4) and t (1 - 2 / e + .5), whose ratio is the same
    # at each t.
    energies = [1 - 2 * np.exp(-1) + square for square in (0.4, 0.5)]
    baseline = energies[1] / sum(energies)
    for sample, advantage in zip(batch.samples, batch.advantages, strict=True):
        np.testing.assert_allclose(advantage, sample.index - baseline, rtol=1e-5)


def give_parts(samples):
    """Parts of the reward: `right` is the index, `form` is 100 for three of the samples."""
    for position, sample in enumerate(samples):
        has_form = position in (0, 3, 5)
        parts = {"right": float(sample.index), "form": 100.0 * has_form}
        sample.extra["reward_parts"] = parts


def test_gdpo_normalizes_the_parts_of_the_reward_one_by_one(tmp_path):
    pipeline = build(tmp_path, World(random.Random(0)), 1, 1)
    pipeline.cfg.algorithm.adv_estimator = "gdpo"
    pipeline.val = None
    change_samples(pipeline, lambda purpose, samples: give_parts(samples))
    (batch,) = train_all(pipeline)
    (row,) = read_rows(tmp_path, "metrics.jsonl")
    assert row["reward/right/mean"] == 0.5
    assert row["reward/form/mean"] == 50.0
    # Each part is -s, s in every group of two; form is against right in the first group and with it
    # in the others.
    s = np.sqrt(0.5)
    sums = np.array([0, 0, -2 * s, 2 * s, -2 * s, 2 * s])
    found = [advantage[0] for advantage in batch.advantages]
    np.testing.assert_allclose(found, sums / sums.std(ddof=1), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("estimator", ["gdpo", "dr_grpo"])
def test_gdpo_needs_every_part_of_every_sample(tmp_path, estimator):
    pipeline = build(tmp_path, World(random.Random(0)), 1, 1)
    pipeline.cfg.algorithm.adv_estimator = estimator
    pipeline.val = None

    def leave_out_a_part(purpose, samples):
        give_parts(samples)
        del samples[-1].extra["reward_parts"]["form"]

    change_samples(pipeline, leave_out_a_part)
    if estimator == "gdpo":
        with pytest.raises(ConfigError, match="gdpo: sample 5, of prompt .* has no part 'form'"):
            asyncio.run(pipeline.fit())
        return
    train_all(pipeline)
    (row,) = read_rows(tmp_path, "metrics.jsonl")
    assert row["reward/right/mean"] == 0.5
    assert row["reward/form/mean"] == 40.0, "of those that have it"


@pytest.mark.parametrize("estimator", ["gdpo", "dr_grpo"])
def test_gdpo_needs_rewards_in_parts(tmp_path, estimator):
    pipeline = build(tmp_path, World(random.Random(0)), 1, 1)
    pipeline.cfg.algorithm.adv_estimator = estimator
    pipeline.val = None
    if estimator == "gdpo":
        with pytest.raises(ConfigError, match="gdpo: needs rewards in parts"):
            asyncio.run(pipeline.fit())
    else:
        assert len(train_all(pipeline)) == 1
