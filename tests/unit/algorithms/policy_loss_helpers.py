"""Inputs and comparisons for the tests of the policy losses."""

import torch
from hypothesis import settings

from one_step_off.algorithms.policy_losses import POLICY_LOSSES, LossInputs

NAMES = list(POLICY_LOSSES)
quick = settings(max_examples=25, deadline=None)


def of(ratio, advantage, sequence=None, old=None, **clips):
    """Inputs whose theta / old is `ratio`; `old` are log-probs, -10 unless told, so that no
    probability exceeds 1.
    """
    log_ratio = torch.tensor(ratio).log()
    old = torch.full_like(log_ratio, -10.0) if old is None else torch.tensor(old)
    n = len(log_ratio)
    sequence = torch.tensor(sequence if sequence is not None else list(range(n)))
    log_probs = (old + log_ratio).requires_grad_()
    return LossInputs(log_probs, old, torch.tensor(advantage), sequence, torch.ones(n), **clips)


def run(name, x, **own):
    """Loss, clipped, and the gradient of the summed loss by each log-prob."""
    loss, clipped = POLICY_LOSSES[name].function(x, **own)
    (gradient,) = torch.autograd.grad((loss * x.weight).sum(), x.log_probs)
    assert loss.shape == clipped.shape == x.advantage.shape
    assert clipped.dtype == torch.bool
    return loss.detach(), clipped.tolist(), gradient


def close(actual, expected, **kwargs):
    torch.testing.assert_close(
        actual, torch.tensor(expected), **({"rtol": 1e-5, "atol": 1e-5} | kwargs)
    )
