"""Samples of several versions, with the real engine: what a sync pauses continues as
weight_sync.in_flight says, and whole batches of any age resume exactly."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from one_step_off.config.schema import Config
from one_step_off.data.samples import NOT_GENERATED, Sample
from tests.conftest import tiny_config
from tests.e2e import external_agent
from tests.e2e.rewards import LETTER_SHARE
from tests.e2e.run_folder import (
    assert_same_weights,
    learned_metrics,
    read_rows,
    used_prompts,
)

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(1200)]

ROUNDING = 2e-4
"""Nats between the float32 log-probs of a token by engine and trainer, at most."""

ROUNDING_OF_LORA = 1e-3
"""The same at a high learning rate, which makes the policy sure of few tokens. The log-probs of the
others differed by up to 3.2e-4 in 12,000 tokens. With the weights of another step log-probs differ
by 0.6 in the mean."""


@dataclass
class ScoredBatch:
    """A batch before its update.

    Attributes:
        step: of the run.
        samples: with the engine's log-probs.
        log_probs: of the samples' tokens by the trainer's newest weights, [response length] each.
    """

    step: int
    samples: list[Sample]
    log_probs: list[np.ndarray]


@dataclass
class LogProbDifferences:
    """How far the engine's log-probs are from those of the trainer's newest weights.

    Attributes:
        newest: of the tokens that the engine made with these weights.
        older: of the tokens that it made with older ones.
        newest_after_interruption: how many of the newest continue an interrupted sample.
    """

    newest: list[float] = field(default_factory=list)
    older: list[float] = field(default_factory=list)
    newest_after_interruption: int = 0

    def add(self, step: int, sample: Sample, log_probs: np.ndarray) -> None:
        """Take the policy's tokens of a sample. Fails if their versions are out of range."""
        is_generated = sample.versions != NOT_GENERATED
        versions = sample.versions[is_generated]
        assert max(0, step - 2) <= versions.min()
        assert versions.max() <= step
        assert (np.diff(versions) >= 0).all()
        differences = np.abs(sample.log_probs - log_probs)[is_generated]
        is_newest = versions == step
        self.newest += differences[is_newest].tolist()
        self.older += differences[versions < step].tolist()
        if versions[0] < step:
            self.newest_after_interruption += int(is_newest.sum())


@pytest.fixture
def scored_batches(monkeypatch) -> list[ScoredBatch]:
    """The batches of the runs that follow."""
    from one_step_off import ray_trainer

    batches: list[ScoredBatch] = []
    real_fill_advantages = ray_trainer.fill_advantages

    def record(batch: Any, *arguments: Any) -> Any:
        batches.append(ScoredBatch(batch.step, batch.samples, batch.old_log_probs))
        return real_fill_advantages(batch, *arguments)

    monkeypatch.setattr(ray_trainer, "fill_advantages", record)
    return batches


STEPS = 5
ADAPTERS_APART = {"model.lora_rank": 4, "weight_sync.lora": "adapter", "actor.lr": 3e-2}


@pytest.mark.parametrize(
    ("changes", "rounding"),
    [
        pytest.param({}, ROUNDING, id="all weights", marks=[pytest.mark.slow, pytest.mark.ci]),
        pytest.param(ADAPTERS_APART, ROUNDING_OF_LORA, id="adapters apart", marks=pytest.mark.slow),
        pytest.param(
            {"rollout.engine": "transformers"}, ROUNDING, id="transformers", marks=pytest.mark.slow
        ),
    ],
)
def test_interrupted_samples_continue_with_the_new_weights_and_none_is_dropped(
    models, tmp_path, scored_batches, changes, rounding
):
    """Random models end after any number of tokens. The trainer scores each batch by its newest
    weights. The log-probs of tokens that the engine made with these weights must be alike, also
    after an interruption; those of older tokens must differ. That would fail if the interrupted
    samples kept any of the old weights' KV cache. The engine works on few samples at once, so that
    it takes longer than training, and a sync comes in the middle of a step's samples."""
    from one_step_off.runtime import launch

    settings = {
        "pipeline.staleness": 2,
        "weight_sync.in_flight": "recompute",
        "agent.max_concurrency": 4,
        "data.max_response_length": 384,
        "algorithm.old_log_probs": "recompute",
        "trainer.total_steps": STEPS,
        "actor.lr": 3e-3,
        "reward.function": LETTER_SHARE,
    }
    cfg = tiny_config(models("qwen2", True), str(tmp_path), **settings | changes)
    assert launch.run(cfg) == 0
    differences = LogProbDifferences()
    for batch in scored_batches:
        for sample, log_probs in zip(batch.samples, batch.log_probs, strict=True):
            differences.add(batch.step, sample, log_probs)
    assert differences.newest_after_interruption > 50, (
        "too few tokens after an interruption to tell anything"
    )
    assert max(differences.newest) < rounding
    assert np.mean(differences.older) > 5e-3
    assert len(used_prompts(tmp_path)) == STEPS * 4
    metrics = read_rows(tmp_path, "metrics.jsonl")
    assert max(row["carry/interrupted"] for row in metrics) > 0
    for row in metrics:
        assert row["staleness/max"] <= 2
        shares = [row[f"staleness/age_{age}"] for age in range(3)]
        assert sum(shares) == pytest.approx(1.0)
        for age, share in enumerate(shares):
            assert (f"staleness/ratio_age_{age}" in row) == (share > 0)


@pytest.mark.slow
def test_kept_caches_are_of_older_weights_and_new_requests_do_not_find_them(
    models, tmp_path, scored_batches
):
    """The same few prompts again and again, each longer than a block of the KV cache. Samples that
    the newest weights began have exactly their log-probs, though older weights have computed the
    same prompts; the tail of a paused sample has not, because its KV cache is of older weights.
    Recomputed log-probs and a correction make up for that. The engine works on few samples at once,
    so that it takes longer than training, and a sync comes in the middle of a step's samples."""
    from one_step_off.runtime import launch

    words = "one two three four five six seven eight nine ten eleven twelve"
    rows = [{"question": f"{number} {words} {words}", "answer": "#### 1"} for number in range(6)]
    data = tmp_path / "prompts.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    settings = {
        "data.train_files": str(data),
        "data.val_files": "",
        "data.max_prompt_length": 256,
        "pipeline.staleness": 2,
        "weight_sync.in_flight": "keep",
        "agent.max_concurrency": 4,
        "data.max_response_length": 384,
        "algorithm.old_log_probs": "recompute",
        "algorithm.rollout_correction": "tis",
        "trainer.total_steps": 8,
        "actor.lr": 3e-3,
        "reward.function": LETTER_SHARE,
    }
    assert launch.run(tiny_config(models("qwen2", True), str(tmp_path / "run"), **settings)) == 0
    begun_by_newest: list[float] = []
    after_pause: list[float] = []
    for batch in scored_batches[1:]:  # there is nothing older in the first one
        for sample, log_probs in zip(batch.samples, batch.log_probs, strict=True):
            differences = np.abs(sample.log_probs - log_probs)[sample.versions == batch.step]
            is_new = sample.versions[0] == batch.step
            (begun_by_newest if is_new else after_pause).extend(differences)
            assert len(sample.prompt_ids) > 32
    assert len(begun_by_newest) > 50
    assert len(after_pause) > 50
    assert max(begun_by_newest) < ROUNDING
    assert np.mean(after_pause) > 1e-3
    assert len(used_prompts(tmp_path / "run")) == 8 * 4
    for row in read_rows(tmp_path / "run", "metrics.jsonl"):
        assert row["staleness/max"] <= 2
        assert row["canary/logprob_diff_max"] < 1e-3


def stale_config(model: str, folder: Path) -> Config:
    """Whole batches of ages 1 and 2: a sync at each even step."""
    settings = {
        "pipeline.staleness": 2,
        "trainer.total_steps": 7,
        "trainer.save_freq": 3,
        "trainer.test_freq": 3,
        "trainer.val_before_train": True,
        "reward.function": LETTER_SHARE,
    }
    return tiny_config(model, str(folder), **settings)


@pytest.mark.slow
def test_whole_batches_of_two_ages_resume_exactly(models, tmp_path, monkeypatch):
    """The plug is pulled in step 4, after the checkpoint of step 3, which is between two syncs:
    batches 3 and 4 are in it, made by v2."""
    from one_step_off import ray_trainer
    from one_step_off.runtime import launch

    whole = tmp_path / "whole"
    halves = tmp_path / "halves"
    assert launch.run(stale_config(models(), whole)) == 0
    real_train = ray_trainer.Pipeline._train

    async def fail_in_step_4(self, batch):
        if batch.step == 4:
            raise RuntimeError("pulled the plug")
        return await real_train(self, batch)

    with monkeypatch.context() as patch:
        patch.setattr(ray_trainer.Pipeline, "_train", fail_in_step_4)
        with pytest.raises(RuntimeError, match="pulled the plug"):
            launch.run(stale_config(models(), halves))
    assert launch.run(stale_config(models(), halves)) == 0
    assert read_rows(whole, "ledger.jsonl") == read_rows(halves, "ledger.jsonl")
    assert learned_metrics(whole) == learned_metrics(halves)
    assert_same_weights(whole, halves)
    metrics = read_rows(whole, "metrics.jsonl")
    assert [row["staleness/max"] for row in metrics] == [0, 1, 2, 1, 2, 1, 2]
    assert [row["sync/bytes"] > 0 for row in metrics] == [
        False,
        False,
        True,
        False,
        True,
        False,
        True,
    ]
    assert [row["staleness/age_2"] for row in metrics] == [0, 0, 1, 0, 1, 0, 1]
    evaluated = [row["val/version"] for row in read_rows(whole, "evaluations.jsonl")]
    assert evaluated == [0, 4, 6, 7], "v3 is not in the replicas, so v4 is evaluated in its place"


@pytest.mark.slow
def test_an_agents_episode_that_spans_syncs_is_recorded_per_token(models, tmp_path, scored_batches):
    """Agents that pause between their turns for longer than a step: the turns of an episode come
    from several versions, and each token has the version and the log-prob of the weights that made
    it, though the sample is one conversation."""
    from one_step_off.runtime import launch

    settings = {
        "pipeline.staleness": 2,
        "weight_sync.in_flight": "recompute",
        "data.max_response_length": 128,
        "algorithm.old_log_probs": "recompute",
        "trainer.total_steps": 8,
        "actor.lr": 3e-3,
        "agent.loop": "external",
        "agent.command": f"{external_agent.__name__}:over_several_steps",
        "agent.timeout_s": 60.0,
    }
    assert launch.run(tiny_config(models("qwen2", True), str(tmp_path), **settings)) == 0
    differences = LogProbDifferences()
    turns_of_versions = set()
    for batch in scored_batches:
        for sample, log_probs in zip(batch.samples, batch.log_probs, strict=True):
            differences.add(batch.step, sample, log_probs)
            is_generated = sample.versions != NOT_GENERATED
            assert (sample.loss_mask == is_generated).all()
            turns_of_versions.add(len(np.unique(sample.versions[is_generated])))
    assert max(turns_of_versions) >= 2
    assert differences.newest_after_interruption > 50, (
        "too few tokens after a sync to tell anything"
    )
    assert max(differences.newest) < ROUNDING
    assert np.mean(differences.older) > 5e-3
    assert len(used_prompts(tmp_path)) == 8 * 4
    metrics = read_rows(tmp_path, "metrics.jsonl")
    assert max(row["carry/interrupted"] for row in metrics) > 0
    for row in metrics:
        assert row["agent/errors"] == 0
        assert row["agent/turns/mean"] == 3
        assert row["staleness/max"] <= 2
        assert 0.5 < row["ratio/mean"] < 2
        assert row["ratio/max"] < 100
