"""From hidden states to one number per wanted token, in chunks, so that not all logits exist at
once."""

import functools
from collections.abc import Callable

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from one_step_off.algorithms.core_algos import TokenOutputs


def in_chunks(
    project: Callable[..., TokenOutputs],
    hidden: Tensor,
    logit_index: Tensor,
    tokens: Tensor,
    chunk: int,
) -> TokenOutputs:
    """`project` of the wanted positions, `chunk` of them at a time.

    All logits in fp32 would take 10 GB for 16k tokens of a 152k vocabulary. In training each chunk
    is recomputed in the backward pass, so that its logits need not be kept.

    Args:
        project: (hidden [c, H], tokens of these c places) -> its answer, see
            `core_algos.TokenOutputs`.
        hidden: [rows, width, H].
        logit_index: int64 [n]; flat positions in [rows * width]. Where n is 0 one position stands
            in: its gradient is zero but reaches every parameter, so this rank takes part in every
            reduction.
        tokens: int64 [n]; the wanted tokens; or [n, m], where m of each place are wanted.

    Returns:
        The answer for all n tokens.
    """
    wanted = len(tokens)
    if not wanted:
        logit_index = logit_index.new_zeros(1)
        tokens = tokens.new_zeros(1, *tokens.shape[1:])
    hidden = hidden.reshape(-1, hidden.shape[-1]).index_select(0, logit_index)
    if torch.is_grad_enabled() and len(tokens) > chunk:
        project = functools.partial(
            checkpoint, project, use_reentrant=False, preserve_rng_state=False
        )
    chunks = zip(hidden.split(chunk), tokens.split(chunk), strict=True)
    answers = [project(chunk_hidden, chunk_tokens) for chunk_hidden, chunk_tokens in chunks]
    values = _joined([value for value, _ in answers], wanted)
    if answers[0][1] is None:
        return values, None
    return values, _joined([figure for _, figure in answers], wanted)


def _joined(parts: list[Tensor], count: int) -> Tensor:
    # A clone: FSDP2's backward hook must not sit on a view.
    return torch.cat(parts)[:count].clone()
