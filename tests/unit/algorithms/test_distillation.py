"""On-policy distillation: the gradients in closed form on a few logits, mixing, and metrics."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from one_step_off.algorithms.batch_advantages import fill_advantages
from one_step_off.algorithms.core_algos import KLController
from one_step_off.algorithms.distillation import (
    distill,
    teacher_advantages,
    top_k_reverse_kl,
)
from one_step_off.algorithms.policy_losses import POLICY_LOSSES, LossInputs
from one_step_off.config.schema import Config
from one_step_off.data.samples import Batch
from tests.unit.algorithms.test_advantages_in_pipeline import make_sample

LOGITS = torch.tensor([0.3, -1.2, 0.9, 0.1, -0.4], dtype=torch.float64)
TEACHER = torch.tensor([1.1, 0.2, -0.7, 0.4, -2.0], dtype=torch.float64).log_softmax(-1)


def gradient_of_kl(p: torch.Tensor, log_ratio: torch.Tensor) -> torch.Tensor:
    """d KL / d logits of a softmax p: p_i (log ratio of i's category - KL)."""
    return p * (log_ratio - (p * log_ratio).sum())


@pytest.mark.parametrize("loss", ["vanilla", "gpg", "cispo"])
def test_the_mean_policy_gradient_of_the_advantages_is_that_of_the_reverse_kl(loss: str) -> None:
    """The mean over all tokens, each with its probability, for several policy losses at theta =
    mu."""
    logits = LOGITS.clone().requires_grad_()
    student = logits.log_softmax(-1)
    old = student.detach()
    advantage = teacher_advantages(TEACHER.numpy(), old.numpy(), np.ones(5, bool), weight=0.7)
    inputs = LossInputs(
        student, old, torch.from_numpy(advantage).double(), torch.arange(5), torch.ones(5)
    )
    per_token, _ = POLICY_LOSSES[loss].function(inputs)
    (old.exp() * per_token).sum().backward()
    expected = 0.7 * gradient_of_kl(old.exp(), old - TEACHER)
    torch.testing.assert_close(logits.grad, expected, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("k", [1, 2, 4])
def test_the_gradient_of_the_top_k_loss_in_closed_form(k: int) -> None:
    logits = LOGITS.clone().requires_grad_()
    student = logits.log_softmax(-1)
    top = TEACHER.topk(k).indices
    loss = top_k_reverse_kl(student[top][None], TEACHER[top][None])
    loss.sum().backward()
    p = student.detach().exp()
    in_top = torch.zeros(5, dtype=torch.bool).index_fill(0, top, True)
    rest_ratio = (p[~in_top].sum() / TEACHER[~in_top].exp().sum()).log()
    log_ratio = torch.where(in_top, student.detach() - TEACHER, rest_ratio)
    torch.testing.assert_close(loss.item(), (p * log_ratio).sum().item())
    torch.testing.assert_close(logits.grad, gradient_of_kl(p, log_ratio))


def test_with_all_tokens_the_top_k_loss_is_the_whole_reverse_kl() -> None:
    logits = LOGITS.clone().requires_grad_()
    student = logits.log_softmax(-1)
    loss = top_k_reverse_kl(student[None], TEACHER[None]).sum()
    loss.backward()
    p = student.detach().exp()
    torch.testing.assert_close(loss.item(), (p * (student.detach() - TEACHER)).sum().item())
    torch.testing.assert_close(logits.grad, gradient_of_kl(p, student.detach() - TEACHER))


def test_the_top_k_loss_is_at_least_zero_and_at_most_the_whole_kl() -> None:
    torch.manual_seed(0)
    student = torch.randn(200, 12, dtype=torch.float64).log_softmax(-1)
    teacher = torch.randn(200, 12, dtype=torch.float64).log_softmax(-1)
    whole = (student.exp() * (student - teacher)).sum(-1)
    previous = torch.zeros(200, dtype=torch.float64)
    for k in (1, 3, 6, 11):
        top = teacher.topk(k, dim=-1).indices
        loss = top_k_reverse_kl(student.gather(1, top), teacher.gather(1, top))
        assert (loss >= previous - 1e-9).all(), "more tokens tell more"
        previous = loss
    assert (previous <= whole + 1e-9).all()


def test_a_teacher_equal_to_the_student_teaches_nothing() -> None:
    student = LOGITS.float().log_softmax(-1)
    advantages = teacher_advantages(student.numpy(), student.numpy(), np.ones(5, bool), 1.0)
    assert not advantages.any()
    logits = LOGITS.float().requires_grad_()
    top = logits.log_softmax(-1)[:2][None]
    loss = top_k_reverse_kl(top, top.detach())
    loss.sum().backward()
    assert loss.item() == pytest.approx(0, abs=1e-7)
    assert logits.grad.abs().max() < 1e-6


def test_a_teacher_that_is_sure_gives_no_nan() -> None:
    """All probability on the k tokens, or none of the student's."""
    logits = torch.tensor([[60.0, 0.0, 0.0]], requires_grad=True)
    sure = torch.tensor([[0.0, 60.0, 0.0]]).log_softmax(-1)
    top = sure.topk(1, dim=-1).indices
    loss = top_k_reverse_kl(logits.log_softmax(-1).gather(1, top), sure.gather(1, top))
    loss.sum().backward()
    assert torch.isfinite(loss).all()
    assert torch.isfinite(logits.grad).all()


def batch_with_teachers(names: list[str] | None = None) -> Batch:
    """Two samples; the last token of the second one is not trained."""
    samples = [make_sample(0, [-1.0, -2.0], 1.0), make_sample(1, [-0.5, -0.25, 0.0], 0.0)]
    samples[1].loss_mask[2] = False
    batch = Batch(0, samples, (0, 0))
    batch.teacher_log_probs = [
        np.array([-0.5, -3.0], np.float32),
        np.array([-1.5, -0.25, -9.0], np.float32),
    ]
    batch.teacher_names = names
    return batch


@pytest.mark.parametrize(("estimator", "rewards"), [("none", [0.0, 0.0]), ("dr_grpo", [0.5, -0.5])])
def test_the_weighted_teacher_is_added_to_the_rewards_advantages(estimator, rewards) -> None:
    cfg = Config()
    cfg.algorithm.adv_estimator = estimator
    cfg.teacher.weight = 0.25
    batch = batch_with_teachers()
    metrics = fill_advantages(batch, cfg, KLController(0.0))
    expected = [[0.125, -0.25], [-0.25, 0.0, 0.0]]
    for i, (advantages, reward) in enumerate(zip(batch.advantages, rewards, strict=True)):
        mask = batch.samples[i].loss_mask
        np.testing.assert_allclose(advantages, np.array(expected[i]) + reward * mask, atol=1e-7)
        assert advantages.dtype == np.float32
    assert metrics == {"distill/kl": pytest.approx((-0.5 + 1.0 + 1.0 + 0.0) / 4)}


def test_recomputed_log_probs_stand_for_the_student() -> None:
    cfg = Config()
    cfg.algorithm.adv_estimator = "none"
    batch = batch_with_teachers()
    batch.old_log_probs = batch.teacher_log_probs
    metrics = fill_advantages(batch, cfg, KLController(0.0))
    assert metrics == {"distill/kl": 0.0}
    assert not any(advantages.any() for advantages in batch.advantages)


def test_with_top_k_the_advantages_stay_those_of_the_reward() -> None:
    cfg = Config()
    cfg.algorithm.adv_estimator = "dr_grpo"
    cfg.teacher.top_k = 2
    batch = batch_with_teachers(["default", "math"])
    metrics = fill_advantages(batch, cfg, KLController(0.0))
    np.testing.assert_allclose(batch.advantages[0], [0.5, 0.5])
    assert metrics["distill/default/kl"] == pytest.approx(0.25)
    assert metrics["distill/math/kl"] == pytest.approx(0.5)


def test_a_batch_without_trained_tokens_has_a_kl_of_zero() -> None:
    batch = batch_with_teachers()
    for sample in batch.samples:
        sample.loss_mask[:] = False
    batch.advantages = [np.zeros(2, np.float32), np.zeros(3, np.float32)]
    log_probs = [sample.log_probs for sample in batch.samples]
    assert distill(batch, log_probs, Config()) == {"distill/kl": 0.0}
    assert not any(advantages.any() for advantages in batch.advantages)
