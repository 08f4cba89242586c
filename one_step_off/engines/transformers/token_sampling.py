"""Which token follows: sampled from a row's logits, with a random number of its own."""

import torch
from torch import Tensor


def sample(
    logits: Tensor, temperatures: Tensor, top_ps: Tensor, uniforms: Tensor
) -> tuple[Tensor, Tensor]:
    """Sample one token per row by the inverse of the cumulative distribution.

    A row's token depends on its own logits and number alone, so that a seeded request repeats
    whatever is batched with it.

    Args:
        logits: float32 [B, V].
        temperatures: float32 [B]; 0 is greedy decoding.
        top_ps: float32 [B]; a greedy row ignores it.
        uniforms: float64 [B], from [0, 1).

    Returns:
        Tokens, int64 [B], and their log-probs, float32 [B], of the distribution that was sampled
        from. Of a greedy row it is that of temperature 1.
    """
    is_greedy = temperatures == 0
    scaled = logits / temperatures.where(~is_greedy, 1.0)[:, None]
    cuts_tail = (top_ps < 1) & ~is_greedy
    if cuts_tail.any():
        scaled[cuts_tail] = _nucleus(scaled[cuts_tail], top_ps[cuts_tail])
    log_probs = scaled.log_softmax(-1)
    # In float64: the sum of a large vocabulary in float32 would move the borders between tokens.
    cumulative = log_probs.double().exp().cumsum(-1)
    targets = uniforms[:, None] * cumulative[:, -1:]
    sampled = torch.searchsorted(cumulative, targets, right=True)[:, 0]
    sampled = sampled.clamp(max=logits.shape[1] - 1)  # a target may round up to the whole sum
    tokens = torch.where(is_greedy, logits.argmax(-1), sampled)
    return tokens, log_probs.gather(1, tokens[:, None])[:, 0]


def _nucleus(logits: Tensor, top_ps: Tensor) -> Tensor:
    """Logits [B, V] without the tokens beyond the likeliest ones that have `top_ps` [B] together.
    The likeliest token stays."""
    ascending, order = logits.sort(-1)
    cumulative = ascending.softmax(-1).cumsum(-1)
    is_cut = cumulative <= 1 - top_ps[:, None]
    is_cut[:, -1] = False
    return logits.masked_fill(is_cut.scatter(1, order, is_cut), float("-inf"))
