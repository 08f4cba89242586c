"""The teacher of on-policy distillation as a role of this run, whatever the back end."""

import functools

import numpy as np
import torch
from torch import Tensor

from one_step_off.config.roles import vocabulary_size
from one_step_off.data.samples import Batch
from one_step_off.training.model_worker import ModelWorker


class TeacherWorker(ModelWorker):
    """The role "teacher": it scores what the student generated, after `rollout.temperature`."""

    def score_responses(self, batch: Batch) -> dict[int, np.ndarray]:
        """Log-probs of all response tokens of this rank's share: position in batch -> float32 [R]
        (collective).

        With `teacher.top_k` float32 [R, 1 + 2 k]: beside each log-prob those of the k likeliest
        tokens of the student's vocabulary, and their ids, which float32 holds exactly below 2^24.
        """
        count = self.cfg.teacher.top_k
        if not count:
            return self._response_outputs(batch)
        likeliest = functools.partial(
            likeliest_tokens, count=count, vocabulary=self._student_vocabulary
        )
        return self._response_outputs(batch, likeliest)

    @functools.cached_property
    def _student_vocabulary(self) -> int:
        return vocabulary_size(self.cfg, "model")


def likeliest_tokens(log_probs: Tensor, count: int, vocabulary: int) -> Tensor:
    """The log-probs of the likeliest tokens, then their ids: float32 [n, 2 count].

    Args:
        log_probs: float32 [n, V].
        vocabulary: only ids below it are taken. Models of one family pad their vocabulary to
            different sizes, and the student has no logits beyond its own.
    """
    values, ids = log_probs[:, :vocabulary].topk(count, dim=-1)
    return torch.cat([values, ids.to(values.dtype)], dim=-1)
