"""What every role computes from packed batches is what it computes from padded ones."""

from __future__ import annotations

import numpy as np
import pytest

from one_step_off.algorithms import batching
from one_step_off.training.fsdp.fsdp_workers import PolicyWorker, RewardModelWorker
from tests.unit.training.fsdp_helpers import (
    MODELS,
    OBJECTIVES,
    Recorder,
    RecordingCritic,
    assert_gradients_equal,
    config,
    make_batch,
)

PACKINGS = ("off", "on")


def ragged(path, seed):
    return make_batch(path, prompts=5, n=2, seed=seed)


def worker_of(start_single, packing, role, cls, path, **changes):
    """A worker whose batches make several micro-batches."""
    settings = {"actor__packing": packing, "actor__micro_batch_tokens": 60} | changes
    worker = start_single(config(path, **settings), role=role, cls=cls)
    assert worker.packed == (packing == "on")
    return worker


def assert_same_arrays(found, wanted):
    assert len(found) == len(wanted)
    for i in range(len(wanted)):
        np.testing.assert_allclose(found[i], wanted[i], rtol=1e-6, atol=1e-6)


def assert_same_metrics(found, wanted):
    """All but times."""
    for name, value in wanted.items():
        if not name.endswith("_s"):
            assert found[name] == pytest.approx(value, rel=2e-6, abs=1e-6), name


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", MODELS)
def test_the_actor_trains_alike(model_folders, start_single, name, seed):
    """Loss, entropy, KL, ratios and gradients."""
    path = model_folders[name]
    objective = OBJECTIVES["sequences" if seed == 2 else "everything"]
    gradients = {}
    metrics = {}
    for packing in PACKINGS:
        worker = worker_of(start_single, packing, "actor", Recorder, path, **objective)
        metrics[packing] = worker.update(ragged(path, seed))
        gradients[packing] = worker.gradients
    assert_gradients_equal(gradients["on"], gradients["off"])
    assert_same_metrics(metrics["on"], metrics["off"])


def test_the_reference_scores_alike(model_folders, start_single):
    """Log-probs, sums of squared probabilities, and the canary's scores."""
    path = model_folders["untied"]
    batch = ragged(path, 4)
    sequences = [s.response_ids for s in batch.samples]
    squares = {}
    scores = {}
    for packing in PACKINGS:
        worker = worker_of(start_single, packing, "ref", PolicyWorker, path)
        squares[packing] = worker.log_prob_and_squares(batch)
        scores[packing] = worker.score(sequences)
    assert_same_arrays(squares["on"], squares["off"])
    assert_same_arrays(scores["on"], scores["off"])


def test_the_critic_trains_alike(model_folders, start_single):
    path = model_folders["tied"]
    batch = ragged(path, 5)
    rng = np.random.default_rng(0)
    lengths = [len(s.response_ids) for s in batch.samples]
    batch.values = [rng.normal(0, 1, length).astype(np.float32) for length in lengths]
    batch.returns = [rng.normal(0, 1, length).astype(np.float32) for length in lengths]
    values = {}
    gradients = {}
    metrics = {}
    for packing in PACKINGS:
        worker = worker_of(start_single, packing, "critic", RecordingCritic, path)
        values[packing] = worker.values(batch)
        metrics[packing] = worker.update(batch)
        gradients[packing] = worker.gradients
    assert_same_arrays(values["on"], values["off"])
    assert_gradients_equal(gradients["on"], gradients["off"])
    assert_same_metrics(metrics["on"], metrics["off"])


def test_the_reward_model_scores_alike(model_folders, judge, start_single):
    sequences = [s.response_ids for s in ragged(model_folders["tied"], 6).samples]
    scores = {}
    for packing in PACKINGS:
        worker = worker_of(
            start_single,
            packing,
            "reward_model",
            RewardModelWorker,
            model_folders["tied"],
            reward_model__path=judge,
        )
        scores[packing] = worker.score_sequences(sequences)
    assert_same_arrays(scores["on"], scores["off"])


def test_wrong_boundaries_change_the_log_probs(model_folders, start_single, monkeypatch):
    """The comparisons above see boundaries that are off by one."""
    path = model_folders["tied"]
    batch = ragged(path, 6)
    worker = worker_of(start_single, "on", "ref", PolicyWorker, path)
    right = worker.log_prob(batch)
    collate = batching.collate

    def with_shifted_boundaries(*args):
        layout = collate(*args)
        layout.cu_seqlens[1:-1] += 1
        return layout

    monkeypatch.setattr(batching, "collate", with_shifted_boundaries)
    wrong = worker.log_prob(batch)
    differing = [np.abs(wrong[i] - right[i]).max() > 1e-3 for i in right]
    assert sum(differing) > len(right) / 2
