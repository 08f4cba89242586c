"""A token per row: from the right distribution, with the row's own number."""

from __future__ import annotations

import math

import pytest
import torch

from one_step_off.engines.transformers.generation_thread import sample

LOGITS = torch.tensor([2.0, -1.0, 0.5, 1.5, 0.0])


def draws(temperature: float, top_p: float = 1.0, count: int = 4000) -> tuple:
    """Tokens and log-probs for `count` numbers that divide [0, 1) evenly."""
    logits = LOGITS.repeat(count, 1)
    numbers = (torch.arange(count, dtype=torch.float64) + 0.5) / count
    return sample(logits, torch.full((count,), temperature), torch.full((count,), top_p), numbers)


@pytest.mark.parametrize("temperature", [1.0, 0.3, 3.0])
def test_tokens_are_as_frequent_as_their_log_probs_say(temperature):
    tokens, log_probs = draws(temperature)
    expected = (LOGITS / temperature).log_softmax(-1)
    torch.testing.assert_close(log_probs, expected[tokens])
    shares = torch.bincount(tokens, minlength=5) / len(tokens)
    torch.testing.assert_close(shares, expected.exp(), atol=1e-3, rtol=0)


def test_top_p_keeps_the_likeliest_tokens_and_their_log_probs_add_up():
    shares = LOGITS.softmax(-1)  # token 0: 0.49, token 3: 0.30, token 2: 0.11
    for top_p, kept in ((0.01, [0]), (0.6, [0, 3]), (0.85, [0, 2, 3])):
        tokens, log_probs = draws(1.0, top_p)
        assert sorted(set(tokens.tolist())) == kept
        total = shares[kept].sum()
        torch.testing.assert_close(log_probs, (shares[tokens] / total).log())


def test_rows_have_settings_of_their_own():
    logits = LOGITS.repeat(3, 1)
    temperatures = torch.tensor([0.0, 1.0, 1.0])
    top_ps = torch.tensor([0.1, 0.1, 1.0])
    almost_one = 1 - 2.0**-53
    numbers = torch.full((3,), almost_one, dtype=torch.float64)
    tokens, log_probs = sample(logits, temperatures, top_ps, numbers)
    assert tokens.tolist() == [0, 0, 4]
    # A greedy token has the log-prob of temperature 1, and top_p does not count.
    assert log_probs[0].item() == pytest.approx(LOGITS.log_softmax(-1)[0].item())
    assert log_probs[1].item() == 0.0
    assert torch.equal(logits, LOGITS.repeat(3, 1)), "the logits are the caller's"


def test_a_token_without_probability_is_never_sampled():
    logits = torch.tensor([[-math.inf, 1.0, -math.inf, 1.0]]).repeat(2, 1)
    numbers = torch.tensor([0.0, 0.75], dtype=torch.float64)
    tokens, _ = sample(logits, torch.ones(2), torch.ones(2), numbers)
    assert tokens.tolist() == [1, 3]
