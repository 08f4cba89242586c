"""Trainers give an episode one weight, however many samples it has, and know its segments on every
rank."""

from __future__ import annotations

import copy
import pickle

import numpy as np
import pytest

from one_step_off.cluster.errors import RoleError
from one_step_off.config.errors import ConfigError
from one_step_off.config.schema import Config
from one_step_off.data.samples import Batch
from one_step_off.runtime.prepare import _check_external_loops
from one_step_off.training.reward_models import mix
from one_step_off.training.trainer_group import put_batch, put_slices
from one_step_off.training.worker_interface import BatchShare
from tests.unit.data.episode_helpers import cut, cut_arrays, make_sample
from tests.unit.training.fsdp_helpers import (
    RecordingCritic,
    assert_gradients_equal,
    config,
    make_batch,
)

COLUMNS = ("advantages", "ref_log_probs", "old_log_probs", "values", "returns")


def cut_batch(batch: Batch, seed: int = 0) -> Batch:
    """The same batch with its samples cut into segments at random places."""
    rng = np.random.default_rng(seed)
    episodes = []
    for sample in copy.deepcopy(batch.samples):
        ends = rng.integers(1, len(sample.response_ids) + 1, rng.integers(0, 4))
        episodes.append(cut(sample, ends.tolist()))
    result = Batch(batch.step, [s for own in episodes for s in own], batch.expected_stamp)
    for name in COLUMNS:
        if getattr(batch, name) is not None:
            setattr(result, name, cut_arrays(getattr(batch, name), episodes))
    assert len(result.samples) > len(batch.samples) + 5
    return result


@pytest.mark.parametrize("aggregation", ["token-mean", "sequence-mean", "seq-sum-norm"])
def test_an_update_does_not_depend_on_the_cuts(model_folders, start_single, aggregation):
    """Every token has the context that it had, so its gradient is the same if its weight is."""
    path = model_folders["tied"]
    batch = make_batch(path)
    cfg = config(path, algorithm__loss_agg=aggregation, actor__ppo_mini_batch_size=2)
    gradients = []
    for given in (batch, cut_batch(batch)):
        worker = start_single(cfg)
        worker.update(given)
        gradients.append(worker.gradients)
    assert_gradients_equal(gradients[1], gradients[0], rtol=1e-5)


def test_a_critic_s_update_does_not_depend_on_the_cuts(model_folders, start_single):
    path = model_folders["untied"]
    batch = make_batch(path)
    rng = np.random.default_rng(1)
    for name in ("values", "returns"):
        columns = [rng.normal(size=len(s.response_ids)).astype(np.float32) for s in batch.samples]
        setattr(batch, name, columns)
    cfg = config(path, critic__loss_agg="sequence-mean", critic__ppo_mini_batch_size=2)
    gradients = []
    for given in (batch, cut_batch(batch)):
        worker = start_single(cfg, role="critic", cls=RecordingCritic)
        worker.update(given)
        gradients.append(worker.gradients)
    assert_gradients_equal(gradients[1], gradients[0], rtol=1e-5)


def test_ranks_know_the_episodes_of_all_samples(monkeypatch):
    """The extras do not travel; the map of segments does, with each share."""
    monkeypatch.setattr("ray.put", pickle.dumps)
    samples = [make_sample(0), *cut(make_sample(1), [2, 4]), *cut(make_sample(0, row=1), [1])]
    numbers = [0, 1, 1, 1, 2, 2]
    batch = Batch(0, samples, (0, 0))
    for data in (put_batch(batch), *put_slices(batch, BatchShare(0, 2), 1)):
        arrived = pickle.loads(data)
        assert arrived.episodes.tolist() == numbers
        assert all("segment" not in sample.extra for sample in arrived.samples)
    assert batch.episodes is None
    old = Batch(0, [make_sample(0), make_sample(1)], (0, 0))
    assert pickle.loads(put_batch(old)).episodes is None


def test_a_worker_weights_by_the_map_that_came_with_the_batch(model_folders, start_single):
    path = model_folders["tied"]
    cfg = config(path, algorithm__loss_agg="sequence-mean")
    worker = start_single(cfg)
    batch = cut_batch(make_batch(path))
    everything = list(range(len(batch.samples)))
    wanted = worker._token_weights(batch, everything)
    batch.episodes = np.unique(
        [(*s.prompt_id, s.index) for s in batch.samples], axis=0, return_inverse=True
    )[1].reshape(-1)
    for sample in batch.samples:
        sample.extra = {}
    np.testing.assert_array_equal(worker._token_weights(batch, everything), wanted)
    batch.episodes = None
    assert not np.array_equal(worker._token_weights(batch, everything), wanted)


def test_a_reward_model_scores_no_episode_of_several_samples():
    segments = cut(make_sample(2, row=7), [3])
    fix = r"prompt \(0, 7\), sample 2: its episode has 2 samples.*reward.function"
    with pytest.raises(RoleError, match=fix):
        mix([make_sample(0), *segments], [0.5, 0.5, 0.5], Config())
    assert [segment.reward for segment in segments] == [1.0, 1.0]


def test_external_agents_and_a_reward_model_are_refused_together():
    cfg = Config()
    _check_external_loops(cfg, ["external"])
    cfg.placement.roles["reward_model"] = "judge"
    _check_external_loops(cfg, [])
    with pytest.raises(ConfigError, match=r"placement.roles.reward_model=judge: .*remove it"):
        _check_external_loops(cfg, ["external"])
    cfg.reward_model.url = "http://judge"
    with pytest.raises(ConfigError, match=r"reward_model.url=http://judge: .*=external"):
        _check_external_loops(cfg, ["external"])
