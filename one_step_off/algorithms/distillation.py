"""On-policy distillation: the student generates, and a teacher judges each of its tokens.

Both forms lower the reverse KL of the student to its teacher at the states that the student visits,
KL(student || teacher) = sum_v p(v) (log p(v) - log q(v)), p: student, q: teacher.

    advantages    one sampled token stands for the sum; any policy loss trains it
    top-k loss    the sum over the teacher's k likeliest tokens and the rest, by autograd

Sources: on-policy distillation as a whole, with divergences that need no reward, arXiv:2306.13649
(GKD), whose gradient, as here, does not flow through the sampling of the states; the sampled form
as an advantage with discount 0, thinkingmachines.ai/blog/on-policy-distillation.

Log-probs are in nats, after `rollout.temperature`. The functions use methods of tensors only, and
do not import torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from one_step_off.config.schema import Config
from one_step_off.data.samples import Batch

if TYPE_CHECKING:
    from torch import Tensor

MIN_REST = 1e-7
"""The least probability of all tokens besides the k: below it a difference from 1 is rounding in
float32."""


def teacher_advantages(
    teacher: np.ndarray, student: np.ndarray, mask: np.ndarray, weight: float
) -> np.ndarray:
    """The advantage of each token of a response, float32 [R].

        A_t = weight (log q(y_t) - log p(y_t))      0 for tokens that are not trained

    Its mean over y_t ~ p is -weight KL(p || q) of this token alone: a token is not credited with
    the KL of the tokens after it (discount 0). With it the policy gradient sum_t A_t grad log p is
    -weight grad KL(p || q) in the mean, at fixed states.

    Args:
        teacher: log q of the sampled tokens, [R].
        student: log p of them under the policy before the update, [R]: the trainer's where it was
            asked (`algorithm.old_log_probs=recompute`), else mu's, by the engine.
        mask: bool [R], the trained tokens.
        weight: `teacher.weight`.
    """
    return (np.float32(weight) * (teacher - student) * mask).astype(np.float32)


def top_k_reverse_kl(student: Tensor, teacher: Tensor) -> Tensor:
    """The reverse KL of two distributions over k tokens and one bucket for all others, [n].

        l = sum_{v in K} p(v) (log p(v) - log q(v)) + p(rest) (log p(rest) - log q(rest))
        p(rest) = 1 - sum_{v in K} p(v), at least MIN_REST; q(rest) likewise

    K are the teacher's k likeliest tokens. The bucket makes it a KL: never negative, zero where
    both agree on K, and at most the KL over the whole vocabulary. Without it the sum has its
    minimum at p = q / e, so the student would move mass out of K.

    Args:
        student: log p of the tokens of K, [n, k]; the gradient flows through it.
        teacher: log q of them, [n, k].
    """
    p = student.exp()
    p_rest = (1.0 - p.sum(-1)).clamp(min=MIN_REST)
    q_rest = (1.0 - teacher.exp().sum(-1)).clamp(min=MIN_REST)
    inside = (p * (student - teacher)).sum(-1)
    return inside + p_rest * (p_rest.log() - q_rest.log())


def distill(batch: Batch, log_probs: list[np.ndarray], cfg: Config) -> dict[str, float]:
    """Add the teachers' advantages to the batch's, unless the distillation is a loss of the update
    (`teacher.top_k`).

    Args:
        batch: with `teacher_log_probs` and `teacher_names`; None: the run has no teacher.
        log_probs: of the student, see `teacher_advantages`, float32 [R] per sample.

    Returns:
        The metrics `distill/kl`, and with several teachers `distill/NAME/kl`: means over the
        trained tokens.
    """
    if batch.teacher_log_probs is None:
        return {}
    masks = [sample.loss_mask for sample in batch.samples]
    columns = list(zip(batch.teacher_log_probs, log_probs, masks, strict=True))
    if not cfg.teacher.top_k:
        added = [teacher_advantages(*column, cfg.teacher.weight) for column in columns]
        batch.advantages = [
            advantage + more for advantage, more in zip(batch.advantages, added, strict=True)
        ]
    kl_of_samples = [(student - teacher)[mask] for teacher, student, mask in columns]
    return _kl_metrics(kl_of_samples, batch.teacher_names)


def _kl_metrics(kl_of_samples: list[np.ndarray], names: list[str] | None) -> dict[str, float]:
    metrics = {"distill/kl": _mean(kl_of_samples)}
    if names is None:
        return metrics
    for name in dict.fromkeys(names):
        own = [kl for kl, of in zip(kl_of_samples, names, strict=True) if of == name]
        metrics[f"distill/{name}/kl"] = _mean(own)
    return metrics


def _mean(arrays: list[np.ndarray]) -> float:
    """The mean of all values; 0 where there are none."""
    values = np.concatenate([np.zeros(0), *arrays])
    return float(values.mean()) if len(values) else 0.0
