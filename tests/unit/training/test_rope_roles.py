"""With every type of rotary embedding, what a role computes of a sequence depends on neither its
neighbors nor padding nor packing, nor on what the role computed before."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import transformers

from one_step_off.config.supervised import supervised_config, warm_up_config
from one_step_off.data.samples import Batch, Sample
from one_step_off.training.fsdp.fsdp_workers import (
    CriticWorker,
    PolicyWorker,
    RewardModelWorker,
    SupervisedWorker,
    TeacherWorker,
)
from tests.unit.models.ropes import ROPES, hf_config, nested_config
from tests.unit.training.fsdp_helpers import config

WORDS = 97
LENGTHS = {"short": (8, 12), "middle": (20, 20), "long": (20, 60), "longest": (40, 150)}
"""Tokens of prompt and response; longrope's trained length lies between the first two."""


def sample(row: int, prompt: int, response: int) -> Sample:
    rng = np.random.default_rng(row)
    return Sample(
        (0, row),
        0,
        rng.integers(3, WORDS, prompt).astype(np.int32),
        rng.integers(3, WORDS, response).astype(np.int32),
        np.zeros(response, np.float32),
        np.ones(response, bool),
        np.zeros(response, np.int32),
    )


SAMPLES = [sample(row, *sizes) for row, sizes in enumerate(LENGTHS.values())]


def saved(folder, name, is_scalar=False) -> str:
    """A random model of this rope."""
    torch.manual_seed(0)
    own_config = nested_config() if name == "nested" else hf_config(*ROPES[name])
    kind = transformers.AutoModelForCausalLM
    if is_scalar:
        own_config.num_labels = 1
        kind = transformers.AutoModelForSequenceClassification
    model = kind.from_config(own_config)
    model.save_pretrained(folder)
    return str(folder)


def batch_of(samples) -> Batch:
    return Batch(0, list(samples), (0, 0))


def run_config(path, packing):
    cfg = config(path, actor__packing=packing, actor__micro_batch_tokens=4096)
    cfg.placement.roles = {"actor": "a", "rollout": "r"}
    cfg.data.max_prompt_length = 40
    cfg.data.max_response_length = 150
    return cfg


@pytest.mark.parametrize("packing", ["off", "on"])
@pytest.mark.parametrize("name", [*ROPES, "nested"])
def test_log_probs_do_not_depend_on_the_neighbors(start_single, tmp_path, name, packing):
    path = saved(tmp_path, name)
    worker = start_single(run_config(path, packing), role="actor", cls=PolicyWorker)
    alone = [worker.log_prob(batch_of([own]))[0] for own in SAMPLES]
    together = worker.log_prob(batch_of(SAMPLES))
    for i in range(len(SAMPLES)):
        np.testing.assert_allclose(together[i], alone[i], rtol=1e-5, atol=2e-5)
        again = worker.log_prob(batch_of([SAMPLES[i]]))[0]
        np.testing.assert_array_equal(again, alone[i])


@pytest.mark.parametrize("name", ["longrope", "dynamic", "nested"])
def test_reference_and_teacher_agree_with_the_actor(start_single, tmp_path, name):
    path = saved(tmp_path, name)
    cfg = run_config(path, "off")
    cfg.teacher.path = path
    short = batch_of(SAMPLES[:1])
    actor = start_single(cfg, role="actor", cls=PolicyWorker).log_prob(short)
    reference = start_single(cfg, role="ref", cls=PolicyWorker).log_prob(short)
    teacher = start_single(cfg, role="teacher", cls=TeacherWorker).score_responses(short)
    np.testing.assert_array_equal(reference[0], actor[0])
    np.testing.assert_array_equal(teacher[0], actor[0])


def test_supervised_steps_before_rl_use_its_frequencies(start_single, tmp_path):
    path = saved(tmp_path, "longrope")
    cfg = run_config(path, "off")
    cfg.placement.pools = {"a": [1], "r": [1]}
    cfg.sft.max_length = 16  # alone, rows this short would have the short factors
    actor = start_single(cfg, role="actor", cls=PolicyWorker)
    frequencies = actor.model.model.rotary_emb.inv_freq
    for make_config in (warm_up_config, supervised_config):
        own = make_config(cfg)
        worker = start_single(own, role="actor", cls=SupervisedWorker)
        is_same = torch.equal(worker.model.model.rotary_emb.inv_freq, frequencies)
        assert is_same == (make_config is warm_up_config)


@pytest.mark.parametrize("name", ["longrope", "dynamic"])
def test_values_do_not_depend_on_the_neighbors(start_single, tmp_path, name):
    path = saved(tmp_path, name, is_scalar=True)
    cfg = run_config(path, "off")
    cfg.critic.path = path
    worker = start_single(cfg, role="critic", cls=CriticWorker)
    alone = worker.values(batch_of(SAMPLES[:1]))[0]
    together = worker.values(batch_of(SAMPLES))
    np.testing.assert_allclose(together[0], alone, rtol=1e-5, atol=2e-5)


@pytest.mark.parametrize("name", ["longrope", "dynamic"])
def test_scores_do_not_depend_on_the_neighbors(start_single, tmp_path, name):
    path = saved(tmp_path, name, is_scalar=True)
    cfg = run_config(path, "off")
    cfg.reward_model.path = path
    worker = start_single(cfg, role="reward_model", cls=RewardModelWorker)
    sequences = [own.response_ids for own in SAMPLES]
    alone = worker.score_sequences(sequences[:1])[0]
    together = worker.score_sequences(sequences)[0]
    np.testing.assert_allclose(together, alone, rtol=1e-5, atol=2e-5)
