"""The teacher's outputs, and the actor's update with them, against plain models."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from one_step_off.algorithms.distillation import top_k_reverse_kl
from one_step_off.training.fsdp.fsdp_workers import TeacherWorker
from one_step_off.training.roles import likeliest_tokens
from one_step_off.training.teachers import Teachers
from tests.unit.training.fsdp_helpers import (
    assert_gradients_equal,
    config,
    hf_log_probs,
    hf_model,
    make_batch,
    token_ids,
)

K = 3
TEMPERATURE = 0.7
LAYOUTS = {
    "padded": {"actor__packing": "off"},
    "micro-batches": {"actor__packing": "off", "actor__micro_batch_tokens": 48},
    "packed": {"actor__packing": "on", "actor__micro_batch_tokens": 60},
    "chunks": {"actor__packing": "on", "actor__log_prob_chunk": 7},
}


def distilling(path, teacher, **changes):
    """A config with a teacher beside the actor."""
    cfg = config(path, **changes)
    cfg.placement.roles = {"rollout": "rollout", "actor": "actor", "teacher": "actor"}
    cfg.teacher.path = teacher
    cfg.teacher.top_k = changes.get("teacher__top_k", K)
    return cfg


def log_probs_of_all(model, sample):
    """Of the whole vocabulary in place of each response token, [R, V]."""
    first = len(sample.prompt_ids)
    logits = model(token_ids(sample)[None], use_cache=False).logits[0, first - 1 : -1]
    return (logits / TEMPERATURE).log_softmax(-1)


def with_teacher_columns(batch, cfg, start_single):
    """The batch with what the role gives, put into its columns as in a run."""
    worker = start_single(cfg, role="teacher", cls=TeacherWorker)
    shares = worker.score_responses(batch)
    outputs = [shares[i] for i in range(len(batch.samples))]
    teachers = Teachers({}, lambda sample: "", cfg.teacher.top_k)
    batch.set_columns({"teacher": teachers._columns(outputs)})
    return batch


@pytest.mark.parametrize("packing", ["off", "on"])
def test_the_teacher_scores_the_students_tokens(model_folders, start_single, packing):
    cfg = distilling(model_folders["tied"], model_folders["untied"], teacher__packing=packing)
    batch = with_teacher_columns(make_batch(model_folders["tied"]), cfg, start_single)
    model = hf_model(model_folders["untied"])
    for i, sample in enumerate(batch.samples):
        with torch.no_grad():
            whole = log_probs_of_all(model, sample)
            chosen = hf_log_probs(model, sample, TEMPERATURE)
        values, ids = whole.topk(K, dim=-1)
        np.testing.assert_allclose(batch.teacher_log_probs[i], chosen, atol=2e-6)
        np.testing.assert_allclose(batch.teacher_top_log_probs[i], values, atol=2e-6)
        assert batch.teacher_top_ids[i].dtype == np.int32
        np.testing.assert_array_equal(batch.teacher_top_ids[i], ids)


def test_without_top_k_it_gives_one_number_per_token(model_folders, start_single):
    cfg = distilling(model_folders["tied"], model_folders["untied"], teacher__top_k=0)
    batch = with_teacher_columns(make_batch(model_folders["tied"]), cfg, start_single)
    assert batch.teacher_top_ids is None
    model = hf_model(model_folders["untied"])
    with torch.no_grad():
        expected = hf_log_probs(model, batch.samples[0], TEMPERATURE)
    np.testing.assert_allclose(batch.teacher_log_probs[0], expected, atol=2e-6)


def test_tokens_beyond_the_students_vocabulary_are_left_out():
    log_probs = torch.tensor([[-3.0, -1.0, -2.0, -0.1]])
    found = likeliest_tokens(log_probs, count=2, vocabulary=3)
    assert found.tolist() == [[-1.0, -2.0, 1.0, 2.0]]


def top_k_gradients(path, batch, weight):
    """Loss and gradients of the distillation alone, token-mean, on the plain model."""
    model = hf_model(path)
    total = 0
    tokens = sum(int(s.loss_mask.sum()) for s in batch.samples)
    for i, sample in enumerate(batch.samples):
        ids = torch.from_numpy(batch.teacher_top_ids[i]).long()
        student = log_probs_of_all(model, sample).gather(1, ids)
        divergence = top_k_reverse_kl(student, torch.tensor(batch.teacher_top_log_probs[i]))
        total = total + divergence[torch.from_numpy(sample.loss_mask)].sum()
    loss = weight * total / tokens
    loss.backward()
    gradients = {n: p.grad.numpy() for n, p in model.named_parameters()}
    return loss.item(), gradients


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_update_has_the_gradient_of_the_top_k_loss(model_folders, start_single, layout):
    """Advantages of zero, so that the distillation alone trains."""
    path = model_folders["tied"]
    cfg = distilling(path, model_folders["untied"], teacher__weight=0.6, **LAYOUTS[layout])
    batch = with_teacher_columns(make_batch(path), cfg, start_single)
    batch.advantages = [np.zeros_like(a) for a in batch.advantages]
    loss, gradients = top_k_gradients(path, batch, 0.6)
    worker = start_single(cfg)
    metrics = worker.update(batch)
    assert metrics["actor/loss"] == pytest.approx(loss, rel=1e-5)
    assert metrics["actor/distill_kl"] == pytest.approx(loss / 0.6, rel=1e-5)
    assert metrics["actor/pg_loss"] == 0
    assert_gradients_equal(worker.gradients, gradients, rtol=1e-5)


@pytest.mark.parametrize("top_k", [0, K])
def test_a_teacher_equal_to_the_student_has_no_gradient(model_folders, start_single, top_k):
    path = model_folders["tied"]
    cfg = distilling(path, path, teacher__top_k=top_k)
    batch = make_batch(path)
    batch.ref_log_probs = None
    with_teacher_columns(batch, cfg, start_single)
    worker = start_single(cfg)
    student = worker.log_prob(batch)
    batch.advantages = [
        (batch.teacher_log_probs[i] - student[i]) * sample.loss_mask
        for i, sample in enumerate(batch.samples)
    ]
    assert max(np.abs(a).max() for a in batch.advantages) < 1e-5
    metrics = worker.update(batch)
    assert abs(metrics["actor/loss"]) < 1e-6
    assert metrics["actor/grad_norm"] < 1e-4


def test_an_update_without_the_teachers_columns_is_refused(model_folders, start_single):
    worker = start_single(distilling(model_folders["tied"], model_folders["untied"]))
    with pytest.raises(ValueError, match="needs teacher of all 12 samples"):
        worker.update(make_batch(model_folders["tied"]))
